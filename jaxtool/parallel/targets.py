"""Machines that programs are compiled for without being there: TPU slices by name, and fake CPU devices.

What slices there are is in `topologies`, compiling for one in `ahead_of_time`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

import jax
from jax.experimental import topologies

from jaxtool.parallel.topologies import TOPOLOGIES, find_topology

_CPU = re.compile(r"cpu:([1-9]\d{0,3})")


@dataclass(frozen=True, kw_only=True)
class Target:
    """A machine to plan for.

    Attributes:
        name: accelerator type, or "cpu:N".
        devices: what a mesh is made of; no program can run on a TPU's.
        hbm_bytes: memory of a device that a program can use; None for CPUs.
        peak_flops: bf16 FLOP/s of a device; None for CPUs.
    """

    name: str
    devices: tuple[Any, ...]
    hbm_bytes: int | None
    peak_flops: float | None


def find_target(name: str) -> Target:
    """The machine of that name.

    Args:
        name: accelerator type (`v5litepod-64`, also `v5e-64`), shape (`v5e:8x8`), or `cpu:N` for N fake devices.

    Raises:
        ValueError: an unknown name (the message lists near ones), no TPU compiler, or too few fake devices.
    """
    if found := _CPU.fullmatch(name):
        return Target(name=name, devices=_fake_devices(int(found[1])), hbm_bytes=None, peak_flops=None)
    if name.partition(":")[0] == "cpu":
        raise ValueError(f"{name!r} is no number of fake devices, expected cpu:N with N from 1")
    by_shape = {topology.aot_name: topology for topology in TOPOLOGIES.values()}
    short = {f"{each.generation}-{each.accelerator_type.rpartition('-')[2]}": each for each in TOPOLOGIES.values()}
    topology = by_shape.get(name) or short.get(name) or find_topology(name)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            f"planning for {name} needs the TPU compiler, which no TPU is needed for: "
            f"pip install 'jax[tpu]=={jax.__version__}'"
        )
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology.aot_name, **dict(topology.aot_options)
    )
    return Target(
        name=topology.accelerator_type,
        devices=tuple(description.devices),
        hbm_bytes=int(topology.hbm_gib * 2**30),
        peak_flops=topology.peak_tflops * 1e12,
    )


def _fake_devices(count: int) -> tuple[jax.Device, ...]:
    with contextlib.suppress(RuntimeError):  # jax has begun to work with those it has
        jax.config.update("jax_num_cpu_devices", count)
    devices = jax.devices("cpu")
    if len(devices) < count:
        raise ValueError(f"cpu:{count} is more than the {len(devices)} fake devices that this process began with")
    return tuple(devices[:count])
