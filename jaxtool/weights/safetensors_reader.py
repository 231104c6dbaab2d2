"""A Hugging Face model folder of safetensors: `model.safetensors`, or an index with its shards.

Opens and checks files and reads parts of tensors by byte range. The format of one file is in `safetensors_header`,
what the tensors are for in `tensor_map`.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from jaxtool.weights.safetensors_header import (
    LENGTH_BYTES,
    NUMPY_DTYPES,
    StoredTensor,
    header_length,
    parse_header,
    parse_json_object,
)
from jaxtool.weights.tensor_map import FileTensor, TensorRule, WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# Between two runs of wanted bytes, what is read and thrown away rather than skipped. Linux reads ahead 128 KiB, so
# that skipping less saves nothing on a disk: half of each 4 KiB row took 9 times longer run by run than whole.
READ_THROUGH_BYTES = 128 * 1024
# Rows that are read whole pass through a buffer of this size.
BUFFER_BYTES = 1024 * 1024


class SafetensorsFolder:
    """The opened safetensors of a model folder. Opening reads headers only; nothing is memory-mapped.

    The files stay open while the object lives, so that a checkpoint replaced meanwhile is never read half and half.
    `read` may be called from several threads.

    Attributes:
        source: the folder.
        tensors: all tensors by name.
        bytes_read: bytes of tensor data read so far.

    Raises:
        FileNotFoundError: the folder or a shard doesn't exist.
        WeightsError: no safetensors there, a file is damaged, or the index contradicts folder or shards.
    """

    readable_dtypes = frozenset(NUMPY_DTYPES)
    rotary_interleaved = False

    def __init__(self, folder: Path) -> None:
        self.source = folder
        self.tensors: dict[str, FileTensor] = {}
        self.bytes_read = 0
        self._counting = threading.Lock()
        self._stored: dict[str, StoredTensor] = {}
        self._descriptors: dict[Path, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        for file, names in _listed_tensors(folder).items():
            stored = self._open(file)
            if names is not None and stored.keys() != names:
                raise WeightsError(
                    f"{folder / INDEX_FILE}: disagrees with {file.name}: listed but not there "
                    f"{_some(names - stored.keys())}; there but not listed {_some(stored.keys() - names)}"
                )
            self._stored |= stored
            for name, tensor in sorted(stored.items()):
                self.tensors[name] = FileTensor(shape=tensor.shape, dtype=tensor.dtype, file=file)

    def name_of(self, rule: TensorRule) -> str:
        return rule.hf

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """That part of a tensor, one slice with step 1 for each dimension, in the file's dtype.

        Of the file, the runs of bytes that the index cuts out are read, and the bytes between two runs where they
        are fewer than `READ_THROUGH_BYTES`. Beside the result, 1 MiB is held.

        Raises:
            WeightsError: the tensor's dtype can't be read, or the file can't.
        """
        tensor, file = self._stored[name], self.tensors[name].file
        if tensor.dtype not in NUMPY_DTYPES:
            raise WeightsError(
                f"{file}: can't read tensor {name}: its dtype is {tensor.dtype}, expected one of "
                f"{', '.join(sorted(NUMPY_DTYPES))}"
            )
        dtype = NUMPY_DTYPES[tensor.dtype]
        ranges = [part.indices(size) for part, size in zip(index, tensor.shape, strict=True)]
        if any(step != 1 for _, _, step in ranges):
            raise ValueError(f"tensor {name}: index {index} has a step, expected plain slices")
        result = np.empty([max(stop - start, 0) for start, stop, _ in ranges], dtype)
        if result.size == 0:
            return result

        # Dimensions that are taken whole join the one before them: what is left is runs of bytes, `stride` apart.
        cut = max((axis for axis, size in enumerate(tensor.shape) if result.shape[axis] < size), default=0)
        strides = [dtype.itemsize * math.prod(tensor.shape[axis + 1 :]) for axis in range(len(tensor.shape))]
        offset = tensor.start + sum(start * stride for (start, _, _), stride in zip(ranges, strides, strict=True))
        outer, rows = result.shape[: max(cut - 1, 0)], result.shape[max(cut - 1, 0) : cut]
        runs = result.reshape(-1).view(np.uint8).reshape(*outer, math.prod(rows), -1)
        source = _Source(self._descriptors[file], f"{file}: can't read tensor {name}")
        for place in np.ndindex(*outer):
            first = offset + sum(i * stride for i, stride in zip(place, strides, strict=False))
            source.read_runs(first, strides[cut - 1] if cut else 0, runs[place])
        with self._counting:
            self.bytes_read += source.bytes_read
        return result

    def _open(self, file: Path) -> dict[str, StoredTensor]:
        try:
            if not file.is_file():
                raise FileNotFoundError(f"{file}: no such file, though {INDEX_FILE} lists it")
            descriptor = self._descriptors[file] = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(descriptor).st_size
            where = f"{file}: not a whole safetensors file ({size} bytes)"
            length = os.pread(descriptor, LENGTH_BYTES, 0)
            header = os.pread(descriptor, header_length(length, size, where), LENGTH_BYTES)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise WeightsError(f"{file}: can't be opened: {error}") from error
        return parse_header(length, header, size, where)


class _Source:
    """Reads of one tensor: an open file and how every message begins."""

    def __init__(self, descriptor: int, where: str) -> None:
        self._descriptor = descriptor
        self._where = where
        self.bytes_read = 0

    def read_runs(self, offset: int, stride: int, runs: np.ndarray) -> None:
        """Fills uint8 [rows, run]; row i lies `stride * i` bytes behind the offset."""
        rows, run = runs.shape
        held = BUFFER_BYTES // max(stride, 1)
        if rows == 1 or held < 2 or stride - run >= READ_THROUGH_BYTES:
            for row in range(rows):
                self._read(offset + row * stride, runs[row])
            return
        buffer = np.empty(min(held, rows) * stride, np.uint8)
        for row in range(0, rows, held):
            count = min(held, rows - row)
            self._read(offset + row * stride, buffer[: (count - 1) * stride + run])
            runs[row : row + count] = buffer[: count * stride].reshape(count, stride)[:, :run]

    def _read(self, offset: int, into: np.ndarray) -> None:
        view, done = into.data, 0
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done:]], offset + done)
            except OSError as error:
                raise WeightsError(f"{self._where}: {error}") from error
            if count == 0:
                raise WeightsError(
                    f"{self._where}: the file ends at byte {offset + done}, expected {len(view) - done} more; "
                    "it has been cut off since it was opened"
                )
            done += count
        self.bytes_read += done


def _close(descriptors: dict[Path, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)


def _listed_tensors(folder: Path) -> dict[Path, set[str] | None]:
    """The folder's weight files, each with the tensor names that the index gives it; None without index."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder")
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.is_file():
        if single.is_file():
            return {single: None}
        raise WeightsError(_nothing_to_read(folder))
    listed = _read_index(index)
    if single.is_file() and single not in listed:
        raise WeightsError(
            f"{folder}: both {SINGLE_FILE} and an {INDEX_FILE} that doesn't list it; remove the one that isn't meant"
        )
    return {file: names for file, names in listed.items()}


