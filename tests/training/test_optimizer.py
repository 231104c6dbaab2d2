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


@pytest.mark.parametrize("schedule", ["linear", "constant"])
@pytest.mark.parametrize(("steps", "share"), [(100, 0.1), (10, 0.0), (1, 0.03)])
def test_other_schedules(schedule: str, steps: int, share: float) -> None:
    """Toolformer's: linear warm-up over a tenth of the steps, then constant."""
    config = OptimizerConfig(learning_rate=1e-5, schedule=schedule, warmup_share=share, final_share=0.2)
    rate, warmup = learning_rate_schedule(config, steps), round(share * steps)
    for step in range(steps + 5):
        expected = 1e-5
        if step < warmup:
            expected = 1e-5 * (1 + step) / (warmup + 1)
        elif schedule == "linear":
            expected = 1e-5 * (1 - 0.8 * min((step - warmup) / (steps - warmup), 1))
        assert float(rate(step)) == pytest.approx(expected, rel=1e-5), step


def test_adafactor_by_hand() -> None:
    """Shazeer & Stern 2018, algorithm 4 in float64: factored second moment, clipping by root mean square."""
    config = OptimizerConfig(
        kind="adafactor", learning_rate=0.02, schedule="constant", warmup_share=0.0, weight_decay=0.1, clip_norm=1e9
    )
    rng = np.random.default_rng(0)
    weights = {"up_ldf": rng.normal(size=(2, 130, 140)), "final_norm_d": rng.normal(size=6)}
    gradients = [{name: rng.normal(size=w.shape) * 3 for name, w in weights.items()} for _ in range(3)]
    part = {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}
    found = updates_of(config, part, [jax.tree.map(lambda g: jnp.asarray(g, jnp.float32), g) for g in gradients], 10)
    rows = columns = second = 0.0
    for step, gradient in enumerate(gradients):
        kept = 1 - (step + 1) ** -0.8
        squared = {name: g**2 + 1e-30 for name, g in gradient.items()}
        rows = kept * rows + (1 - kept) * squared["up_ldf"].mean(2)
        columns = kept * columns + (1 - kept) * squared["up_ldf"].mean(1)
        second = kept * second + (1 - kept) * squared["final_norm_d"]
        estimate = rows[:, :, None] * columns[:, None] / rows.mean(1)[:, None, None]
        for name, estimated in (("up_ldf", estimate), ("final_norm_d", second)):
            update = gradient[name] / np.sqrt(estimated)
            update /= max(1.0, np.sqrt((update**2).mean()))
            decay = 0.1 * weights[name] if name == "up_ldf" else 0.0
            np.testing.assert_allclose(found[step][name], -0.02 * (update + decay), rtol=1e-4, atol=1e-7)


def test_adafactor_state_is_small() -> None:
    part = {"up_ldf": jnp.zeros((2, 130, 140))}
    sizes = {
        kind: sum(leaf.size for leaf in jax.tree.leaves(make_optimizer(OptimizerConfig(kind=kind), 10).init(part)))
        for kind in ("adamw", "adafactor")
    }
    assert sizes["adamw"] > 2 * 2 * 130 * 140 and sizes["adafactor"] < 2 * (130 + 140) + 10


def test_the_norm_of_half_precision_gradients_is_float32() -> None:
    """In bfloat16 the sum of 100,000 equal squares stops growing at 256 times the square."""
    gradient = {"up_ldf": jnp.full((1, 250, 400), 0.01, jnp.bfloat16)}
    config = OptimizerConfig(learning_rate=1.0, warmup_share=0.0, epsilon=1e3, clip_norm=0.1)
    exact = float(gradient["up_ldf"][0, 0, 0]) * math.sqrt(100_000)
    part = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), gradient)
    (update,) = updates_of(config, part, [gradient], steps=1)
    expected = 0.1 / exact * float(gradient["up_ldf"][0, 0, 0]) / 1e3
    np.testing.assert_allclose(-update["up_ldf"], expected, rtol=1e-2)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kind", "sgd"),
        ("schedule", "step"),
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
