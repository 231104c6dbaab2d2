"""AdamW with warm-up, cosine decay and clipping, as optax builds it."""

from __future__ import annotations

import re
from typing import Any

import jax
import optax

from jaxtool.config import OptimizerConfig

_VECTORS = re.compile("norm|bias")


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Rate by step: linear warm-up over `warmup_share` of `steps`, then cosine to `final_share` of the peak."""
    warmup = round(config.warmup_share * steps)
    return optax.warmup_cosine_decay_schedule(
        init_value=config.learning_rate / (warmup + 1),
        peak_value=config.learning_rate,
        warmup_steps=warmup,
        decay_steps=max(steps, warmup + 1),
        end_value=config.learning_rate * config.final_share,
    )


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW on the schedule over `steps`."""

    def matrices(model: Any) -> Any:
        # By name: stacked norm scales and biases have as many axes as plain matrices.
        leaves, structure = jax.tree_util.tree_flatten_with_path(model)
        return jax.tree_util.tree_unflatten(
            structure, [not _VECTORS.search(jax.tree_util.keystr(path)) for path, _ in leaves]
        )

    return optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        optax.adamw(
            learning_rate_schedule(config, steps),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=matrices,
        ),
    )
