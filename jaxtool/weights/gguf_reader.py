"""A GGUF file of a Llama model: its metadata as a `LlamaConfig`, its tensors dequantised part by part.

Which tensor fills which parameter is in `tensor_map`; the vocabulary becomes a tokenizer in `tokenizers`.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import numpy as np

from jaxtool.models import LlamaConfig
from jaxtool.weights.hf_config import DEFAULT_ROPE_THETA, ConfigError
from jaxtool.weights.tensor_map import EMBEDDING, HEAD, FileTensor, TensorRule, WeightsError

_VERSIONS = (2, 3)

# What the library raises on a damaged file depends on where it stumbles.
_DAMAGE = (
    ValueError,
    KeyError,
    IndexError,
    TypeError,
    OverflowError,
    FloatingPointError,
    RecursionError,
)

# llama.cpp writes the frequencies of a rescaled rotary embedding as a tensor.
_SCALED_ROTARY = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

# Values at which a field of the llama.* metadata leaves the network as it is; None stands for any.
_HARMLESS_METADATA: dict[str, Any] = {
    "rope.scaling.type": "none",
    "rope.scaling.finetuned": None,
    "expert_count": 0,
    "expert_used_count": 0,
}


class GgufFile:
    """An opened, memory-mapped GGUF file; only metadata and tensor headers are read at once.

    Raises:
        FileNotFoundError: no such file.
        WeightsError: not GGUF, cut off, or damaged.
    """

    rotary_interleaved = True

    def __init__(self, path: Path) -> None:
        self.source = path
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file")
        with path.open("rb") as file:
            magic, version = file.read(4), file.read(4)
        if magic != b"GGUF":
            raise WeightsError(f"{path}: not a GGUF file: it starts with {magic!r}, expected b'GGUF'")
        if int.from_bytes(version, "little") not in _VERSIONS:
            raise WeightsError(f"{path}: GGUF version bytes {version!r}, expected version 2 or 3, little-endian ('<I')")
        try:
            with np.errstate(over="raise"):
                self._reader = _BoundedReader(path)
            self._metadata = {name: field.contents() for name, field in self._reader.fields.items()}
        except _DAMAGE as error:
            raise WeightsError(
                f"{path}: damaged or cut off GGUF file ({path.stat().st_size} bytes): {error}"
            ) from error
        self._by_name = {tensor.name: tensor for tensor in self._reader.tensors}
        self.tensors = {
            name: FileTensor(
                shape=tuple(int(size) for size in reversed(tensor.shape)),
                dtype=tensor.tensor_type.name,
                file=path,
            )
            for name, tensor in self._by_name.items()
        }
        self.readable_dtypes = frozenset(dtype.name for dtype in gguf.GGMLQuantizationType if _can_dequantise(dtype))

    def name_of(self, rule: TensorRule) -> str:
        return rule.gguf

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """That part of a tensor in float32, rows in the file's order; whole rows are dequantised."""
        tensor = self._by_name[name]
        rows = gguf.quants.dequantize(np.ascontiguousarray(tensor.data[index[0]]), tensor.tensor_type)
        return rows[(slice(None), *index[1:])]

    def field(self, name: str, kind: type, default: Any = None) -> Any:
        """A metadata value, checked to be of `kind`; `default` where the file has none.

        Raises:
            ConfigError: the field is of another type, or absent without a default.
        """
        if name not in self._metadata:
            if default is None:
                raise ConfigError(f"{self.source}: metadata field {name!r} is missing")
            return default
        value = self._metadata[name]
        if not isinstance(value, kind) or (isinstance(value, bool) and kind not in (bool, object)):
            raise ConfigError(f"{self.source}: metadata field {name!r} is {_short(value)}, expected {kind.__name__}")
        return value

    def field_names(self, prefix: str) -> list[str]:
        """Names of the metadata fields that start with `prefix`, in file order."""
        return [name for name in self._metadata if name.startswith(prefix)]


class _BoundedReader(gguf.GGUFReader):
    """The library's reader, which takes what is left of a file that is too short; this one says so.

    It also ends the walk over a damaged length field at the end of the file instead of at that length, and
    slices a plain array: a memory map is five times slower, and a vocabulary takes 200,000 slices.
    """

    @functools.cached_property
    def _bytes(self) -> np.ndarray:
        return self.data.view(np.ndarray)

    def _get(self, offset: Any, dtype: Any, count: Any = 1, override_order: Any = None) -> Any:
        start = int(offset)
        end = start + np.dtype(dtype).itemsize * int(count)
        if end > self._bytes.size:
            raise ValueError(f"needs {end} bytes, has {self._bytes.size}")
        return self._bytes[start:end].view(dtype)


