"""Causal attention on TPUs by the Pallas splash kernel: no scores in memory, blocks above the diagonal are skipped.

The kernel is JAX's own; here are its block sizes, padding and layout. Shared prefixes are not for it.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxtool.models.attention_kernels import run_on_own_heads
from jaxtool.parallel import AxisRules

_LANES = 128  # blocks are multiples of the vector width, and narrower heads take as much room as these
_SMALL_MEMORY = 16 * 2**20  # bytes of vector memory of a TPU v4; later ones have four to eight times as much
_FUSED_KEY_BLOCKS = 4


def splash_attention(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    segment_ids_bs: jax.Array,
    rules: AxisRules,
    *,
    interpret: bool = False,
) -> jax.Array:
    """See `jaxtool.models.attention.attention`.

    Args:
        q_bsnh: queries [B, S, N, H].
        k_bskh: keys [B, S, K, H].
        v_bskh: values [B, S, K, H].
        segment_ids_bs: int32 [B, S]; padding (0) attends to padding.
        rules: mesh axes of batch and heads.
        interpret: run the kernel's program without a TPU, slowly (for tests).
    """
    kernel = functools.partial(_splash, interpret=interpret)
    return run_on_own_heads(kernel, q_bsnh, k_bskh, v_bskh, segment_ids_bs, rules)


def largest_blocks(head_size: int, dtype: jnp.dtype[Any], memory: int) -> tuple[int, int]:
    """Tokens of a block of queries and keys, and of a block of keys in the backward kernel, at most.

    Larger blocks read keys and values less often. These compile for all topologies within the compiler's own limits.

    Args:
        head_size: H.
        dtype: of queries, keys and values.
        memory: vector memory of a core in bytes.
    """
    wide = max(head_size, _LANES) * dtype.itemsize // 256  # 1 for heads of 128 in bfloat16
    if memory <= _SMALL_MEMORY:
        return 512, 2048 // wide
    return (1024 if wide == 1 else 512), min(2048, 4096 // wide)


def padded_length(length: int, block: int) -> tuple[int, int]:
    """(tokens of a row, of a block): the row in as few blocks of at most `block` as it takes, all of one size."""
    blocks = -(-length // block)
    block = -(-length // (blocks * _LANES)) * _LANES
    return blocks * block, block


def _splash(
    q_bsnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, segment_ids_bs: jax.Array, *, interpret: bool
) -> jax.Array:
    # Imported here: a second that programs without a TPU need not spend.
    from jax.experimental.pallas import tpu
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    _, length, heads, size = q_bsnh.shape
    memory = _SMALL_MEMORY if interpret else tpu.get_tpu_info().vmem_capacity_bytes
    largest, largest_key_block = largest_blocks(size, q_bsnh.dtype, memory)
    padded, block = padded_length(length, largest)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((padded, padded))] * heads),
        block_sizes=_block_sizes(splash, padded, block, largest_key_block),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name="kept",
        interpret=interpret,
    )
    q_bsnh = (q_bsnh.astype(jnp.float32) * size**-0.5).astype(q_bsnh.dtype)

    def laid_out(x_bsnh: jax.Array) -> jax.Array:
        return jnp.pad(x_bsnh, ((0, 0), (0, padded - length), (0, 0), (0, 0))).transpose(0, 2, 1, 3)

    # Padding lies behind all real tokens, where no real query looks.
    segments_bs = jnp.pad(segment_ids_bs, ((0, 0), (0, padded - length)))
    ids = splash.SegmentIds(q=segments_bs, kv=segments_bs)
    mixed_bnsh = jax.vmap(kernel)(laid_out(q_bsnh), laid_out(k_bskh), laid_out(v_bskh), ids)
    return mixed_bnsh[:, :, :length].transpose(0, 2, 1, 3)


def _block_sizes(splash: Any, padded: int, block: int, largest_key_block: int) -> Any:
    blocks = padded // block
    # Blocks of keys consist of whole blocks and divide the row.
    key_block = max(n * block for n in range(1, blocks + 1) if blocks % n == 0 and n * block <= largest_key_block)
    # The fused backward kernel writes the queries' gradient once for every block of keys before they are summed.
    fused = padded // key_block <= _FUSED_KEY_BLOCKS
    return splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=key_block,
        block_kv_dkv_compute=block,
        block_q_dq=None if fused else block,
        block_kv_dq=None if fused else block,
        use_fused_bwd_kernel=fused,
    )
