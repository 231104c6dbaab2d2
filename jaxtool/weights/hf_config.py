"""A Hugging Face `config.json` as the config of a port, field by field against a whitelist, and back.

Each field is used, harmless whatever it says, harmless at the listed values only, or unknown. What isn't
harmless raises, so no setting that changes the network is ever ignored. The tensors themselves are in
`tensor_map`, GGUF metadata in `gguf_reader`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxtool.models import GPTJConfig, LanguageModelConfig, LlamaConfig, RopeScaling
from jaxtool.weights.hf_fields import ConfigError, boolean, check_whitelist, positive_float, positive_int

# What transformers' own LlamaConfig takes when the field is absent (Llama 1 and 2 configs leave it out).
DEFAULT_ROPE_THETA = 10_000.0
# Likewise of its Qwen3Config, where null means something else than absence.
QWEN3_DEFAULTS: Mapping[str, int] = {"head_dim": 128, "num_key_value_heads": 32}

_LLAMA_USED = frozenset(
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

_LLAMA_ONLY_AT: Mapping[str, tuple[Any, ...]] = {
    "architectures": (None, ["LlamaForCausalLM"]),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (None, 0, 0.0),
    "pretraining_tp": (None, 1),
    "sliding_window": (None,),
    "use_sliding_window": (None, False),
    "partial_rotary_factor": (None, 1, 1.0),
    # SmolLM2: a Llama with the usual half-split rotary embedding
    "is_llama_config": (True,),
    "rope_interleaved": (False,),
}

_QWEN3_ONLY_AT: Mapping[str, tuple[Any, ...]] = {
    "architectures": (None, ["Qwen3ForCausalLM"]),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "attention_dropout": (None, 0, 0.0),
    "use_sliding_window": (False,),
}
# These two act only together with use_sliding_window, which must be false.
_QWEN3_HARMLESS = frozenset({"sliding_window", "max_window_layers"})

_GPTJ_USED = frozenset(
    {
        "model_type",
        "vocab_size",
        "n_positions",
        "n_ctx",
        "n_embd",
        "n_layer",
        "n_head",
        "n_inner",
        "rotary_dim",
        "layer_norm_epsilon",
    }
)
_GPTJ_ONLY_AT: Mapping[str, tuple[Any, ...]] = {
    "architectures": (None, ["GPTJForCausalLM"]),
    "activation_function": ("gelu_new",),
    "tie_word_embeddings": (False,),
    "rotary": (True,),
    "scale_attn_weights": (True,),
    "attn_pdrop": (0, 0.0),
    "embd_pdrop": (0, 0.0),
    "resid_pdrop": (0, 0.0),
}
# Settings of a classification head, and of memory in training.
_GPTJ_HARMLESS = frozenset(
    {
        "gradient_checkpointing",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    }
)


def config_from_hf(config: Mapping[str, Any], source: str) -> LanguageModelConfig:
    """The port's config of a parsed `config.json`; `model_type` picks the port.

    Absent fields take transformers' defaults where published configs leave them out: `num_key_value_heads`
    (as many as query heads; 32 in Qwen3), `head_dim` (hidden size over heads; 128 in Qwen3), `rope_theta` (10,000),
    `n_inner` (4 x width) and `tie_word_embeddings` (false).

    Args:
        config: the JSON object.
        source: the file's name, for messages.

    Raises:
        ConfigError: a field is missing, unknown, of the wrong type or at a value that isn't implemented.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"{source}: expected a JSON object, found {type(config).__name__}")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in _READERS:
        raise ConfigError(f"{source}: field 'model_type' is {model_type!r}, expected one of {', '.join(_READERS)}")
    try:
        return _READERS[model_type](config, source)
    except ConfigError:
        raise
    except ValueError as error:  # what the port itself refuses
        raise ConfigError(f"{source}: {error}") from error


