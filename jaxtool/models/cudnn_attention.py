"""Causal attention on NVIDIA GPUs by cuDNN, where every row of a batch is one document.

JAX's public function has no segment ids. A mask would do, but cuDNN then reads a bias of [S, S] and, as of jax 0.10,
writes its gradient as well. So packed rows go to the blockwise XLA implementation, which the ids decide at run time.
"""

from __future__ import annotations

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxtool.models.attention_kernels import run_on_own_heads
from jaxtool.models.xla_attention import attend_in_blocks
from jaxtool.parallel import AxisRules

CUDNN_DTYPES = ("bfloat16", "float16")


def cudnn_attention(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    segment_ids_bs: jax.Array,
    rules: AxisRules,
    *,
    kernel: Literal["xla", "cudnn"] = "cudnn",
) -> jax.Array:
    """See `jaxtool.models.attention.attention`.

    Args:
        q_bsnh: queries [B, S, N, H] in bfloat16 or float16.
        k_bskh: keys [B, S, K, H].
        v_bskh: values [B, S, K, H].
        segment_ids_bs: int32 [B, S]. One packed or left-padded row takes the whole batch to the XLA implementation.
        rules: mesh axes of batch and heads.
        kernel: `implementation` of `jax.nn.dot_product_attention` ("xla" for tests, in any dtype).

    Raises:
        ValueError: cuDNN can't: another dtype, no NVIDIA GPU, or a head size that it doesn't take.
    """
    if kernel == "cudnn" and q_bsnh.dtype.name not in CUDNN_DTYPES:
        raise ValueError(f"attention 'cudnn' computes in {' or '.join(CUDNN_DTYPES)}, the queries are {q_bsnh.dtype}")

    def fused(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return run_on_own_heads(functools.partial(_causal, kernel=kernel), q, k, v, segments, rules)

    def blockwise(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return attend_in_blocks(q, k, v, segments, rules)

    mixed_bsnh = jax.lax.cond(
        one_document_a_row(segment_ids_bs), fused, blockwise, q_bsnh, k_bskh, v_bskh, segment_ids_bs
    )
    return checkpoint_name(mixed_bsnh, "kept")


def one_document_a_row(segment_ids_bs: jax.Array) -> jax.Array:
    """Whether each row is one segment from its first token on, with padding only behind it: boolean scalar.

    Then the causal mask alone hides all that a real token must not see.
    """
    before, after = segment_ids_bs[:, :-1], segment_ids_bs[:, 1:]
    return jnp.all((after == 0) | (after == before))


def _causal(
    q_bsnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    segment_ids_bs: jax.Array,
    *,
    kernel: Literal["xla", "cudnn"],
) -> jax.Array:
    del segment_ids_bs
    try:
        return jax.nn.dot_product_attention(q_bsnh, k_bskh, v_bskh, is_causal=True, implementation=kernel)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"attention 'cudnn' is not available ({error}); expected an NVIDIA GPU with cuDNN and a head size that is "
            "a multiple of 8, at most 128 (from Hopper on 256); 'xla' runs everywhere"
        ) from error
