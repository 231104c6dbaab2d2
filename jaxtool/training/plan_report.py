"""Plans as records and tables, and what to say about one that doesn't fit.

Records are plain JSON values, one for each program that was compiled; tables are made from records.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from jaxtool.training.plan_variations import STATE_SHARE, Variation
from jaxtool.training.planner import StepPlan

Record = dict[str, Any]


def record_of(
    plan: StepPlan, *, stages: str, settings: Mapping[str, Any], variation: Variation | None, utilisation: float
) -> Record:
    """A plan as plain values.

    Args:
        plan: the plan.
        stages: names of the stages that have this program.
        settings: whatever else identifies the program, e.g. rows and their length.
        variation: what was changed in the run, if anything.
        utilisation: share of the peak that the step's time is stated for.
    """
    return {
        "topology": plan.target,
        "stages": stages,
        "change": variation.options if variation else "",
        "why": variation.why if variation else "",
        **settings,
        "mesh": plan.mesh,
        "devices": plan.devices,
        "weight_bytes": plan.weights,
        "optimizer_bytes": plan.optimizer,
        **plan.program.record(),
        "flops": dataclasses.asdict(plan.flops) | plan.flops.by_definition(),
        "utilisation": utilisation,
        "step_seconds": plan.step_seconds(utilisation),
        "notes": list(plan.notes),
    }


def memory_table(records: Sequence[Record], utilisation: float) -> Table:
    """One line for each program, of training or of decoding: memory, whether it fits, work and time."""
    table = Table(
        title="Memory of a device in GiB, as the compiler counts it",
        caption=f"step: at {utilisation:.0%} of the peak, attention halved for causality, padding counted as text",
    )
    for column in ("machine", "program", "mesh d x f x m", "change"):
        table.add_column(column)
    for column in (
        "weights",
        "moments",
        "cache",
        "arguments",
        "temporary",
        "peak",
        "of",
        "fits",
        "TFLOP",
        "step",
        "compiled",
    ):
        table.add_column(column, justify="right")
    for each in records:
        peak = _gib(each["peak_bytes"])
        if each["peak_bytes"] is None:
            peak = f"> {_gib(each['needed_bytes'] or each['hbm_bytes'])}"
        seconds, flops = each.get("step_seconds"), each.get("flops")
        table.add_row(
            each["topology"],
            each["stages"],
            " x ".join(str(size) for size in each["mesh"].values()),
            each["change"],
            _gib(each["weight_bytes"]),
            _gib(each.get("optimizer_bytes")),
            _gib(each.get("cache_bytes")),
            _gib(each["argument_bytes"]),
            _gib(each["temporary_bytes"]),
            peak,
            _gib(each["hbm_bytes"]),
            "yes" if each["fits"] else "NO",
            "" if flops is None else f"{flops['causal'] / 1e12:,.1f}",
            "" if seconds is None else f"{seconds:.2f} s",
            f"{each['compile_seconds']:.0f} s",
        )
    return table


def transfer_table(records: Sequence[Record]) -> Table:
    """One line for each program and kind of transfer."""
    table = Table(
        title="Transfers between devices, MiB of their results",
        caption="in loops: each run of the body of a loop over layers, micro-batches, chunks of the loss or tokens",
    )
    for column in ("machine", "program", "change", "kind"):
        table.add_column(column)
    for column in ("once", "MiB", "in loops", "MiB"):
        table.add_column(column, justify="right")
    for each in records:
        for transfer in each["collectives"]:
            table.add_row(
                each["topology"],
                each["stages"],
                each["change"],
                transfer["kind"],
                str(transfer["count"]),
                f"{transfer['bytes'] / 2**20:,.1f}",
                str(transfer["loop_count"]),
                f"{transfer['loop_bytes'] / 2**20:,.1f}",
            )
    return table


def advice(plan: StepPlan, ways: Sequence[Variation]) -> list[str]:
    """What could make a program fit that doesn't, line by line; nothing for one that fits."""
    hbm = plan.program.hbm
    if plan.program.fits or hbm is None:
        return []
    state, lines = plan.weights + plan.optimizer, []
    if state > STATE_SHARE * hbm:
        devices = math.ceil(state * plan.devices / (STATE_SHARE * hbm))
        lines.append(
            f"weights and moments alone take {_gib(state)} of {_gib(hbm)} GiB of a device: what saves activations "
            f"doesn't help. In equal parts they leave room on {devices:,} devices or more"
        )
        ways = [way for way in ways if way.saves == "state"]
    return [*lines, *(f"try {way.options} ({way.why})" for way in ways)]


def _gib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**30:,.2f}"
