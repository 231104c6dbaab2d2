"""Whether texts can be decoded on a machine, without the machine: the two programs compiled ahead of time for it.

The programs are those of `generation`: a part of the prompts is read, and tokens are decoded in a loop. Both are
compiled for the settings that need the most: every row draws from the filtered distribution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxtool.config import MeshConfig
from jaxtool.decoding.decode_model import decode_model
from jaxtool.decoding.generation import decode, read
from jaxtool.decoding.rows import Rows
from jaxtool.decoding.sampling import RowSampling, Sampling
from jaxtool.models import LanguageModelConfig, abstract_model, build_model, tools_config
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.parallel.ahead_of_time import CompiledProgram, compile_program, device_bytes, placed
from jaxtool.parallel.targets import Target

# Longer prompts are read in parts: what a part needs grows with its length, and a device is busy with this many tokens.
CHUNK = 512


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """Decoding on a machine.

    Attributes:
        target: name of the machine.
        mesh: sizes of the axes `data`, `fsdp`, `model`.
        rows: texts at a time.
        length: tokens of each, prompt and continuation.
        chunk: tokens of each that are read at a time.
        weights: bytes of the model on a device, as decoding has it.
        cache: bytes of keys and values on a device.
        reading: what the compiler says of reading a part of the prompts.
        decoding: what it says of the loop that decodes tokens.
        notes: a line for each axis that the mesh doesn't divide.
    """

    target: str
    mesh: dict[str, int]
    rows: int
    length: int
    chunk: int
    weights: int
    cache: int
    reading: CompiledProgram
    decoding: CompiledProgram
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether both programs can be loaded."""
        return self.reading.fits and self.decoding.fits

    def records(self) -> list[dict[str, Any]]:
        """Both programs as plain JSON values, with the names that records of training have."""
        shared = {
            "topology": self.target,
            "change": "",
            "rows": self.rows,
            "row_length": self.length,
            "mesh": self.mesh,
            "devices": math.prod(self.mesh.values()),
            "weight_bytes": self.weights,
            "cache_bytes": self.cache,
            "notes": list(self.notes),
        }
        programs = {f"reading {self.chunk} tokens": self.reading, "decoding": self.decoding}
        return [shared | {"stages": name} | program.record() for name, program in programs.items()]


def plan_decode(
    base: LanguageModelConfig, target: Target, *, mesh: MeshConfig, tools: int, rows: int, length: int
) -> DecodePlan:
    """Compiles reading and decoding for a machine.

    Args:
        base: the pretrained model's config with the run's dtypes.
        target: the machine.
        mesh: how the devices share the work.
        tools: size of the catalogue.
        rows: texts at a time.
        length: tokens of each, prompt and continuation.

    Raises:
        ValueError: a mesh that the devices or rows don't fit.
    """
    devices = make_mesh(mesh, target.devices)
    sizes = dict(devices.shape)
    if rows % (sizes["data"] * sizes["fsdp"]):
        raise ValueError(
            f"{rows} texts at a time are not a multiple of {sizes['data'] * sizes['fsdp']}: "
            f"mesh.data {sizes['data']} x mesh.fsdp {sizes['fsdp']}"
        )
    with jax.set_mesh(devices):
        config = tools_config(base, tools)
    rules, notes = AxisRules().fit(sizes, config.axis_sizes)
    stored = abstract_model(lambda: build_model(config, rules), devices)
    chunk = min(CHUNK, length)
    with jax.set_mesh(devices):
        model = placed(jax.eval_shape(decode_model, stored), devices)
        state = jax.eval_shape(lambda model: Rows.empty(model, rows=rows, slots=length, most=length), model)
    state = placed(state, devices)

    # What the host hands in lies nowhere yet.
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    sampling = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), RowSampling.of([Sampling()] * rows, range(rows))
    )
    prompts, settings = (array(rows, chunk), array(rows)), (sampling, array(rows), array(1))
    return DecodePlan(
        target=target.name,
        mesh=sizes,
        rows=rows,
        length=length,
        chunk=chunk,
        weights=device_bytes(model),
        cache=device_bytes(state.cache),
        reading=compile_program(
            lambda: read.lower(model, state, *prompts, *settings, draws=True), devices, target.hbm_bytes
        ),
        decoding=compile_program(
            lambda: decode.lower(model, state, *settings, array(), draws=True), devices, target.hbm_bytes
        ),
        notes=notes,
    )
