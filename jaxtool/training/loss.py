"""Cross-entropy at the supervised positions only, against soft targets, in float32.

The loss is a sum over the positions of the whole (global) batch divided by their number, so it does not depend on how
the batch is cut into devices, rows or chunks.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtool.data import Batch
from jaxtool.models import LanguageModel, ToolRows
from jaxtool.parallel import active_mesh_axes


def supervised_loss(
    model: LanguageModel, batch: Batch, *, chunk: int = 0, tool_rows: ToolRows | None = None
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean cross-entropy -sum_a w_a log p(target_a) over the supervised positions, over the full vocabulary.

    Args:
        model: the network.
        batch: packed rows.
        chunk: supervised positions of a row whose logits exist at a time (0: all). Logits take B x chunk x V x 4 bytes.
        tool_rows: the tool rows of the vocabulary matrices once more, to take the gradient in the matrices' place.

    Returns:
        The loss and the metrics `supervised` (number of positions) and `correct` (share of positions whose most
        probable id is one of the targets).
    """
    hidden_bsd = model(batch.tokens_bs, batch.positions_bs, batch.segment_ids_bs, tool_rows=tool_rows)
    hidden_bpd = _at_positions(hidden_bsd, batch.supervised_bp, model)
    weights_bpa = batch.weights_bpa
    pieces = hidden_bpd.shape[1] // chunk if chunk else 1
    if chunk and hidden_bpd.shape[1] % chunk:
        raise ValueError(f"loss chunk {chunk} does not divide the {hidden_bpd.shape[1]} supervised positions of a row")

    def piece(hidden_bpd: jax.Array, targets_bpa: jax.Array, weights_bpa: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits_bpv = model.logits(hidden_bpd, tool_rows=tool_rows)
        log_norm_bp = jax.nn.logsumexp(logits_bpv, axis=-1)
        # The target distribution is compared into being inside the sum: nothing of size V is gathered or scattered, and
        # a vocabulary sharded over devices stays where it is. -inf of padded columns must not meet a weight of 0.
        ids_v = jnp.arange(logits_bpv.shape[-1], dtype=jnp.int32)
        share_bpv = jnp.zeros_like(logits_bpv)
        for a in range(targets_bpa.shape[-1]):
            share_bpv += jnp.where(ids_v == targets_bpa[..., a, None], weights_bpa[..., a, None], 0.0)
        target_bp = jnp.sum(jnp.where(share_bpv > 0, share_bpv * logits_bpv, 0.0), axis=-1)
        total = jnp.sum(weights_bpa, axis=-1) * log_norm_bp - target_bp
        best_bp = jnp.argmax(jax.lax.stop_gradient(logits_bpv), axis=-1)
        right_bp = jnp.any((targets_bpa == best_bp[..., None]) & (weights_bpa > 0), axis=-1)
        return jnp.sum(total), jnp.sum(right_bp)

    if pieces == 1:
        total, right = piece(hidden_bpd, batch.targets_bpa, weights_bpa)
    else:
        cut = [_chunked(x, pieces) for x in (hidden_bpd, batch.targets_bpa, weights_bpa)]

        def step(carry: tuple[jax.Array, jax.Array], x: list[jax.Array]) -> tuple[tuple[jax.Array, jax.Array], None]:
            total, right = piece(*x)
            return (carry[0] + total, carry[1] + right), None

        (total, right), _ = jax.lax.scan(jax.checkpoint(step), (jnp.float32(0), jnp.int32(0)), cut)
    # Counted, not summed: the weights of a position add up to 1 only within rounding.
    count = jnp.sum(jnp.any(weights_bpa > 0, axis=-1), dtype=jnp.float32)
    return total / count, {"supervised": count, "correct": right / count}


def _at_positions(hidden_bsd: jax.Array, positions_bp: jax.Array, model: LanguageModel) -> jax.Array:
    """hidden_bsd[b, positions_bp[b, p]], with the layout of the batch kept."""
    sharding = model.rules.spec("batch", None, "activation") if active_mesh_axes() else None
    rows_b1 = jnp.arange(hidden_bsd.shape[0])[:, None]
    return hidden_bsd.at[rows_b1, positions_bp].get(out_sharding=sharding)


def _chunked(x_bp: jax.Array, pieces: int) -> jax.Array:
    """[B, P, ...] -> [pieces, B, P / pieces, ...]; adjacent chunks hold every `pieces`-th position."""
    b, p = x_bp.shape[:2]
    return jnp.moveaxis(x_bp.reshape(b, p // pieces, pieces, *x_bp.shape[2:]), 2, 0)
