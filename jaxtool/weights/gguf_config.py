"""The metadata of a GGUF file as the config of a port, field by field against a whitelist for each architecture.

llama.cpp writes Llama 3.1's rescaled rotary embedding as a tensor of divisors; here it becomes a `RopeScaling` again.
The file itself is read in `gguf_reader`, Hugging Face's `config.json` in `hf_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtool.models import LlamaConfig, RopeScaling
from jaxtool.models.rotary import rotary_frequencies
from jaxtool.weights.gguf_reader import ROTARY_DIVISORS, GgufFile, short
from jaxtool.weights.hf_config import DEFAULT_ROPE_THETA
from jaxtool.weights.hf_fields import ConfigError
from jaxtool.weights.tensor_map import WeightsError

_EMBEDDING = "token_embd.weight"
_HEAD = "output.weight"

# The divisors of another rescaling (LongRoPE).
_OTHER_DIVISORS = ("rope_factors_long.weight", "rope_factors_short.weight")

# Llama 3.1 to 3.3 differ in the factor only, and only that is seen in the divisors beyond doubt.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_POSITIONS = 1.0, 4.0, 8192
_DIVISOR_TOLERANCE = 1e-5

# Values at which a metadata field leaves any of the networks as it is; None stands for any value.
_HARMLESS: Mapping[str, Any] = {
    "attention.causal": True,
    "rope.scaling.type": "none",
    "rope.scaling.finetuned": None,
}


@dataclass(frozen=True, kw_only=True)
class _Architecture:
    """What sets an architecture of llama.cpp apart.

    Attributes:
        qk_norm: queries and keys are normed.
        rescaled: a file may hold divisors of the rotary frequencies.
        harmless: as `_HARMLESS`, for this architecture only.
    """

    qk_norm: bool
    rescaled: bool
    harmless: Mapping[str, Any]


_ARCHITECTURES: Mapping[str, _Architecture] = {
    "llama": _Architecture(qk_norm=False, rescaled=True, harmless={"expert_count": 0, "expert_used_count": 0}),
    "qwen3": _Architecture(qk_norm=True, rescaled=False, harmless={}),
}


def config_from_gguf(file: GgufFile) -> LlamaConfig:
    """The port's config of a GGUF file. The model is tied where the file has no output matrix.

    Raises:
        ConfigError: another architecture, a field missing, unknown, of the wrong type or at a value that isn't
            implemented (other rotary scaling than Llama 3.1's, partial rotary, experts, split files).
    """
    if (files := file.field("split.count", int, 1)) > 1:  # before all else: only the first file has the metadata
        raise ConfigError(
            f"{file.source}: one of the {files} files of a split model ('split.count'); merge them first, "
            "e.g. with llama.cpp's llama-gguf-split --merge"
        )
    fields, architecture = _Fields(file), _ARCHITECTURES[file.architecture]
    num_heads = fields.size("attention.head_count")
    head_dim = _head_dim(fields, num_heads)
    theta = fields.number("rope.freq_base", DEFAULT_ROPE_THETA)
    num_kv_heads = fields.size("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(
            "attention.head_count_kv", num_kv_heads, f"expected a divisor of attention.head_count {num_heads}"
        )
    config = LlamaConfig(
        vocab_size=_vocab_size(fields),
        hidden_size=fields.size("embedding_length"),
        intermediate_size=fields.size("feed_forward_length"),
        num_hidden_layers=fields.size("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=theta,
        rope_scaling=_rope_scaling(file, architecture, head_dim, theta),
        rms_norm_eps=fields.number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=fields.size("context_length"),
        tie_word_embeddings=_HEAD not in file.tensors,
        qk_norm=architecture.qk_norm,
    )
    fields.check_whitelist({**_HARMLESS, **architecture.harmless})
    return config


class _Fields:
    """Fields of the network's metadata by their names without the architecture, and which of them were used."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = f"{file.architecture}."
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._prefix + name in self.file.field_names(self._prefix)

    def size(self, name: str, default: int | None = None) -> int:
        self._used.add(name)
        value: int = self.file.field(self._prefix + name, int, default)
        if value <= 0:
            raise self.error(name, value, "expected a positive whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        self._used.add(name)
        value = _shortest(self.file.field(self._prefix + name, float, default))
        if not 0 < value < float("inf"):
            raise self.error(name, value, "expected a positive number")
        return value

    def error(self, name: str, value: object, expected: str) -> ConfigError:
        return ConfigError(f"{self.file.source}: metadata field {self._prefix + name!r} is {short(value)}, {expected}")

    def check_whitelist(self, harmless: Mapping[str, Any]) -> None:
        for field in self.file.field_names(self._prefix):
            name = field.removeprefix(self._prefix)
            if name in self._used:
                continue
            value = self.file.field(field, object)
            if name not in harmless:
                raise ConfigError(
                    f"{self.file.source}: metadata field {field!r} = {short(value)} is not known to this port"
                )
            allowed = harmless[name]
            if allowed is not None and (type(value) is not type(allowed) or value != allowed):
                raise self.error(name, value, f"only {allowed!r} is implemented")


def _shortest(value: float) -> float:
    """The shortest decimal that names the same float32 is what the original config said."""
    return float(str(np.float32(value)))


def _head_dim(fields: _Fields, num_heads: int) -> int:
    width = fields.size("embedding_length")
    if "attention.key_length" not in fields and width % num_heads:
        raise fields.error("embedding_length", width, f"expected a multiple of attention.head_count {num_heads}")
    head_dim = fields.size("attention.key_length", width // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if (value := fields.size(name, head_dim)) != head_dim:
            raise fields.error(name, value, f"only the head size {head_dim} is implemented")
    if head_dim % 2:
        raise ConfigError(f"{fields.file.source}: head size {head_dim}: rotary embedding needs an even number")
    return head_dim


def _vocab_size(fields: _Fields) -> int:
    """Rows of the embedding; the metadata have to agree."""
    file = fields.file
    if _EMBEDDING not in file.tensors:
        raise WeightsError(f"{file.source}: tensor {_EMBEDDING!r} is missing")
    rows = file.tensors[_EMBEDDING].shape[0]
    if (value := fields.size("vocab_size", rows)) != rows:
        raise fields.error("vocab_size", value, f"but {_EMBEDDING} has {rows} rows")
    return rows


def _rope_scaling(file: GgufFile, architecture: _Architecture, head_dim: int, theta: float) -> RopeScaling | None:
    """The rescaling that the divisors come from: the largest is the factor, all others must follow from it."""
    if other := [name for name in _OTHER_DIVISORS if name in file.tensors]:
        raise ConfigError(f"{file.source}: tensor {other[0]!r} rescales the rotary embedding, which is not implemented")
    divisors = file.rotary_divisors
    if divisors is None:
        return None
    where = f"{file.source}: tensor {ROTARY_DIVISORS!r}"
    if not architecture.rescaled:
        raise ConfigError(f"{where} rescales the rotary embedding, which {file.architecture} has no use for")
    if divisors.shape != (head_dim // 2,):
        raise ConfigError(f"{where} has {divisors.size} divisors, expected {head_dim // 2}, half the head size")
    factor = _shortest(divisors.max())
    if not np.isfinite(divisors).all() or factor < 1:
        raise ConfigError(f"{where} holds {divisors.min()} to {divisors.max()}, expected divisors of at least 1")
    if (divisors == 1).all():
        return None
    scaling = RopeScaling(
        factor=factor,
        low_freq_factor=_LOW_FREQ_FACTOR,
        high_freq_factor=_HIGH_FREQ_FACTOR,
        original_max_position_embeddings=_ORIGINAL_POSITIONS,
    )
    expected = rotary_frequencies(head_dim, theta) / rotary_frequencies(head_dim, theta, scaling)
    wrong = np.flatnonzero(np.abs(divisors - expected) > _DIVISOR_TOLERANCE * expected)
    if wrong.size:
        first = wrong[0]
        raise ConfigError(
            f"{where}: divisor {first} is {divisors[first]}, expected {expected[first]} for Llama 3.1's rescaling by "
            f"{factor} (low_freq_factor {_LOW_FREQ_FACTOR}, high_freq_factor {_HIGH_FREQ_FACTOR}, "
            f"original_max_position_embeddings {_ORIGINAL_POSITIONS}); no other is implemented"
        )
    return scaling
