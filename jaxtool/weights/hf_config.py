"""A Hugging Face `config.json` as a `LlamaConfig`, field by field against a whitelist.

Each field is used, harmless whatever it says, harmless at the listed values only, or unknown. What isn't
harmless raises, so no setting that changes the network is ever ignored. The tensors themselves are in
`tensor_map`, GGUF metadata in `gguf_reader`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from jaxtool.models import LlamaConfig

# What transformers' own LlamaConfig takes when the field is absent (Llama 1 and 2 configs leave it out).
DEFAULT_ROPE_THETA = 10_000.0

USED_FIELDS = frozenset(
    {
        "model_type",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
        "tie_word_embeddings",
        "layer_types",
    }
)

# None of these changes what the network computes from given token ids.
HARMLESS_FIELDS = frozenset(
    {
        # provenance
        "_name_or_path",
        "_model_name_or_path",
        "_commit_hash",
        "transformers_version",
        "transformers.js_config",
        "tokenizer_class",
        "unsloth_fixed",
        "unsloth_version",
        # storage dtype: the dtype of the abstract tree decides, each tensor says its own
        "torch_dtype",
        "dtype",
        "use_bfloat16",
        # training from scratch only
        "initializer_range",
        # how transformers runs it and what it returns
        "use_cache",
        "torchscript",
        "return_dict",
        "return_dict_in_generate",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "_attn_implementation",
        "_attn_implementation_autoset",
        "attn_implementation",
        "chunk_size_feed_forward",
        "max_sequence_length",
        # special ids: the tokenizer and the sampler have their own
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "cls_token_id",
        "mask_token_id",
        "unk_token_id",
        "decoder_start_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "prefix",
        # classification heads, not part of a causal language model
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "finetuning_task",
        "task_specific_params",
        # generation settings that old configs carry
        "max_length",
        "min_length",
        "max_new_tokens",
        "do_sample",
        "early_stopping",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "diversity_penalty",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        "repetition_penalty",
        "length_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "suppress_tokens",
        "begin_suppress_tokens",
        "exponential_decay_length_penalty",
        "remove_invalid_values",
        "tf_legacy_loss",
    }
)

# Fields that change the network (or its training, for dropout) at any other value.
ONLY_AT: Mapping[str, tuple[Any, ...]] = {
    "architectures": (None, ["LlamaForCausalLM"]),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (None, 0, 0.0),
    "pretraining_tp": (None, 1),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "auto_map": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
    # SmolLM2: a Llama with the usual half-split rotary embedding
    "is_llama_config": (True,),
    "rope_interleaved": (False,),
}


class ConfigError(ValueError):
    """A model config that this port can't express; names the file, the field and its value."""


