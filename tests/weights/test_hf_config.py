"""The config whitelist: what is read, what is let pass, what is refused with which words.

Writing configs is in `test_hf_config_written`.
"""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from jaxtool.models import GPTJConfig, LlamaConfig
from jaxtool.weights import ConfigError, config_from_hf, read_config
from jaxtool.weights import hf_config as hf_config_module
from jaxtool.weights.hf_fields import HARMLESS_FIELDS, ONLY_AT

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


QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "head_dim": 12,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "max_window_layers": 3,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 272,
}
GPTJ: dict[str, Any] = {
    "architectures": ["GPTJForCausalLM"],
    "model_type": "gptj",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_embd": 64,
    "n_head": 4,
    "n_inner": None,
    "n_layer": 3,
    "n_positions": 128,
    "rotary_dim": 8,
    "vocab_size": 272,
}


def test_smollm2_config() -> None:
    assert config_from_hf(SMOLLM2, "config.json") == LlamaConfig(
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
    config = config_from_hf(hf_config, "config.json")
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert config.head_dim == 16
    assert config.rope_theta == 10_000.0
    assert config.tie_word_embeddings is False


def test_explicit_head_size_need_not_divide_the_width(hf_config: dict[str, Any]) -> None:
    assert config_from_hf(hf_config | {"head_dim": 48}, "config.json").head_dim == 48


def test_config_of_transformers_5_agrees_with_the_one_of_4(hf_config: dict[str, Any]) -> None:
    five = {key: value for key, value in hf_config.items() if key not in ("rope_theta", "rope_scaling")}
    five["rope_parameters"] = {"rope_theta": 10000.0, "rope_type": "default"}
    five["dtype"] = five.pop("torch_dtype")
    assert config_from_hf(five, "a") == config_from_hf(hf_config, "a")


def test_both_spellings_of_the_rotary_base_may_stand_together_when_equal(hf_config: dict[str, Any]) -> None:
    hf_config |= {"rope_parameters": {"rope_theta": 10000, "rope_type": "default"}}
    assert config_from_hf(hf_config, "a").rope_theta == 10000.0
    hf_config["rope_scaling"] = {"type": "default"}
    assert config_from_hf(hf_config, "a").rope_theta == 10000.0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mistral"}, ["model_type", "'mistral'", "llama, qwen3, gptj"]),
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
        ({"rope_scaling": {"rope_type": "llama3", "type": "default"}}, ["rope_scaling.type", "'llama3'", "disagree"]),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ["rope_scaling", "low_freq_factor", "missing"]),
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
        config_from_hf(hf_config | change, "some/config.json")
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
        config_from_hf(hf_config, "config.json")


def test_not_an_object() -> None:
    with pytest.raises(ConfigError, match="expected a JSON object"):
        config_from_hf([], "config.json")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ["rope_scaling.rope_type", "'yarn'"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["rope_scaling.rope_type", "'linear'"]),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ["rope_scaling.type", "'dynamic'"]),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, ["rope_parameters.rope_type", "'longrope'"]),
        ({"use_sliding_window": True}, ["use_sliding_window", "True"]),
        ({"use_sliding_window": True, "sliding_window": 64}, ["use_sliding_window", "True"]),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, ["layer_types", "sliding"]),
        ({"attention_bias": True}, ["attention_bias", "True"]),
        ({"attention_dropout": 0.1}, ["attention_dropout", "0.1"]),
        ({"quantization_config": {"quant_method": "fp8"}}, ["quantization_config", "fp8"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ({"architectures": ["Qwen3ForSequenceClassification"]}, ["architectures", "SequenceClassification"]),
        ({"model_type": "qwen3_moe", "num_experts": 128}, ["model_type", "'qwen3_moe'"]),
        ({"num_experts": 128}, ["num_experts", "128", "not known", "qwen3"]),
        ({"mlp_bias": True}, ["mlp_bias", "True"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "num_attention_heads 4"]),
    ],
)
def test_refused_in_qwen3(change: dict[str, Any], words: list[str]) -> None:
    assert_refused(QWEN3 | change, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tie_word_embeddings": True}, ["tie_word_embeddings", "True", "False"]),
        ({"attn_pdrop": 0.1}, ["attn_pdrop", "0.1"]),
        ({"embd_pdrop": 0.1}, ["embd_pdrop", "0.1"]),
        ({"resid_pdrop": 0.1}, ["resid_pdrop", "0.1"]),
        ({"quantization_config": {"load_in_8bit": True}}, ["quantization_config", "load_in_8bit"]),
        ({"activation_function": "gelu"}, ["activation_function", "'gelu'", "'gelu_new'"]),
        ({"rotary": False}, ["'rotary'", "False"]),
        ({"rotary_dim": None}, ["rotary_dim", "missing"]),
        ({"rotary_dim": 0}, ["rotary_dim", "0"]),
        ({"rotary_dim": 18}, ["rotary_dim", "18", "16"]),
        ({"rotary_dim": 5}, ["rotary_dim", "5", "even"]),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, ["rope_scaling", "not known", "gptj"]),
        ({"rope_theta": 10_000.0}, ["rope_theta", "not known"]),
        ({"n_ctx": 64}, ["n_ctx", "64", "n_positions", "128"]),
        ({"n_embd": 66}, ["n_embd", "66", "n_head 4"]),
        ({"n_inner": 0}, ["n_inner", "0"]),
        ({"layer_norm_epsilon": None}, ["layer_norm_epsilon", "missing"]),
        ({"layer_norm_epsilon": 0.0}, ["layer_norm_epsilon", "0.0"]),
        ({"scale_attn_weights": False}, ["scale_attn_weights", "False"]),
        ({"architectures": ["GPTJForQuestionAnswering"]}, ["architectures", "QuestionAnswering"]),
        ({"parallel_residual": False}, ["parallel_residual", "not known"]),
    ],
)
def test_refused_in_gptj(change: dict[str, Any], words: list[str]) -> None:
    assert_refused(GPTJ | change, words)


