"""Blocks of tool rows against numpy: read, written back, and the gradient of what is looked up in them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.models.tool_rows import ToolBlock, look_up
from jaxtool.parallel import AxisRules, make_mesh

FIRST, COUNT, V, D = 100, 9, 384, 16


def mesh_of(data: int, fsdp: int, model: int) -> Mesh:
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, model=model), jax.devices()[: data * fsdp * model])


MESHES = {"one": (1, 1, 1), "all": (2, 2, 2), "thirds": (1, 2, 3)}  # 128 rows of a block don't divide by 3
BLOCK = ToolBlock(first=FIRST, count=COUNT, rules=AxisRules())


def placed(mesh: Mesh, value: np.ndarray, *axes: Any) -> jax.Array:
    return jax.device_put(value, NamedSharding(mesh, PartitionSpec(*axes)))


@pytest.fixture(params=MESHES)
def mesh(request: pytest.FixtureRequest) -> Mesh:
    return mesh_of(*MESHES[request.param])


@pytest.mark.parametrize(("count", "size"), [(0, 0), (1, 128), (128, 128), (129, 256), (46_985, 47_104)])
def test_size(count: int, size: int) -> None:
    assert ToolBlock(first=FIRST, count=count, rules=AxisRules()).size == size


def test_read_and_write(mesh: Mesh) -> None:
    rng = np.random.default_rng(0)
    for shape in ((V, D), (V,)):
        table, other = rng.standard_normal(shape).astype(np.float32), rng.standard_normal((128, *shape[1:]))
        with jax.set_mesh(mesh):
            on_mesh = placed(mesh, table, "model", *("fsdp",) * (len(shape) - 1))
            block = jax.jit(BLOCK.read)(on_mesh)
            written = jax.jit(BLOCK.write)(on_mesh, jnp.asarray(other, jnp.float32, out_sharding=block.sharding))
        assert block.shape == (128, *shape[1:])
        np.testing.assert_array_equal(np.asarray(block)[:COUNT], table[FIRST : FIRST + COUNT])
        assert not np.asarray(block)[COUNT:].any()
        expected = table.copy()
        expected[FIRST : FIRST + COUNT] = other[:COUNT]
        np.testing.assert_array_equal(written, expected)
        assert written.sharding.is_equivalent_to(on_mesh.sharding, written.ndim)
        parts = 1 if 128 % mesh.shape["model"] else mesh.shape["model"]
        assert block.addressable_shards[0].data.shape[0] == 128 // parts


def test_without_a_mesh() -> None:
    table = np.random.default_rng(0).standard_normal((V, D)).astype(np.float32)
    block = BLOCK.read(jnp.asarray(table))
    np.testing.assert_array_equal(block[:COUNT], table[FIRST : FIRST + COUNT])
    np.testing.assert_array_equal(BLOCK.write(jnp.zeros((V, D)), block)[FIRST : FIRST + COUNT], block[:COUNT])


def test_gradient(mesh: Mesh) -> None:
    b, s = 4, 6
    rng = np.random.default_rng(1)
    table, mix = rng.standard_normal((V, D)).astype(np.float32), rng.standard_normal((b, s, D)).astype(np.float32)
    tokens = rng.integers(FIRST - 4, FIRST + COUNT + 4, size=(b, s)).astype(np.int32)

    def value(rows_xd: jax.Array, table_vd: jax.Array, tokens_bs: jax.Array, mix_bsd: jax.Array) -> Any:
        x_bsd = look_up(table_vd, rows_xd, tokens_bs, BLOCK)
        return jnp.sum(mix_bsd * x_bsd), x_bsd

    batch = ("data", "fsdp")
    with jax.set_mesh(mesh):
        table_vd = placed(mesh, table, "model", "fsdp")
        rows_xd = BLOCK.read(table_vd)
        compute = jax.jit(jax.value_and_grad(value, has_aux=True))
        (_, x), grad_xd = compute(rows_xd, table_vd, placed(mesh, tokens, batch), placed(mesh, mix, batch))
    assert grad_xd.sharding.is_equivalent_to(rows_xd.sharding, 2)
    np.testing.assert_array_equal(x, table[tokens])
    expected = np.zeros((V, D))
    np.add.at(expected, tokens, mix)
    assert np.abs(expected[:FIRST]).max() > 1  # what text rows would get, and don't
    np.testing.assert_allclose(np.asarray(grad_xd)[:COUNT], expected[FIRST : FIRST + COUNT], rtol=1e-5, atol=1e-5)
    assert not np.asarray(grad_xd)[COUNT:].any()


def test_a_frozen_matrix_takes_no_gradient() -> None:
    """Not even zeros are made for it: the backward pass has no array of its shape."""
    table, tokens = jnp.ones((V, D)), jnp.zeros((2, 3), jnp.int32)
    program = jax.make_jaxpr(jax.grad(lambda rows_xd: jnp.sum(look_up(table, rows_xd, tokens, BLOCK))))(
        BLOCK.read(table)
    )
    made = [variable.aval.shape for equation in program.eqns for variable in equation.outvars]
    assert (128, D) in made and (V, D) not in made
