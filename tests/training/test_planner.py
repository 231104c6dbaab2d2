"""Plans for fake devices against the programs that training compiles, and sizes by closed form."""

from __future__ import annotations

import dataclasses
import importlib.util
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
from jaxtool.training import initial_state, make_optimizer, make_train_step, on_mesh, planner
from jaxtool.training.planner import DecodePlan, StepPlan, Target, find_target, plan_decode, plan_step

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
    assert planned.memory is not None
    assert planned.memory.arguments == planned.weights + planned.optimizer + batch + 4  # and the step
    assert planned.mesh == {"data": 2, "fsdp": 2, "model": 2}
    config = dataclasses.replace(BASE, num_tools=TOOLS, padded_vocab_size=512)
    assert planned.flops == training_flops(config, Work(tokens=256, pairs=16 * 256, positions=16 * SUPERVISED))
    assert planned.fits
    assert planned.hbm is None
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
    assert planned.memory == planner.Memory(
        arguments=found.argument_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        peak=found.peak_memory_in_bytes,
    )
    assert planned.memory.peak >= planned.memory.arguments


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
    """The text is that of the TPU compiler."""
    message = REFUSAL

    class Step:
        def lower(self, *_: Any) -> Step:
            return self

        def compile(self) -> None:
            raise JaxRuntimeError(message)

    monkeypatch.setattr(planner, "make_train_step", lambda *_, **__: Step())
    refused = plan()
    assert not refused.fits
    assert refused.memory is None
    assert refused.needed == int(19.57 * 2**30)
    message = "RESOURCE_EXHAUSTED: no figures"
    assert plan().needed is None
    message = "INTERNAL: something else"
    with pytest.raises(JaxRuntimeError, match="something else"):
        plan()


REFUSAL = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 19.57G of 15.75G hbm. Exceeded hbm capacity by "
    "3.82G.\n\nTotal hbm usage >= 19.82G:"
)


def test_step_time() -> None:
    flops = training_flops(BASE, Work.of_full_rows(1, 16))
    plan = StepPlan(
        target="v5litepod-4",
        mesh={"data": 1, "fsdp": 4, "model": 1},
        hbm=1000,
        weights=1,
        optimizer=2,
        memory=planner.Memory(arguments=3, temporary=4, peak=1001),
        needed=None,
        collectives=(),
        flops=flops,
        devices=4,
        peak_flops=200.0,
        seconds=0.0,
        notes=(),
    )
    assert not plan.fits
    assert plan.step_seconds(0.5) == pytest.approx(flops.causal / 400)


def test_decoding_by_formula() -> None:
    """Keys and values: 2 x 2 layers x 3 texts x 10 tokens x 2 heads x 8, of 4 bytes."""
    found = plan_decode(BASE, find_target("cpu:8"), tools=TOOLS, rows=3, length=10)
    weights, cache = 4 * (BLOCKS + 2 * 384 * WIDTH + VECTORS), 4 * 2 * 2 * 3 * 10 * 2 * 8
    assert found == DecodePlan(weights=weights, cache=cache, device_bytes=-(-(weights + cache) // 8), hbm=None)


def test_names_of_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(find_target("cpu:2").devices) == 2
    with pytest.raises(ValueError, match="cpu:64 is more than the 8 fake devices"):
        find_target("cpu:64")
    for name in ("v5e-60", "v5e:9x9", "h100", "cpu:0", "v5litepod-60"):
        with pytest.raises(ValueError, match=f"unknown accelerator type '{name}'; near ones: ") as raised:
            find_target(name)
        if "60" in name:
            assert "v5litepod-64" in str(raised.value)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name in ("v5e:8x8", "v5e-64", "v5litepod-64", "v4-32"):
        with pytest.raises(ValueError, match=rf"pip install 'jax\[tpu\]=={jax.__version__}'"):
            find_target(name)


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
