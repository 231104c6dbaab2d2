"""Writes a checkpoint as safetensors, block by block: no file and no tensor has to be whole in memory.

Which tensors there are is the caller's; `config.json` and tokenizer files are too. Reading is in `safetensors_reader`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from jaxtool.weights.safetensors_header import METADATA, NUMPY_DTYPES, StoredTensor, build_header
from jaxtool.weights.safetensors_reader import INDEX_FILE, SINGLE_FILE
from jaxtool.weights.tensor_map import WeightsError

# What transformers takes as "5GB".
SHARD_BYTES = 5 * 1000**3

_PARTIAL = ".partial"
_SHARDS = "model-*-of-*.safetensors"
_FORMAT_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}

# Name, dtype by the format's name, shape.
TensorSpec = tuple[str, str, Sequence[int]]


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsWriter:
    """Writes `model.safetensors`, or numbered shards and their index, into a folder.

        with SafetensorsWriter(folder, tensors) as writer:
            for name, block in ...:
                writer.write(name, block)

    Files carry temporary names (`.partial`) until every tensor is whole and on the disk, and the index comes last:
    a killed process leaves no checkpoint that could be taken for a whole one. An exception inside the block removes
    what was written. Leftovers of a killed process are overwritten.

    Args:
        folder: made where it doesn't exist; must hold no weights.
        tensors: everything that will be written: name, dtype ("F16", "BF16" or "F32") and shape. Shards are filled
            in this order.
        shard_bytes: most bytes of tensor data in one file; a larger tensor has a file of its own.

    Raises:
        WeightsError: the folder already holds weights or can't be written, or the list isn't one of a checkpoint.
    """

    def __init__(self, folder: Path, tensors: Sequence[TensorSpec], *, shard_bytes: int = SHARD_BYTES) -> None:
        listed = _checked(tensors, shard_bytes)
        shards = _plan_shards(listed, shard_bytes)
        count = len(shards)
        self._folder = folder
        self._tensors = {tensor.name: tensor for tensor in listed}
        self._files = {
            SINGLE_FILE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors": shard
            for number, shard in enumerate(shards, 1)
        }
        self._file_of = {tensor.name: file for file, shard in self._files.items() for tensor in shard}
        self._total = sum(tensor.size for tensor in listed)
        self._written = dict.fromkeys(self._tensors, 0)
        self._starts: dict[str, int] = {}
        self._descriptors: dict[str, int] = {}

    def __enter__(self) -> SafetensorsWriter:
        folder = self._folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if held := sorted(path.name for name in (SINGLE_FILE, INDEX_FILE, _SHARDS) for path in folder.glob(name)):
                raise WeightsError(
                    f"{folder}: already holds weights ({held[0]}{', ...' if held[1:] else ''}); remove them or write "
                    "to another folder"
                )
            for name in (SINGLE_FILE, INDEX_FILE, _SHARDS):
                for path in folder.glob(name + _PARTIAL):
                    path.unlink()
        except OSError as error:
            raise WeightsError(f"{folder}: can't write weights there: {error}") from error
        try:
            for file, shard in self._files.items():
                self._begin(file, shard)
        except BaseException:
            self._abandon()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            self._finish()
        except BaseException:
            self._abandon()
            raise

    def write(self, name: str, block: np.ndarray) -> None:
        """Appends to a tensor the rows that `block` holds: [rows, ...] of the tensor's dtype (all of a scalar).

        The blocks of one tensor come in their order, the tensors in any.

        Raises:
            WeightsError: no such tensor, another dtype or shape, too many rows, or the disk doesn't take them.
        """
        if name not in self._tensors:
            raise WeightsError(f"{self._folder}: tensor {name} is not among those announced")
        tensor, file = self._tensors[name], self._file_of[name]
        if block.dtype != tensor.dtype or block.shape[1:] != tensor.shape[1:] or block.ndim != len(tensor.shape):
            raise WeightsError(
                f"{self._folder / file}: tensor {name} is {tensor.dtype}{list(tensor.shape)}, "
                f"found a block {block.dtype}{list(block.shape)}"
            )
        start = self._written[name]
        if start + block.nbytes > tensor.size:
            raise WeightsError(
                f"{self._folder / file}: tensor {name} is {tensor.size} bytes, but {start} are written already and "
                f"the block has {block.nbytes}"
            )
        self._put(file, np.ascontiguousarray(block).reshape(-1).view(np.uint8), self._starts[name] + start, name)
        self._written[name] = start + block.nbytes

    def _begin(self, file: str, shard: Sequence[_Tensor]) -> None:
        """Makes the file and writes its header."""
        stored: dict[str, StoredTensor] = {}
        end = 0
        # Wide types first, so that every tensor is aligned: readers view the bytes in place.
        for tensor in sorted(shard, key=lambda tensor: -tensor.dtype.itemsize):
            stored[tensor.name] = StoredTensor(
                dtype=_FORMAT_NAMES[tensor.dtype], shape=tensor.shape, start=end, stop=end + tensor.size
            )
            end += tensor.size
        header = build_header(stored)
        self._starts |= {name: len(header) + tensor.start for name, tensor in stored.items()}
        self._open(file)
        self._put(file, np.frombuffer(header, np.uint8), 0, None)

    def _open(self, file: str) -> None:
        path = self._folder / (file + _PARTIAL)
        try:
            self._descriptors[file] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise WeightsError(f"{path}: can't be made: {error}") from error

    def _put(self, file: str, data: np.ndarray, offset: int, tensor: str | None) -> None:
        view, done = data.data, 0
        while done < len(view):
            try:
                done += os.pwrite(self._descriptors[file], view[done:], offset + done)
            except OSError as error:
                raise self._cant_write(file, f"tensor {tensor}" if tensor else "the header", error) from error

    def _finish(self) -> None:
        if cut := [name for name, tensor in self._tensors.items() if self._written[name] < tensor.size]:
            raise WeightsError(
                f"{self._folder}: {len(cut)} of {len(self._tensors)} tensors are not whole, the first is {cut[0]} "
                f"({self._written[cut[0]]} of {self._tensors[cut[0]].size} bytes); nothing is kept"
            )
        if len(self._files) > 1:
            index = {"metadata": {"total_size": self._total}, "weight_map": self._file_of}
            self._open(INDEX_FILE)
            text = json.dumps(index, ensure_ascii=False, indent=2) + "\n"
            self._put(INDEX_FILE, np.frombuffer(text.encode(), np.uint8), 0, None)
        for file, descriptor in self._descriptors.items():
            try:
                os.fsync(descriptor)
            except OSError as error:
                raise self._cant_write(file, "the file", error) from error
        self._rename()

    def _rename(self) -> None:
        """Gives the files their names; takes back the ones given where one fails."""
        given: list[Path] = []
        try:
            for file in self._descriptors:  # the index is the last
                path = self._folder / file
                os.rename(self._folder / (file + _PARTIAL), path)
                given.append(path)
            _sync_folder(self._folder)
        except BaseException as error:
            for path in reversed(given):
                path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise WeightsError(f"{self._folder}: can't rename the finished files: {error}") from error
            raise
        self._close()

    def _abandon(self) -> None:
        for file in self._descriptors:
            (self._folder / (file + _PARTIAL)).unlink(missing_ok=True)
        self._close()

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def _cant_write(self, file: str, what: str, error: OSError) -> WeightsError:
        return WeightsError(
            f"{self._folder / file}: can't write {what}: {error.strerror}; the whole checkpoint takes {self._total} "
            "bytes; nothing is kept"
        )


def _checked(tensors: Sequence[TensorSpec], shard_bytes: int) -> list[_Tensor]:
    if not tensors:
        raise WeightsError("no tensors to write")
    if shard_bytes < 1:
        raise WeightsError(f"shard_bytes is {shard_bytes}, expected a positive number")
    listed: dict[str, _Tensor] = {}
    for name, dtype, shape in tensors:
        if name in listed or not name or name == METADATA:
            raise WeightsError(f"tensor name {name!r} is empty, reserved or there twice")
        if dtype not in NUMPY_DTYPES:
            raise WeightsError(f"tensor {name}: dtype {dtype!r}, expected one of {', '.join(NUMPY_DTYPES)}")
        if any(size < 0 for size in shape):
            raise WeightsError(f"tensor {name}: shape {list(shape)}, expected sizes from 0 up")
        listed[name] = _Tensor(name=name, dtype=NUMPY_DTYPES[dtype], shape=tuple(shape))
    return list(listed.values())


def _plan_shards(tensors: Sequence[_Tensor], shard_bytes: int) -> list[list[_Tensor]]:
    shards: list[list[_Tensor]] = []
    left = 0
    for tensor in tensors:
        if not shards or tensor.size > left:
            shards.append([])
            left = shard_bytes
        shards[-1].append(tensor)
        left -= tensor.size
    return shards


def _sync_folder(folder: Path) -> None:
    """Makes the names in a folder last, on file systems that can do so."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
