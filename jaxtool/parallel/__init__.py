"""Mesh, axis rules and the contractions that respect them."""

from jaxtool.parallel.axis_rules import AxisRules
from jaxtool.parallel.mesh import MESH_AXES, active_mesh_axes, einsum, make_mesh, reshard

__all__ = ["MESH_AXES", "AxisRules", "active_mesh_axes", "einsum", "make_mesh", "reshard"]
