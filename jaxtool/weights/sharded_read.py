"""Fills one parameter from a checkpoint: only the rows and columns that this process's devices hold are read.

The assignment of tensors to parameters is in `tensor_map`.
"""

from __future__ import annotations

import math

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from jaxtool.weights.tensor_map import (
    EMBEDDING,
    PlannedParameter,
    TensorFiles,
    TensorRule,
    WeightPlan,
    WeightsError,
)

# Rows compared at a time when a head repeats the embedding.
_COMPARED_ROWS = 4096

Range = tuple[int, int]


def read_parameter(files: TensorFiles, planned: PlannedParameter) -> jax.Array:
    """The parameter with the leaf's dtype and sharding; on the default device where the leaf has none.

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

    # Devices that hold the same part share one read.
    blocks: dict[tuple[Range, ...], np.ndarray] = {}

    def block(index: tuple[slice, ...] | None) -> np.ndarray:
        index = (slice(None),) * len(leaf.shape) if index is None else index
        ranges = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        if ranges not in blocks:
            blocks[ranges] = read_block(files, planned, ranges)
        return blocks[ranges]

    return jax.make_array_from_callback(leaf.shape, leaf.sharding, block)


def read_block(files: TensorFiles, planned: PlannedParameter, ranges: tuple[Range, ...]) -> np.ndarray:
    """The part of a parameter that `ranges` (start and stop on each axis) cut out, in the leaf's dtype."""
    rule, leaf = planned.rule, planned.leaf
    block = np.zeros([stop - start for start, stop in ranges], leaf.dtype)
    if not rule.stacked:
        _fill(block, files, rule, planned.names[0], leaf.shape, ranges)
        return block
    start, stop = ranges[0]
    for row, layer in enumerate(range(start, stop)):
        _fill(block[row], files, rule, planned.names[layer], leaf.shape[1:], ranges[1:])
    return block


def _fill(
    block: np.ndarray,
    files: TensorFiles,
    rule: TensorRule,
    name: str,
    shape: tuple[int, ...],
    ranges: tuple[Range, ...],
) -> None:
    """Writes one tensor's part into `block`; rows behind the file's last stay as they are.

    Of a dimension that merges several parameter axes, the outermost is cut in the file and the others after
    reading: a device that holds half of each head reads whole heads, whose rows are contiguous.
    """
    index: list[slice] = []
    split: list[int] = []
    cut: list[slice] = []
    order: list[int] = []
    for axes, size in zip(rule.axes, files.tensors[name].shape, strict=True):
        outer, *inner = axes
        stride = math.prod(shape[axis] for axis in inner)
        start, stop = ranges[outer][0] * stride, min(ranges[outer][1] * stride, size)
        index.append(slice(start, stop))
        split += [(stop - start) // stride, *(shape[axis] for axis in inner)]
        cut += [slice(None), *(slice(*ranges[axis]) for axis in inner)]
        order += axes
    if any(part.start >= part.stop for part in index):
        return
    part = files.read(name, tuple(index))
    if rule.rotary and files.rotary_interleaved:
        part = undo_rotary_permutation(part, head_size=shape[rule.axes[0][-1]])
    part = part.reshape(split)[tuple(cut)].transpose(np.argsort(order))
    block[tuple(slice(size) for size in part.shape)] = part


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
    embedding = files.name_of(EMBEDDING)
    rows, columns = files.tensors[embedding].shape
    for start in range(0, rows, _COMPARED_ROWS):
        index = (slice(start, min(start + _COMPARED_ROWS, rows)), slice(0, columns))
        first, second = files.read(embedding, index), files.read(plan.repeated_head, index)
        if first.dtype != second.dtype or first.tobytes() != second.tobytes():
            raise WeightsError(
                f"{files.source}: the model is tied, but {plan.repeated_head} in "
                f"{files.tensors[plan.repeated_head].file.name} differs from {embedding} "
                f"(rows {start} to {index[0].stop - 1}); set tie_word_embeddings to false to use both"
            )
