"""Tool rows of embedding and head as blocks of their own: read, written back, and alone in taking a gradient.

Training tool rows must not compute a gradient for the text rows, nor keep moments for them. What is trained beside the
rows is `jaxtool.training.trainable`'s to say; growing the matrices is in `vocabulary`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from jaxtool.parallel import AxisRules, active_mesh_axes, reshard

ROW_MULTIPLE = 128
# Matrix (or bias) by its path in the model -> block of its tool rows.
ToolRows = Mapping[str, jax.Array]

_NO_ROW = 2**31 - 1  # an index behind every row: reads give 0, writes are dropped


@dataclass(frozen=True, kw_only=True)
class ToolBlock:
    """Where the tool rows lie in a matrix, and how a block of them is laid out.

    A block has `size` rows, of which the first `count` are tools; the rest is zero and stands for no row of the matrix.
    It depends on the number of tools alone, so a block saved on one mesh can be read on any.

    Attributes:
        first: row of the first tool.
        count: number of tools.
        rules: layout of the matrix, and of the block where the mesh divides it.
    """

    first: int
    count: int
    rules: AxisRules

    @property
    def size(self) -> int:
        """Rows of a block: `count`, rounded up to a multiple of 128."""
        return -(-self.count // ROW_MULTIPLE) * ROW_MULTIPLE

    @property
    def rows_axis(self) -> str | None:
        """Logical axis of the block's rows: cut like the vocabulary if that leaves equal parts."""
        axes, parts = self.rules.vocabulary, 1
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            parts *= active_mesh_axes().get(axis, 1)
        return "vocabulary" if self.size % parts == 0 else None

    def spec(self, *others: str | None) -> PartitionSpec:
        """Layout of a block with further axes `others`."""
        return self.rules.spec(self.rows_axis, *others)

    def read(self, matrix: jax.Array) -> jax.Array:
        """The tool rows of a matrix [V, D] as a block [size, D], or of a bias [V] as [size]."""
        out = self.spec(*("embed",) * (matrix.ndim - 1))
        return matrix.at[self._indices()].get(mode="fill", fill_value=0, out_sharding=_on_mesh(out))

    def write(self, matrix: jax.Array, rows: jax.Array) -> jax.Array:
        """The matrix with its tool rows replaced by a block's; every other row stays as it is."""
        out = self.rules.spec("vocabulary", *("embed",) * (matrix.ndim - 1))
        return matrix.at[self._indices()].set(rows, mode="drop", unique_indices=True, out_sharding=_on_mesh(out))

    def _indices(self) -> jax.Array:
        row = jnp.arange(self.size, dtype=jnp.int32)
        return jnp.where(row < self.count, self.first + row, (_NO_ROW - self.size) + row)  # unique ones


def take_rows(
    matrix_vd: jax.Array, ids_bs: jax.Array, rows_axis: str | None, rules: AxisRules, dtype: DTypeLike | None = None
) -> jax.Array:
    """Rows of a matrix by id, [B, S, D]; an id that has no row gives NaN, not another one's row.

    The ids go where the columns are, and what was found goes to the batch: that is B x S rows between devices, where
    gathering the matrix would be all V of them, and its gradient as large on every device.

    Args:
        matrix_vd: cut along `rows_axis` and "embed".
        ids_bs: int32 [B, S].
        rows_axis: logical axis of the rows, or None.
        rules: layouts.
        dtype: of the result (None: the matrix's).
    """
    dtype = dtype or matrix_vd.dtype
    if not active_mesh_axes():
        return matrix_vd.at[ids_bs].get(mode="fill", wrap_negative_indices=False).astype(dtype)
    columns, batch = ((axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in (rules.embed, rules.batch))
    by_column = dataclasses.replace(rules, batch=tuple(axis for axis in batch if axis not in columns))
    ids_bs = reshard(ids_bs, by_column.spec("batch", "sequence"))
    out = by_column.spec("batch", "sequence", "embed")
    x_bsd = (
        reshard(matrix_vd, rules.spec(rows_axis, "embed"))
        .at[ids_bs]
        .get(mode="fill", out_sharding=out, wrap_negative_indices=False)
    )
    return reshard(x_bsd.astype(dtype), rules.spec("batch", "sequence", "activation"))


def look_up(matrix_vd: jax.Array, rows_xd: jax.Array, tokens_bs: jax.Array, block: ToolBlock) -> jax.Array:
    """Rows of the embedding, [B, S, D] in its dtype; the gradient goes to the block `rows_xd` of its tool rows alone.

    The matrix holds the same tool rows as the block, and is what is read.
    """
    return _look_up(matrix_vd, rows_xd, tokens_bs, block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _look_up(matrix_vd: jax.Array, rows_xd: jax.Array, tokens_bs: jax.Array, block: ToolBlock) -> jax.Array:
    del rows_xd
    return take_rows(matrix_vd, tokens_bs, "vocabulary", block.rules)


def _look_up_forward(
    matrix_vd: jax.Array, rows_xd: jax.Array, tokens_bs: jax.Array, block: ToolBlock
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _look_up(matrix_vd, rows_xd, tokens_bs, block), (rows_xd, tokens_bs)


def _look_up_backward(
    block: ToolBlock, kept: tuple[jax.Array, jax.Array], grad_bsd: jax.Array
) -> tuple[None, jax.Array, None]:
    rows_xd, tokens_bs = kept
    tool_bs = tokens_bs - block.first
    tool_bs = jnp.where((tool_bs >= 0) & (tool_bs < block.count), tool_bs, _NO_ROW)
    _, pull = jax.vjp(lambda rows_xd: take_rows(rows_xd, tool_bs, block.rows_axis, block.rules), rows_xd)
    (grad_xd,) = pull(grad_bsd)
    return None, grad_xd, None


_look_up.defvjp(_look_up_forward, _look_up_backward)


def _on_mesh(spec: PartitionSpec) -> PartitionSpec | None:
    return spec if active_mesh_axes() else None
