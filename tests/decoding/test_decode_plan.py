"""Plans of decoding for fake devices: sizes by closed form, and against the programs that generation compiles."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from jaxtool.config import MeshConfig
from jaxtool.decoding import Rows, RowSampling, Sampling, decode_model, decode_plan, read
from jaxtool.decoding.decode_plan import DecodePlan, plan_decode
from jaxtool.models import LlamaConfig, build_model, initialise, tools_config
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.parallel.ahead_of_time import Memory
from jaxtool.parallel.targets import find_target

BASE = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    compute_dtype="bfloat16",
)
TOOLS, ROWS, LENGTH = 100, 8, 24
MESH = MeshConfig(data=2, fsdp=2, model=2)
# Two layers: query and output 32 x 32, key and value 32 x 16, gate, up and down 32 x 64. Norms are 5 x 32. Rows of the
# vocabulary are 356, padded to a multiple of 128 x the model axis: 512 on both meshes here.
BLOCKS = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)
# Keys and values of two layers, of 2 heads x 8.
CACHE = 2 * 2 * ROWS * LENGTH * 2 * 8


def plan(mesh: MeshConfig = MESH, **options: Any) -> DecodePlan:
    fixed: dict[str, Any] = {"tools": TOOLS, "rows": ROWS, "length": LENGTH} | options
    return plan_decode(BASE, find_target("cpu:8"), mesh=mesh, **fixed)


@pytest.fixture(scope="module")
def planned() -> DecodePlan:
    return plan()


def test_sizes_by_closed_form(planned: DecodePlan) -> None:
    """bfloat16 layers and head in two parts (fsdp doesn't cut them), the embedding in four, float32 norms whole."""
    assert planned.weights == 2 * (BLOCKS // 2 + 512 * 32 // 2 + 512 * 32 // 4) + 4 * 5 * 32
    assert planned.cache == 2 * CACHE // 8 + 4 * ROWS // 4  # and how many tokens a row has
    for program in (planned.reading, planned.decoding):
        assert program.memory is not None
        # And tokens with their probabilities, two numbers of a row, and what the host hands in.
        assert program.memory.arguments > planned.weights + planned.cache + ROWS // 4 * LENGTH * 8
        assert program.memory.peak >= program.memory.arguments
    assert planned.fits
    assert planned.mesh == {"data": 2, "fsdp": 2, "model": 2}
    assert (planned.chunk, planned.notes) == (LENGTH, ())
    assert any(each.loop_count for each in planned.decoding.collectives)
    assert not any(each.loop_count for each in planned.reading.collectives)


def test_the_program_is_that_of_generation(planned: DecodePlan) -> None:
    mesh = make_mesh(MESH, jax.devices())
    with jax.set_mesh(mesh):
        config = tools_config(BASE, TOOLS)
        rules, _ = AxisRules().fit(dict(mesh.shape), config.axis_sizes)
        model = decode_model(initialise(lambda: build_model(config, rules), mesh))
        state = Rows.empty(model, rows=ROWS, slots=LENGTH, most=LENGTH)
        sampling = RowSampling.of([Sampling(temperature=1.0)] * ROWS, range(ROWS))
        few = np.ones(ROWS, np.int32)
        tokens, stop_ids = np.ones((ROWS, LENGTH), np.int32), np.ones(1, np.int32)
        lowered = read.lower(model, state, tokens, few, sampling, few, stop_ids, draws=True)
        found = lowered.compile().memory_analysis()
    assert planned.reading.memory == Memory(
        arguments=found.argument_size_in_bytes,
        temporary=found.temp_size_in_bytes,
        peak=found.peak_memory_in_bytes,
    )


def test_records_are_json(planned: DecodePlan) -> None:
    records = planned.records()
    assert json.loads(json.dumps(records)) == records
    assert [each["stages"] for each in records] == ["reading 24 tokens", "decoding"]
    for each, program in zip(records, (planned.reading, planned.decoding), strict=True):
        assert (each["rows"], each["row_length"], each["fits"]) == (ROWS, LENGTH, True)
        assert (each["weight_bytes"], each["cache_bytes"]) == (planned.weights, planned.cache)
        assert program.memory is not None
        assert each["peak_bytes"] == program.memory.peak


def test_heads_that_the_mesh_does_not_divide() -> None:
    """Two key-value heads over four devices: whole on each, with the queries; the MLP is in four parts."""
    found = plan(MeshConfig(data=2, fsdp=1, model=4))
    heads, mlp = 2 * (2 * 32 * 32 + 2 * 32 * 16), 2 * 3 * 32 * 64
    assert found.weights == 2 * (heads + mlp // 4 + 2 * 512 * 32 // 4) + 4 * 5 * 32
    assert found.cache == 2 * CACHE // 2 + 4 * ROWS // 2
    assert len(found.notes) == 2
    assert "kv_heads (2) is not divisible by 4 devices" in " ".join(found.notes)


def test_mistakes_name_the_field() -> None:
    with pytest.raises(ValueError, match=r"6 texts at a time are not a multiple of 4: mesh\.data 2 x mesh\.fsdp 2"):
        plan(rows=6)
    with pytest.raises(ValueError, match="does not fit 8 devices"):
        plan(MeshConfig(fsdp=3))


def test_what_the_compiler_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    class Loop:
        def lower(self, *_: Any, **__: Any) -> Loop:
            return self

        def compile(self) -> None:
            raise JaxRuntimeError("RESOURCE_EXHAUSTED: Used 19.57G of 15.75G hbm.")

    monkeypatch.setattr(decode_plan, "decode", Loop())
    refused = plan()
    assert (refused.reading.fits, refused.decoding.fits, refused.fits) == (True, False, False)
    assert refused.decoding.needed == int(19.57 * 2**30)
    assert [each["fits"] for each in refused.records()] == [True, False]


def test_a_machine_that_is_too_small(planned: DecodePlan) -> None:
    assert planned.reading.memory is not None
    small = dataclasses.replace(planned.reading, hbm=planned.reading.memory.peak - 1)
    assert not dataclasses.replace(planned, reading=small).fits
