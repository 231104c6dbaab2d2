"""The mesh, and the contraction whose gradient rule is our own, against jnp.einsum and its rule."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.parallel import MESH_AXES, active_mesh_axes, einsum, make_mesh, reshard

P = PartitionSpec


@pytest.mark.parametrize(
    ("config", "devices", "shape"),
    [
        (MeshConfig(), 8, (8, 1, 1)),
        (MeshConfig(), 1, (1, 1, 1)),
        (MeshConfig(fsdp=2, model=2), 8, (2, 2, 2)),
        (MeshConfig(data=1, fsdp=4, model=2), 8, (1, 4, 2)),
        (MeshConfig(model=8), 8, (1, 1, 8)),
        (MeshConfig(data=3), 3, (3, 1, 1)),
    ],
)
def test_shape(config: MeshConfig, devices: int, shape: tuple[int, ...]) -> None:
    mesh = make_mesh(config, jax.devices()[:devices])
    assert mesh.axis_names == MESH_AXES == ("data", "fsdp", "model")
    assert mesh.devices.shape == shape
    assert set(mesh.axis_types) == {AxisType.Explicit}
    assert sorted(device.id for device in mesh.devices.flat) == list(range(devices))


def test_all_devices_by_default() -> None:
    assert make_mesh(MeshConfig()).devices.size == len(jax.devices()) == 8


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MeshConfig(fsdp=0), "mesh.fsdp is 0, expected a positive number"),
        (MeshConfig(model=-1), "mesh.model is -1, expected a positive number"),
        (MeshConfig(data=0), "mesh.data is 0, expected a positive number of devices, or -1"),
        (MeshConfig(data=-2), "mesh.data is -2"),
        (MeshConfig(data=3), "mesh data 3 x fsdp 1 x model 1 does not fit 8 devices"),
        (MeshConfig(fsdp=3), "mesh data -1 x fsdp 3 x model 1 does not fit 8 devices"),
        (MeshConfig(fsdp=16), "mesh data -1 x fsdp 16 x model 1 does not fit 8 devices"),
        (MeshConfig(data=2, fsdp=2), "mesh data 2 x fsdp 2 x model 1 does not fit 8 devices"),
    ],
)
def test_sizes_that_do_not_fit(config: MeshConfig, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make_mesh(config)


def test_active_axes() -> None:
    assert active_mesh_axes() == {}
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=2, model=2))):
        assert active_mesh_axes() == {"data": 2, "fsdp": 2, "model": 2}
    assert active_mesh_axes() == {}


def test_reshard() -> None:
    x = jnp.arange(16.0).reshape(4, 4)
    assert reshard(x, P("fsdp", "model")) is x
    mesh = make_mesh(MeshConfig(fsdp=2, model=2))
    with jax.set_mesh(mesh):
        laid_out = reshard(x, P("fsdp", "model"))
    assert laid_out.sharding == NamedSharding(mesh, P("fsdp", "model"))
    np.testing.assert_array_equal(laid_out, x)


# Every kind of contraction in the model, with the layouts it has there.
CONTRACTIONS = [
    ("bsd,dnh->bsnh", (4, 3, 6), (6, 2, 5), P("fsdp"), P(None, "model", None), P("fsdp", None, "model", None)),
    ("bkxh,bkht->bkxt", (2, 4, 3, 5), (2, 4, 5, 7), *2 * [P("data", "model")], P("data", "model", None, None)),
    ("bsnh,nhd->bsd", (4, 3, 2, 5), (2, 5, 6), P("fsdp", None, "model"), P("model"), P("fsdp", None, None)),
    ("bpd,vd->bpv", (4, 3, 6), (8, 6), P(("data", "fsdp")), P("model"), P(("data", "fsdp"), None, "model")),
    ("bd,td->bt", (4, 6), (5, 6), P("data"), P(), P("data", None)),
]  # fmt: skip


@pytest.fixture
def operands() -> Callable[..., list[jax.Array]]:
    rng = np.random.default_rng(0)
    return lambda *shapes: [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.mark.parametrize("on_mesh", [False, True])
@pytest.mark.parametrize(("equation", "left", "right", "x_spec", "y_spec", "out"), CONTRACTIONS)
def test_einsum_and_its_gradients(
    operands: Callable[..., list[jax.Array]],
    equation: str,
    left: tuple[int, ...],
    right: tuple[int, ...],
    x_spec: PartitionSpec,
    y_spec: PartitionSpec,
    out: PartitionSpec,
    on_mesh: bool,
) -> None:
    x, y = operands(left, right)
    plain, plain_vjp = jax.vjp(lambda x, y: jnp.einsum(equation, x, y), x, y)
    (cotangent,) = operands(plain.shape)
    expected = plain_vjp(cotangent)

    def value_and_vjp(x: jax.Array, y: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        value, vjp = jax.vjp(lambda x, y: einsum(equation, x, y, out=out), x, y)
        return value, vjp(cotangent)

    if on_mesh:
        mesh = make_mesh(MeshConfig(fsdp=2, model=2))
        with jax.set_mesh(mesh):
            x, y, cotangent = reshard(x, x_spec), reshard(y, y_spec), reshard(cotangent, out)
            value, found = jax.jit(value_and_vjp)(x, y, cotangent)
        assert value.sharding.is_equivalent_to(NamedSharding(mesh, out), value.ndim)
        for gradient, operand in zip(found, (x, y), strict=True):
            assert gradient.sharding.is_equivalent_to(operand.sharding, operand.ndim)
    else:
        value, found = value_and_vjp(x, y, cotangent)
    np.testing.assert_allclose(value, plain, rtol=1e-5, atol=1e-5)
    for gradient, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(gradient, wanted, rtol=1e-5, atol=1e-5)


def test_result_dtype_is_wide() -> None:
    """bfloat16 has 8 bits: 257 is 256 there."""
    ones = jnp.ones((1, 257), jnp.bfloat16)

    def total(x: jax.Array, y: jax.Array) -> jax.Array:
        return 257 * einsum("ab,cb->ac", x, y, out=P(None, None), result_dtype="float32").sum()

    value, gradients = jax.value_and_grad(total, argnums=(0, 1))(ones, ones)
    assert value.dtype == jnp.float32 and float(value) == 257 * 257
    # Gradients come back in the operands' dtype.
    assert all(g.dtype == jnp.bfloat16 and float(g[0, 0]) == 256 for g in gradients)
