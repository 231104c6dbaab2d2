"""Whether a run fits a machine, without the machine: its train step compiled ahead of time by the machine's compiler.

The step, its state and its shapes are those of training (`step`, `starting_model`); nothing is allocated or run. What
to change when it doesn't fit is in `plan_variations`, the transfers between devices are counted in `collectives`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import re
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.errors import JaxRuntimeError
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig, StageConfig, TrainableConfig
from jaxtool.data import Batch
from jaxtool.models import LanguageModelConfig, abstract_model, build_model, tools_config
from jaxtool.models.attention import resolve_attention
from jaxtool.models.flops import Flops, Work, training_flops
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.parallel.topologies import TOPOLOGIES, find_topology
from jaxtool.training.collectives import Collectives, count_collectives
from jaxtool.training.optimizer import make_optimizer
from jaxtool.training.starting_model import run_config_of
from jaxtool.training.step import initial_state, make_train_step

GIB = 2**30
_CPU = re.compile(r"cpu:([1-9]\d{0,3})")
_OUT_OF_MEMORY = re.compile(r"Used ([\d.]+)([KMGT]) of ([\d.]+)([KMGT]) hbm")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class Target:
    """A machine to plan for.

    Attributes:
        name: accelerator type, or "cpu:N".
        devices: what a mesh is made of; no program can run on a TPU's.
        hbm_bytes: memory of a device that a program can use; None for CPUs.
        peak_flops: bf16 FLOP/s of a device; None for CPUs.
    """

    name: str
    devices: tuple[Any, ...]
    hbm_bytes: int | None
    peak_flops: float | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device, of the fullest one where they differ.

    Attributes:
        arguments: weights, moments and batch as the compiler lays them out.
        temporary: gradients, activations and gathered weights. Together with the arguments more than the peak, where
            not all of it is alive at once.
        peak: the most at any time.
    """

    arguments: int
    temporary: int
    peak: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """What is known of a train step that was compiled, or that the compiler refused for want of memory.

    Attributes:
        target: name of the machine.
        mesh: sizes of the axes `data`, `fsdp`, `model`.
        hbm: bytes of a device that a program can use; None for CPUs.
        weights: bytes of parameters on a device.
        optimizer: bytes of moments on a device.
        memory: the compiler's figures; None if it refused.
        needed: bytes that a device would need, where the compiler refused and said so.
        collectives: transfers between devices.
        flops: of the step, all devices, by formula.
        devices: how many share them.
        peak_flops: of a device.
        seconds: what compiling took.
        notes: which attention is used, and a line for each axis that the mesh doesn't divide.
    """

    target: str
    mesh: dict[str, int]
    hbm: int | None
    weights: int
    optimizer: int
    memory: Memory | None
    needed: int | None
    collectives: tuple[Collectives, ...]
    flops: Flops
    devices: int
    peak_flops: float | None
    seconds: float
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the program can be loaded."""
        return self.memory is not None and (self.hbm is None or self.memory.peak <= self.hbm)

    def step_seconds(self, utilisation: float) -> float | None:
        """Time of a step at a share of the peak, attention halved for causality; None where the peak isn't known."""
        if self.peak_flops is None:
            return None
        return self.flops.causal / (self.devices * self.peak_flops * utilisation)


def find_target(name: str) -> Target:
    """The machine of that name.

    Args:
        name: accelerator type (`v5litepod-64`, also `v5e-64`), shape (`v5e:8x8`), or `cpu:N` for N fake devices.

    Raises:
        ValueError: an unknown name (the message lists near ones), no TPU compiler, or too few fake devices.
    """
    if found := _CPU.fullmatch(name):
        return Target(name=name, devices=_fake_devices(int(found[1])), hbm_bytes=None, peak_flops=None)
    by_shape = {topology.aot_name: topology for topology in TOPOLOGIES.values()}
    short = {f"{each.generation}-{each.accelerator_type.rpartition('-')[2]}": each for each in TOPOLOGIES.values()}
    topology = by_shape.get(name) or short.get(name) or find_topology(name)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"planning for {name} needs the TPU compiler, which no TPU is needed for: "
            f"pip install 'jax[tpu]=={jax.__version__}'"
        )
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology.aot_name, **dict(topology.aot_options)
    )
    return Target(
        name=topology.accelerator_type,
        devices=tuple(description.devices),
        hbm_bytes=int(topology.hbm_gib * GIB),
        peak_flops=topology.peak_tflops * 1e12,
    )


