"""Fills one parameter from a checkpoint: only the rows and columns that this process's devices hold are read.

Tensors pass through in pieces of some rows, each read once for all devices of the process. The assignment of tensors
to parameters is in `tensor_map`.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, SingleDeviceSharding

from jaxtool.weights.safetensors_reader import READ_THROUGH_BYTES
from jaxtool.weights.tensor_map import (
    EMBEDDING_PATH,
    PlannedParameter,
    TensorFiles,
    TensorRule,
    WeightPlan,
    WeightsError,
)

# Elements of one piece, which is to fit the L2 cache; of wide tensors up to `_LARGEST_PIECE` for `_ROWS` rows. Copying
# a transposed piece of 128 rows is twice as fast as one of 32, since shorter runs are written, and as one of 512.
_PIECE = 1 << 18
_LARGEST_PIECE = 1 << 20
_ROWS = 128
# Parts of a parameter that are filled together, in bytes; at least one device's part is.
_FILLED_TOGETHER = 2 << 30
_THREADS = min(32, os.cpu_count() or 1)
# Bits of infinity, by dtype; NaN have larger ones.
_INFINITIES = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F80_0000}
# XLA on CPU takes numpy memory that is aligned like this as it is, without a copy.
_ALIGNMENT = 64

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def read_parameter(files: TensorFiles, planned: PlannedParameter) -> jax.Array:
    """The parameter with the leaf's dtype and sharding; on the default device where the leaf has none.

    Each byte that a process needs is read once for all its devices. Beside the result the host holds some MiB, and
    on accelerators the parts on their way to the devices: at most 2 GiB, or one device's part if that is more.

    Raises:
        WeightsError: the leaf's sharding names no devices, or the file can't be read.
    """
    leaf = planned.leaf
    if leaf.sharding is None:
        return jax.device_put(read_block(files, planned, tuple((0, size) for size in leaf.shape)))
    if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, AbstractMesh):
        raise WeightsError(
            f"parameter {planned.rule.path}: its sharding is on an abstract mesh, which names no devices"
        )
    holders: dict[Ranges, list[jax.Device]] = {}
    for device, index in leaf.sharding.addressable_devices_indices_map(leaf.shape).items():
        whole = (slice(None),) * len(leaf.shape) if index is None else index
        ranges = tuple(part.indices(size)[:2] for part, size in zip(whole, leaf.shape, strict=True))
        holders.setdefault(ranges, []).append(device)

    parts: list[jax.Array] = []
    for together in _batches(sorted(holders), leaf.dtype.itemsize):
        on_their_way = [
            jax.device_put(block, SingleDeviceSharding(device, memory_kind=leaf.sharding.memory_kind))
            for ranges, block in zip(together, _read_blocks(files, planned, together), strict=True)
            for device in holders[ranges]
        ]
        # The host's copies are dropped here, before the next ones are made.
        parts += jax.block_until_ready(on_their_way)
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, parts, dtype=leaf.dtype)


def read_block(files: TensorFiles, planned: PlannedParameter, ranges: Ranges) -> np.ndarray:
    """The part of a parameter that `ranges` (start and stop on each axis) cut out, in the leaf's dtype."""
    return _read_blocks(files, planned, [ranges])[0]


def _batches(parts: Sequence[Ranges], itemsize: int) -> Iterator[list[Ranges]]:
    """The parts in runs of at most `_FILLED_TOGETHER` bytes."""
    batch: list[Ranges] = []
    held = 0
    for ranges in parts:
        size = itemsize * math.prod(stop - start for start, stop in ranges)
        if batch and held + size > _FILLED_TOGETHER:
            yield batch
            batch, held = [], 0
        batch.append(ranges)
        held += size
    if batch:
        yield batch


def _read_blocks(files: TensorFiles, planned: PlannedParameter, parts: Sequence[Ranges]) -> list[np.ndarray]:
    rule, leaf = planned.rule, planned.leaf
    blocks = [_aligned_zeros([stop - start for start, stop in ranges], leaf.dtype) for ranges in parts]
    pieces: list[_Piece] = []
    if not rule.stacked:
        targets = list(zip(blocks, parts, strict=True))
        pieces += _pieces(files, rule, planned.names[0], leaf.shape, targets)
    else:
        for layer, name in enumerate(planned.names):
            targets = [
                (block[layer - ranges[0][0]], ranges[1:])
                for block, ranges in zip(blocks, parts, strict=True)
                if ranges[0][0] <= layer < ranges[0][1]
            ]
            pieces += _pieces(files, rule, name, leaf.shape[1:], targets)
    # Reading and copying release the interpreter lock.
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda piece: piece.fill(files), pieces):
            pass
    return blocks


