"""What to change in a run that doesn't fit its machine: a few fields at a time, the cheapest in speed first.

Whether a changed run fits is for `planner` to find out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtool.config import RunConfig, StageConfig

# Where weights and moments alone take this share of a device, saving activations doesn't help.
STATE_SHARE = 0.85
_LARGEST_MODEL_AXIS = 8


@dataclass(frozen=True, kw_only=True)
class Variation:
    """A way to need less memory.

    Attributes:
        changes: new values by the field's name, as the command line has it.
        why: what it saves and what it costs.
        saves: "activations", or "state" (weights, gradients and moments).
        same: the trained model is the same, up to rounding; it only costs time.
    """

    changes: Mapping[str, Any]
    why: str
    saves: str
    same: bool = True

    @property
    def options(self) -> str:
        """The changes as options of the command line."""
        return " ".join(f"--{name} {value}" for name, value in self.changes.items())

    def of(self, config: RunConfig) -> RunConfig:
        """The run with the changes.

        Raises:
            ValueError: the fields contradict each other.
        """
        for name, value in self.changes.items():
            config = _replaced(config, name.split("."), value)
        return config


def _replaced(config: Any, names: list[str], value: Any) -> Any:
    first, *rest = names
    return dataclasses.replace(config, **{first: _replaced(getattr(config, first), rest, value) if rest else value})


def together(found: tuple[Variation, ...]) -> Variation | None:
    """All variations that only cost time at once, the first of those that exclude one another; None if it's one."""
    changes: dict[str, Any] = {}
    count = 0
    for variation in found:
        if variation.same and not variation.changes.keys() & changes.keys():
            changes |= variation.changes
            count += 1
    if count < 2:
        return None
    return Variation(changes=changes, why="all that only cost time", saves="activations")


def variations(config: RunConfig, name: str, mesh: Mapping[str, int], *, kv_heads: int) -> tuple[Variation, ...]:
    """Changes that need less memory on the same devices, those that only cost time first.

    Args:
        config: the run.
        name: the stage that doesn't fit, e.g. "memorization".
        mesh: sizes of the axes `data`, `fsdp`, `model`.
        kv_heads: key-value heads, which the `model` axis must divide.
    """
    stage: StageConfig = getattr(config, name)
    return (
        *_of_model_and_mesh(config, mesh),
        *_of_stage(name, stage, mesh["data"] * mesh["fsdp"]),
        *_of_model_axis(mesh, kv_heads),
        *_of_training(config, name, stage, mesh["data"] * mesh["fsdp"]),
    )


def _of_model_and_mesh(config: RunConfig, mesh: Mapping[str, int]) -> Iterator[Variation]:
    if mesh["data"] > 1:
        parts = mesh["data"] * mesh["fsdp"]
        yield Variation(
            changes={"mesh.data": 1, "mesh.fsdp": parts},
            why=f"weights, gradients and moments in {parts} parts, not {mesh['fsdp']}; gathered layer by layer",
            saves="state",
        )
    if config.model.compute_dtype == "float32":
        yield Variation(
            changes={"model.compute_dtype": "bfloat16"},
            why="half the bytes of activations, and the fast matrix units",
            saves="activations",
        )
    if config.model.attention == "xla":
        yield Variation(changes={"model.attention": "auto"}, why="no scores in memory", saves="activations")
    if config.model.remat != "full":
        yield Variation(
            changes={"model.remat": "full"},
            why="keeps the inputs of the layers alone; up to a third more computation",
            saves="activations",
        )


def _of_stage(name: str, stage: StageConfig, shares: int) -> Iterator[Variation]:
    each = stage.rows // stage.accumulate // shares  # rows of a device at a time
    least = next((factor for factor in range(2, each + 1) if each % factor == 0), 1)
    for factor in sorted({each, least} - {0, 1}, reverse=True):
        yield Variation(
            changes={f"{name}.accumulate": stage.accumulate * factor},
            why=f"{each // factor} rows of a device at a time, not {each}; the same result",
            saves="activations",
        )
    if stage.loss_chunk == 0 or stage.loss_chunk > 128:
        yield Variation(changes={f"{name}.loss_chunk": 128}, why="fewer logits at a time", saves="activations")


def _of_model_axis(mesh: Mapping[str, int], kv_heads: int) -> Iterator[Variation]:
    parts = mesh["model"] * 2
    if mesh["fsdp"] % 2 == 0 and kv_heads % parts == 0 and parts <= _LARGEST_MODEL_AXIS:
        yield Variation(
            changes={"mesh.data": mesh["data"], "mesh.fsdp": mesh["fsdp"] // 2, "mesh.model": parts},
            why="heads, MLP width and vocabulary in parts; more transfers in every layer",
            saves="activations",
        )


def _of_training(config: RunConfig, name: str, stage: StageConfig, shares: int) -> Iterator[Variation]:
    if stage.rows % (2 * shares * stage.accumulate) == 0:
        yield Variation(
            changes={f"{name}.rows": stage.rows // 2}, why="half the batch", saves="activations", same=False
        )
    if stage.optimizer.kind == "adamw":
        yield Variation(
            changes={f"{name}.optimizer.kind": "adafactor"},
            why="another optimiser, next to no moments: 8 bytes less for a parameter",
            saves="state",
            same=False,
        )
    if config.model.param_dtype == "float32":
        yield Variation(
            changes={"model.param_dtype": "bfloat16"},
            why="half the bytes of weights and moments; small updates are rounded away",
            saves="state",
            same=False,
        )
    if config.trainable.parameters == "full":
        yield Variation(
            changes={"trainable.parameters": "lora"},
            why="tool rows and low-rank updates alone have gradients and moments",
            saves="state",
            same=False,
        )
