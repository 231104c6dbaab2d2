"""Published configs, word for word: the whitelist takes them, and the abstract trees have the published sizes.

Nothing is allocated.
"""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import jax
import pytest

from jaxtool.config import MeshConfig
from jaxtool.models import LanguageModelConfig, abstract_model, build_model, parameters
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.weights import config_from_hf

# 28 x (2 x 4096 + 4 x 4096^2 + 2 x 4096 x 16384 + 16384 + 4096) + 2 x 50400 x 4096 + 50400 + 2 x 4096
GPTJ_6B = """{
  "activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "attn_pdrop": 0.0, "bos_token_id": 50256,
  "embd_pdrop": 0.0, "eos_token_id": 50256, "gradient_checkpointing": false, "initializer_range": 0.02,
  "layer_norm_epsilon": 1e-05, "model_type": "gptj", "n_embd": 4096, "n_head": 16, "n_inner": null, "n_layer": 28,
  "n_positions": 2048, "resid_pdrop": 0.0, "rotary": true, "rotary_dim": 64, "scale_attn_weights": true,
  "summary_activation": null, "summary_first_dropout": 0.1, "summary_proj_to_labels": true,
  "summary_type": "cls_index", "summary_use_proj": true,
  "task_specific_params": {"text-generation": {"do_sample": true, "max_length": 50, "temperature": 1.0}},
  "tie_word_embeddings": false, "tokenizer_class": "GPT2Tokenizer", "transformers_version": "4.18.0.dev0",
  "use_cache": true, "vocab_size": 50400}"""

LLAMA_2_7B = """{
  "_name_or_path": "meta-llama/Llama-2-7b-hf", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1,
  "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": null, "tie_word_embeddings": false, "torch_dtype": "float16",
  "transformers_version": "4.31.0.dev0", "use_cache": true, "vocab_size": 32000}"""

LLAMA_3_8B = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 32,
  "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": null, "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.40.0.dev0", "use_cache": true, "vocab_size": 128256}"""

LLAMA_3_70B = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02,
  "intermediate_size": 28672, "max_position_embeddings": 8192, "model_type": "llama", "num_attention_heads": 64,
  "num_hidden_layers": 80, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": null, "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.40.0.dev0", "use_cache": true, "vocab_size": 128256}"""

LLAMA_3_1_8B_INSTRUCT = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
  "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "transformers_version": "4.42.3", "use_cache": true, "vocab_size": 128256}"""

LLAMA_3_2_1B = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": 128001, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
  "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama",
  "num_attention_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8, "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}"""

LLAMA_3_2_3B_INSTRUCT = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009], "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072,
  "initializer_range": 0.02, "intermediate_size": 8192, "max_position_embeddings": 131072, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 24, "num_hidden_layers": 28, "num_key_value_heads": 8,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05,
  "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                   "original_max_position_embeddings": 8192, "rope_type": "llama3"},
  "rope_theta": 500000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
  "transformers_version": "4.45.0.dev0", "use_cache": true, "vocab_size": 128256}"""

# 36 x (2 x 2560 + 2 x 128 + 2 x 2560 x 4096 + 2 x 2560 x 1024 + 3 x 2560 x 9728) + 151936 x 2560 + 2560
QWEN3_4B = """{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2560, "initializer_range": 0.02,
  "intermediate_size": 9728, "max_position_embeddings": 40960, "max_window_layers": 36, "model_type": "qwen3",
  "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": true,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
  "vocab_size": 151936}"""

QWEN3_14B = """{
  "architectures": ["Qwen3ForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 151643,
  "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120, "initializer_range": 0.02,
  "intermediate_size": 17408, "max_position_embeddings": 40960, "max_window_layers": 40, "model_type": "qwen3",
  "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
  "rope_scaling": null, "rope_theta": 1000000, "sliding_window": null, "tie_word_embeddings": false,
  "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": true, "use_sliding_window": false,
  "vocab_size": 151936}"""

SMOLLM2_135M = """{
  "architectures": ["LlamaForCausalLM"], "attention_bias": false, "attention_dropout": 0.0, "bos_token_id": 0,
  "eos_token_id": 0, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
  "intermediate_size": 1536, "is_llama_config": true, "max_position_embeddings": 8192, "mlp_bias": false,
  "model_type": "llama", "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3,
  "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": false, "rope_scaling": null, "rope_theta": 100000,
  "tie_word_embeddings": true, "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": true,
  "vocab_size": 49152}"""

