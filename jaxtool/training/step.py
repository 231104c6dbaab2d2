"""The train state and the one jitted step that all stages share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtool.data import Batch
from jaxtool.models import LanguageModel
from jaxtool.parallel import AxisRules, active_mesh_axes
from jaxtool.training.loss import supervised_loss
from jaxtool.training.optimizer import gradient_norm
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


def make_train_step(
    optimizer: optax.GradientTransformation, *, loss_chunk: int = 0, z_loss: float = 0.0, accumulate: int = 1
) -> TrainStep:
    """The jitted step: loss, gradients, clipping, update. The state passed in is donated and must not be used again.

    Gradients, their clipping and the update are those of the trained part alone; the rest passes through untouched.
    With `accumulate` the batch is computed in so many parts, and gradients are summed in float32: every part's loss is
    divided by the supervised positions of the whole batch, so the result is that of the batch at once.
    Metrics (scalars on the device): `loss`, `correct`, `supervised`, `grad_norm` before clipping, and with `z_loss` its
    term `z_loss`.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, jax.Array]]:
        part = trained_part(state.model, state.trained)
        count = jnp.sum(jnp.any(batch.weights_bpa > 0, axis=-1), dtype=jnp.float32)

        def loss_of(part: TrainedPart, batch: Batch) -> tuple[jax.Array, dict[str, jax.Array]]:
            model, tool_rows = for_gradient(state.model, part)
            return supervised_loss(model, batch, count=count, chunk=loss_chunk, z_loss=z_loss, tool_rows=tool_rows)

        gradient_of = jax.value_and_grad(loss_of, has_aux=True)
        if accumulate == 1:
            (loss, metrics), gradients = gradient_of(part, batch)
        else:

            def add(total: Any, micro: Batch) -> tuple[Any, None]:
                found = gradient_of(part, micro)
                return jax.tree.map(lambda x, y: x + y.astype(x.dtype), total, found), None

            micro_batches = jax.tree.map(lambda x: _cut(x, accumulate), batch)
            first = jax.tree.map(lambda x: x[0], micro_batches)
            nothing = jax.tree.map(_float32_zeros, jax.eval_shape(gradient_of, part, first))
            ((loss, metrics), gradients), _ = jax.lax.scan(add, nothing, micro_batches)
            gradients = jax.tree.map(lambda gradient, leaf: gradient.astype(leaf.dtype), gradients, part)
        updates, optimizer_state = optimizer.update(gradients, state.optimizer_state, part)
        model = with_trained_part(state.model, optax.apply_updates(part, updates))
        metrics = {"loss": loss, **metrics, "grad_norm": gradient_norm(gradients)}
        state = TrainState(model=model, optimizer_state=optimizer_state, step=state.step + 1, trained=state.trained)
        return state, metrics

    return jax.jit(step, donate_argnums=0)


def _cut(x_b: jax.Array, parts: int) -> jax.Array:
    """[B, ...] -> [parts, B / parts, ...]. Every part takes rows from all devices, so that no row moves."""
    rows = x_b.shape[0] // parts
    sharding = jax.typeof(x_b).sharding
    out = None
    if active_mesh_axes():
        out = sharding.update(spec=PartitionSpec(sharding.spec[0], None, *sharding.spec[1:]))
    return jnp.moveaxis(jax.lax.reshape(x_b, (rows, parts, *x_b.shape[1:]), out_sharding=out), 1, 0)


def _float32_zeros(leaf: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = leaf.sharding if active_mesh_axes() else None
    return jnp.zeros(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32), device=sharding)


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
