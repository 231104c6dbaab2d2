"""AdamW steps worked out in float64 from the published update, and the schedule from its formula."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.config import OptimizerConfig
from jaxtool.models import Llama, lora_config, parameters
from jaxtool.training import learning_rate_schedule, make_optimizer
from tests.tiny_models import CONFIG, random_model

TIED = dataclasses.replace(CONFIG, tie_word_embeddings=True)
NORMS = {"blocks.attention_norm_d", "blocks.mlp_norm_d", "final_norm_d"}


def updates_of(config: OptimizerConfig, model: Any, gradients: list[Any], steps: int) -> list[dict[str, np.ndarray]]:
    """What the optimiser adds to the parameters in each step (parameters held still)."""
    optimizer = make_optimizer(config, steps)
    update = jax.jit(optimizer.update)
    state, found = optimizer.init(model), []
    for gradient in gradients:
        change, state = update(gradient, state, model)
        found.append(parameters(change))
    return found


def float64(model: Llama) -> dict[str, np.ndarray]:
    return {path: np.asarray(leaf, np.float64) for path, leaf in parameters(model).items()}


def test_two_steps_by_hand() -> None:
    config = OptimizerConfig(
        learning_rate=0.02, warmup_share=0.5, beta1=0.8, beta2=0.9, epsilon=1e-3, weight_decay=0.1, clip_norm=5.0
    )
    model, gradients = random_model(TIED), [random_model(TIED, seed=1), random_model(TIED, seed=2)]
    found = updates_of(config, model, gradients, steps=4)
    weights = float64(model)
    first = second = dict.fromkeys(weights, 0.0)
    for step, gradient in enumerate(map(float64, gradients)):
        norm = math.sqrt(sum((g**2).sum() for g in gradient.values()))
        assert norm > 5  # so that clipping matters
        gradient = {path: g * 5 / norm for path, g in gradient.items()}
        first = {path: 0.8 * first[path] + 0.2 * g for path, g in gradient.items()}
        second = {path: 0.9 * second[path] + 0.1 * g**2 for path, g in gradient.items()}
        rate = 0.02 * (1 / 3, 2 / 3)[step]  # 2 of 4 steps warm up: 1/3, 2/3, then the peak
        for path, weight in weights.items():
            direction = first[path] / (1 - 0.8 ** (step + 1))
            scale = np.sqrt(second[path] / (1 - 0.9 ** (step + 1))) + 1e-3
            decay = 0.0 if path in NORMS else 0.1 * weight
            np.testing.assert_allclose(
                found[step][path], -rate * (direction / scale + decay), rtol=2e-5, atol=1e-8, err_msg=path
            )


def test_small_gradients_are_not_clipped() -> None:
    """With a large epsilon AdamW's first step is linear in the gradient, so a scaled gradient shows."""
    config = OptimizerConfig(learning_rate=1.0, warmup_share=0.0, epsilon=1e3, clip_norm=1.0)
    model = random_model(TIED)
    gradient = random_model(TIED, seed=1)
    norm = math.sqrt(sum((g**2).sum() for g in float64(gradient).values()))
    for size, kept in ((0.5, 0.5), (0.999, 0.999), (1.5, 1.0), (100.0, 1.0)):
        scaled = jax.tree.map(lambda g, size=size: g * (size / norm), gradient)
        (update,) = updates_of(config, model, [scaled], steps=1)
        total = math.sqrt(sum((np.asarray(u, np.float64) ** 2).sum() for u in update.values()))
        assert total * 1e3 == pytest.approx(kept, rel=1e-3)


def test_weight_decay_spares_norm_scales() -> None:
    config = OptimizerConfig(learning_rate=0.5, warmup_share=0.0, weight_decay=0.2)
    model = random_model()
    nothing = jax.tree.map(lambda leaf: 0 * leaf, model)
    (update,) = updates_of(config, model, [nothing], steps=10)
    decayed = {path for path, leaf in update.items() if np.asarray(leaf).any()}
    assert update.keys() - decayed == NORMS
    for path in decayed:
        np.testing.assert_allclose(update[path], -0.5 * 0.2 * parameters(model)[path], rtol=1e-6)


def test_low_rank_factors_decay_as_matrices_do() -> None:
    config = lora_config(CONFIG, rank=2, alpha=1.0, projections=("query", "down"))
    part = {path: leaf for path, leaf in parameters(random_model(config)).items() if "lora" in path}
    part |= {"head_bias_v": jnp.ones(128), "embedding_vd": jnp.ones((128, 32))}
    settings = OptimizerConfig(learning_rate=0.5, warmup_share=0.0, weight_decay=0.2)
    nothing = jax.tree.map(jnp.zeros_like, part)
    (update,) = updates_of(settings, part, [nothing], steps=10)
    assert len(update) == 6 and not np.asarray(update.pop("head_bias_v")).any()
    for path, leaf in update.items():
        np.testing.assert_allclose(leaf, -0.5 * 0.2 * part[path], rtol=1e-6, err_msg=path)


def test_no_decay_by_default() -> None:
    model = random_model(TIED)
    (update,) = updates_of(OptimizerConfig(), model, [jax.tree.map(lambda leaf: 0 * leaf, model)], steps=10)
    assert not any(np.asarray(leaf).any() for leaf in update.values())


@pytest.mark.parametrize(
    ("steps", "share", "final"), [(100, 0.03, 0.0), (40, 0.25, 0.1), (10, 0.0, 0.5), (1, 0.03, 0.0)]
)
def test_schedule(steps: int, share: float, final: float) -> None:
    peak = 3e-4
    rate = learning_rate_schedule(OptimizerConfig(learning_rate=peak, warmup_share=share, final_share=final), steps)
    warmup = round(share * steps)
    for step in range(steps):
        if step < warmup:
            expected = peak * (1 / (warmup + 1) + step / warmup * (1 - 1 / (warmup + 1)))
        else:
            cosine = 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))
            expected = peak * (final + (1 - final) * cosine)
        assert float(rate(step)) == pytest.approx(expected, rel=1e-4), step
    assert float(rate(warmup)) == pytest.approx(peak)
    assert float(rate(0)) > 0  # no step is wasted
    assert float(rate(steps + warmup)) == pytest.approx(peak * final, rel=1e-6, abs=1e-12)


def test_linear_warmup_has_equal_increments() -> None:
    rate = learning_rate_schedule(OptimizerConfig(learning_rate=1.0, warmup_share=0.5), 8)
    assert [round(float(rate(step)), 5) for step in range(5)] == [0.2, 0.4, 0.6, 0.8, 1.0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0),
        ("learning_rate", float("nan")),
        ("warmup_share", 1.0),
        ("clip_norm", -1.0),
        ("beta1", 1.0),
    ],
)
def test_settings_out_of_range(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is "):
        OptimizerConfig(**{field: value})