PUBLISHED: dict[str, tuple[str, int]] = {
    "GPT-J-6B": (GPTJ_6B, 6_050_882_784),
    "Llama-2-7B": (LLAMA_2_7B, 6_738_415_616),
    "Llama-3-8B": (LLAMA_3_8B, 8_030_261_248),
    "Llama-3-70B": (LLAMA_3_70B, 70_553_706_496),
    "Llama-3.1-8B-Instruct": (LLAMA_3_1_8B_INSTRUCT, 8_030_261_248),
    "Llama-3.2-1B": (LLAMA_3_2_1B, 1_235_814_400),
    "Llama-3.2-3B-Instruct": (LLAMA_3_2_3B_INSTRUCT, 3_212_749_824),
    "Qwen3-4B": (QWEN3_4B, 4_022_468_096),
    "Qwen3-14B": (QWEN3_14B, 14_768_307_200),
    "SmolLM2-135M": (SMOLLM2_135M, 134_515_008),
}
# 9 query and 3 key-value heads can't be halved.
ODD_HEADS = {"SmolLM2-135M"}
published = pytest.mark.parametrize("name", list(PUBLISHED))


@functools.cache
def config_of(name: str) -> LanguageModelConfig:
    return config_from_hf(json.loads(PUBLISHED[name][0]), f"{name}/config.json")


def leaves_of(config: LanguageModelConfig, **options: Any) -> dict[str, jax.ShapeDtypeStruct]:
    return parameters(abstract_model(lambda: build_model(config), **options))


@published
def test_number_of_parameters(name: str) -> None:
    assert sum(leaf.size for leaf in leaves_of(config_of(name)).values()) == PUBLISHED[name][1]


@published
def test_what_distinguishes_the_models(name: str) -> None:
    config = config_of(name)
    fields: dict[str, Any] = {
        "GPT-J-6B": {"head_dim": 256, "rotary_dim": 64, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048},
        "Llama-2-7B": {"rope_theta": 10_000.0, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
        "Llama-3-8B": {"rope_theta": 500_000.0, "rope_scaling": None, "head_dim": 128, "qk_norm": False},
        "Llama-3-70B": {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128},
        "Llama-3.1-8B-Instruct": {"max_position_embeddings": 131_072},
        "Llama-3.2-1B": {"head_dim": 64, "tie_word_embeddings": True},
        "Llama-3.2-3B-Instruct": {"head_dim": 128, "tie_word_embeddings": True},
        "Qwen3-4B": {"head_dim": 128, "qk_norm": True, "rms_norm_eps": 1e-6, "rope_theta": 1_000_000.0},
        "Qwen3-14B": {"tie_word_embeddings": False, "num_attention_heads": 40, "qk_norm": True},
        "SmolLM2-135M": {"rope_theta": 100_000.0, "head_dim": 64, "tie_word_embeddings": True},
    }[name]
    assert {field: getattr(config, field) for field in fields} == fields
    scaling = getattr(config, "rope_scaling", None)
    factors = {"Llama-3.1-8B-Instruct": 8.0, "Llama-3.2-1B": 32.0, "Llama-3.2-3B-Instruct": 32.0}
    assert (scaling and scaling.factor) == factors.get(name)


@published
def test_eight_devices_hold_a_quarter_of_each_matrix(name: str) -> None:
    """fsdp 2 x model 2 cut every matrix in four, data 2 holds each part twice."""
    config = config_of(name)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    rules, notes = AxisRules().fit(dict(mesh.shape), config.axis_sizes)
    assert len(notes) == (2 if name in ODD_HEADS else 0)
    leaves = parameters(abstract_model(lambda: build_model(config, rules), mesh))
    assert {path: leaf.shape for path, leaf in leaves.items()} == {
        path: leaf.shape for path, leaf in leaves_of(config).items()
    }
    for path, leaf in leaves.items():
        parts = leaf.size // math.prod(leaf.sharding.shard_shape(leaf.shape))
        if path in ("head_bias_v", "blocks.up_bias_f"):
            assert parts == 2, path
        elif leaf.ndim - path.startswith("blocks.") == 1:
            assert parts == 1, path
        else:
            whole_heads = name in ODD_HEADS and path.rpartition("_")[2] in ("dnh", "dkh", "nhd")
            assert parts == (2 if whole_heads else 4), path


@pytest.mark.torch
@pytest.mark.parametrize("name", ["GPT-J-6B", "Llama-3.2-1B", "Qwen3-4B"])
def test_transformers_counts_the_same(name: str) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    settings = json.loads(PUBLISHED[name][0])
    config = transformers.AutoConfig.for_model(**settings)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name][1]