def _fake_devices(count: int) -> tuple[jax.Device, ...]:
    with contextlib.suppress(RuntimeError):  # jax has begun to work with those it has
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(f"cpu:{count} is more than the {len(devices)} fake devices that this process began with")
    return tuple(devices[:count])


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
    state = jax.tree.map(lambda leaf: _placed(leaf, devices), state)
    batch = _abstract_batch(stage, supervised, targets, devices, rules)
    step = make_train_step(optimizer, loss_chunk=stage.loss_chunk, z_loss=stage.z_loss, accumulate=stage.accumulate)
    began = time.monotonic()
    weights, moments = _device_bytes(state.model), _device_bytes(state.optimizer_state)
    memory: Memory | None = None
    needed: int | None = None
    collectives: tuple[Collectives, ...] = ()
    with jax.set_mesh(devices):
        lowered = step.lower(state, batch)  # type: ignore[attr-defined]
    try:
        compiled = lowered.compile()
    except JaxRuntimeError as error:
        needed = _needed(error)
    else:
        found = compiled.memory_analysis()
        memory = Memory(
            arguments=found.argument_size_in_bytes,
            temporary=found.temp_size_in_bytes,
            peak=found.peak_memory_in_bytes,
        )
        collectives = count_collectives(compiled.as_text())
    return StepPlan(
        target=target.name,
        mesh=sizes,
        hbm=target.hbm_bytes,
        weights=weights,
        optimizer=moments,
        memory=memory,
        needed=needed,
        collectives=collectives,
        flops=training_flops(config, Work.of_full_rows(stage.rows, stage.row_length, stage.rows * supervised), trained),
        devices=len(target.devices),
        peak_flops=target.peak_flops,
        seconds=time.monotonic() - began,
        notes=(why, *notes),
    )


def _placed(leaf: jax.ShapeDtypeStruct, mesh: Mesh) -> jax.ShapeDtypeStruct:
    """The leaf on the devices; step counts come from no parameter and live everywhere."""
    spec = leaf.sharding.spec if leaf.sharding is not None else PartitionSpec()
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


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


def _device_bytes(tree: Any) -> int:
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _needed(error: JaxRuntimeError) -> int | None:
    """The memory that a refused program asked for, if the refusal was for memory; else the error goes on."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        raise error
    found = _OUT_OF_MEMORY.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """What one decode step reads, by formula: no program is compiled.

    Attributes:
        weights: bytes of all parameters in the compute dtype.
        cache: bytes of keys and values of all rows.
        device_bytes: both, evenly over the devices.
        hbm: bytes of a device that a program can use; None for CPUs.
    """

    weights: int
    cache: int
    device_bytes: int
    hbm: int | None


def plan_decode(base: LanguageModelConfig, target: Target, *, tools: int, rows: int, length: int) -> DecodePlan:
    """Memory of decoding.

    Args:
        base: the pretrained model's config with the run's dtypes.
        target: the machine.
        tools: size of the catalogue.
        rows: texts at a time.
        length: tokens of each, prompt and continuation.
    """
    config = tools_config(base, tools)
    itemsize = jnp.dtype(config.compute_dtype).itemsize
    model = abstract_model(lambda: build_model(config))
    weights = sum(leaf.size for leaf in jax.tree.leaves(model)) * itemsize
    cache = 2 * config.num_hidden_layers * rows * length * config.kv_heads * config.head_dim * itemsize
    return DecodePlan(
        weights=weights,
        cache=cache,
        device_bytes=-(-(weights + cache) // len(target.devices)),
        hbm=target.hbm_bytes,
    )
