"""Cross-entropy at the supervised positions of a batch, against soft targets, over the full vocabulary.

The loss is a sum over the positions of the whole (global) batch divided by their number, so it does not depend on how
the batch is cut into devices, rows, chunks or micro-batches. The sum itself is computed in `cross_entropy`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtool.data import Batch
from jaxtool.models import LanguageModel, ToolRows
from jaxtool.training.cross_entropy import cross_entropy
from jaxtool.training.cross_entropy_loop import CrossEntropy


def supervised_loss(
    model: LanguageModel,
    batch: Batch,
    *,
    count: jax.Array | float | None = None,
    chunk: int = 0,
    z_loss: float = 0.0,
    tool_rows: ToolRows | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Mean of -sum_a w_a log p(target_a) + z_loss x log-normaliser^2 over the supervised positions.

    A batch without any has loss 0 and gradient 0, a target that can't be predicted makes the loss infinite.

    Args:
        model: the network.
        batch: packed rows.
        count: what sums are divided by (None: the supervised positions of this batch). With the number of a larger
            batch, loss, `correct`, `z_loss` and gradients of its parts add up to its own. Below 1 counts as 1.
        chunk: positions of a device whose logits exist at a time, over all its rows; they take chunk x V / (devices of
            the `model` axis) x 4 bytes. 0: as many as take 512 MiB.
        z_loss: weight of the squared log-normaliser, which keeps logits small.
        tool_rows: the tool rows of the vocabulary matrices once more, to take the gradient in the matrices' place.

    Returns:
        The loss and the metrics `supervised` (number of positions of this batch), `correct` (positions whose most
        probable id is one of the targets, divided by the count) and, if there is one, `z_loss` (its part of the loss).
    """
    hidden_bsd = model(batch.tokens_bs, batch.positions_bs, batch.segment_ids_bs, tool_rows=tool_rows)
    hidden_bpd = _at_positions(hidden_bsd, batch.supervised_bp)
    head = {"matrix": model.head_rows()}
    if model.config.head_bias:
        head["bias"] = model.head_bias_v[...]
    if tool_rows:
        head["tool_matrix"] = tool_rows["embedding_vd" if model.config.tie_word_embeddings else "head_vd"]
        if model.config.head_bias:
            head["tool_bias"] = tool_rows["head_bias_v"]
    setup = CrossEntropy(config=model.config, rules=model.rules, chunk=chunk, z_loss=z_loss)
    sums = cross_entropy(setup, hidden_bpd, head, batch.targets_bpa, batch.weights_bpa)
    divisor = jnp.maximum(sums.count if count is None else jnp.asarray(count, jnp.float32), 1.0)
    metrics = {"supervised": sums.count, "correct": sums.right / divisor}
    if z_loss:
        metrics["z_loss"] = z_loss * sums.squared_norm / divisor
    return sums.loss / divisor, metrics


def _at_positions(hidden_bsd: jax.Array, positions_bp: jax.Array) -> jax.Array:
    """hidden_bsd[b, positions_bp[b, p]]. A gather of rows apart: with row numbers as indices, XLA moves all rows."""
    return jax.vmap(lambda hidden_sd, positions_p: hidden_sd.at[positions_p].get())(hidden_bsd, positions_bp)
