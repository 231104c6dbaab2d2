"""Device programs over the rows of embedding and head: moving them, means of rows, normally distributed rows.

On a mesh each device works on all rows of a few columns: an all-to-all leads there and back, and no device ever holds
more of a matrix than its share. Rows are worked on in blocks, so float32 copies stay small. Which rows go where, and
how new ones begin, is decided in `vocabulary` and `row_initialisation`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxtool.parallel import active_mesh_axes, reshard

# 512 rows of width 4096 are 8 MiB in float32.
_BLOCK = 512

_WHOLE = PartitionSpec()


@functools.partial(jax.jit, static_argnames="out")
def moved_rows(
    matrix_vd: jax.Array, source_v: Any, rows_td: Any = None, place_t: Any = None, *, out: PartitionSpec | None = None
) -> jax.Array:
    """The matrix whose row i is row `source_v[i]` of `matrix_vd`, bit for bit; zeros where that is -1.

    Args:
        matrix_vd: [V, D], or [V]: then rows are single values.
        source_v: int32, one for each row of the result.
        rows_td: rows to put in afterwards, [T, D] or [T] in the dtype of the matrix; None for none.
        place_t: int32, where they go.
        out: layout of the result on the active mesh; None: that of `matrix_vd`.
    """
    flat = matrix_vd.ndim == 1
    table_vd = matrix_vd[:, None] if flat else matrix_vd
    columns = _columns(table_vd)

    def move(table_vd: jax.Array, source_v: jax.Array) -> jax.Array:
        return jnp.take(table_vd, source_v, axis=0, mode="fill", fill_value=0)

    def move_and_put(table_vd: jax.Array, source_v: jax.Array, rows_td: jax.Array, place_t: jax.Array) -> jax.Array:
        return move(table_vd, source_v).at[place_t].set(rows_td, unique_indices=True, indices_are_sorted=True)

    # `take` counts negative indices from the end: what is to be zero must lie behind it.
    source_v = jnp.where(source_v < 0, table_vd.shape[0], source_v)
    arguments = [reshard(table_vd, columns), source_v]
    if rows_td is None:
        moved_vd = _per_device(move, (columns, _WHOLE), columns)(*arguments)
    else:
        arguments += [reshard(rows_td[:, None] if flat else rows_td, columns), place_t]
        moved_vd = _per_device(move_and_put, (columns, _WHOLE, columns, _WHOLE), columns)(*arguments)
    if out is None:
        out = jax.typeof(matrix_vd).sharding.spec
    if flat:
        return reshard(reshard(moved_vd, _WHOLE)[:, 0], out)
    return reshard(moved_vd, out)


def token_means(matrix_vd: jax.Array, token_ids: list[np.ndarray]) -> jax.Array:
    """Mean of the rows of each id list, [T, D] in the dtype of the matrix.

    Rows are added one after the other in float32, in the order of the ids, so that the result is the same on every
    mesh. The ids must be rows of the matrix and no list empty.
    """
    if not token_ids:
        return matrix_vd[:0]
    count_t = np.asarray([len(ids) for ids in token_ids], np.int32)
    flat_n = np.concatenate(token_ids).astype(np.int32)
    start_t = (np.cumsum(count_t) - count_t).astype(np.int32)
    # Lists of like length share a block: its longest one decides how long it takes.
    order_t = np.argsort(count_t, kind="stable")
    padding = -len(count_t) % _BLOCK
    blocks = [np.pad(values[order_t], (0, padding)).reshape(-1, _BLOCK) for values in (start_t, count_t)]
    return _token_means(matrix_vd, flat_n, *blocks, np.argsort(order_t).astype(np.int32))


@jax.jit
def _token_means(matrix_vd: jax.Array, flat_n: Any, start_gt: Any, count_gt: Any, rank_t: Any) -> jax.Array:
    columns = _columns(matrix_vd)

    def means(
        matrix_vd: jax.Array, flat_n: jax.Array, start_gt: jax.Array, count_gt: jax.Array, rank_t: jax.Array
    ) -> jax.Array:
        def block(arguments: tuple[jax.Array, jax.Array]) -> jax.Array:
            start_t, count_t = arguments

            def add(place: jax.Array, total_td: jax.Array) -> jax.Array:
                inside_t = place < count_t
                rows_td = matrix_vd[flat_n[jnp.where(inside_t, start_t + place, 0)]].astype(jnp.float32)
                return total_td + jnp.where(inside_t[:, None], rows_td, 0.0)

            zero_td = jnp.zeros((_BLOCK, matrix_vd.shape[1]), jnp.float32)
            total_td = jax.lax.fori_loop(0, count_t.max(), add, zero_td)
            return (total_td / jnp.maximum(count_t, 1)[:, None]).astype(matrix_vd.dtype)

        sorted_td = jax.lax.map(block, (start_gt, count_gt)).reshape(-1, matrix_vd.shape[1])
        return sorted_td[rank_t]

    run = _per_device(means, (columns, *[_WHOLE] * 4), columns)
    return run(reshard(matrix_vd, columns), flat_n, start_gt, count_gt, rank_t)


@jax.jit
def row_moments(matrix_vd: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Mean [D] and covariance [D, D] (divided by `count`) of the first `count` rows, float32, whole on every device.

    The rows are centred first; sums and products are float32 throughout (relative error below 1e-5).
    """
    columns, axes, sizes = _columns(matrix_vd), column_axes(matrix_vd), active_mesh_axes()

    def moments(matrix_vd: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
        blocks = (count + _BLOCK - 1) // _BLOCK

        def centred(block: jax.Array, mean_d: jax.Array) -> jax.Array:
            row_b = block * _BLOCK + jnp.arange(_BLOCK)
            rows_bd = jnp.take(matrix_vd, row_b, axis=0, mode="clip").astype(jnp.float32)
            return jnp.where((row_b < count)[:, None], rows_bd - mean_d, 0.0)

        def add_rows(block: jax.Array, total_d: jax.Array) -> jax.Array:
            return total_d + centred(block, jnp.zeros_like(total_d)).sum(axis=0)

        width = matrix_vd.shape[1]
        mean_d = jax.lax.fori_loop(0, blocks, add_rows, jnp.zeros(width, jnp.float32)) / count

        def add_products(block: jax.Array, total_de: jax.Array) -> jax.Array:
            mine_be = centred(block, mean_d)
            all_bd = jax.lax.all_gather(mine_be, axes, axis=1, tiled=True) if axes else mine_be
            return total_de + jnp.einsum("bd,be->de", all_bd, mine_be, precision=jax.lax.Precision.HIGHEST)

        zero_de = jnp.zeros((width * math.prod(sizes[axis] for axis in axes), width), jnp.float32)
        return mean_d, jax.lax.fori_loop(0, blocks, add_products, zero_de) / count

    run = _per_device(moments, (columns, _WHOLE), (PartitionSpec(axes or None), columns))
    mean_d, covariance_de = run(reshard(matrix_vd, columns), jnp.asarray(count))
    return reshard(mean_d, _WHOLE), reshard(covariance_de, _WHOLE)


@functools.partial(jax.jit, static_argnames=("axes", "dtype"))
def normal_rows(
    mean_d: Any, factor_de: Any, row_ids_t: Any, key: jax.Array, *, axes: tuple[str, ...], dtype: str
) -> jax.Array:
    """Rows mean + factor z with standard normal z [D], one for each id: [T, D].

    Args:
        mean_d: float32 [D].
        factor_de: float32 [D, D].
        row_ids_t: int32; z depends on the key and the row's id alone.
        key: random key, the same in all processes.
        axes: mesh axes that cut the columns of the result, see `column_axes`.
        dtype: of the result.
    """
    count = row_ids_t.shape[0]
    ids_gt = jnp.pad(row_ids_t, (0, -count % _BLOCK)).reshape(-1, _BLOCK)

    def rows(mean_d: jax.Array, factor_de: jax.Array, ids_gt: jax.Array, key: jax.Array) -> jax.Array:
        def noise(row_id: jax.Array) -> jax.Array:
            return jax.random.normal(jax.random.fold_in(key, row_id), factor_de.shape[1:], jnp.float32)

        def block(ids_t: jax.Array) -> jax.Array:
            noise_te = jax.vmap(noise)(ids_t)
            product_td = jnp.einsum("te,de->td", noise_te, factor_de, precision=jax.lax.Precision.HIGHEST)
            return (mean_d + product_td).astype(dtype)

        return jax.lax.map(block, ids_gt).reshape(-1, mean_d.shape[0])[:count]

    cut = axes or None
    inputs = (PartitionSpec(cut), PartitionSpec(cut, None), _WHOLE, _WHOLE)
    arguments = (reshard(mean_d, inputs[0]), reshard(factor_de, inputs[1]), ids_gt, key)
    return _per_device(rows, inputs, PartitionSpec(None, cut))(*arguments)


def column_axes(matrix_vd: jax.Array) -> tuple[str, ...]:
    """Mesh axes to cut the columns over: those that cut them already, then (if the width divides) those of the rows."""
    sizes = active_mesh_axes()
    if not sizes:
        return ()
    of_rows, of_columns = (
        (entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in jax.typeof(matrix_vd).sharding.spec
    )
    wide = of_columns + of_rows
    return wide if matrix_vd.shape[1] % math.prod(sizes[axis] for axis in wide) == 0 else of_columns


def _columns(matrix_vd: jax.Array) -> PartitionSpec:
    return PartitionSpec(None, column_axes(matrix_vd) or None)


def _per_device(function: Callable[..., Any], inputs: tuple[PartitionSpec, ...], outputs: Any) -> Callable[..., Any]:
    """`function` run by every device on its part; `function` itself when no mesh is active."""
    if not active_mesh_axes():
        return function
    return jax.shard_map(function, in_specs=inputs, out_specs=outputs, check_vma=False)