def llama_config_from_gguf(file: GgufFile) -> LlamaConfig:
    """The `LlamaConfig` of a GGUF file. The model is tied where the file has no output matrix.

    Raises:
        ConfigError: another architecture, a field missing, unknown, of the wrong type or at a value that
            isn't implemented (rotary scaling, partial rotary, experts, split files).
    """
    source = file.source
    architecture = file.field("general.architecture", str)
    if architecture != "llama":
        raise ConfigError(f"{source}: metadata field 'general.architecture' is {architecture!r}, expected 'llama'")
    if file.field("split.count", int, 1) > 1:
        raise ConfigError(f"{source}: one of several files of a split model ('split.count'); merge them first")
    if scaled := [name for name in _SCALED_ROTARY if name in file.tensors]:
        raise ConfigError(f"{source}: tensor {scaled[0]!r} rescales the rotary embedding, which is not implemented")

    used: set[str] = set()

    def size(name: str, default: int | None = None) -> int:
        used.add(name)
        value: int = file.field(f"llama.{name}", int, default)
        if value <= 0:
            raise ConfigError(f"{source}: metadata field 'llama.{name}' is {value}, expected a positive whole number")
        return value

    def number(name: str, default: float | None = None) -> float:
        used.add(name)
        # The file holds float32: the shortest decimal that names the same float32 is what the config said.
        value = float(str(np.float32(file.field(f"llama.{name}", float, default))))
        if not 0 < value < float("inf"):
            raise ConfigError(f"{source}: metadata field 'llama.{name}' is {value}, expected a positive number")
        return value

    hidden_size, num_heads = size("embedding_length"), size("attention.head_count")
    num_kv_heads = size("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(
            f"{source}: metadata field 'llama.attention.head_count_kv' is {num_kv_heads}, "
            f"expected a divisor of attention.head_count {num_heads}"
        )
    if "llama.attention.key_length" not in file.field_names("llama.") and hidden_size % num_heads:
        raise ConfigError(
            f"{source}: metadata field 'llama.embedding_length' is {hidden_size}, expected a multiple of "
            f"attention.head_count {num_heads}"
        )
    head_dim = size("attention.key_length", hidden_size // num_heads)
    for name in ("attention.value_length", "rope.dimension_count"):
        if size(name, head_dim) != head_dim:
            raise ConfigError(
                f"{source}: metadata field 'llama.{name}' is {size(name)}, only the head size {head_dim} is implemented"
            )
    if head_dim % 2:
        raise ConfigError(f"{source}: head size {head_dim}: rotary embedding needs an even number")
    config = LlamaConfig(
        vocab_size=_vocab_size(file, size),
        hidden_size=hidden_size,
        intermediate_size=size("feed_forward_length"),
        num_hidden_layers=size("block_count"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        rope_theta=number("rope.freq_base", DEFAULT_ROPE_THETA),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=size("context_length"),
        tie_word_embeddings=file.name_of(HEAD) not in file.tensors,
    )
    _check_whitelist(file, used)
    return config


def _vocab_size(file: GgufFile, size: Any) -> int:
    """Rows of the embedding; the metadata have to agree."""
    embedding = file.name_of(EMBEDDING)
    if embedding not in file.tensors:
        raise WeightsError(f"{file.source}: tensor {embedding!r} is missing")
    rows = file.tensors[embedding].shape[0]
    if size("vocab_size", rows) != rows:
        raise ConfigError(
            f"{file.source}: metadata field 'llama.vocab_size' is {size('vocab_size')}, but {embedding} has {rows} rows"
        )
    return rows


def _check_whitelist(file: GgufFile, used: set[str]) -> None:
    for field in file.field_names("llama."):
        name = field.removeprefix("llama.")
        if name in used:
            continue
        value = file.field(field, object)
        if name not in _HARMLESS_METADATA:
            raise ConfigError(f"{file.source}: metadata field {field!r} = {_short(value)} is not known to this port")
        allowed = _HARMLESS_METADATA[name]
        if allowed is not None and value != allowed:
            raise ConfigError(
                f"{file.source}: metadata field {field!r} is {_short(value)}, only {allowed!r} is implemented"
            )


def _can_dequantise(dtype: gguf.GGMLQuantizationType) -> bool:
    """Whether the library turns this type into float32, tried on no rows."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[dtype]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), dtype)
    except NotImplementedError:
        return False
    return True


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({type(value).__name__})"
