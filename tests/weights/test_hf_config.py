"""The config whitelist: what is read, what is let pass, what is refused with which words."""

import json
import math
from typing import Any

import pytest

from jaxtool.models import LlamaConfig
from jaxtool.weights import ConfigError, llama_config_from_hf, read_config
from jaxtool.weights.hf_config import HARMLESS_FIELDS, ONLY_AT, USED_FIELDS

SMOLLM2 = json.loads("""{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
  "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576,
  "initializer_range": 0.041666666666666664,
  "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
  "pad_token_id": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false,
  "rope_scaling": null, "rope_theta": 100000, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3",
  "use_cache": true, "vocab_size": 49152}""")


def test_smollm2_config() -> None:
    assert llama_config_from_hf(SMOLLM2, "config.json") == LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        rope_theta=100_000.0,
        rms_norm_eps=1e-5,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )


def test_absent_fields_take_the_defaults_of_transformers(hf_config: dict[str, Any]) -> None:
    for field in ("num_key_value_heads", "rope_theta", "rope_scaling", "tie_word_embeddings", "head_dim"):
        hf_config.pop(field, None)
    config = llama_config_from_hf(hf_config, "config.json")
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert config.head_dim == 16
    assert config.rope_theta == 10_000.0
    assert config.tie_word_embeddings is False


def test_explicit_head_size_need_not_divide_the_width(hf_config: dict[str, Any]) -> None:
    assert llama_config_from_hf(hf_config | {"head_dim": 48}, "config.json").head_dim == 48


def test_config_of_transformers_5_agrees_with_the_one_of_4(hf_config: dict[str, Any]) -> None:
    five = {key: value for key, value in hf_config.items() if key not in ("rope_theta", "rope_scaling")}
    five["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    five["dtype"] = five.pop("torch_dtype")
    assert llama_config_from_hf(five, "a") == llama_config_from_hf(hf_config, "a")


def test_both_spellings_of_the_rotary_base_may_stand_together_when_equal(hf_config: dict[str, Any]) -> None:
    hf_config |= {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}}
    assert llama_config_from_hf(hf_config, "a").rope_theta == 10000.0
    hf_config["rope_scaling"] = {"type": "default"}
    assert llama_config_from_hf(hf_config, "a").rope_theta == 10000.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mistral"}, ["model_type", "'mistral'", "'llama'"]),
        ({"model_type": None}, ["model_type", "None"]),
        ({"attention_bias": True}, ["attention_bias", "True", "False"]),
        ({"attention_bias": 0}, ["attention_bias", "0"]),
        ({"mlp_bias": True}, ["mlp_bias", "True"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "'silu'"]),
        ({"attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
        ({"pretraining_tp": 2}, ["pretraining_tp", "2"]),
        ({"sliding_window": 4096}, ["sliding_window", "4096"]),
        ({"quantization_config": {"bits": 4}}, ["quantization_config", "bits"]),
        ({"architectures": ["LlamaForSequenceClassification"]}, ["architectures", "SequenceClassification"]),
        ({"auto_map": {"AutoModel": "x.Y"}}, ["auto_map"]),
        ({"rope_interleaved": True}, ["rope_interleaved", "True"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ({"layer_types": ["sliding_attention"] * 3}, ["layer_types", "sliding_attention"]),
        ({"layer_types": ["full_attention"] * 2}, ["layer_types"]),
        ({"logit_softcap": 30.0}, ["logit_softcap", "30.0", "not known"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling.type", "'linear'"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling.rope_type", "'llama3'"]),
        ({"rope_scaling": {"factor": 8.0}}, ["rope_scaling.factor", "8.0"]),
        ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            ["disagree", "10000.0", "500000.0"],
        ),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}},
            ["rope_parameters.rope_type", "'yarn'"],
        ),
        ({"rope_theta": -1}, ["rope_theta", "-1"]),
        ({"rope_theta": "1e4"}, ["rope_theta", "'1e4'"]),
        ({"rope_theta": math.inf}, ["rope_theta", "inf"]),
        ({"rms_norm_eps": math.nan}, ["rms_norm_eps", "nan"]),
        ({"rms_norm_eps": None}, ["rms_norm_eps", "missing"]),
        ({"vocab_size": None}, ["vocab_size", "missing"]),
        ({"vocab_size": "272"}, ["vocab_size", "'272'"]),
        ({"vocab_size": 272.0}, ["vocab_size", "272.0"]),
        ({"num_hidden_layers": True}, ["num_hidden_layers", "True"]),
        ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "num_attention_heads 4"]),
        ({"hidden_size": 66}, ["hidden_size", "66", "num_attention_heads 4"]),
        ({"head_dim": 15}, ["head_dim", "15", "even"]),
        ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "'yes'"]),
        ({"tie_word_embeddings": None}, ["tie_word_embeddings", "None"]),
    ],
)
def test_refused(hf_config: dict[str, Any], change: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        llama_config_from_hf(hf_config | change, "some/config.json")
    for word in ["some/config.json", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_required_fields(hf_config: dict[str, Any], field: str) -> None:
    del hf_config[field]
    with pytest.raises(ConfigError, match=f"'{field}' is missing"):
        llama_config_from_hf(hf_config, "config.json")


def test_not_an_object() -> None:
    with pytest.raises(ConfigError, match="expected a JSON object"):
        llama_config_from_hf([], "config.json")  # type: ignore[arg-type]


def test_each_field_is_in_one_list() -> None:
    assert not USED_FIELDS & HARMLESS_FIELDS
    assert not USED_FIELDS & ONLY_AT.keys()
    assert not HARMLESS_FIELDS & ONLY_AT.keys()


def test_all_that_transformers_writes_is_known(tmp_path: Any) -> None:
    transformers = pytest.importorskip("transformers")
    written = transformers.LlamaConfig(
        vocab_size=99, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5
    )
    written.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert (config.vocab_size, config.head_dim, config.num_key_value_heads) == (99, 8, 2)
    assert config.rope_theta == written.rope_parameters["rope_theta"]
    # Including what it leaves out of the file because it is a default.
    (tmp_path / "config.json").write_text(written.to_json_string(use_diff=False))
    assert read_config(tmp_path) == config
