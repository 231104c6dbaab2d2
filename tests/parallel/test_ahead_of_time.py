"""Programs compiled for fake devices, sizes by closed form, and what is made of a compiler's refusal."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.errors import JaxRuntimeError
from jax.sharding import NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.parallel import make_mesh
from jaxtool.parallel.ahead_of_time import CompiledProgram, Memory, compile_program, device_bytes, placed

# The texts of the TPU compiler.
REFUSAL = (
    "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 19.57G of 15.75G hbm. Exceeded hbm capacity by "
    "3.82G.\n\nTotal hbm usage >= 19.82G:"
)
EARLY_REFUSAL = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries (31.50G) exceeds "
    "available HBM (15.75G)."
)


def test_sizes_and_transfers_of_a_program() -> None:
    """A matrix [64, 6] in four parts and a vector [6] that is whole everywhere; the result is whole as well."""
    mesh = make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])
    given = {
        "matrix": jax.ShapeDtypeStruct((64, 6), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp"))),
        "vector": jax.ShapeDtypeStruct((6,), jnp.bfloat16),
    }
    shapes = placed(given, mesh)
    assert shapes["matrix"].sharding == given["matrix"].sharding
    assert shapes["vector"].sharding == NamedSharding(mesh, PartitionSpec())
    assert device_bytes(shapes) == 64 * 6 * 4 // 4 + 6 * 2

    @jax.jit
    def program(tree: dict[str, jax.Array]) -> jax.Array:
        return jax.sharding.reshard(tree["matrix"], PartitionSpec()) * tree["vector"].astype(jnp.float32)

    found = compile_program(lambda: program.lower(shapes), mesh, None)
    assert found.memory is not None
    assert found.memory.arguments == device_bytes(shapes)
    assert found.memory.peak >= found.memory.arguments
    assert [(each.kind, each.count, each.bytes) for each in found.collectives] == [("all-gather", 1, 64 * 6 * 4)]
    assert found.fits
    assert found.record()["collectives"][0]["kind"] == "all-gather"


def test_what_the_compiler_refuses() -> None:
    class Lowered:
        def __init__(self, message: str) -> None:
            self.message = message

        def compile(self) -> None:
            raise JaxRuntimeError(self.message)

    def program(message: str) -> CompiledProgram:
        lowered: Any = Lowered(message)
        return compile_program(lambda: lowered, make_mesh(MeshConfig(), jax.devices()[:1]), 1000)

    refused = program(REFUSAL)
    assert not refused.fits
    assert refused.memory is None
    assert refused.needed == int(19.57 * 2**30)
    assert refused.record()["peak_bytes"] is None
    assert program(EARLY_REFUSAL).needed == int(31.5 * 2**30)
    assert program("RESOURCE_EXHAUSTED: no figures").needed is None
    with pytest.raises(JaxRuntimeError, match="something else"):
        program("INTERNAL: something else")


def test_what_compiles_may_be_too_large() -> None:
    fields: dict[str, Any] = {"needed": None, "collectives": (), "seconds": 0.0}
    memory = Memory(arguments=3, temporary=4, peak=1001)
    assert not CompiledProgram(hbm=1000, memory=memory, **fields).fits
    assert CompiledProgram(hbm=1001, memory=memory, **fields).fits
    assert CompiledProgram(hbm=None, memory=memory, **fields).fits
