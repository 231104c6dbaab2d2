"""Compiling a program for a machine that isn't there, and what the compiler says of it: memory, and transfers.

Arguments are shapes with shardings; nothing is allocated or run. Which programs are compiled is for the planners of
training and decoding to say.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.stages import Lowered

from jaxtool.parallel.collectives import Collectives, count_collectives

Tree = TypeVar("Tree")

# Two passes of the TPU compiler say it, each in its own words.
_OUT_OF_MEMORY = re.compile(r"(?:Used |required for HLO temporaries \()([\d.]+)([KMGT])(?: of|\) exceeds)")
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on each device, of the fullest one where they differ.

    Attributes:
        arguments: what the program is given, as the compiler lays it out.
        temporary: what it makes on the way. Together with the arguments more than the peak, where not all of it is
            alive at once.
        peak: the most at any time.
    """

    arguments: int
    temporary: int
    peak: int


@dataclass(frozen=True, kw_only=True)
class CompiledProgram:
    """What is known of a program that was compiled, or that the compiler refused for want of memory.

    Attributes:
        hbm: bytes of a device that a program can use; None for CPUs.
        memory: the compiler's figures; None if it refused.
        needed: bytes that a device would need, where the compiler refused and said so.
        collectives: transfers between devices.
        seconds: what compiling took.
    """

    hbm: int | None
    memory: Memory | None
    needed: int | None
    collectives: tuple[Collectives, ...]
    seconds: float

    @property
    def fits(self) -> bool:
        """Whether the program can be loaded."""
        return self.memory is not None and (self.hbm is None or self.memory.peak <= self.hbm)

    def record(self) -> dict[str, Any]:
        """All of it as plain JSON values."""
        return {
            "fits": self.fits,
            "hbm_bytes": self.hbm,
            "needed_bytes": self.needed,
            "argument_bytes": self.memory and self.memory.arguments,
            "temporary_bytes": self.memory and self.memory.temporary,
            "peak_bytes": self.memory and self.memory.peak,
            "collectives": [dataclasses.asdict(each) for each in self.collectives],
            "compile_seconds": round(self.seconds, 1),
        }


def compile_program(lower: Callable[[], Lowered], mesh: Mesh, hbm: int | None) -> CompiledProgram:
    """Compiles a jitted function for the devices of a mesh.

    Args:
        lower: lowers the function for its arguments (`placed`); called with the mesh active.
        mesh: the devices.
        hbm: bytes of a device that a program can use; None for CPUs.

    Raises:
        JaxRuntimeError: the compiler failed, and not for want of memory.
    """
    began = time.monotonic()
    memory: Memory | None = None
    needed: int | None = None
    collectives: tuple[Collectives, ...] = ()
    with jax.set_mesh(mesh):
        lowered = lower()
    try:
        compiled: Any = lowered.compile()
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
    return CompiledProgram(
        hbm=hbm, memory=memory, needed=needed, collectives=collectives, seconds=time.monotonic() - began
    )


def placed(tree: Tree, mesh: Mesh) -> Tree:
    """Shapes of arrays on the devices of a mesh; those that no sharding is known of live everywhere."""

    def on_devices(leaf: Any) -> jax.ShapeDtypeStruct:
        known = getattr(leaf, "sharding", None)
        spec = PartitionSpec() if known is None else known.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(on_devices, tree)


def device_bytes(tree: Any) -> int:
    """Bytes of a tree of placed shapes on one device."""
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _needed(error: JaxRuntimeError) -> int | None:
    """The memory that a refused program asked for, if the refusal was for memory; else the error goes on."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" not in text:
        raise error
    found = _OUT_OF_MEMORY.search(text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None
