"""Loss and gradients on 8 devices against one device. Whole training steps are in test_step."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxtool.config import MeshConfig
from jaxtool.data import DRAWN, Batch, PackedBatches, Sample
from jaxtool.models import Llama, LlamaConfig, parameters
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training import on_mesh, supervised_loss
from tests.tiny_models import CONFIG, random_model

UNTIED = dataclasses.replace(CONFIG, num_tools=9)
TIED = dataclasses.replace(UNTIED, tie_word_embeddings=True)


def packed() -> PackedBatches:
    """Rows of 16 with one to three samples each, tool ids among tokens and soft targets."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(40):
        length = int(rng.integers(3, 9))
        tools = tuple(int(100 + tool) for tool in rng.permutation(9)[: rng.integers(1, 4)])
        text = rng.integers(100, size=length).tolist()
        samples.append(Sample(tokens=(*text, DRAWN), positions=(length - 1, length), targets=(tools, (2,))))
    return PackedBatches(samples, rows=8, row_length=16, epochs=2, seed=0)


def mesh_of(data: int, fsdp: int, model: int) -> Mesh:
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, model=model), jax.devices()[: data * fsdp * model])


@jax.jit
def loss_and_gradient(model: Llama, batch: Batch) -> Any:
    return jax.value_and_grad(supervised_loss, has_aux=True)(model, batch)


def loss_and_gradient_on(
    mesh: Mesh,
    config: LlamaConfig,
    rules: AxisRules = AxisRules(),  # noqa: B008
) -> tuple[float, dict[str, float], dict[str, jax.Array]]:
    with jax.set_mesh(mesh):
        model = random_model(config, mesh=mesh, rules=rules)
        (loss, metrics), gradient = loss_and_gradient(model, on_mesh(packed().batch(0), mesh, rules))
    for path, leaf in parameters(gradient).items():
        assert leaf.sharding.is_equivalent_to(parameters(model)[path].sharding, leaf.ndim), path
    return float(loss), {name: float(value) for name, value in metrics.items()}, parameters(gradient)


@pytest.fixture(scope="module")
def on_one_device() -> dict[bool, Any]:
    """By tiedness."""
    return {tied: loss_and_gradient_on(mesh_of(1, 1, 1), TIED if tied else UNTIED) for tied in (False, True)}


def assert_close(found: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    """Every leaf within 1e-5 of the expected one's norm."""
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        scale = np.linalg.norm(value)
        assert scale > 0, path
        error = np.linalg.norm(np.asarray(found[path]) - np.asarray(value)) / scale
        assert error <= 1e-5, f"{path}: {error:.1e}"


@pytest.mark.parametrize(
    ("sizes", "tied"),
    [
        ((2, 2, 2), False),
        ((2, 2, 2), True),
        ((8, 1, 1), False),
        ((1, 8, 1), True),
        ((1, 1, 2), False),
    ],
)
def test_loss_and_gradients(on_one_device: dict[bool, Any], sizes: tuple[int, int, int], tied: bool) -> None:
    loss, metrics, gradient = loss_and_gradient_on(mesh_of(*sizes), TIED if tied else UNTIED)
    expected_loss, expected_metrics, expected_gradient = on_one_device[tied]
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)
    assert_close(gradient, expected_gradient)


def test_heads_that_do_not_divide_are_replicated(on_one_device: dict[bool, Any]) -> None:
    """2 key-value heads on 4 parts: `fit` replicates the heads and leaves the rest cut."""
    mesh = mesh_of(2, 1, 4)
    rules, notes = AxisRules().fit(dict(mesh.shape), UNTIED.axis_sizes)
    assert len(notes) == 2
    loss, _, gradient = loss_and_gradient_on(mesh, UNTIED, rules)
    assert gradient["blocks.key_dkh"].sharding.is_fully_replicated
    assert not gradient["blocks.up_df"].sharding.is_fully_replicated
    assert loss == pytest.approx(on_one_device[False][0], rel=1e-5)
    assert_close(gradient, on_one_device[False][2])
