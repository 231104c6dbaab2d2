"""Plans for fake devices against the programs that training compiles, and sizes by closed form."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from jaxtool.config import MeshConfig, StageConfig, TrainableConfig
from jaxtool.data import Batch
from jaxtool.models import LlamaConfig, build_model, initialise, tools_config
from jaxtool.models.flops import Work, training_flops
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.parallel.ahead_of_time import CompiledProgram, Memory
from jaxtool.parallel.targets import Target, find_target
from jaxtool.training import initial_state, make_optimizer, make_train_step, on_mesh, planner
from jaxtool.training.planner import StepPlan, plan_step

BASE = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
TOOLS, SUPERVISED = 100, 4
STAGE = StageConfig(rows=16, row_length=16, accumulate=2)
MESH = MeshConfig(data=2, fsdp=2, model=2)
# Two layers: query and output 32 x 32, key and value 32 x 16, gate, up and down 32 x 64. Norms are 5 x 32. Rows are a
# multiple of 128 and, on the mesh, of 256.
BLOCKS, WIDTH = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64), 32
MATRICES = BLOCKS + 2 * 512 * WIDTH
VECTORS = 5 * WIDTH


def plan(stage: StageConfig = STAGE, mesh: MeshConfig = MESH, **options: Any) -> StepPlan:
    fixed: dict[str, Any] = {"trainable": TrainableConfig(), "tools": TOOLS, "supervised": SUPERVISED} | options
    return plan_step(BASE, stage, find_target("cpu:8"), mesh=mesh, **fixed)


@pytest.fixture(scope="module")
def planned() -> StepPlan:
    return plan()


def test_sizes_by_closed_form(planned: StepPlan) -> None:
    """Matrices are in four parts (fsdp 2 x model 2), norms whole on every device; two moments of each, two counters."""
    assert planned.weights == 4 * (MATRICES // 4 + VECTORS)
    assert planned.optimizer == 2 * planned.weights + 2 * 4
    batch = (
        4 * 4 * (3 * 16 + SUPERVISED * 3)
    )  # four rows of a device: ids, positions, segments; places, targets, weights
    assert planned.program.memory is not None
    assert planned.program.memory.arguments == planned.weights + planned.optimizer + batch + 4  # and the step
    assert planned.mesh == {"data": 2, "fsdp": 2, "model": 2}
    config = dataclasses.replace(BASE, num_tools=TOOLS, padded_vocab_size=512)
    assert planned.flops == training_flops(config, Work(tokens=256, pairs=16 * 256, positions=16 * SUPERVISED))
    assert planned.program.fits
    assert planned.program.hbm is None
    assert planned.step_seconds(0.4) is None
    assert planned.notes == ("attention: xla, on cpu (cpu)",)


def test_the_program_is_that_of_training(planned: StepPlan) -> None:
    mesh = make_mesh(MESH, jax.devices())
    with jax.set_mesh(mesh):
        config = tools_config(BASE, TOOLS)
        rules, _ = AxisRules().fit(dict(mesh.shape), config.axis_sizes)
        optimizer = make_optimizer(STAGE.optimizer, 10)
        state = initial_state(initialise(lambda: build_model(config, rules), mesh), optimizer)
        ids = np.ones((16, 16), np.int32)
        few = np.ones((16, SUPERVISED), np.int32)
        batch = on_mesh(
            Batch(
                tokens_bs=ids,
                positions_bs=ids,
                segment_ids_bs=ids,
                supervised_bp=few,
                targets_bpa=few[..., None],
                weights_bpa=few[..., None].astype(np.float32),
            ),
            mesh,
            rules,
        )
        step: Any = make_train_step(optimizer, accumulate=2)
        found = step.lower(state, batch).compile().memory_analysis()
    assert planned.program.memory == Memory(
        arguments=found.argument_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        peak=found.peak_memory_in_bytes,
    )
    assert planned.program.memory.peak >= planned.program.memory.arguments


def test_tool_rows_alone_have_moments() -> None:
    rows = plan(trainable=TrainableConfig(parameters="tool_rows"))
    # Of embedding and head a block of 128 rows each, in four parts.
    assert rows.optimizer == 2 * 4 * (2 * 128 * 32 // 4) + 2 * 4


def test_mistakes_name_the_field() -> None:
    with pytest.raises(
        ValueError, match=r"rows 16 is not a multiple of 32: mesh\.data 8 x mesh\.fsdp 1 x accumulate 4"
    ):
        plan(StageConfig(rows=16, row_length=16, accumulate=4), MeshConfig(data=8))
    with pytest.raises(ValueError, match="does not fit 8 devices"):
        plan(mesh=MeshConfig(fsdp=3))
    for supervised in (0, 17):
        with pytest.raises(ValueError, match=f"supervised is {supervised}, expected 1 to row_length 16"):
            plan(supervised=supervised)


def test_what_the_compiler_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Step:
        def lower(self, *_: Any) -> Step:
            return self

        def compile(self) -> None:
            raise JaxRuntimeError("RESOURCE_EXHAUSTED: Used 19.57G of 15.75G hbm.")

    monkeypatch.setattr(planner, "make_train_step", lambda *_, **__: Step())
    refused = plan()
    assert not refused.program.fits
    assert refused.program.needed == int(19.57 * 2**30)
    assert refused.weights > 0


def test_step_time() -> None:
    flops = training_flops(BASE, Work.of_full_rows(1, 16))
    plan = StepPlan(
        target="v5litepod-4",
        mesh={"data": 1, "fsdp": 4, "model": 1},
        weights=1,
        optimizer=2,
        program=CompiledProgram(
            hbm=1000, memory=Memory(arguments=3, temporary=4, peak=1001), needed=None, collectives=(), seconds=0.0
        ),
        flops=flops,
        devices=4,
        peak_flops=200.0,
        notes=(),
    )
    assert not plan.program.fits
    assert plan.step_seconds(0.5) == pytest.approx(flops.causal / 400)


def test_bfloat16_state_is_half_as_large() -> None:
    target: Target = find_target("cpu:8")
    half = plan_step(
        dataclasses.replace(BASE, param_dtype="bfloat16"),
        STAGE,
        target,
        mesh=MESH,
        trainable=TrainableConfig(),
        tools=TOOLS,
        supervised=SUPERVISED,
    )
    assert half.weights == jnp.dtype("bfloat16").itemsize * (MATRICES // 4 + VECTORS)
