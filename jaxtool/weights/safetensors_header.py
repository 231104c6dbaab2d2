"""The header of a safetensors file, parsed strictly and built: which bytes of the file are which tensor.

A file is the header's length (8 bytes, little-endian), the header (a JSON object by tensor name), then the data of
all tensors without a gap. Model folders are in `safetensors_reader` and `safetensors_writer`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxtool.weights.tensor_map import WeightsError

LENGTH_BYTES = 8
# The bound of the reference implementation.
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
# numpy's.
_MAX_RANK = 64

DTYPE_BITS: Mapping[str, int] = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
# What parameters may be made of.
NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(jnp.bfloat16),
    "F32": np.dtype("<f4"),
}

_FIELDS = {"dtype", "shape", "data_offsets"}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a file: dtype by the format's name, shape, and its bytes `start` to `stop`.

    The bytes count from the file's beginning in a parsed header, from the end of the header in one to be built.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


def parse_header(length: bytes, header: bytes, file_bytes: int, where: str) -> dict[str, StoredTensor]:
    """The tensors of a file, in the order of their data; every byte behind the header belongs to exactly one.

    Args:
        length: the file's first 8 bytes.
        header: as many of the bytes that follow as the length asks for, or fewer where the file is cut off.
        file_bytes: the size of the file.
        where: begins every message.

    Raises:
        WeightsError: anything in the header that the format doesn't allow or that contradicts the file's size.
    """
    data_start = LENGTH_BYTES + header_length(length, file_bytes, where)
    if not header.startswith(b"{"):
        raise WeightsError(f"{where}: the header starts with {header[:1]!r}, expected a curly bracket")
    content = parse_json_object(header, f"{where}: header")
    metadata = content.pop(METADATA, None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise WeightsError(f"{where}: {METADATA} is {_short(metadata)}, expected an object of strings")
    tensors = {name: _stored_tensor(name, fields, data_start, where) for name, fields in content.items()}
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop))

    end, before = data_start, "the header"
    for name, tensor in ordered:
        if tensor.start != end:
            kind = "overlaps" if tensor.start < end else "leaves a gap behind"
            raise WeightsError(
                f"{where}: tensor {name!r} starts at byte {tensor.start} and {kind} {before}, which ends at byte {end}"
            )
        end, before = tensor.stop, f"tensor {name!r}"
    if end != file_bytes:
        raise WeightsError(f"{where}: {before} ends at byte {end}, expected the end of the file, byte {file_bytes}")
    return dict(ordered)


def header_length(length: bytes, file_bytes: int, where: str) -> int:
    """Bytes of JSON that the first 8 bytes of a file announce.

    Raises:
        WeightsError: there are no 8 bytes, or the file (or the bound of 100 MB) is smaller than that.
    """
    if len(length) < LENGTH_BYTES:
        raise WeightsError(f"{where}: no room for the {LENGTH_BYTES} bytes of the header's length")
    found = int.from_bytes(length, "little")
    if found > min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES):
        raise WeightsError(
            f"{where}: a header of {found} bytes, expected at most "
            f"{min(file_bytes - LENGTH_BYTES, MAX_HEADER_BYTES)} (a file cut off, or not of this format)"
        )
    return found


def build_header(tensors: Mapping[str, StoredTensor]) -> bytes:
    """Length and header of a file with these tensors, filled up with spaces so that the data start at 8n bytes."""
    content: dict[str, Any] = {METADATA: {"format": "pt"}}
    for name, tensor in tensors.items():
        content[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.start, tensor.stop],
        }
    header = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % LENGTH_BYTES)
    return len(header).to_bytes(LENGTH_BYTES, "little") + header


def parse_json_object(text: bytes, where: str) -> dict[str, Any]:
    """The JSON object that `text` is; `where` begins every message.

    Raises:
        WeightsError: not UTF-8, not JSON, not an object, or an object that has a key twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise WeightsError(f"{where}: key {key!r} appears twice in one object")
            found[key] = value
        return found

    try:
        content = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except WeightsError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: no UTF-8, no JSON, a number of thousands of digits
        raise WeightsError(f"{where}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{where}: expected a JSON object, found {type(content).__name__}")
    return content


def _stored_tensor(name: str, fields: Any, data_start: int, where: str) -> StoredTensor:
    where = f"{where}: tensor {name!r}"
    if not _is_unicode(name):
        raise WeightsError(f"{where}: the name is not valid Unicode")
    if not isinstance(fields, dict) or fields.keys() != _FIELDS:
        raise WeightsError(f"{where} is {_short(fields)}, expected an object of {', '.join(sorted(_FIELDS))}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise WeightsError(f"{where}: field 'dtype' is {_short(dtype)}, expected one of {', '.join(DTYPE_BITS)}")
    if not _are_sizes(shape) or len(shape) > _MAX_RANK:
        raise WeightsError(f"{where}: field 'shape' is {_short(shape)}, expected a list of whole numbers from 0 up")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightsError(f"{where}: field 'data_offsets' is {_short(offsets)}, expected two ascending whole numbers")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise WeightsError(
            f"{where}: data_offsets {offsets} are {8 * (offsets[1] - offsets[0])} bits, "
            f"but {dtype}{_short(shape)} takes {_short(bits)}"
        )
    return StoredTensor(dtype=dtype, shape=tuple(shape), start=data_start + offsets[0], stop=data_start + offsets[1])


def _is_unicode(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 2**63 for value in values)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