def _nothing_to_read(folder: Path) -> str:
    def names(pattern: str) -> list[str]:
        return sorted(path.name for path in folder.glob(pattern))

    if shards := names("model-*-of-*.safetensors"):
        return f"{folder}: {len(shards)} shards ({shards[0]}, ...) but no {INDEX_FILE}"
    if pickles := names("*.bin") + names("*.pth") + names("*.pt"):
        return (
            f"{folder}: only pickled weights ({pickles[0]}, ...): unpickling runs code from the file, "
            "so they aren't read; convert them to safetensors"
        )
    if gguf := names("*.gguf"):
        return f"{folder}: holds GGUF files; give the file itself, e.g. {folder / gguf[0]}"
    return f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}"


def _read_index(index: Path) -> dict[Path, set[str]]:
    content = read_json_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: field 'weight_map' is {type(weight_map).__name__}, expected a non-empty object")
    listed: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise WeightsError(f"{index}: weight_map[{name!r}] is {file!r}, expected the name of a .safetensors file")
        parts = PurePosixPath(file).parts
        if file.startswith("/") or ".." in parts or "\\" in file or ":" in file:
            raise WeightsError(f"{index}: weight_map[{name!r}] is {file!r}, which lies outside the model folder")
        listed.setdefault(index.parent / file, set()).add(name)
    return listed


def read_json_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: no such file.
        WeightsError: not UTF-8, not JSON, not an object, or an object that has a key twice.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return parse_json_object(path.read_bytes(), str(path))


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return (", ".join(ordered[:5]) + more) if ordered else "none"