def llama_config_from_hf(config: Mapping[str, Any], source: str) -> LlamaConfig:
    """The `LlamaConfig` of the parsed `config.json` of a Llama model.

    Absent fields take transformers' defaults where published configs leave them out: `num_key_value_heads`
    (as many as query heads), `head_dim` (hidden size over heads), `rope_theta` (10,000) and
    `tie_word_embeddings` (false).

    Args:
        config: the JSON object.
        source: the file's name, for messages.

    Raises:
        ConfigError: a field is missing, unknown, of the wrong type or at a value that isn't implemented.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source}: expected a JSON object, found {type(config).__name__}")
    if config.get("model_type") != "llama":
        raise ConfigError(f"{source}: field 'model_type' is {config.get('model_type')!r}, expected 'llama'")
    _check_whitelist(config, source)

    hidden_size = _positive_int(config, "hidden_size", source)
    num_heads = _positive_int(config, "num_attention_heads", source)
    num_kv_heads = num_heads
    if config.get("num_key_value_heads") is not None:
        num_kv_heads = _positive_int(config, "num_key_value_heads", source)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{source}: field 'num_key_value_heads' is {num_kv_heads}, expected a divisor of "
            f"num_attention_heads {num_heads}"
        )
    return LlamaConfig(
        vocab_size=_positive_int(config, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=_positive_int(config, "intermediate_size", source),
        num_hidden_layers=_layers(config, source),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads, source),
        rope_theta=_rope_theta(config, source),
        rms_norm_eps=_positive_float(config, "rms_norm_eps", source),
        max_position_embeddings=_positive_int(config, "max_position_embeddings", source),
        tie_word_embeddings=_tied(config, source),
    )


def _check_whitelist(config: Mapping[str, Any], source: str) -> None:
    for name, value in config.items():
        if name in USED_FIELDS or name in HARMLESS_FIELDS:
            continue
        if name not in ONLY_AT:
            raise ConfigError(f"{source}: field {name!r} = {value!r} is not known to this port of Llama")
        # By type too: in Python 0 == False and 1 == True.
        if not any(type(value) is type(allowed) and value == allowed for allowed in ONLY_AT[name]):
            allowed = " or ".join(repr(v) for v in ONLY_AT[name])
            raise ConfigError(f"{source}: field {name!r} is {value!r}, only {allowed} is implemented")


def _layers(config: Mapping[str, Any], source: str) -> int:
    count = _positive_int(config, "num_hidden_layers", source)
    types = config.get("layer_types")
    if types is not None and types != ["full_attention"] * count:
        raise ConfigError(
            f"{source}: field 'layer_types' is {types!r}, only 'full_attention' for each of the {count} "
            "layers is implemented"
        )
    return count


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int, source: str) -> int:
    if config.get("head_dim") is not None:
        size = _positive_int(config, "head_dim", source)
    elif hidden_size % num_heads:
        raise ConfigError(
            f"{source}: field 'hidden_size' is {hidden_size}, expected a multiple of num_attention_heads "
            f"{num_heads} where head_dim is absent"
        )
    else:
        size = hidden_size // num_heads
    if size % 2:
        raise ConfigError(f"{source}: field 'head_dim' is {size}, rotary embedding needs an even number")
    return size


def _tied(config: Mapping[str, Any], source: str) -> bool:
    value = config.get("tie_word_embeddings", False)
    if not isinstance(value, bool):
        raise ConfigError(f"{source}: field 'tie_word_embeddings' is {value!r}, expected true or false")
    return value


def _rope_theta(config: Mapping[str, Any], source: str) -> float:
    """Transformers 4 writes `rope_theta` and `rope_scaling`, 5 `rope_parameters`; they have to agree."""
    found: dict[str, float] = {}
    if config.get("rope_theta") is not None:
        found["rope_theta"] = _positive_float(config, "rope_theta", source)
    for field in ("rope_parameters", "rope_scaling"):
        value = config.get(field)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{source}: field {field!r} is {value!r}, expected an object or null")
        for key, setting in value.items():
            if key in ("rope_type", "type"):
                if setting != "default":
                    raise ConfigError(f"{source}: field '{field}.{key}' is {setting!r}, only 'default' is implemented")
            elif key == "rope_theta":
                found[f"{field}.rope_theta"] = _positive_float(value, key, f"{source}: in {field!r}")
            elif key != "partial_rotary_factor" or setting != 1:
                raise ConfigError(f"{source}: field '{field}.{key}' = {setting!r} is not implemented")
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{name} = {value}" for name, value in found.items())
        raise ConfigError(f"{source}: fields disagree on the rotary base: {listed}")
    return next(iter(found.values()), DEFAULT_ROPE_THETA)


def _required(config: Mapping[str, Any], field: str, source: str) -> Any:
    if config.get(field) is None:
        raise ConfigError(f"{source}: field {field!r} is missing")
    return config[field]


def _positive_int(config: Mapping[str, Any], field: str, source: str) -> int:
    value = _required(config, field, source)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{source}: field {field!r} is {value!r}, expected a positive whole number")
    return value


def _positive_float(config: Mapping[str, Any], field: str, source: str) -> float:
    value = _required(config, field, source)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ConfigError(f"{source}: field {field!r} is {value!r}, expected a positive number")
    return float(value)
