"""Causal attention in plain XLA operations: what the other implementations are tested against, and what CPUs run.

It takes any dtype and mesh, and packed rows. Rows longer than `LONGEST_WHOLE` are computed a block of
queries at a time, so that memory grows with the length of a row and not with its square.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtool.parallel import AxisRules, einsum, reshape

LONGEST_WHOLE = 2048
QUERY_BLOCK = 512  # with 8,192 keys as many scores as a whole row of 2,048

_GROUPED = ("batch", "sequence", "kv_heads", None, "head_size")
_QUERY = ("batch", "sequence", "heads", "head_size")


def xla_attention(
    q_bsnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, segment_ids_bs: jax.Array, rules: AxisRules
) -> jax.Array:
    """See `jaxtool.models.attention.attention`. Scores and softmax are float32."""
    if q_bsnh.shape[1] > LONGEST_WHOLE:
        return checkpoint_name(attend_in_blocks(q_bsnh, k_bskh, v_bskh, segment_ids_bs, rules), "kept")
    mixed_bsnh = _attend(q_bsnh, k_bskh, v_bskh, attention_mask(segment_ids_bs), rules, "kept")
    return checkpoint_name(mixed_bsnh, "kept")


def attend_in_blocks(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    segment_ids_bs: jax.Array,
    rules: AxisRules,
    block: int = QUERY_BLOCK,
) -> jax.Array:
    """The same, `block` queries at a time, [B, S, N, H]; the backward pass computes each block's scores anew.

    Scores take 4 x B x N x block x S bytes. Keys behind a block are computed and masked as in a whole row.
    """
    b, s, n, h = q_bsnh.shape
    block = min(block, s)
    blocks = -(-s // block)
    missing = blocks * block - s
    # Each block adds to the gradient of all keys and values; in float32 the sums of many blocks lose nothing.
    keys, values, dtype = k_bskh.astype(jnp.float32), v_bskh.astype(jnp.float32), v_bskh.dtype

    def cut(x_bs: jax.Array, *axes: str) -> jax.Array:
        padded = jnp.pad(x_bs, [(0, 0), (0, missing), *[(0, 0)] * (x_bs.ndim - 2)])
        shape = (b, blocks, block, *x_bs.shape[2:])
        return jnp.moveaxis(reshape(padded, shape, rules.spec("batch", None, "sequence", *axes)), 1, 0)

    @jax.checkpoint
    def attend_block(keys: jax.Array, values: jax.Array, of_block: tuple[jax.Array, ...]) -> jax.Array:
        q_bsnh, segments_bs, first = of_block
        mask_bst = attention_mask(segment_ids_bs, segments_bs, first)
        return _attend(q_bsnh, keys.astype(dtype), values.astype(dtype), mask_bst, rules, "recomputed")

    def step(_: None, of_block: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        return None, attend_block(keys, values, of_block)

    of_blocks = (cut(q_bsnh, "heads", "head_size"), cut(segment_ids_bs), jnp.arange(blocks) * block)
    _, mixed_xbsnh = jax.lax.scan(step, None, of_blocks)
    mixed_bsnh = reshape(jnp.moveaxis(mixed_xbsnh, 0, 1), (b, blocks * block, n, h), rules.spec(*_QUERY))
    return mixed_bsnh[:, :s]


def attention_mask(
    key_segments_bt: jax.Array, query_segments_bs: jax.Array | None = None, first: jax.Array | int = 0
) -> jax.Array:
    """Boolean [B, S, T]: query s sees key t when t <= s and both are of one segment.

    Padding (0) sees only itself: the own position is always visible, so no softmax row is empty.

    Args:
        key_segments_bt: segments of whole rows.
        query_segments_bs: segments of the queries (None: whole rows).
        first: position of the first query in its row.
    """
    if query_segments_bs is None:
        query_segments_bs = key_segments_bt
    position_s1 = first + jnp.arange(query_segments_bs.shape[1])[:, None]
    position_1t = jnp.arange(key_segments_bt.shape[1])[None, :]
    visible = query_segments_bs[:, :, None] == key_segments_bt[:, None, :]
    real = (query_segments_bs != 0)[:, :, None] | (position_s1 == position_1t)
    return (position_s1 >= position_1t) & visible & real


def _attend(
    q_bsnh: jax.Array, k_btkh: jax.Array, v_btkh: jax.Array, mask_bst: jax.Array, rules: AxisRules, weights_name: str
) -> jax.Array:
    """Softmax(q k / sqrt(H)) v under the mask, [B, S, N, H] in the dtype of the values.

    Query heads of one key-value head are rows of one matrix: [G*S, H] x [H, T] per (batch, K), which CPU and
    accelerator matrix units run at full speed, and keys are never repeated.
    """
    spec = rules.spec
    b, s, heads, size = q_bsnh.shape
    kv_heads = k_btkh.shape[2]
    groups = heads // kv_heads
    rows = spec("batch", "kv_heads", None, "head_size")
    q_bskgh = reshape(q_bsnh, (b, s, kv_heads, groups, size), spec(*_GROUPED))
    q_bkxh = reshape(q_bskgh.transpose(0, 2, 3, 1, 4), (b, kv_heads, groups * s, size), rows)
    scores_bkxt = einsum(
        "bkxh,bkht->bkxt",
        q_bkxh,
        k_btkh.transpose(0, 2, 3, 1),
        out=spec("batch", "kv_heads", None, None),
        result_dtype="float32",
    )
    mask_bxt = jnp.tile(mask_bst, (1, groups, 1))
    scores_bkxt = jnp.where(mask_bxt[:, None], scores_bkxt * size**-0.5, jnp.finfo(jnp.float32).min)
    weights_bkxt = checkpoint_name(jax.nn.softmax(scores_bkxt, axis=-1).astype(v_btkh.dtype), weights_name)
    mixed_bkxh = einsum("bkxt,bkth->bkxh", weights_bkxt, v_btkh.transpose(0, 2, 1, 3), out=rows)
    split = spec("batch", "kv_heads", None, "sequence", "head_size")
    mixed_bkgsh = reshape(mixed_bkxh, (b, kv_heads, groups, s, size), split)
    return reshape(mixed_bkgsh.transpose(0, 3, 1, 2, 4), q_bsnh.shape, spec(*_QUERY))
