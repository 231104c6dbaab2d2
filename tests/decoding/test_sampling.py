"""Filters and draws against plain NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.decoding import RowSampling, Sampling
from jaxtool.decoding.sampling import choose, filtered, penalised

V = 50


def allowed(logits: np.ndarray, settings: Sampling) -> set[int]:
    """Tokens that the filters let through, one by one from the most probable."""
    order = sorted(range(len(logits)), key=lambda token: -logits[token])
    if settings.top_k:
        order = order[: settings.top_k]
    scaled = logits[order].astype(np.float64) / settings.temperature
    probability = np.exp(scaled - scaled.max())
    probability /= probability.sum()
    found, total = set(), 0.0
    for token, share in zip(order, probability, strict=True):
        if (not found or total < settings.top_p) and share >= settings.min_p * probability[0]:
            found.add(token)
        total += share
    return found


SETTINGS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5, top_k=1),
    Sampling(temperature=2.0, top_k=13),
    Sampling(temperature=1.0, top_p=0.3),
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=1.3, min_p=0.2),
    Sampling(temperature=1.1, top_k=30, top_p=0.9, min_p=0.02),
    Sampling(temperature=1.0, top_k=1000, top_p=1e-6),
]


def test_filters() -> None:
    logits = np.random.default_rng(0).normal(scale=2, size=(len(SETTINGS), V)).astype(np.float32)
    logits[:, 7] = -np.inf
    found = np.asarray(jax.jit(filtered)(logits, RowSampling.of(SETTINGS, range(len(SETTINGS)))))
    for row, settings in enumerate(SETTINGS):
        expected = allowed(logits[row], settings) - {7}
        assert set(np.flatnonzero(np.isfinite(found[row])).tolist()) == expected, settings
        kept = sorted(expected)
        np.testing.assert_allclose(found[row, kept], logits[row, kept] / settings.temperature, rtol=1e-6)


def test_frequencies_are_the_probabilities() -> None:
    """20,000 draws of one distribution, each by a row and place of its own."""
    count = 20_000
    logits = np.random.default_rng(1).normal(size=6).astype(np.float32)
    settings = Sampling(temperature=0.7, seed=5)
    rows = RowSampling.of([settings] * 200, range(200))
    draw = jax.jit(lambda rows, place: choose(np.tile(logits, (200, 1)), rows, place, draws=True))
    drawn = np.concatenate([np.asarray(draw(rows, np.full(200, place, np.int32))) for place in range(count // 200)])
    probability = np.exp(logits / 0.7) / np.exp(logits / 0.7).sum()
    found = np.bincount(drawn, minlength=6) / count
    assert np.abs(found - probability).max() < 4 * np.sqrt(0.25 / count)


def test_no_temperature_takes_the_first_of_the_largest() -> None:
    logits = np.zeros((2, V), np.float32)
    logits[1, [9, 4]] = 3
    rows = RowSampling.of([Sampling(), Sampling(top_k=3, top_p=0.5)], [0, 1])
    for draws in (False, True):
        assert np.asarray(choose(logits, rows, np.zeros(2, np.int32), draws=draws)).tolist() == [0, 4]


def test_repetition_penalty() -> None:
    logits = np.array([[2.0, -2.0, 4.0, -np.inf]], np.float32)
    seen = np.array([[True, True, False, True]])
    found = np.asarray(penalised(logits, seen, np.array([2.0], np.float32)))
    assert found.tolist() == [[1.0, -4.0, 4.0, -np.inf]]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"temperature": -1}, "temperature is -1, expected 0 or a number from 1e-30 to 1e30"),
        ({"temperature": 1e-38}, "temperature is 1e-38"),
        ({"temperature": "1"}, "temperature is '1', expected a number"),
        ({"top_k": 2.5}, "top_k is 2.5, expected a whole number"),
        ({"seed": True}, "seed is True, expected a whole number"),
        ({"temperature": 1e39}, "temperature is 1e"),
        ({"top_k": 2**40}, "top_k is 1099511627776, expected 0 or a positive number below 2"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty is 1e-300"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0}, "top_p is 0, expected a share above 0, up to 1"),
        ({"min_p": 1.5}, "min_p is 1.5"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_settings_out_of_range(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        dataclasses.replace(Sampling(), **change)
