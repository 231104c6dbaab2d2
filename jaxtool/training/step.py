"""The train state and the one jitted step that all stages share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxtool.data import Batch
from jaxtool.models import Llama
from jaxtool.parallel import AxisRules
from jaxtool.training.loss import supervised_loss


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
        model: the network.
        optimizer_state: optax state over the network.
        step: int32 scalar, steps taken in this stage.
    """

    model: Llama
    optimizer_state: Any
    step: jax.Array


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def initial_state(model: Llama, optimizer: optax.GradientTransformation) -> TrainState:
    """State before the first step; moments take the sharding of their parameters."""
    return TrainState(model=model, optimizer_state=jax.jit(optimizer.init)(model), step=jnp.int32(0))


def make_train_step(optimizer: optax.GradientTransformation, *, loss_chunk: int = 0) -> TrainStep:
    """The jitted step: loss, gradients, clipping, AdamW. The state passed in is donated and must not be used again.

    Metrics (scalars on the device): `loss`, `correct`, `supervised`, `grad_norm` before clipping.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_of(model: Llama) -> tuple[jax.Array, dict[str, jax.Array]]:
            return supervised_loss(model, batch, chunk=loss_chunk)

        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(state.model)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, state.model)
        model = optax.apply_updates(state.model, updates)
        metrics = {"loss": loss, **metrics, "grad_norm": optax.tree.norm(gradients)}
        return TrainState(model=model, optimizer_state=optimizer_state, step=state.step + 1), metrics

    return jax.jit(step, donate_argnums=0)


def on_mesh(batch: Batch, mesh: Mesh, rules: AxisRules) -> Batch:
    """The batch as device arrays with its rows cut over the batch axes; every process fills only its own devices.

    Raises:
        ValueError: the rows don't divide by the devices of the batch axes.
    """

    def put(x: np.ndarray) -> jax.Array:
        sharding = NamedSharding(mesh, rules.spec("batch", *[None] * (x.ndim - 1)))
        try:
            return jax.make_array_from_callback(x.shape, sharding, lambda index: x[index])
        except ValueError as error:
            raise ValueError(
                f"{x.shape[0]} rows of a batch don't divide by mesh axes {rules.batch}: {error}"
            ) from error

    return jax.tree.map(put, batch)