@pytest.mark.parametrize("field", sorted(GPTJ.keys() - {"n_inner", "architectures", "activation_function"}))
def test_required_fields_of_gptj(field: str) -> None:
    config = {name: value for name, value in GPTJ.items() if name != field}
    assert_refused(config, [f"'{field}' is " + ("None" if field == "model_type" else "missing")])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"low_freq_factor": None}, ["low_freq_factor", "missing"]),
        ({"factor": 0.5}, ["factor is 0.5", "at least 1"]),
        ({"factor": "8"}, ["factor", "'8'"]),
        ({"low_freq_factor": 4.0}, ["low_freq_factor 4.0", "high_freq_factor 4.0"]),
        ({"original_max_position_embeddings": 8192.0}, ["original_max_position_embeddings", "8192.0"]),
        ({"attention_factor": 1.2}, ["rope_scaling.attention_factor", "1.2"]),
        ({"type": "linear"}, ["rope_scaling.rope_type"]),
        ({"rope_theta": 20_000.0}, ["disagree", "10000.0", "20000.0"]),
    ],
)
def test_refused_in_llama3_scaling(hf_config: dict[str, Any], change: dict[str, Any], words: list[str]) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    hf_config["rope_scaling"] = scaling
    assert isinstance(config_from_hf(hf_config, "a"), LlamaConfig)
    assert_refused(hf_config | {"rope_scaling": scaling | change}, words)


def assert_refused(config: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config_from_hf(config, "some/config.json")
    for word in ["some/config.json", *words]:
        assert word in str(error.value)


def test_gptj_config() -> None:
    expected = GPTJConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        head_dim=16,
        rotary_dim=8,
        layer_norm_eps=1e-5,
        max_position_embeddings=128,
    )
    assert config_from_hf(GPTJ, "a") == expected
    assert config_from_hf(GPTJ | {"n_inner": 96, "n_ctx": 128}, "a") == dataclasses.replace(
        expected, intermediate_size=96
    )


def test_qwen3_config() -> None:
    expected = LlamaConfig(
        vocab_size=272,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        max_position_embeddings=128,
        qk_norm=True,
    )
    assert config_from_hf(QWEN3, "a") == expected
    # A window that isn't used does no harm.
    unused = {"sliding_window": 64, "max_window_layers": 1, "layer_types": ["full_attention"] * 3}
    assert config_from_hf(QWEN3 | unused, "a") == expected


@pytest.mark.torch
def test_absent_fields_of_qwen3_take_the_defaults_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    left_out = ("num_key_value_heads", "head_dim", "rope_theta")
    config = {name: value for name, value in QWEN3.items() if name not in left_out} | {"num_attention_heads": 64}
    found, theirs = config_from_hf(config, "a"), transformers.AutoConfig.for_model(**config)
    assert isinstance(found, LlamaConfig)
    assert found.num_key_value_heads == theirs.num_key_value_heads == 32
    assert found.head_dim == theirs.head_dim == 128
    assert found.rope_theta == theirs.rope_parameters["rope_theta"] == 10_000.0
    # Null is not absence.
    config["num_key_value_heads"] = None
    found, theirs = config_from_hf(config, "a"), transformers.AutoConfig.for_model(**config)
    assert isinstance(found, LlamaConfig)
    assert found.num_key_value_heads == theirs.num_key_value_heads == 64


FAMILIES = {
    "llama": (hf_config_module._LLAMA_USED, frozenset(), hf_config_module._LLAMA_ONLY_AT),
    "qwen3": (hf_config_module._LLAMA_USED, hf_config_module._QWEN3_HARMLESS, hf_config_module._QWEN3_ONLY_AT),
    "gptj": (hf_config_module._GPTJ_USED, hf_config_module._GPTJ_HARMLESS, hf_config_module._GPTJ_ONLY_AT),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_field_is_in_one_list(family: str) -> None:
    used, harmless, only_at = FAMILIES[family]
    lists = [used, harmless, HARMLESS_FIELDS, only_at.keys(), ONLY_AT.keys()]
    assert len(frozenset().union(*lists)) == sum(map(len, lists))


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "hidden_size": 32}),
        ("Qwen3Config", {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 32}),
        ("GPTJConfig", {"n_head": 4, "n_embd": 32, "rotary_dim": 4, "n_layer": 2}),
    ],
)
def test_all_that_transformers_writes_is_known(tmp_path: Path, kind: str, settings: dict[str, Any]) -> None:
    transformers = pytest.importorskip("transformers")
    written = getattr(transformers, kind)(vocab_size=99, **settings)
    written.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert (config.vocab_size, config.head_dim, config.num_attention_heads) == (99, 8, 4)
    if isinstance(config, LlamaConfig):
        assert config.num_key_value_heads == 2
        assert config.rope_theta == written.rope_parameters["rope_theta"]
    # Including what it leaves out of the file because it is a default.
    (tmp_path / "config.json").write_text(written.to_json_string(use_diff=False))
    assert read_config(tmp_path) == config
