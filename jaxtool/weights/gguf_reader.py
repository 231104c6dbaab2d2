"""A GGUF file: its metadata as checked values, its tensors in floating point, dequantised part by part.

What the metadata say about the network is in `gguf_config`, which tensor fills which parameter in `tensor_map`; the
vocabulary becomes a tokenizer in `tokenizers`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import gguf.quants
import jax.numpy as jnp
import numpy as np

from jaxtool.weights.hf_fields import ConfigError
from jaxtool.weights.tensor_map import FileTensor, TensorRule, WeightsError

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

# For each architecture whether llama.cpp's rotary embedding pairs neighbouring rows of a head. Its converter reorders
# the rows of queries and keys for that; Qwen's it leaves as they are.
ROTARY_INTERLEAVED: Mapping[str, bool] = {"llama": True, "qwen3": False}

# The divisors of a rescaled rotary embedding, which belong to the config.
ROTARY_DIVISORS = "rope_freqs.weight"

# Types that numpy holds as they are; all others are blocks of quantised numbers.
_PLAIN: Mapping[gguf.GGMLQuantizationType, np.dtype] = {
    gguf.GGMLQuantizationType.F32: np.dtype(np.float32),
    gguf.GGMLQuantizationType.F16: np.dtype(np.float16),
    gguf.GGMLQuantizationType.BF16: np.dtype(jnp.bfloat16),
}

# Numbers that are dequantised at once: numpy needs some 20 bytes for each while it unpacks them.
_AT_ONCE = 1 << 18


class GgufFile:
    """An opened, memory-mapped GGUF file; only metadata and tensor headers are read at once.

    Attributes:
        source: the file.
        tensors: all tensors by name, but for the divisors of a rescaled rotary embedding (`rotary_divisors`).
        readable_dtypes: names of the tensor types that `read` can return.

    Raises:
        FileNotFoundError: no such file.
        WeightsError: not GGUF, cut off, or damaged.
    """

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
        self._check_layout()
        self._by_name = {tensor.name: tensor for tensor in self._reader.tensors}
        self.tensors = {
            name: FileTensor(
                shape=tuple(int(size) for size in reversed(tensor.shape)),
                dtype=tensor.tensor_type.name,
                file=path,
            )
            for name, tensor in self._by_name.items()
            if name != ROTARY_DIVISORS
        }
        self.readable_dtypes = _readable_dtypes()

    def _check_layout(self) -> None:
        """Tensors must follow one another without overlap or gap, each from the next aligned byte on."""
        alignment, end, before = int(self._reader.alignment), int(self._reader.data_offset), "the header"
        for tensor in sorted(self._reader.tensors, key=lambda tensor: int(tensor.data_offset)):
            expected = -(-end // alignment) * alignment
            if int(tensor.data_offset) != expected:
                raise WeightsError(
                    f"{self.source}: tensor {tensor.name!r} starts at byte {int(tensor.data_offset)}, expected "
                    f"{expected}: the first multiple of {alignment} behind {before}"
                )
            end, before = expected + int(tensor.n_bytes), f"tensor {tensor.name!r}"

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the network; metadata fields about it start with `<architecture>.`.

        Raises:
            ConfigError: missing, or none that is supported.
        """
        name: str = self.field("general.architecture", str)
        if name not in ROTARY_INTERLEAVED:
            raise ConfigError(
                f"{self.source}: metadata field 'general.architecture' is {name!r}, "
                f"expected one of {', '.join(ROTARY_INTERLEAVED)}"
            )
        return name

    @property
    def rotary_interleaved(self) -> bool:
        """Whether query and key rows are in the order of llama.cpp's interleaved rotary embedding."""
        return ROTARY_INTERLEAVED[self.architecture]

    @functools.cached_property
    def rotary_divisors(self) -> np.ndarray | None:
        """What the rotary frequencies are divided by, float32 [H / 2]; None where the file has no such tensor.

        Raises:
            WeightsError: of a type that can't be read, or not a vector.
        """
        tensor = self._by_name.get(ROTARY_DIVISORS)
        if tensor is None:
            return None
        if tensor.tensor_type.name not in self.readable_dtypes or len(tensor.shape) != 1:
            raise WeightsError(
                f"{self.source}: tensor {ROTARY_DIVISORS!r} is {tensor.tensor_type.name}"
                f"{list(map(int, reversed(tensor.shape)))}, expected a vector in one of "
                f"{', '.join(sorted(self.readable_dtypes))}"
            )
        return self.read(ROTARY_DIVISORS, (slice(0, int(tensor.shape[0])),)).astype(np.float32)

    def name_of(self, rule: TensorRule) -> str:
        return rule.gguf

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """That part of a tensor, rows in the file's order: float16 and bfloat16 as they are, all else in float32.

        Only the rows asked for are dequantised, and of each the blocks that hold the columns asked for.
        """
        tensor = self._by_name[name]
        if tensor.tensor_type in _PLAIN:
            return tensor.data.view(_PLAIN[tensor.tensor_type])[index]
        block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
        *outer, last = index
        first, stop, _ = last.indices(tensor.data.shape[-1] // block_bytes * block)
        blocks = slice(first // block * block_bytes, -(-stop // block) * block_bytes)
        columns = slice(first - first // block * block, stop - first // block * block)
        data = np.atleast_2d(tensor.data[(*outer, blocks)])
        values = np.empty((*data.shape[:-1], max(stop - first, 0)), np.float32)
        rows = max(_AT_ONCE // max(data.shape[-1] // block_bytes * block, 1), 1)
        for row in range(0, len(data) if values.size else 0, rows):
            part = np.ascontiguousarray(data[row : row + rows])
            values[row : row + rows] = gguf.quants.dequantize(part, tensor.tensor_type)[..., columns]
        return values if outer else values[0]

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
            raise ConfigError(f"{self.source}: metadata field {name!r} is {short(value)}, expected {kind.__name__}")
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


@functools.cache
def _readable_dtypes() -> frozenset[str]:
    return frozenset(dtype.name for dtype in gguf.GGMLQuantizationType if _can_dequantise(dtype))


def _can_dequantise(dtype: gguf.GGMLQuantizationType) -> bool:
    """Whether the library turns this type into float32, tried on no rows."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[dtype]
    try:
        gguf.quants.dequantize(np.zeros((1, block_bytes), np.uint8), dtype)
    except NotImplementedError:
        return False
    return True


def short(value: Any) -> str:
    """A value as a message shows it."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}... ({type(value).__name__})"
