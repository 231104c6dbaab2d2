"""The `config.json` that we write: read back by ourselves and by transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from jaxtool.models import GPTJConfig, LanguageModelConfig, LlamaConfig, RopeScaling
from jaxtool.weights import ConfigError, config_from_hf, read_config
from jaxtool.weights.hf_config import config_to_hf
from tests import tiny_models
from tests.tiny_models import CONFIG, QWEN3_CONFIG

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
CONFIGS: dict[str, LanguageModelConfig] = {
    **tiny_models.CONFIGS,
    "llama-scaled": dataclasses.replace(CONFIG, rope_scaling=SCALING, rope_theta=500_000.0, head_dim=20),
    "llama-tied": dataclasses.replace(CONFIG, tie_word_embeddings=True, num_key_value_heads=4),
    "qwen3-scaled": dataclasses.replace(QWEN3_CONFIG, rope_scaling=SCALING, tie_word_embeddings=True),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> LanguageModelConfig:
    return CONFIGS[request.param]


def test_round_trip(config: LanguageModelConfig) -> None:
    written = json.loads(json.dumps(config_to_hf(config)))
    assert config_from_hf(written, "config.json") == config


def test_written_vocabulary_counts_text_and_tools(config: LanguageModelConfig) -> None:
    grown = dataclasses.replace(config, num_tools=7)
    assert config_to_hf(grown) == config_to_hf(config) | {"vocab_size": 107}


def test_low_rank_updates_are_not_written(config: LanguageModelConfig) -> None:
    with pytest.raises(ConfigError, match=r"low-rank updates.*merge them first"):
        config_to_hf(dataclasses.replace(config, lora_rank=2, lora_projections=("query",)))


@pytest.mark.torch
def test_transformers_reads_what_is_written(config: LanguageModelConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = dataclasses.replace(config, param_dtype="bfloat16")
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(config)))
    found = transformers.AutoConfig.from_pretrained(tmp_path)
    assert found.dtype == torch.bfloat16
    assert found.tie_word_embeddings == config.tie_word_embeddings
    # The generic names are aliases in GPT-J's config.
    for field in (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ):
        assert getattr(found, field) == getattr(config, field), field
    if isinstance(config, GPTJConfig):
        assert (found.n_inner, found.rotary_dim) == (config.intermediate_size, config.rotary_dim)
        assert found.layer_norm_epsilon == config.layer_norm_eps
        assert found.activation_function == "gelu_new"
        assert found.attn_pdrop == found.embd_pdrop == found.resid_pdrop == 0
        return
    assert isinstance(config, LlamaConfig)
    assert type(found) is (transformers.Qwen3Config if config.qk_norm else transformers.LlamaConfig)
    for field in ("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps"):
        assert getattr(found, field) == getattr(config, field), field
    assert found.hidden_act == "silu" and found.attention_bias is False and found.attention_dropout == 0
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    assert found.rope_parameters == rope
    # And back: what transformers writes then is the same config again.
    found.save_pretrained(tmp_path / "again")
    assert read_config(tmp_path / "again") == dataclasses.replace(config, param_dtype="float32")
