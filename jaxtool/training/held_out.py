"""The loss on samples that are not trained on: the number that says which checkpoint is the best."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxtool.data import Batch, PackedBatches
from jaxtool.models import LanguageModel
from jaxtool.parallel import AxisRules
from jaxtool.training.loss import supervised_loss
from jaxtool.training.step import on_mesh

HeldOut = Callable[[LanguageModel], dict[str, float]]


def make_held_out(batches: PackedBatches, mesh: Mesh, rules: AxisRules, *, loss_chunk: int = 0) -> HeldOut:
    """A function from a model to its `loss`, `perplexity`, `correct` and `supervised` on all of `batches` (one epoch).

    The loss is the sum over all supervised positions divided by their number, whatever the batches; the perplexity its
    exponential (infinite where that is beyond float64).
    """

    @jax.jit
    def sums(model: LanguageModel, batch: Batch) -> dict[str, jax.Array]:
        loss, metrics = supervised_loss(model, batch, count=jnp.float32(1), chunk=loss_chunk)
        return {"loss": loss, "correct": metrics["correct"], "supervised": metrics["supervised"]}

    def held_out(model: LanguageModel) -> dict[str, float]:
        total = {"loss": 0.0, "correct": 0.0, "supervised": 0.0}
        waiting: list[dict[str, jax.Array]] = []
        for step in range(batches.steps):
            waiting.append(sums(model, on_mesh(batches.batch(step), mesh, rules)))
            if len(waiting) > 1 or step == batches.steps - 1:  # fetched one batch late
                for found in waiting[:-1] if step < batches.steps - 1 else waiting:
                    total = {name: value + float(found[name]) for name, value in total.items()}
                waiting = waiting[-1:]
        loss = total["loss"] / total["supervised"]
        perplexity = math.exp(loss) if loss < 709 else math.inf
        return {
            "loss": loss,
            "perplexity": perplexity,
            "correct": total["correct"] / total["supervised"],
            "supervised": total["supervised"],
        }

    return held_out
