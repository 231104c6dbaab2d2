"""AdamW or Adafactor with warm-up, a schedule and clipping, put together from optax."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxtool.config import OptimizerConfig

_VECTORS = re.compile("norm|bias")


def learning_rate_schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    """Rate by step: linear warm-up over `warmup_share` of `steps`, then as `config.schedule` says.

    "cosine" and "linear" fall to `final_share` of the peak at the last step, "constant" stays at the peak.
    """
    warmup, peak = round(config.warmup_share * steps), config.learning_rate
    final = peak * config.final_share
    first = peak / (warmup + 1)
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(
            init_value=first,
            peak_value=peak,
            warmup_steps=warmup,
            decay_steps=max(steps, warmup + 1),
            end_value=final,
        )
    rising = optax.linear_schedule(first, peak, warmup)
    after = optax.linear_schedule(peak, final, max(steps - warmup, 1))
    if config.schedule == "constant":
        after = optax.constant_schedule(peak)
    return optax.join_schedules([rising, after], [warmup])


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW or Adafactor on the schedule over `steps`.

    Adafactor (Shazeer & Stern 2018) keeps the second moment of a matrix as row and column means and no first moment.
    As the rates are given, updates are not scaled by the size of the parameters; they are clipped to a root mean square
    of 1 for each parameter, and decayed as AdamW's are.
    """

    def matrices(model: Any) -> Any:
        # By name: stacked norm scales and biases have as many axes as plain matrices.
        leaves, structure = jax.tree_util.tree_flatten_with_path(model)
        return jax.tree_util.tree_unflatten(
            structure, [not _VECTORS.search(jax.tree_util.keystr(path)) for path, _ in leaves]
        )

    rate, clip = learning_rate_schedule(config, steps), clip_by_global_norm(config.clip_norm)
    if config.kind == "adafactor":
        return optax.chain(
            clip,
            optax.scale_by_factored_rms(decay_rate=0.8, epsilon=1e-30),
            optax.clip_by_block_rms(1.0),
            optax.add_decayed_weights(config.weight_decay, matrices),
            optax.scale_by_learning_rate(rate),
        )
    return optax.chain(
        clip,
        optax.adamw(
            rate,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.epsilon,
            weight_decay=config.weight_decay,
            mask=matrices,
        ),
    )


def gradient_norm(gradients: Any) -> jax.Array:
    """Global norm in float32, whatever the dtype of the gradients: bfloat16 squares lose what clipping decides on."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(gradients)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def clip_by_global_norm(most: float) -> optax.GradientTransformation:
    """Gradients scaled down to a global norm of `most` where theirs is larger; the norm in float32."""

    def update(gradients: Any, state: optax.EmptyState, params: Any = None) -> tuple[Any, optax.EmptyState]:
        del params
        norm = gradient_norm(gradients)
        scale = jnp.where(norm < most, 1.0, most / norm)
        return jax.tree.map(lambda leaf: (leaf * scale).astype(leaf.dtype), gradients), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)
