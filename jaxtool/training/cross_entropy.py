"""Cross-entropy of hidden states over a vocabulary of any width, as a function with a gradient of its own.

The pass that computes the loss computes the gradients too, chunk by chunk (`cross_entropy_loop`), so the logits of a
chunk exist once and are multiplied three times, not four as with rematerialisation. Here is what is differentiated and
how arrays lie on devices; what is supervised and what sums are divided by is in `loss`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal, SymbolicZero
from jax.sharding import PartitionSpec

from jaxtool.parallel import active_mesh_axes, reshard
from jaxtool.training.cross_entropy_loop import CrossEntropy, Sums, device_share, divides_arrays

# The arrays of the head by name: `matrix` [V, D] and, where the model has them, `bias` [V] and the blocks of tool rows
# `tool_matrix` [X, D] and `tool_bias` [X]. What a block holds is what the matrix holds; it only takes a gradient.
HeadArrays = Mapping[str, jax.Array]


def cross_entropy(
    setup: CrossEntropy, hidden_bpd: jax.Array, head: HeadArrays, targets_bpa: jax.Array, weights_bpa: jax.Array
) -> Sums:
    """Sums over the supervised positions, those with a positive weight; the others cost nothing and have no gradient.

    Gradients go to the hidden states and the arrays of the head, and are computed for those alone that are
    differentiated: none in evaluation. They can't be differentiated once more.

    Args:
        setup: how to compute.
        hidden_bpd: in the compute dtype.
        head: as stored, with their FSDP axis.
        targets_bpa: int32 ids.
        weights_bpa: float32 target probabilities, 0 for what is no target.
    """
    rows = setup.rules.spec("batch", None, None)
    hidden_bpd, targets_bpa, weights_bpa = (
        reshard(jnp.asarray(x), rows) for x in (hidden_bpd, targets_bpa, weights_bpa)
    )
    return _cross_entropy(setup, hidden_bpd, dict(head), targets_bpa, weights_bpa)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _cross_entropy(
    setup: CrossEntropy, hidden_bpd: jax.Array, head: HeadArrays, targets_bpa: jax.Array, weights_bpa: jax.Array
) -> Sums:
    return _on_devices(setup, hidden_bpd, head, targets_bpa, weights_bpa, frozenset())[0]


def _forward(
    setup: CrossEntropy,
    hidden_bpd: CustomVJPPrimal,
    head: Mapping[str, CustomVJPPrimal],
    targets_bpa: CustomVJPPrimal,
    weights_bpa: CustomVJPPrimal,
) -> tuple[Sums, tuple[dict[str, jax.Array], dict[str, None]]]:
    wanted = frozenset(name for name, x in {"hidden": hidden_bpd, **head}.items() if x.perturbed)
    values = {name: x.value for name, x in head.items()}
    sums, gradients = _on_devices(setup, hidden_bpd.value, values, targets_bpa.value, weights_bpa.value, wanted)
    return sums, (gradients, dict.fromkeys(head))


def _backward(
    setup: CrossEntropy, kept: tuple[dict[str, jax.Array], dict[str, None]], slopes: Sums
) -> tuple[jax.Array | None, dict[str, jax.Array | None], None, None]:
    gradients, no_head = kept
    slope = jnp.float32(0) if isinstance(slopes.loss, SymbolicZero) else slopes.loss
    scaled = {name: (slope * x.astype(jnp.float32)).astype(x.dtype) for name, x in gradients.items()}
    return scaled.pop("hidden", None), no_head | scaled, None, None


_cross_entropy.defvjp(_forward, _backward, symbolic_zeros=True)


def _on_devices(
    setup: CrossEntropy,
    hidden_bpd: jax.Array,
    head: HeadArrays,
    targets_bpa: jax.Array,
    weights_bpa: jax.Array,
    wanted: frozenset[str],
) -> tuple[Sums, dict[str, jax.Array]]:
    """The sums, and their gradients in the arrays `wanted` (of the head, or `hidden`) in these arrays' layouts."""
    spec, tools = setup.rules.spec, setup.tools
    rows, columns = spec("batch", None, None), spec("vocabulary")
    layouts = {
        "hidden": rows,
        "matrix": spec("vocabulary", "embed"),
        "bias": columns,
        "tool_matrix": tools.spec("embed"),
        "tool_bias": tools.spec(),
    }
    # Gathered here, once for all chunks; cast first, so that half the bytes travel.
    matrix_vd = reshard(head["matrix"].astype(setup.config.compute_dtype), spec("vocabulary", None))
    share: Any = functools.partial(device_share, setup, wanted)
    if active_mesh_axes():
        share = jax.shard_map(
            share,
            in_specs=(rows, rows, rows, spec("vocabulary", None), columns),
            out_specs=(PartitionSpec(), {name: layouts[name] for name in wanted}),
            check_vma=divides_arrays(),  # one device sums nothing over axes, which the check would miss
        )
    sums, gradients = share(hidden_bpd, targets_bpa, weights_bpa, matrix_vd, head.get("bias"))
    arrays = {"hidden": hidden_bpd, **head}
    return sums, {name: gradient.astype(arrays[name].dtype) for name, gradient in gradients.items()}