def _llama(config: Mapping[str, Any], source: str) -> LlamaConfig:
    check_whitelist(config, source, used=_LLAMA_USED, only_at=_LLAMA_ONLY_AT)
    return _llama_like(config, source, qk_norm=False)


def _qwen3(config: Mapping[str, Any], source: str) -> LlamaConfig:
    check_whitelist(config, source, used=_LLAMA_USED, harmless=_QWEN3_HARMLESS, only_at=_QWEN3_ONLY_AT)
    return _llama_like({**QWEN3_DEFAULTS, **config}, source, qk_norm=True)


def _llama_like(config: Mapping[str, Any], source: str, *, qk_norm: bool) -> LlamaConfig:
    hidden_size = positive_int(config, "hidden_size", source)
    num_heads = positive_int(config, "num_attention_heads", source)
    num_kv_heads = num_heads
    if config.get("num_key_value_heads") is not None:
        num_kv_heads = positive_int(config, "num_key_value_heads", source)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{source}: field 'num_key_value_heads' is {num_kv_heads}, expected a divisor of "
            f"num_attention_heads {num_heads}"
        )
    theta, scaling = _rope(config, source)
    return LlamaConfig(
        vocab_size=positive_int(config, "vocab_size", source),
        hidden_size=hidden_size,
        intermediate_size=positive_int(config, "intermediate_size", source),
        num_hidden_layers=_layers(config, source),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=_head_dim(config, hidden_size, num_heads, source),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=positive_float(config, "rms_norm_eps", source),
        max_position_embeddings=positive_int(config, "max_position_embeddings", source),
        tie_word_embeddings=boolean(config, "tie_word_embeddings", source, default=False),
        qk_norm=qk_norm,
    )


def _gptj(config: Mapping[str, Any], source: str) -> GPTJConfig:
    check_whitelist(config, source, used=_GPTJ_USED, harmless=_GPTJ_HARMLESS, only_at=_GPTJ_ONLY_AT)
    width, heads = positive_int(config, "n_embd", source), positive_int(config, "n_head", source)
    if width % heads:
        raise ConfigError(f"{source}: field 'n_embd' is {width}, expected a multiple of n_head {heads}")
    positions = positive_int(config, "n_positions", source)
    if config.get("n_ctx", positions) != positions:
        raise ConfigError(f"{source}: field 'n_ctx' is {config['n_ctx']!r}, but n_positions is {positions}")
    inner = 4 * width if config.get("n_inner") is None else positive_int(config, "n_inner", source)
    return GPTJConfig(
        vocab_size=positive_int(config, "vocab_size", source),
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=positive_int(config, "n_layer", source),
        num_attention_heads=heads,
        head_dim=width // heads,
        rotary_dim=positive_int(config, "rotary_dim", source),
        layer_norm_eps=positive_float(config, "layer_norm_epsilon", source),
        max_position_embeddings=positions,
    )


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], LanguageModelConfig]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "gptj": _gptj,
}


def config_to_hf(config: LanguageModelConfig) -> dict[str, Any]:
    """The `config.json` of a model, as transformers reads it; `vocab_size` counts text rows and tool rows.

    Raises:
        ConfigError: the config holds low-rank updates, which must be merged first.
    """
    if config.lora_rank:
        raise ConfigError("the model has low-rank updates, which config.json can't express; merge them first")
    rows = config.vocab_size + config.num_tools
    if isinstance(config, GPTJConfig):
        return {
            "architectures": ["GPTJForCausalLM"],
            "model_type": "gptj",
            "activation_function": "gelu_new",
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "layer_norm_epsilon": config.layer_norm_eps,
            "n_embd": config.hidden_size,
            "n_head": config.num_attention_heads,
            "n_inner": config.intermediate_size,
            "n_layer": config.num_hidden_layers,
            "n_positions": config.max_position_embeddings,
            "rotary_dim": config.rotary_dim,
            "tie_word_embeddings": False,
            "vocab_size": rows,
            "dtype": config.param_dtype,
        }
    if not isinstance(config, LlamaConfig):
        raise ConfigError(f"no Hugging Face config for {type(config).__name__}")
    scaling = None
    if config.rope_scaling is not None:
        scaling = {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    kind = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "mlp_bias": False}
    if config.qk_norm:
        kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "use_sliding_window": False}
    return {
        **kind,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_key_value_heads,
        "rms_norm_eps": config.rms_norm_eps,
        # The spelling of transformers 4, which 5 reads too.
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_word_embeddings,
        "vocab_size": rows,
        "dtype": config.param_dtype,
    }


