"""Gradient accumulation against the batch at once, and the optimisers and z-loss through whole steps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxtool.config import MeshConfig, OptimizerConfig
from jaxtool.data import PackedBatches, Sample
from jaxtool.models import LanguageModelConfig, lora_config, parameters
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training import initial_state, make_optimizer, make_train_step, on_mesh
from tests.tiny_models import CONFIG, random_model

UNTIED = dataclasses.replace(CONFIG, num_tools=9)
TIED = dataclasses.replace(UNTIED, tie_word_embeddings=True)
LORA = lora_config(UNTIED, rank=4, alpha=8.0, projections=tuple(UNTIED.projections))


def uneven(rows: int = 16) -> PackedBatches:
    """Rows with 1 to 5 supervised positions: the mean of the parts' means is not the mean."""
    rng = np.random.default_rng(3)
    samples = []
    for number in range(rows):
        count = 1 + number % 5
        text = rng.integers(100, size=12).tolist()
        targets = tuple((int(rng.integers(100)),) for _ in range(count))
        samples.append(Sample(tokens=tuple(text), positions=tuple(range(12 - count, 12)), targets=targets))
    return PackedBatches(samples, rows=rows, row_length=16, epochs=2, seed=0)


def mesh_of(data: int, fsdp: int, model: int) -> Mesh:
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, model=model), jax.devices()[: data * fsdp * model])


def trained(
    mesh: Mesh, config: LanguageModelConfig, *, part: str = "full", kind: str = "adamw", **options: Any
) -> tuple[dict[str, np.ndarray], list[dict[str, float]]]:
    """Two steps: parameters and metrics."""
    batches = uneven()
    optimizer = make_optimizer(OptimizerConfig(kind=kind, learning_rate=1e-2, clip_norm=0.5, epsilon=1e-5), steps=2)
    with jax.set_mesh(mesh):
        state = initial_state(random_model(config, mesh=mesh), optimizer, part)
        step = make_train_step(optimizer, **options)
        metrics = []
        for number in range(2):
            state, found = step(state, on_mesh(batches.batch(number), mesh, AxisRules()))
            metrics.append({name: float(value) for name, value in found.items()})
    return {path: np.asarray(leaf) for path, leaf in parameters(state.model).items()}, metrics


def assert_same(found: Any, expected: Any) -> None:
    for path, value in expected[0].items():
        error = np.linalg.norm(found[0][path] - value) / np.linalg.norm(value)
        assert error <= 1e-5, f"{path}: {error:.1e}"
    for one, other in zip(found[1], expected[1], strict=True):
        # Adam's first step divides by gradients of any size: their rounding shows in the second gradient.
        assert one.pop("grad_norm") == pytest.approx(other["grad_norm"], rel=1e-4)
        assert one == pytest.approx({name: value for name, value in other.items() if name != "grad_norm"}, rel=1e-5)


@pytest.mark.parametrize(
    ("config", "part"), [(TIED, "full"), (LORA, "lora"), (UNTIED, "tool_rows")], ids=["full", "lora", "tool_rows"]
)
def test_parts_add_up_to_the_batch(config: LanguageModelConfig, part: str) -> None:
    """On one device in 1, 2 and 4 parts, on eight devices in 4."""
    one = mesh_of(1, 1, 1)
    whole = trained(one, config, part=part)
    # 16 rows with 1, 2, 3, 4, 5, 1, ... positions
    assert whole[1][0]["supervised"] == sum(1 + number % 5 for number in range(16))
    for parts in (2, 4):
        assert_same(trained(one, config, part=part, accumulate=parts), whole)
    assert_same(trained(mesh_of(2, 2, 2), config, part=part, accumulate=4), whole)


@pytest.mark.parametrize("kind", ["adamw", "adafactor"])
def test_optimisers_and_z_loss_on_eight_devices(kind: str) -> None:
    one = trained(mesh_of(1, 1, 1), UNTIED, kind=kind, z_loss=1e-2)
    assert one[1][0]["z_loss"] > 0
    assert_same(trained(mesh_of(2, 2, 2), UNTIED, kind=kind, z_loss=1e-2, accumulate=2), one)
    plain = trained(mesh_of(1, 1, 1), UNTIED, kind=kind)
    assert one[1][0]["loss"] == pytest.approx(plain[1][0]["loss"] + one[1][0]["z_loss"], rel=1e-5)


def test_half_precision_parameters() -> None:
    """Gradients of bfloat16 parameters are summed in float32: many parts lose nothing to rounding."""
    config = dataclasses.replace(UNTIED, param_dtype="bfloat16", compute_dtype="bfloat16")
    whole, parts = (trained(mesh_of(1, 1, 1), config, accumulate=parts)[1] for parts in (1, 16))
    for one, other in zip(whole, parts, strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-2)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-2)
