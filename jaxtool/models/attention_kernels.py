"""Where a fused attention kernel runs: each device has whole rows and whole key-value heads and needs no other device.

The kernels themselves are in `splash_attention` and `cudnn_attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import jax

from jaxtool.parallel import AxisRules, active_mesh_axes, reshard

AttentionKernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def run_on_own_heads(
    kernel: AttentionKernel,
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    segment_ids_bs: jax.Array,
    rules: AxisRules,
) -> jax.Array:
    """`kernel(q, k, v, segment_ids)` on every device with its part of batch and heads, [B, S, N, H].

    Raises:
        ValueError: the rules cut rows or heads, or query and key-value heads differently.
    """
    if not active_mesh_axes():
        return kernel(q_bsnh, k_bskh, v_bskh, segment_ids_bs)
    for axis in ("sequence", "head_size"):
        if getattr(rules, axis) is not None:
            raise ValueError(
                f"rules map {axis!r} to mesh axis {getattr(rules, axis)!r}: attention kernels need whole rows and "
                "heads on a device, expected None (attention 'xla' takes it)"
            )
    if rules.heads != rules.kv_heads:
        raise ValueError(
            f"rules map 'heads' to mesh axis {rules.heads!r} and 'kv_heads' to {rules.kv_heads!r}: expected the same, "
            "a query head's keys must be on its device"
        )
    query = rules.spec("batch", "sequence", "heads", "head_size")
    keys = rules.spec("batch", "sequence", "kv_heads", "head_size")
    rows = rules.spec("batch", "sequence")
    specs = (query, keys, keys, rows)
    # Kernels don't say how their results vary over the mesh, which is what check_vma would look at.
    on_mesh = jax.shard_map(kernel, in_specs=specs, out_specs=query, check_vma=False)
    arrays = (q_bsnh, k_bskh, v_bskh, segment_ids_bs)
    return on_mesh(*(reshard(array, spec) for array, spec in zip(arrays, specs, strict=True)))
