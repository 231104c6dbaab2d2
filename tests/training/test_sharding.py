"""Loss and gradients on 8 devices against one device. Whole training steps are in test_step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxtool.config import MeshConfig
from jaxtool.data import DRAWN, Batch, PackedBatches, Sample
from jaxtool.models import LanguageModel, LanguageModelConfig, parameters
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training import on_mesh, supervised_loss
from tests.tiny_models import CONFIG, GPTJ_CONFIG, QWEN3_CONFIG, random_model

UNTIED = dataclasses.replace(CONFIG, num_tools=9)
CONFIGS = {
    "untied": UNTIED,
    "tied": dataclasses.replace(UNTIED, tie_word_embeddings=True),
    "qwen3": dataclasses.replace(QWEN3_CONFIG, num_tools=9),
    # Two text rows that the tokenizer doesn't know: the mask is cut too.
    "gptj": dataclasses.replace(GPTJ_CONFIG, vocab_size=102, text_tokens=100, num_tools=9),
}


def packed(config: LanguageModelConfig) -> PackedBatches:
    """Rows of 16 with one to three samples each, tool ids among tokens and soft targets."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(40):
        length = int(rng.integers(3, 9))
        tools = tuple(int(config.vocab_size + tool) for tool in rng.permutation(9)[: rng.integers(1, 4)])
        text = rng.integers(100, size=length).tolist()
        samples.append(Sample(tokens=(*text, DRAWN), positions=(length - 1, length), targets=(tools, (2,))))
    return PackedBatches(samples, rows=8, row_length=16, epochs=2, seed=0)


def mesh_of(data: int, fsdp: int, model: int) -> Mesh:
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, model=model), jax.devices()[: data * fsdp * model])


@jax.jit
def loss_and_gradient(model: LanguageModel, batch: Batch) -> Any:
    return jax.value_and_grad(supervised_loss, has_aux=True)(model, batch)


def loss_and_gradient_on(
    mesh: Mesh,
    config: LanguageModelConfig,
    rules: AxisRules = AxisRules(),  # noqa: B008
) -> tuple[float, dict[str, float], dict[str, jax.Array]]:
    with jax.set_mesh(mesh):
        model = random_model(config, mesh=mesh, rules=rules)
        (loss, metrics), gradient = loss_and_gradient(model, on_mesh(packed(config).batch(0), mesh, rules))
    for path, leaf in parameters(gradient).items():
        assert leaf.sharding.is_equivalent_to(parameters(model)[path].sharding, leaf.ndim), path
    return float(loss), {name: float(value) for name, value in metrics.items()}, parameters(gradient)


@functools.cache
def on_one_device(name: str) -> Any:
    return loss_and_gradient_on(mesh_of(1, 1, 1), CONFIGS[name])


def assert_close(found: dict[str, jax.Array], expected: dict[str, jax.Array]) -> None:
    """Every leaf within 1e-5 of the expected one's norm."""
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        scale = np.linalg.norm(value)
        assert scale > 0, path
        error = np.linalg.norm(np.asarray(found[path]) - np.asarray(value)) / scale
        assert error <= 1e-5, f"{path}: {error:.1e}"


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("untied", (2, 2, 2)),
        ("tied", (2, 2, 2)),
        ("qwen3", (2, 2, 2)),
        ("gptj", (2, 2, 2)),
        ("untied", (8, 1, 1)),
        ("tied", (1, 8, 1)),
        ("untied", (1, 1, 2)),
    ],
)
def test_loss_and_gradients(name: str, sizes: tuple[int, int, int]) -> None:
    loss, metrics, gradient = loss_and_gradient_on(mesh_of(*sizes), CONFIGS[name])
    expected_loss, expected_metrics, expected_gradient = on_one_device(name)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert metrics == pytest.approx(expected_metrics, rel=1e-6)
    assert_close(gradient, expected_gradient)


def test_heads_that_do_not_divide_are_replicated() -> None:
    """2 key-value heads on 4 parts: `fit` replicates the heads and leaves the rest cut."""
    mesh = mesh_of(2, 1, 4)
    rules, notes = AxisRules().fit(dict(mesh.shape), UNTIED.axis_sizes)
    assert len(notes) == 2
    loss, _, gradient = loss_and_gradient_on(mesh, UNTIED, rules)
    assert gradient["blocks.key_dkh"].sharding.is_fully_replicated
    assert not gradient["blocks.up_df"].sharding.is_fully_replicated
    assert loss == pytest.approx(on_one_device("untied")[0], rel=1e-5)
    assert_close(gradient, on_one_device("untied")[2])
