"""Variations of a run: what they change, that they are runs, and what is said of a plan that doesn't fit."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from rich.console import Console

from jaxtool.config import MeshConfig, ModelConfig, RunConfig, StageConfig
from jaxtool.models.flops import Flops
from jaxtool.parallel.ahead_of_time import CompiledProgram, Memory
from jaxtool.parallel.collectives import Collectives
from jaxtool.training.plan_report import advice, memory_table, record_of, transfer_table
from jaxtool.training.plan_variations import Variation, together, variations
from jaxtool.training.planner import StepPlan

RUN = RunConfig(mesh=MeshConfig(data=2, fsdp=4), memorization=StageConfig(rows=64, row_length=128))
SIZES = {"data": 2, "fsdp": 4, "model": 1}
GIB = 2**30


def found(config: RunConfig = RUN, sizes: dict[str, int] = SIZES, kv_heads: int = 8) -> dict[str, Variation]:
    return {way.options: way for way in variations(config, "memorization", sizes, kv_heads=kv_heads)}


def test_each_field_that_saves_memory() -> None:
    # 64 rows over 8 devices are 8 each.
    assert list(found()) == [
        "--mesh.data 1 --mesh.fsdp 8",
        "--model.compute_dtype bfloat16",
        "--model.remat full",
        "--memorization.accumulate 8",
        "--memorization.accumulate 2",
        "--memorization.loss_chunk 128",
        "--mesh.data 2 --mesh.fsdp 2 --mesh.model 2",
        "--memorization.rows 32",
        "--memorization.optimizer.kind adafactor",
        "--model.param_dtype bfloat16",
        "--trainable.parameters lora",
    ]


def test_variations_are_runs() -> None:
    for options, way in found().items():
        changed = dataclasses.asdict(way.of(RUN))
        before = dataclasses.asdict(RUN)
        assert changed != before, options
        for name, value in way.changes.items():
            node, kept = changed, before
            *outer, last = name.split(".")
            for part in outer:
                node, kept = node[part], kept[part]
            assert node[last] == value
            node[last] = kept[last]
        assert changed == before, options


def test_what_is_small_already_stays() -> None:
    small = RunConfig(
        model=ModelConfig(compute_dtype="bfloat16", remat="full"),
        memorization=StageConfig(rows=64, row_length=128, accumulate=8, loss_chunk=128),
    )
    rest = found(small, {"data": 1, "fsdp": 8, "model": 1}, kv_heads=3)
    assert list(rest) == [
        "--memorization.optimizer.kind adafactor",
        "--model.param_dtype bfloat16",
        "--trainable.parameters lora",
    ]
    assert not any(way.same for way in rest.values())
    assert together(tuple(rest.values())) is None


def test_all_together_trains_the_same() -> None:
    way = together(tuple(found().values()))
    assert way is not None
    assert way.options == (
        "--mesh.data 1 --mesh.fsdp 8 --model.compute_dtype bfloat16 --model.remat full --memorization.accumulate 8 "
        "--memorization.loss_chunk 128"
    )
    assert way.of(RUN).memorization.accumulate == 8


REFUSED = CompiledProgram(hbm=16 * GIB, memory=None, needed=20 * GIB, collectives=(), seconds=61.2)
COMPILED = dataclasses.replace(
    REFUSED, memory=Memory(arguments=12 * GIB, temporary=2 * GIB, peak=13 * GIB), needed=None
)


def plan(**fields: Any) -> StepPlan:
    given: dict[str, Any] = {
        "target": "v5litepod-8",
        "mesh": SIZES,
        "weights": 4 * GIB,
        "optimizer": 8 * GIB,
        "program": REFUSED,
        "flops": Flops(projections=6 * 10**12, attention=2 * 10**12, head=10**12),
        "devices": 8,
        "peak_flops": 1e12,
        "notes": ("attention: splash",),
    }
    return StepPlan(**given | fields)


def test_advice_is_by_what_takes_the_memory() -> None:
    ways = tuple(found().values())
    assert advice(plan(program=COMPILED), ways) == []
    assert [line.split(" (")[0] for line in advice(plan(), ways)] == [f"try {options}" for options in found()]
    # 32 GiB of state on each of 8 devices are 256: 19 devices with 13.6 GiB each (85 % of 16).
    lines = advice(plan(weights=12 * GIB, optimizer=20 * GIB), ways)
    assert lines[0].startswith("weights and moments alone take 32.00 of 16.00 GiB of a device")
    assert lines[0].endswith("on 19 devices or more")
    assert [line.split(" (")[0] for line in lines[1:]] == [
        "try --mesh.data 1 --mesh.fsdp 8",
        "try --memorization.optimizer.kind adafactor",
        "try --model.param_dtype bfloat16",
        "try --trainable.parameters lora",
    ]


def test_records_are_json_and_tables_show_them() -> None:
    gathered = Collectives(kind="all-gather", count=2, bytes=3 * 2**20, loop_count=7, loop_bytes=2**20)
    fits = plan(program=dataclasses.replace(COMPILED, collectives=(gathered,)))
    way = found()["--model.remat full"]
    records = [
        record_of(each, stages="memorization", settings={"rows": 64}, variation=change, utilisation=0.5)
        for each, change in ((fits, None), (plan(), way))
    ]
    assert json.loads(json.dumps(records)) == records
    assert records[0]["fits"]
    assert (records[0]["peak_bytes"], records[0]["change"], records[0]["rows"]) == (13 * GIB, "", 64)
    # 6 + 2 / 2 + 1 TFLOP on 8 devices at half of 1 TFLOP/s.
    assert records[0]["step_seconds"] == pytest.approx(2.0)
    assert not records[1]["fits"]
    assert records[1]["change"] == "--model.remat full"
    console = Console(width=250)
    with console.capture() as captured:
        console.print(memory_table(records, 0.5), transfer_table(records))
    text = captured.get()
    for shown in ("13.00", "> 20.00", "NO", "2.00 s", "--model.remat full", "all-gather", "61 s", "2 x 4 x 1"):
        assert shown in text
