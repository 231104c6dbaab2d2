"""Reading fields of a Hugging Face `config.json`: checked values, the whitelist, and what is harmless in any model.

What the fields mean for each family of models is in `hf_config`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

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

# Fields that change any network (or its training, for dropout) at any other value.
ONLY_AT: Mapping[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "auto_map": (None,),
    "is_decoder": (False, True),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (None,),
    "tie_encoder_decoder": (False,),
    "pruned_heads": (None, {}),
}


class ConfigError(ValueError):
    """A model config that this port can't express; names the file, the field and its value."""


def check_whitelist(
    config: Mapping[str, Any],
    source: str,
    *,
    used: Collection[str],
    harmless: Collection[str] = (),
    only_at: Mapping[str, tuple[Any, ...]],
) -> None:
    """Every field must be used, harmless, or at a value where it changes nothing.

    Raises:
        ConfigError: naming the first field that isn't.
    """
    only_at = {**ONLY_AT, **only_at}
    for name, value in config.items():
        if name in used or name in HARMLESS_FIELDS or name in harmless:
            continue
        if name not in only_at:
            raise ConfigError(
                f"{source}: field {name!r} = {value!r} is not known to this port of {config['model_type']}"
            )
        # By type too: in Python 0 == False and 1 == True.
        if not any(type(value) is type(allowed) and value == allowed for allowed in only_at[name]):
            allowed = " or ".join(repr(v) for v in only_at[name])
            raise ConfigError(f"{source}: field {name!r} is {value!r}, only {allowed} is implemented")


def required(config: Mapping[str, Any], field: str, source: str) -> Any:
    """The field's value; absent and null are errors."""
    if config.get(field) is None:
        raise ConfigError(f"{source}: field {field!r} is missing")
    return config[field]


def positive_int(config: Mapping[str, Any], field: str, source: str) -> int:
    """A field that must be a whole number above 0."""
    value = required(config, field, source)
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise ConfigError(f"{source}: field {field!r} is {value!r}, expected a positive whole number")
    return value


def positive_float(config: Mapping[str, Any], field: str, source: str) -> float:
    """A field that must be a finite number above 0."""
    value = required(config, field, source)
    # Bounded as float32 is: that is what it becomes, and a number of 400 digits has no float at all.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1e-37 < value < 1e38:
        raise ConfigError(f"{source}: field {field!r} is {repr(value)[:40]}, expected a positive number below 1e38")
    return float(value)


def boolean(config: Mapping[str, Any], field: str, source: str, default: bool) -> bool:
    """A true or false field."""
    value = config.get(field, default)
    if not isinstance(value, bool):
        raise ConfigError(f"{source}: field {field!r} is {value!r}, expected true or false")
    return value
