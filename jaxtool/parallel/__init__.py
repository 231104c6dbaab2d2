"""Mesh, axis rules and the contractions that respect them; several processes as one run."""

from jaxtool.parallel.axis_rules import AxisRules
from jaxtool.parallel.distributed import (
    BARRIER_SECONDS,
    Processes,
    barrier,
    end_process,
    from_first,
    gather,
    process_names,
    publish,
    published,
    start_processes,
)
from jaxtool.parallel.mesh import MESH_AXES, active_mesh_axes, check_mesh, einsum, make_mesh, reshape, reshard

__all__ = [
    "BARRIER_SECONDS",
    "MESH_AXES",
    "AxisRules",
    "Processes",
    "active_mesh_axes",
    "barrier",
    "check_mesh",
    "einsum",
    "end_process",
    "from_first",
    "gather",
    "make_mesh",
    "process_names",
    "publish",
    "published",
    "reshape",
    "reshard",
    "start_processes",
]
