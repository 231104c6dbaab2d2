"""A block's projections in the form that decoding wants: those that read the same input as one matrix, outputs first.

Few tokens are multiplied with large matrices, so a step takes as long as reading them: fewer and larger products, rows
that are read from end to end. Training keeps each projection apart; `DecoderBlock.project_all` uses either form.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxtool.parallel import active_mesh_axes, einsum, reshape, reshard

if TYPE_CHECKING:
    from jaxtool.models.language_model import DecoderBlock, Projection


def fuse(block: DecoderBlock) -> DecoderBlock:
    """The block with the matrices of its projections fused.

    `query`, `key`, `value` become one [K, G+2, H, D], each key-value head behind the G query heads that it serves;
    other groups of n matrices to F outputs one [n, F, D]; single matrices are turned, outputs first. On a mesh they
    are cut over the axes that their outputs are cut over.

    Args:
        block: one layer, its parameters in the dtype to compute in, without low-rank updates.
    """
    config = block.config
    groups = config.fused_projections
    alone = tuple((name,) for name in config.projections if not any(name in group for group in groups))
    result = copy.copy(block)
    for group in (*groups, *alone):
        parts = [(config.projections[name], f"{name}_{config.projections[name].letters}") for name in group]
        matrices = [_outputs_first(getattr(block, path)[...], projection) for projection, path in parts]
        for _, path in parts:
            delattr(result, path)
        setattr(result, fused_name(group), nnx.Param(_joined(block, group, matrices)))
    result.fused = True
    return result


def fused_name(group: tuple[str, ...]) -> str:
    """Name of the parameter that a group of projections is fused to."""
    return "_".join((*group, "fused"))


def project_fused(block: DecoderBlock, group: tuple[str, ...], x: jax.Array) -> tuple[jax.Array, ...]:
    """x [B, S, inputs] through the projections of a group: [B, S, outputs] each."""
    config, rules = block.config, block.rules
    first = config.projections[group[0]]
    weight = getattr(block, fused_name(group))[...]
    inputs, outputs = first.letters[: first.inputs], first.letters[first.inputs :]
    axes = tuple("activation" if axis == "embed" else axis for axis in first.axes[first.inputs :])
    if len(group) == 1:
        return (_product(x, weight, outputs, inputs, rules.spec("batch", "sequence", *axes)),)
    if weight.ndim == 3:
        y_bsgf = _product(x, weight, f"g{outputs}", inputs, rules.spec("batch", "sequence", None, *axes))
        return tuple(y_bsgf[:, :, number] for number in range(len(group)))
    y_bskgh = _product(x, weight, "kgh", "d", rules.spec("batch", "sequence", "kv_heads", None, "head_size"))
    q_bskgh = y_bskgh[:, :, :, :-2]
    b, s, k, g, h = q_bskgh.shape
    q_bsnh = reshape(q_bskgh, (b, s, k * g, h), rules.spec("batch", "sequence", "heads", "head_size"))
    return q_bsnh, y_bskgh[:, :, :, -2], y_bskgh[:, :, :, -1]


def _product(x: jax.Array, weight: jax.Array, outputs: str, inputs: str, out: PartitionSpec) -> jax.Array:
    """x [B, S, inputs] times a weight [outputs, inputs]: [B, S, outputs].

    Without a mesh as a product of matrices: of weights with more axes XLA makes a transposed copy in every step on
    CPUs, which takes three times as long as the product. On a mesh the axes that are cut must stay apart.
    """
    if active_mesh_axes():
        return einsum(f"bs{inputs},{outputs}{inputs}->bs{outputs}", x, weight, out=out)
    x_bsi = x.reshape(*x.shape[:2], -1)
    y_bso = einsum("bsi,oi->bso", x_bsi, weight.reshape(-1, x_bsi.shape[-1]), out=out)
    return y_bso.reshape(*x.shape[:2], *weight.shape[: len(outputs)])


def _outputs_first(weight: jax.Array, projection: Projection) -> jax.Array:
    axes = range(weight.ndim)
    return weight.transpose(*axes[projection.inputs :], *axes[: projection.inputs])


def _joined(block: DecoderBlock, group: tuple[str, ...], matrices: list[jax.Array]) -> jax.Array:
    if len(group) == 1:
        return matrices[0]
    if matrices[0].ndim == 2:
        return jnp.stack(matrices)
    query, key, value = matrices  # [N, H, D], [K, H, D], [K, H, D]
    spec = block.rules.spec("kv_heads", None, "head_size", None)
    query = reshape(query, (len(key), len(query) // len(key), *query.shape[1:]), spec)
    return jnp.concatenate([query, reshard(key[:, None], spec), reshard(value[:, None], spec)], axis=1)
