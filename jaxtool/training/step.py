"""The train state and the one jitted step that all stages share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from jaxtool.data import Batch
from jaxtool.models import LanguageModel
from jaxtool.parallel import AxisRules
from jaxtool.training.loss import supervised_loss
from jaxtool.training.trainable import TrainedPart, for_gradient, trained_part, with_trained_part


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that a step changes.

    Attributes:
        model: the network.
        optimizer_state: optax state over the trained part of the network.
        step: int32 scalar, steps taken in this stage.
        trained: which part that is: "full", "lora" or "tool_rows" (see `trained_part`).
    """

    model: LanguageModel
    optimizer_state: Any
    step: jax.Array
    trained: str = field(default="full", metadata={"static": True})


TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]


def initial_state(model: LanguageModel, optimizer: optax.GradientTransformation, trained: str = "full") -> TrainState:
    """State before the first step; moments take the sharding of their parameters.

    Raises:
        ValueError: the model has nothing of what is to be trained.
    """
    optimizer_state = jax.jit(lambda model: optimizer.init(trained_part(model, trained)))(model)
    return TrainState(model=model, optimizer_state=optimizer_state, step=jnp.int32(0), trained=trained)


def abstract_state(
    model: LanguageModel, optimizer: optax.GradientTransformation, trained: str = "full", *, step: int = 0
) -> TrainState:
    """Shapes, dtypes and shardings of the state of an abstract model; of its `step` the value."""
    optimizer_state = jax.eval_shape(lambda model: optimizer.init(trained_part(model, trained)), model)
    return TrainState(model=model, optimizer_state=optimizer_state, step=jnp.int32(step), trained=trained)


def make_train_step(optimizer: optax.GradientTransformation, *, loss_chunk: int = 0) -> TrainStep:
    """The jitted step: loss, gradients, clipping, AdamW. The state passed in is donated and must not be used again.

    Gradients, their clipping and the update are those of the trained part alone; the rest passes through untouched.
    Metrics (scalars on the device): `loss`, `correct`, `supervised`, `grad_norm` before clipping.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        def loss_of(part: TrainedPart) -> tuple[jax.Array, dict[str, jax.Array]]:
            model, tool_rows = for_gradient(state.model, part)
            return supervised_loss(model, batch, chunk=loss_chunk, tool_rows=tool_rows)

        part = trained_part(state.model, state.trained)
        (loss, metrics), gradients = jax.value_and_grad(loss_of, has_aux=True)(part)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, part)
        model = with_trained_part(state.model, optax.apply_updates(part, updates))
        metrics = {"loss": loss, **metrics, "grad_norm": optax.tree.norm(gradients)}
        state = TrainState(model=model, optimizer_state=optimizer_state, step=state.step + 1, trained=state.trained)
        return state, metrics

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