def _layers(config: Mapping[str, Any], source: str) -> int:
    count = positive_int(config, "num_hidden_layers", source)
    types = config.get("layer_types")
    if types is not None and types != ["full_attention"] * count:
        raise ConfigError(
            f"{source}: field 'layer_types' is {types!r}, only 'full_attention' for each of the {count} "
            "layers is implemented"
        )
    return count


def _head_dim(config: Mapping[str, Any], hidden_size: int, num_heads: int, source: str) -> int:
    if config.get("head_dim") is not None:
        size = positive_int(config, "head_dim", source)
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


def _rope(config: Mapping[str, Any], source: str) -> tuple[float, RopeScaling | None]:
    """Base and rescaling. Transformers 4 writes `rope_theta` and `rope_scaling`, 5 `rope_parameters`."""
    thetas: dict[str, float] = {}
    scalings: dict[str, RopeScaling | None] = {}
    if config.get("rope_theta") is not None:
        thetas["rope_theta"] = positive_float(config, "rope_theta", source)
    for field in ("rope_parameters", "rope_scaling"):
        value = config.get(field)
        if value is None:
            continue
        if not isinstance(value, Mapping):
            raise ConfigError(f"{source}: field {field!r} is {value!r}, expected an object or null")
        scalings[field] = _scaling(value, field, source)
        if "rope_theta" in value:
            thetas[f"{field}.rope_theta"] = positive_float(value, "rope_theta", f"{source}: in {field!r}")
    if len(set(thetas.values())) > 1:
        listed = ", ".join(f"{name} = {value}" for name, value in thetas.items())
        raise ConfigError(f"{source}: fields disagree on the rotary base: {listed}")
    if len(set(scalings.values())) > 1:
        raise ConfigError(f"{source}: fields 'rope_parameters' and 'rope_scaling' disagree")
    return next(iter(thetas.values()), DEFAULT_ROPE_THETA), next(iter(scalings.values()), None)


def _scaling(value: Mapping[str, Any], field: str, source: str) -> RopeScaling | None:
    names = {f.name for f in dataclasses.fields(RopeScaling)}
    kinds = {value[key] for key in ("rope_type", "type") if isinstance(value.get(key), str)}
    if len(kinds) > 1:
        raise ConfigError(
            f"{source}: fields '{field}.rope_type' {value['rope_type']!r} and '{field}.type' {value['type']!r} disagree"
        )
    if not kinds <= {"default", "llama3"}:
        key = "rope_type" if "rope_type" in value else "type"
        raise ConfigError(
            f"{source}: field '{field}.{key}' is {value[key]!r}, only 'default' and 'llama3' are implemented"
        )
    scaled = kinds == {"llama3"}
    for key, setting in value.items():
        known = key == "rope_theta" or (scaled and key in names) or (key in ("rope_type", "type") and kinds)
        if not known and not (key == "partial_rotary_factor" and setting == 1):
            raise ConfigError(f"{source}: field '{field}.{key}' = {setting!r} is not implemented")
    if not scaled:
        return None
    where = f"{source}: in {field!r}"
    try:
        return RopeScaling(
            factor=positive_float(value, "factor", where),
            low_freq_factor=positive_float(value, "low_freq_factor", where),
            high_freq_factor=positive_float(value, "high_freq_factor", where),
            original_max_position_embeddings=positive_int(value, "original_max_position_embeddings", where),
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
