"""From logical array axes to mesh axes: the one table that decides how a run is sharded.

Models name the axes of their parameters and activations; nothing but this table knows the mesh axes they map to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec

MeshAxes = str | tuple[str, ...] | None


@dataclass(frozen=True, kw_only=True)
class AxisRules:
    """Mesh axis (or axes, or None for replicated) of every logical axis.

    Attributes:
        batch: rows of a batch.
        sequence: token positions.
        vocabulary: rows of embedding and head.
        embed: model width of parameters (FSDP cuts this axis and gathers it before use).
        heads: query heads.
        kv_heads: key-value heads; must follow `heads`, queries and keys meet in one contraction.
        head_size: width of one head.
        mlp: inner MLP width.
        activation: model width of activations.
        rank: rank of low-rank updates.
        layer: the stacked layers.
    """

    batch: MeshAxes = ("data", "fsdp")
    sequence: MeshAxes = None
    vocabulary: MeshAxes = "model"
    embed: MeshAxes = "fsdp"
    heads: MeshAxes = "model"
    kv_heads: MeshAxes = "model"
    head_size: MeshAxes = None
    mlp: MeshAxes = "model"
    activation: MeshAxes = None
    rank: MeshAxes = None
    layer: MeshAxes = None

    def spec(self, *names: str | None) -> PartitionSpec:
        """The partition spec of an array whose axes have these logical names (None: replicated).

        Raises:
            ValueError: unknown name, or two axes of the array on one mesh axis.
        """
        entries: list[MeshAxes] = []
        used: dict[str, str] = {}
        for name in names:
            if name is None:
                entries.append(None)
                continue
            if name not in self.names():
                raise ValueError(f"unknown logical axis {name!r}, expected one of {', '.join(self.names())}")
            entry: MeshAxes = getattr(self, name)
            for mesh_axis in (entry,) if isinstance(entry, str) else entry or ():
                if mesh_axis in used:
                    raise ValueError(
                        f"logical axes {used[mesh_axis]!r} and {name!r} both map to mesh axis {mesh_axis!r}"
                    )
                used[mesh_axis] = name
            entries.append(entry)
        return PartitionSpec(*entries)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """All logical axis names."""
        return tuple(field.name for field in dataclasses.fields(cls))

    def fit(self, mesh_sizes: Mapping[str, int], array_sizes: Mapping[str, int]) -> tuple[AxisRules, tuple[str, ...]]:
        """Rules with every axis replicated that its mesh axes don't divide, and one line for each such axis.

        `array_sizes` maps logical names to their lengths. Query and key-value heads are kept or dropped together.
        """
        dropped: dict[str, str] = {}
        for name, size in array_sizes.items():
            entry: MeshAxes = getattr(self, name)
            parts = 1
            for mesh_axis in (entry,) if isinstance(entry, str) else entry or ():
                parts *= mesh_sizes.get(mesh_axis, 1)
            if size % parts:
                dropped[name] = (
                    f"{name} ({size}) is not divisible by {parts} devices of mesh axis {entry!r}: replicated"
                )
        if dropped.keys() & {"heads", "kv_heads"}:
            reason = dropped.get("kv_heads") or dropped["heads"]
            dropped |= {
                name: dropped.get(name, f"{name} replicated with the other heads: {reason}")
                for name in ("heads", "kv_heads")
            }
        return dataclasses.replace(self, **dict.fromkeys(dropped)), tuple(dropped.values())