def _aligned_zeros(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.zeros(size + _ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % _ALIGNMENT
    return memory[start : start + size].view(dtype).reshape(shape)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """What one block takes from one tensor.

    Of a dimension that merges several parameter axes, the outermost is cut in the file and the others after
    reading: a device that holds half of each head reads whole heads, whose rows are contiguous.

    Attributes:
        block: the block, without layer axis.
        box: for each dimension of the tensor, the range that is read.
        split: for each dimension of the tensor, the lengths of the merged axes behind the outermost.
        inner: for each parameter axis in the order of the file, what is kept after reading.
        order: parameter axes in the order of the file.
    """

    block: np.ndarray
    box: Ranges
    split: tuple[tuple[int, ...], ...]
    inner: tuple[slice, ...]
    order: tuple[int, ...]

    def take(self, part: np.ndarray, first_row: int) -> None:
        """Writes the rows of `part` (all of the box's columns) where they belong; `first_row` is the first one's."""
        lengths: list[int] = []
        for size, split in zip(part.shape, self.split, strict=True):
            lengths += [size // math.prod(split), *split]
        values = part.reshape(lengths)[self.inner].transpose(np.argsort(self.order))
        if values.dtype != self.block.dtype:
            values = values.astype(self.block.dtype)  # in the source's order: casting while transposing is slower
        place = [slice(size) for size in values.shape]
        start = (first_row - self.box[0][0]) // math.prod(self.split[0])
        place[self.order[0]] = slice(start, start + lengths[0])
        # As plain bits: numpy copies bfloat16 one element at a time and under the interpreter lock.
        bits = np.dtype(f"u{values.dtype.itemsize}")
        self.block.view(bits)[tuple(place)] = values.view(bits)


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some rows of a tensor, read once and handed to every block that takes from them."""

    name: str
    box: Ranges
    cuts: tuple[_Cut, ...]
    head_size: int | None  # where the rows of each head are in llama.cpp's order

    def fill(self, files: TensorFiles) -> None:
        part = files.read(self.name, tuple(slice(*ends) for ends in self.box))
        self.check_finite(part, files)
        if self.head_size is not None:
            part = undo_rotary_permutation(part, self.head_size)
        for cut in self.cuts:
            columns = tuple(
                slice(mine[0] - all_[0], mine[1] - all_[0])
                for mine, all_ in zip(cut.box[1:], self.box[1:], strict=True)
            )
            cut.take(part[(slice(None), *columns)], self.box[0][0])

    def check_finite(self, part: np.ndarray, files: TensorFiles) -> None:
        """Raises WeightsError where a value is infinite or no number, as files cut from float32 to float16 have."""
        infinity = _INFINITIES.get(part.dtype.name)
        if infinity is not None and part.size:
            # As whole numbers, infinities and NaN are the largest, of either sign: many times faster than isfinite,
            # which takes bfloat16 one element at a time.
            size = part.dtype.itemsize
            positive, negative = part.view(f"i{size}").max(), part.view(f"u{size}").max()
            if positive < infinity and negative < infinity + (1 << (8 * size - 1)):
                return
        damaged = ~np.isfinite(part)
        if damaged.any():
            at = [int(i) + start for i, (start, _) in zip(np.argwhere(damaged)[0], self.box, strict=True)]
            raise WeightsError(
                f"{files.tensors[self.name].file}: tensor {self.name} has a value that is infinite or not a number "
                f"at {at}, expected finite weights"
            )


def _pieces(
    files: TensorFiles,
    rule: TensorRule,
    name: str,
    shape: tuple[int, ...],
    targets: Sequence[tuple[np.ndarray, Ranges]],
) -> Iterator[_Piece]:
    """Pieces of a tensor that together fill the blocks; rows behind the file's last stay as they are.

    Args:
        files: the checkpoint.
        rule: how the parameter lies in the tensor.
        name: of the tensor.
        shape: of the parameter, without layer axis.
        targets: blocks and the ranges of the parameter that they hold, without layer axis.
    """
    file_shape = files.tensors[name].shape
    cuts = [cut for block, ranges in targets for cut in _cuts(rule, file_shape, shape, block, ranges)]
    head_size = shape[rule.axes[0][-1]] if rule.rotary and files.rotary_interleaved else None
    step = math.prod(shape[axis] for axis in rule.axes[0][1:])
    borders = sorted({row for cut in cuts for row in cut.box[0]})
    for start, stop in itertools.pairwise(borders):
        here = [cut for cut in cuts if cut.box[0][0] <= start and stop <= cut.box[0][1]]
        for neighbours in _neighbours(here, targets[0][0].dtype.itemsize, file_shape):
            columns = tuple(
                (min(cut.box[axis][0] for cut in neighbours), max(cut.box[axis][1] for cut in neighbours))
                for axis in range(1, len(file_shape))
            )
            width = math.prod(last - first for first, last in columns)
            rows = max(_PIECE // width, min(_ROWS, _LARGEST_PIECE // width))
            rows = max(rows // step, 1) * step
            for row in range(start, stop, rows):
                yield _Piece(
                    name=name,
                    box=((row, min(row + rows, stop)), *columns),
                    cuts=tuple(neighbours),
                    head_size=head_size,
                )


def _cuts(
    rule: TensorRule, file_shape: tuple[int, ...], shape: tuple[int, ...], block: np.ndarray, ranges: Ranges
) -> Iterator[_Cut]:
    box: list[Range] = []
    split: list[tuple[int, ...]] = []
    inner: list[slice] = []
    for axes, size in zip(rule.axes, file_shape, strict=True):
        lengths = tuple(shape[axis] for axis in axes[1:])
        first, last = (end * math.prod(lengths) for end in ranges[axes[0]])
        box.append((first, min(last, size)))
        split.append(lengths)
        inner += [slice(None), *(slice(*ranges[axis]) for axis in axes[1:])]
    if all(first < last for first, last in box):
        order = tuple(axis for axes in rule.axes for axis in axes)
        yield _Cut(block=block, box=tuple(box), split=tuple(split), inner=tuple(inner), order=order)


def _neighbours(cuts: Sequence[_Cut], itemsize: int, file_shape: tuple[int, ...]) -> Iterator[list[_Cut]]:
    """Cuts of the same rows in groups that lie so close together that one read serves them."""
    if len(file_shape) == 1:
        if cuts:
            yield list(cuts)
        return
    gap = READ_THROUGH_BYTES // (itemsize * math.prod(file_shape[2:]))
    group: list[_Cut] = []
    end = 0
    for cut in sorted(cuts, key=lambda cut: cut.box[1]):
        if group and cut.box[1][0] - end >= gap:
            yield group
            group = []
        group.append(cut)
        end = max(end, cut.box[1][1])
    if group:
        yield group


def undo_rotary_permutation(rows: np.ndarray, head_size: int) -> np.ndarray:
    """Rows [heads * H, ...] of llama.cpp's interleaved rotary order in the half-split order of Hugging Face.

    llama.cpp pairs rows (2i, 2i + 1) of a head, Hugging Face rows (i, i + H/2).
    """
    return rows.reshape(-1, head_size // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def check_repeated_head(files: TensorFiles, plan: WeightPlan) -> None:
    """Compares the head tensor of a tied model with the embedding, byte for byte, some rows at a time.

    Raises:
        WeightsError: they differ, so that dropping the head would change the model.
    """
    if plan.repeated_head is None:
        return
    embedding = next(planned.names[0] for planned in plan.parameters if planned.rule.path == EMBEDDING_PATH)
    rows, columns = files.tensors[embedding].shape
    step = max(_PIECE // columns, 1)
    for start in range(0, rows, step):
        index = (slice(start, min(start + step, rows)), slice(0, columns))
        first, second = files.read(embedding, index), files.read(plan.repeated_head, index)
        if first.dtype != second.dtype or first.tobytes() != second.tobytes():
            raise WeightsError(
                f"{files.source}: the model is tied, but {plan.repeated_head} in "
                f"{files.tensors[plan.repeated_head].file.name} differs from {embedding} "
                f"(rows {start} to {index[0].stop - 1}); set tie_word_embeddings to false to use both"
            )
