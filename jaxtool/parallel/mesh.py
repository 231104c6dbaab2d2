"""The device mesh and the contractions that know about it.

Every array of a run lives on one explicit mesh with the axes `data` (replicas of the model), `fsdp` (batch and
parameters) and `model` (heads, MLP width and vocabulary). Which array axis goes where is in `axis_rules`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxtool.config import MeshConfig

MESH_AXES = ("data", "fsdp", "model")


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Makes the mesh (`data`, `fsdp`, `model`) with explicit axes; activate it with `jax.set_mesh`.

    Raises:
        ValueError: a size is neither positive nor -1 (data only), or the sizes don't multiply to the devices.
    """
    devices = list(jax.devices() if devices is None else devices)
    for name in ("fsdp", "model"):
        if getattr(config, name) < 1:
            raise ValueError(f"mesh.{name} is {getattr(config, name)}, expected a positive number of devices")
    if config.data < 1 and config.data != -1:
        raise ValueError(f"mesh.data is {config.data}, expected a positive number of devices, or -1 for the rest")
    inner = config.fsdp * config.model
    data = len(devices) // inner if config.data == -1 else config.data
    if data * inner != len(devices) or data == 0:
        raise ValueError(
            f"mesh data {config.data} x fsdp {config.fsdp} x model {config.model} does not fit {len(devices)} devices"
        )
    return jax.make_mesh((data, config.fsdp, config.model), MESH_AXES, devices=devices)


def active_mesh_axes() -> dict[str, int]:
    """Sizes of the active mesh's axes by name; empty without `jax.set_mesh`."""
    mesh = jax.sharding.get_abstract_mesh()
    return {} if mesh.empty else dict(mesh.shape)


def check_mesh(x: jax.Array) -> None:
    """Raises ValueError where `x` is cut over a mesh and none is active: JAX would only complain of some indexing."""
    if not active_mesh_axes() and any(jax.typeof(x).sharding.spec):
        raise ValueError(
            "the parameters lie on a mesh, but none is active: work with them inside `with jax.set_mesh(mesh):` "
            "(`with loaded.on_mesh():` after jaxtool.load)"
        )


def reshard(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    """`x` laid out as `spec` on the active mesh; `x` itself when no mesh is active (plain single-device use)."""
    return jax.sharding.reshard(x, spec) if active_mesh_axes() else x


def reshape(x: jax.Array, shape: tuple[int, ...], spec: PartitionSpec) -> jax.Array:
    """`x` in another shape, laid out as `spec` on the active mesh, if there is one."""
    return jax.lax.reshape(x, shape, out_sharding=spec if active_mesh_axes() else None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3, 4))
def _contract(equation: str, x: jax.Array, y: jax.Array, out: PartitionSpec, dtype: str | None) -> jax.Array:
    sharding = out if active_mesh_axes() else None
    return jnp.einsum(equation, x, y, preferred_element_type=dtype, out_sharding=sharding)


def _contract_forward(
    equation: str, x: jax.Array, y: jax.Array, out: PartitionSpec, dtype: str | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _contract(equation, x, y, out, dtype), (x, y)


def _contract_backward(
    equation: str,
    out: PartitionSpec,
    dtype: str | None,
    operands: tuple[jax.Array, jax.Array],
    grad: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    # Both gradients come out in the axis order of their operand. The default rule computes the transposed product and
    # transposes it back; XLA then picks a strided layout that makes weight gradients 3-5 times slower on CPU.
    x, y = operands
    left, right, result = equation.replace("->", ",").split(",")
    grad = grad.astype(x.dtype)

    def layout(operand: jax.Array) -> PartitionSpec | None:
        return jax.typeof(operand).sharding.spec if active_mesh_axes() else None

    grad_x = jnp.einsum(f"{result},{right}->{left}", grad, y, out_sharding=layout(x))
    if left[:2] == result[:2] and not set(left[:2]) & set(right) and not any((layout(x) or ())[1:2]):
        # Batch and sequence as one axis: over two, XLA would first copy x into another order on CPU.
        x, grad, left, result = _merged(x), _merged(grad), left[1:], result[1:]
    grad_y = jnp.einsum(f"{left},{result}->{right}", x, grad, out_sharding=layout(y))
    return grad_x, grad_y


def _merged(x: jax.Array) -> jax.Array:
    """[B, S, ...] -> [B x S, ...], cut like B; S is whole on every device."""
    batch, _, *rest = jax.typeof(x).sharding.spec
    return reshape(x, (x.shape[0] * x.shape[1], *x.shape[2:]), PartitionSpec(batch, *rest))


_contract.defvjp(_contract_forward, _contract_backward)


def einsum(
    equation: str, x: jax.Array, y: jax.Array, *, out: PartitionSpec, result_dtype: str | None = None
) -> jax.Array:
    """Two-operand `jnp.einsum` whose result is laid out as `out` on the active explicit mesh.

    Args:
        equation: explicit form `ab,bc->ac`; every index of an operand occurs in the other one or in the result.
        x: first operand.
        y: second operand, of the same dtype.
        out: layout of the result; ignored when no mesh is active.
        result_dtype: accumulation and result dtype (None: the operands').
    """
    return _contract(equation, x, y, out, result_dtype)
