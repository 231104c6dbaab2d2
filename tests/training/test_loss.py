"""The loss against a float64 sum written from its definition, position by position."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.data import DRAWN, Batch, PackedBatches, Sample
from jaxtool.models import Llama, parameters
from jaxtool.training import supervised_loss
from tests.tiny_models import CONFIG, log_probs, random_model

WITH_TOOLS = dataclasses.replace(CONFIG, num_tools=9)  # 128 rows, the last 19 of them padding


def packed_batch() -> Batch:
    """3 rows of 20 tokens with 9 supervised positions in the fullest, one to four targets each."""
    rng = np.random.default_rng(1)
    samples = []
    for length in (5, 6, 7, 4, 9, 8, 10, 3):
        positions = sorted(rng.permutation(length)[: rng.integers(1, 5)].tolist())
        targets = tuple(tuple(rng.permutation(109)[: rng.integers(1, 5)].tolist()) for _ in positions)
        tokens = [DRAWN if p - 1 in positions else int(rng.integers(109)) for p in range(length)]
        samples.append(Sample(tokens=tuple(tokens), positions=tuple(positions), targets=targets))
    batch = PackedBatches(samples, rows=3, row_length=20, epochs=1, seed=2).batch(0)
    assert batch.supervised_bp.shape == (3, 9)
    assert (batch.weights_bpa.sum(axis=(1, 2)) < 8.5).any()  # a row with padding among its positions
    return batch


def by_definition(model: Llama, batch: Batch) -> tuple[float, float, int]:
    """Loss, share of hits and number of supervised positions."""
    log_probs_bsv = log_probs(model, batch.tokens_bs, batch.segment_ids_bs)
    total, hits, count = 0.0, 0, 0
    for b, p in zip(*np.nonzero(np.asarray(batch.weights_bpa).sum(axis=-1)), strict=True):
        row = log_probs_bsv[b, batch.supervised_bp[b, p]]
        ids = [int(i) for i, w in zip(batch.targets_bpa[b, p], batch.weights_bpa[b, p], strict=True) if w > 0]
        total -= sum(row[i] for i in ids) / len(ids)
        hits += int(row.argmax()) in ids
        count += 1
    return total / count, hits / count, count


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_model(WITH_TOOLS)


@pytest.fixture(scope="module")
def batch() -> Batch:
    return packed_batch()


def value_and_gradient(model: Llama, batch: Batch, chunk: int = 0) -> Any:
    def loss(model: Llama) -> Any:
        return supervised_loss(model, batch, chunk=chunk)

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(model)


@pytest.fixture(scope="module")
def whole(model: Llama, batch: Batch) -> Any:
    return value_and_gradient(model, batch)


def test_value_is_the_definition(model: Llama, batch: Batch, whole: Any) -> None:
    (loss, metrics), _ = whole
    expected, hits, count = by_definition(model, batch)
    assert loss.dtype == jnp.float32
    assert float(loss) == pytest.approx(expected, rel=1e-6)
    assert float(metrics["supervised"]) == pytest.approx(count, rel=1e-6)
    assert float(metrics["correct"]) == pytest.approx(hits)


def test_hits_are_counted(model: Llama, batch: Batch) -> None:
    """A batch whose targets are what the model finds most probable, but for one."""
    best = log_probs(model, batch.tokens_bs, batch.segment_ids_bs).argmax(axis=-1)
    targets = np.take_along_axis(best, np.asarray(batch.supervised_bp), axis=1)[..., None]
    weights = np.asarray(batch.weights_bpa).sum(axis=-1, keepdims=True)
    targets[0, 0] = (targets[0, 0] + 1) % 100
    changed = dataclasses.replace(batch, targets_bpa=targets.astype(np.int32), weights_bpa=weights)
    _, metrics = jax.jit(supervised_loss)(model, changed)
    count = round(float(weights.sum()))
    assert float(metrics["correct"]) == pytest.approx((count - 1) / count)


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_chunks_change_nothing(model: Llama, batch: Batch, whole: Any, chunk: int) -> None:
    (loss, metrics), gradient = value_and_gradient(model, batch, chunk)
    (whole_loss, whole_metrics), whole_gradient = whole
    assert float(loss) == pytest.approx(float(whole_loss), rel=1e-6)
    assert {name: float(value) for name, value in metrics.items()} == pytest.approx(
        {name: float(value) for name, value in whole_metrics.items()}, rel=1e-6
    )
    expected = parameters(whole_gradient)
    for path, leaf in parameters(gradient).items():
        error = np.linalg.norm(leaf - expected[path]) / np.linalg.norm(expected[path])
        assert error <= 2e-6, f"{path}: {error:.1e}"


def test_gradient_of_padding_is_zero(whole: Any) -> None:
    _, gradient = whole
    leaves = {path: np.asarray(leaf) for path, leaf in parameters(gradient).items()}
    assert all(np.isfinite(leaf).all() for leaf in leaves.values())
    assert not leaves["head_vd"][109:].any() and not leaves["embedding_vd"][109:].any()
    # Every id that can be predicted is pushed up or down.
    assert np.abs(leaves["head_vd"][:109]).max(axis=1).min() > 0


def test_gradient_is_the_slope(model: Llama, batch: Batch, whole: Any) -> None:
    """Central differences of the definition along the gradient itself: the slope there is the gradient's norm."""
    _, gradient = whole
    norm = float(np.sqrt(sum(float((leaf**2).sum()) for leaf in parameters(gradient).values())))
    step = 1e-2

    def moved(size: float) -> Llama:
        return jax.tree.map(lambda value, slope: value + size / norm * slope, model, gradient)

    slope = (by_definition(moved(step), batch)[0] - by_definition(moved(-step), batch)[0]) / (2 * step)
    assert slope == pytest.approx(norm, rel=2e-3)


def test_positions_weigh_the_same_in_all_rows(model: Llama, batch: Batch) -> None:
    """The mean is over the positions of the batch, not a mean of the rows' means."""

    @jax.jit
    def loss_of(weights: jax.Array) -> jax.Array:
        return supervised_loss(model, dataclasses.replace(batch, weights_bpa=weights))[0]

    weights = np.asarray(batch.weights_bpa)
    counts = weights.sum(axis=(1, 2)).round()
    assert len(set(counts.tolist())) > 1
    rows = [float(loss_of(weights * (np.arange(3) == row)[:, None, None])) for row in range(3)]
    expected = np.dot(rows, counts) / counts.sum()
    assert float(loss_of(weights)) == pytest.approx(expected, rel=1e-6)
    assert abs(np.mean(rows) - expected) > 1e-3
