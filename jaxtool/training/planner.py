"""Whether a run fits a machine, without the machine: its train step compiled ahead of time by the machine's compiler.

The step, its state and its shapes are those of training (`step`, `starting_model`); nothing is allocated or run. What
to change when it doesn't fit is in `plan_variations`; decoding has a planner of its own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxtool.config import MeshConfig, StageConfig, TrainableConfig
from jaxtool.data import Batch
from jaxtool.models import LanguageModelConfig, abstract_model, build_model
from jaxtool.models.attention import resolve_attention
from jaxtool.models.flops import Flops, Work, training_flops
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.parallel.ahead_of_time import CompiledProgram, compile_program, device_bytes, placed
from jaxtool.parallel.targets import Target
from jaxtool.training.optimizer import make_optimizer
from jaxtool.training.starting_model import run_config_of
from jaxtool.training.step import initial_state, make_train_step


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A train step on a machine.

    Attributes:
        target: name of the machine.
        mesh: sizes of the axes `data`, `fsdp`, `model`.
        weights: bytes of parameters on a device.
        optimizer: bytes of moments on a device.
        program: what the compiler says. Its arguments are weights, moments and batch; gradients, activations and
            gathered weights are temporary.
        flops: of the step, all devices, by formula.
        devices: how many share them.
        peak_flops: of a device.
        notes: which attention is used, and a line for each axis that the mesh doesn't divide.
    """

    target: str
    mesh: dict[str, int]
    weights: int
    optimizer: int
    program: CompiledProgram
    flops: Flops
    devices: int
    peak_flops: float | None
    notes: tuple[str, ...]

    def step_seconds(self, utilisation: float) -> float | None:
        """Time of a step at a share of the peak, attention halved for causality; None where the peak isn't known."""
        if self.peak_flops is None:
            return None
        return self.flops.causal / (self.devices * self.peak_flops * utilisation)


def plan_step(
    base: LanguageModelConfig,
    stage: StageConfig,
    target: Target,
    *,
    mesh: MeshConfig,
    trainable: TrainableConfig,
    tools: int,
    attention: str = "auto",
    supervised: int,
    targets: int = 1,
) -> StepPlan:
    """Compiles a stage's train step for a machine.

    Args:
        base: the pretrained model's config with the run's dtypes.
        stage: rows, their length, micro-batches, loss and optimiser.
        target: the machine.
        mesh: how the devices share the work.
        trainable: which part is trained.
        tools: size of the catalogue.
        attention: implementation, "auto" for the one that the run would choose on such devices.
        supervised: most supervised positions of a row (P).
        targets: most right next ids of a position (A).

    Raises:
        ValueError: a mesh that the devices or rows don't fit, or more supervised positions than a row has.
    """
    if not 1 <= supervised <= stage.row_length:
        raise ValueError(f"supervised is {supervised}, expected 1 to row_length {stage.row_length}")
    devices = make_mesh(mesh, target.devices)
    sizes = dict(devices.shape)
    shares = sizes["data"] * sizes["fsdp"]
    if stage.rows % (shares * stage.accumulate):
        raise ValueError(
            f"rows {stage.rows} is not a multiple of {shares * stage.accumulate}: "
            f"mesh.data {sizes['data']} x mesh.fsdp {sizes['fsdp']} x accumulate {stage.accumulate}"
        )
    with jax.set_mesh(devices):
        config = run_config_of(base, tools, trainable)
    chosen, why = resolve_attention(
        attention, compute_dtype=config.compute_dtype, head_size=config.head_dim, device=target.devices[0]
    )
    config = dataclasses.replace(config, attention=chosen)
    rules, notes = AxisRules().fit(sizes, config.axis_sizes)
    optimizer, trained = make_optimizer(stage.optimizer, steps=1000), trainable.parameters
    model = abstract_model(lambda: build_model(config, rules), devices)
    with jax.set_mesh(devices):
        state = jax.eval_shape(lambda model: initial_state(model, optimizer, trained), model)
    state = placed(state, devices)
    batch = _abstract_batch(stage, supervised, targets, devices, rules)
    step: Any = make_train_step(
        optimizer, loss_chunk=stage.loss_chunk, z_loss=stage.z_loss, accumulate=stage.accumulate
    )
    return StepPlan(
        target=target.name,
        mesh=sizes,
        weights=device_bytes(state.model),
        optimizer=device_bytes(state.optimizer_state),
        program=compile_program(lambda: step.lower(state, batch), devices, target.hbm_bytes),
        flops=training_flops(config, Work.of_full_rows(stage.rows, stage.row_length, stage.rows * supervised), trained),
        devices=len(target.devices),
        peak_flops=target.peak_flops,
        notes=(why, *notes),
    )


def _abstract_batch(stage: StageConfig, supervised: int, targets: int, mesh: Mesh, rules: AxisRules) -> Batch:
    def array(*shape: int, dtype: Any = jnp.int32) -> Any:
        sharding = NamedSharding(mesh, rules.spec("batch", *[None] * len(shape)))
        return jax.ShapeDtypeStruct((stage.rows, *shape), dtype, sharding=sharding)

    return Batch(
        tokens_bs=array(stage.row_length),
        positions_bs=array(stage.row_length),
        segment_ids_bs=array(stage.row_length),
        supervised_bp=array(supervised),
        targets_bpa=array(supervised, targets),
        weights_bpa=array(supervised, targets, dtype=jnp.float32),
    )
