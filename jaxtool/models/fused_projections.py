"""A block's projections in the form that decoding wants: those that read the same input as one matrix, outputs first.

Few tokens are multiplied with large matrices, so a step takes as long as reading them: fewer and larger products, rows
that are read from end to end. Training keeps each projection apart; `DecoderBlock.project_all` uses either form.
"""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from jaxtool.parallel import AxisRules, active_mesh_axes, einsum, reshape, reshard

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
    inputs, outputs = first.axes[: first.inputs], first.axes[first.inputs :]
    if len(group) == 1:
        return (_product(x, weight, inputs, outputs, rules),)
    if weight.ndim == 3:
        y_bsgf = _product(x, weight, inputs, (None, *outputs), rules)
        return tuple(y_bsgf[:, :, number] for number in range(len(group)))
    y_bskgh = _product(x, weight, inputs, ("kv_heads", None, "head_size"), rules)
    q_bskgh = y_bskgh[:, :, :, :-2]
    b, s, k, g, h = q_bskgh.shape
    q_bsnh = reshape(q_bskgh, (b, s, k * g, h), rules.spec("batch", "sequence", "heads", "head_size"))
    return q_bsnh, y_bskgh[:, :, :, -2], y_bskgh[:, :, :, -1]


def _product(
    x: jax.Array, weight: jax.Array, inputs: tuple[str, ...], outputs: tuple[str | None, ...], rules: AxisRules
) -> jax.Array:
    """x [B, S, inputs] times a weight [outputs, inputs], by their logical axes: [B, S, outputs].

    As a product of matrices: of weights with more axes XLA makes a transposed copy in every step on CPUs, which takes
    three times as long as the product. Only outputs of which another axis than the first is cut have to stay apart.
    """
    batch, sequence = rules.spec("batch", "sequence")
    into = _uncut_if_whole(tuple("activation" if axis == "embed" else axis for axis in inputs), rules)
    out = _uncut_if_whole(tuple("activation" if axis == "embed" else axis for axis in outputs), rules)
    if any(entry is not None for entry in (*out[1:], *into[1:])):
        letters_in, letters_out = "xyz"[: len(inputs)], "opq"[: len(outputs)]
        equation = f"bs{letters_in},{letters_out}{letters_in}->bs{letters_out}"
        return einsum(equation, x, weight, out=PartitionSpec(batch, sequence, *out))
    b, s = x.shape[:2]
    sizes = weight.shape[: len(outputs)]
    x_bsi = reshape(x, (b, s, math.prod(x.shape[2:])), PartitionSpec(batch, sequence, into[0]))
    weight = reshard(weight, PartitionSpec(*out, *into))
    weight_oi = reshape(weight, (math.prod(sizes), x_bsi.shape[-1]), PartitionSpec(out[0], into[0]))
    y_bso = einsum("bsi,oi->bso", x_bsi, weight_oi, out=PartitionSpec(batch, sequence, out[0]))
    return reshape(y_bso, (b, s, *sizes), PartitionSpec(batch, sequence, *out))


def _uncut_if_whole(axes: tuple[str | None, ...], rules: AxisRules) -> tuple[Any, ...]:
    """Mesh axes of the logical ones; None for those that have a single device, or where there is no mesh."""
    sizes = jax.sharding.get_abstract_mesh().shape if active_mesh_axes() else {}

    def devices(entry: Any) -> int:
        return math.prod(sizes.get(axis, 1) for axis in ((entry,) if isinstance(entry, str) else entry or ()))

    return tuple(entry if devices(entry) > 1 else None for entry in rules.spec(*axes))


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
