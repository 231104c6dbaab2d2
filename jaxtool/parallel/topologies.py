"""The TPU slices one can ask for: chips, hosts, memory and the names that the parts of the ecosystem use for them.

Data and its lookup, standard library only: `tpu_setup/topology.py` reads this file on machines without jax. Meshes are
made in `mesh`. HBM is what the TPU compiler of libtpu 0.0.42 hands out, less than what the data sheets say.
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Topology:
    """One slice.

    Attributes:
        accelerator_type: what gcloud calls it. The number counts TensorCores for v4, v5p and tpu7x (two a chip), chips
            for v5litepod and v6e.
        generation: v4, v5e, v5p, v6e or tpu7x.
        shape: chips along the axes of the interconnect, as GKE's `gke-tpu-topology` has it.
        chips: all chips.
        hosts: virtual machines, each running one process.
        devices_per_chip: devices that JAX shows for a chip.
        hbm_gib: GiB of memory per device that a program can use.
        peak_tflops: bf16 TFLOP/s per device.
        runtime_version: image of the TPU VM; None where only GKE offers the slice.
        gke_accelerator: GKE's `gke-tpu-accelerator`.
        aot_name: `topology_name` of `jax.experimental.topologies.get_topology_desc`.
        aot_options: further arguments of that call which make it agree with `devices` and `hosts`.
    """

    accelerator_type: str
    generation: str
    shape: str
    chips: int
    hosts: int
    devices_per_chip: int
    hbm_gib: float
    peak_tflops: float
    runtime_version: str | None
    gke_accelerator: str
    aot_name: str
    aot_options: tuple[tuple[str, str | tuple[int, ...]], ...] = ()

    @property
    def devices(self) -> int:
        """What `len(jax.devices())` is."""
        return self.chips * self.devices_per_chip

    @property
    def chips_per_host(self) -> int:
        """Chips that one virtual machine has."""
        return self.chips // self.hosts


@dataclass(frozen=True, kw_only=True)
class _Generation:
    prefix: str
    number_per_chip: int  # what the number in the name counts
    devices_per_chip: int
    hbm_gib: float
    peak_tflops: float
    runtime_version: str | None
    gke_accelerator: str
    shapes: tuple[tuple[int, ...], ...]


_FLAT = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_CUBES = (
    *((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16)),
)

_GENERATIONS = {
    "v4": _Generation(
        prefix="v4",
        number_per_chip=2,
        devices_per_chip=1,
        hbm_gib=30.75,
        peak_tflops=275,
        runtime_version="tpu-ubuntu2204-base",
        gke_accelerator="tpu-v4-podslice",
        shapes=_CUBES,
    ),
    "v5e": _Generation(
        prefix="v5litepod",
        number_per_chip=1,
        devices_per_chip=1,
        hbm_gib=15.75,
        peak_tflops=197,
        runtime_version="v2-alpha-tpuv5-lite",
        gke_accelerator="tpu-v5-lite-podslice",
        shapes=_FLAT,
    ),
    "v5p": _Generation(
        prefix="v5p",
        number_per_chip=2,
        devices_per_chip=1,
        hbm_gib=95.74,
        peak_tflops=459,
        runtime_version="v2-alpha-tpuv5",
        gke_accelerator="tpu-v5p-slice",
        shapes=(*_CUBES, (16, 16, 16), (16, 16, 24)),
    ),
    "v6e": _Generation(
        prefix="v6e",
        number_per_chip=1,
        devices_per_chip=1,
        hbm_gib=31.25,
        peak_tflops=918,
        runtime_version="v2-alpha-tpuv6e",
        gke_accelerator="tpu-v6e-slice",
        shapes=_FLAT,
    ),
    "tpu7x": _Generation(
        prefix="tpu7x",
        number_per_chip=2,
        devices_per_chip=2,
        hbm_gib=94.75,
        peak_tflops=1153.5,
        runtime_version=None,
        gke_accelerator="tpu7x",
        shapes=_CUBES,
    ),
}


def _topology(name: str, generation: _Generation, shape: tuple[int, ...]) -> Topology:
    chips = math.prod(shape)
    # A flat slice of up to 8 chips is one machine; everything larger is built of machines with 4 chips.
    hosts = 1 if len(shape) == 2 and chips <= 8 else chips // 4
    options: list[tuple[str, str | tuple[int, ...]]] = []
    if name == "v4":
        options.append(("chip_config_name", "megacore"))
    if chips // hosts != 4:
        options.append(("chips_per_host_bounds", (*shape, 1)))
    dimensions = "x".join(map(str, shape))
    return Topology(
        accelerator_type=f"{generation.prefix}-{chips * generation.number_per_chip}",
        generation=name,
        shape=dimensions,
        chips=chips,
        hosts=hosts,
        devices_per_chip=generation.devices_per_chip,
        hbm_gib=generation.hbm_gib,
        peak_tflops=generation.peak_tflops,
        runtime_version=generation.runtime_version,
        gke_accelerator=generation.gke_accelerator,
        aot_name=f"{name}:{dimensions}",
        aot_options=tuple(options),
    )


TOPOLOGIES: dict[str, Topology] = {
    topology.accelerator_type: topology
    for name, generation in _GENERATIONS.items()
    for topology in (_topology(name, generation, shape) for shape in generation.shapes)
}


def find_topology(accelerator_type: str) -> Topology:
    """The slice of that name.

    Raises:
        ValueError: unknown name; the message lists the near ones.
    """
    if accelerator_type in TOPOLOGIES:
        return TOPOLOGIES[accelerator_type]
    prefix, _, number = accelerator_type.lower().replace("_", "-").rpartition("-")
    prefix = {name: generation.prefix for name, generation in _GENERATIONS.items()}.get(prefix, prefix)
    near = [name for name in TOPOLOGIES if name.rpartition("-")[0] == prefix]
    if near and number.isascii() and number.isdigit():
        near = sorted(near, key=lambda name: abs(int(name.rpartition("-")[2]) - int(number[:9])))[:3]
    elif not near:
        near = difflib.get_close_matches(accelerator_type, TOPOLOGIES, n=3, cutoff=0.0)
    raise ValueError(f"unknown accelerator type {accelerator_type!r}; near ones: {', '.join(near)}")
