"""Causal attention over packed rows, for any ratio of query to key-value heads; norms that networks share.

Scores and softmax are float32 whatever the compute dtype. Projections and rotary embedding are the networks' own.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jaxtool.parallel import AxisRules, active_mesh_axes, einsum

SHARED_PREFIX = -1  # segment of tokens that all segments behind them in the row see, as if each began with them

_GROUPED = ("batch", "sequence", "kv_heads", None, "head_size")


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis; statistics in float32, result in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    normed = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * scale.astype(x.dtype)


def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Layer norm over the last axis; all of it in float32, result in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def attention_mask(segment_ids_bs: jax.Array) -> jax.Array:
    """Boolean [B, S, S]: query s sees key t when t <= s and both are of one segment, or t is of `SHARED_PREFIX`.

    Padding (0) sees only itself: the own position is always visible, so no softmax row is empty.
    """
    length = segment_ids_bs.shape[1]
    causal = jnp.tril(jnp.ones((length, length), dtype=bool))
    key_b1t = segment_ids_bs[:, None, :]
    visible = (segment_ids_bs[:, :, None] == key_b1t) | (key_b1t == SHARED_PREFIX)
    real = (segment_ids_bs != 0)[:, :, None] | jnp.eye(length, dtype=bool)
    return causal & visible & real


def attend(q_bsnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, mask_bst: jax.Array, rules: AxisRules) -> jax.Array:
    """Softmax(q k / sqrt(H)) v under the mask, [B, S, N, H] in the dtype of the values.

    Query heads of one key-value head are rows of one matrix: [G*S, H] x [H, S] per (batch, K), which CPU and
    accelerator matrix units run at full speed, and keys are never repeated.
    """
    spec = rules.spec
    b, s, heads, size = q_bsnh.shape
    kv_heads = k_bskh.shape[2]
    groups = heads // kv_heads
    rows = spec("batch", "kv_heads", None, "head_size")
    q_bskgh = _reshape(q_bsnh, (b, s, kv_heads, groups, size), spec(*_GROUPED))
    q_bkxh = _reshape(q_bskgh.transpose(0, 2, 3, 1, 4), (b, kv_heads, groups * s, size), rows)
    scores_bkxt = einsum(
        "bkxh,bkht->bkxt",
        q_bkxh,
        k_bskh.transpose(0, 2, 3, 1),
        out=spec("batch", "kv_heads", None, None),
        result_dtype="float32",
    )
    mask_bxt = jnp.tile(mask_bst, (1, groups, 1))
    scores_bkxt = jnp.where(mask_bxt[:, None], scores_bkxt * size**-0.5, jnp.finfo(jnp.float32).min)
    weights_bkxt = checkpoint_name(jax.nn.softmax(scores_bkxt, axis=-1).astype(v_bskh.dtype), "kept")
    mixed_bkxh = einsum("bkxt,bkth->bkxh", weights_bkxt, v_bskh.transpose(0, 2, 1, 3), out=rows)
    split = spec("batch", "kv_heads", None, "sequence", "head_size")
    mixed_bkgsh = _reshape(mixed_bkxh, (b, kv_heads, groups, s, size), split)
    mixed_bsnh = _reshape(
        mixed_bkgsh.transpose(0, 3, 1, 2, 4), q_bsnh.shape, spec("batch", "sequence", "heads", "head_size")
    )
    return checkpoint_name(mixed_bsnh, "kept")


def _reshape(x: jax.Array, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
    return jax.lax.reshape(x, shape, out_sharding=spec) if active_mesh_axes() else jnp.reshape(x, shape)
