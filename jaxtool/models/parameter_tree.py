"""A model's parameters as a flat mapping from dotted path to array, and back.

The abstract tree (`abstract_model`) is the single source of shapes, dtypes and shardings: initialising, loading,
resizing and restoring all fill it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

Model = TypeVar("Model", bound=nnx.Module)


def abstract_model(build: Callable[[], Model], mesh: Mesh | None = None) -> Model:
    """The module `build()` makes, with `jax.ShapeDtypeStruct` leaves; no array is allocated.

    With `mesh`, every leaf carries its `NamedSharding` on it.
    """
    if mesh is None:
        return nnx.eval_shape(build)
    with jax.set_mesh(mesh):
        tree = nnx.eval_shape(build)

    def on_devices(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, leaf.sharding.spec))

    return jax.tree.map(on_devices, tree)


def initialise(build: Callable[[], Model], mesh: Mesh | None = None) -> Model:
    """A randomly initialised model, every parameter born in its sharding (no device holds a whole one)."""
    if mesh is None:
        return jax.jit(build)()
    with jax.set_mesh(mesh):
        return jax.jit(build)()


def parameters(model: nnx.Module) -> dict[str, Any]:
    """Leaves of the model by dotted path, e.g. `blocks.query_dnh`, in tree order."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(model)
    return {_dotted(path): leaf for path, leaf in leaves}


def with_parameters(model: Model, values: Mapping[str, Any], *, check_dtypes: bool = True) -> Model:
    """`model` (abstract or not) with every leaf replaced by `values[path]`.

    Raises:
        ValueError: a path is missing or surplus, or a shape or (unless `check_dtypes` is off, for moments of another
            dtype) a dtype differs from the leaf it replaces.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(model)
    expected = {_dotted(path): leaf for path, leaf in leaves}
    if expected.keys() != values.keys():
        missing, surplus = sorted(expected.keys() - values.keys()), sorted(values.keys() - expected.keys())
        raise ValueError(f"parameters don't match the model: missing {missing or 'none'}, surplus {surplus or 'none'}")
    for path, leaf in expected.items():
        value = values[path]
        if value.shape != leaf.shape or (check_dtypes and value.dtype != leaf.dtype):
            raise ValueError(f"{path}: expected {leaf.dtype}{list(leaf.shape)}, found {value.dtype}{list(value.shape)}")
    return jax.tree_util.tree_unflatten(structure, [values[path] for path in expected])


def _dotted(path: tuple[Any, ...]) -> str:
    names = (str(getattr(key, "key", getattr(key, "name", key))).lstrip(".") for key in path)
    return ".".join(name for name in names if name not in ("value", "raw_value"))
