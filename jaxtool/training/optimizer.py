"""AdamW with warm-up, cosine decay and clipping, as optax builds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import optax


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW settings; defaults are those of the ToolGen paper where it names them.

    Attributes:
        learning_rate: peak rate.
        warmup_share: share of the steps in which the rate rises linearly from 0.
        final_share: rate at the last step as a share of the peak (cosine decay).
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: decoupled decay of matrices; norm scales are never decayed.
        clip_norm: largest global gradient norm.
    """

    learning_rate: float = 4e-5
    warmup_share: float = 0.03
    final_share: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.learning_rate <= 0:
            raise ValueError(f"optimizer.learning_rate is {self.learning_rate}, expected a positive number")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"optimizer.warmup_share is {self.warmup_share}, expected 0 <= share < 1")
        if self.clip_norm <= 0:
            raise ValueError(f"optimizer.clip_norm is {self.clip_norm}, expected a positive number")


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
        # Stacked norm scales are [L, D]; every matrix under `blocks` has an axis more.
        leaves, structure = jax.tree_util.tree_flatten_with_path(model)
        return jax.tree_util.tree_unflatten(structure, ["norm" not in jax.tree_util.keystr(path) for path, _ in leaves])

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
