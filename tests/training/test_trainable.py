"""Training a part of the model: AdamW in numpy on the full gradient, sizes by hand, what the program computes."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import jax
import numpy as np
import optax
import pytest

from jaxtool.config import OptimizerConfig
from jaxtool.data import Batch
from jaxtool.models import (
    LanguageModelConfig,
    abstract_model,
    build_model,
    lora_config,
    parameters,
    resized_optimizer_state,
    with_name_rows,
    without_tool_rows,
)
from jaxtool.training import (
    abstract_state,
    initial_state,
    make_optimizer,
    make_train_step,
    supervised_loss,
    trained_count,
    trained_part,
)
from tests.tiny_models import CONFIG, GPTJ_CONFIG, random_model
from tests.training.test_step import packed

V, T, D, F, L, N, K, H, R = 100, 9, 32, 48, 2, 4, 2, 8, 3
ROWS = slice(V, V + T)
MATRICES = ("embedding_vd", "head_vd", "head_bias_v")


def with_tools(config: LanguageModelConfig) -> Any:
    """With rows of padding behind the tools, and low-rank factors, which "tool_rows" must leave alone too."""
    config = dataclasses.replace(config, num_tools=T, padded_vocab_size=256)
    return lora_config(config, rank=R, alpha=6.0, projections=("query", "output", "down"))


CONFIGS = {
    "untied": with_tools(CONFIG),
    "tied": with_tools(dataclasses.replace(CONFIG, tie_word_embeddings=True)),
    "biased": with_tools(GPTJ_CONFIG),
}
OPTIMIZER = OptimizerConfig(
    learning_rate=0.02, warmup_share=0.5, beta1=0.8, beta2=0.9, epsilon=1e-4, weight_decay=0.1, clip_norm=0.5
)
RATES = (0.02 / 3, 0.02 * 2 / 3, 0.02)  # 2 of 4 steps warm up


@jax.jit
def full_gradient(model: Any, batch: Batch) -> Any:
    return jax.grad(lambda model: supervised_loss(model, batch)[0])(model)


def numpy_values(model: Any) -> dict[str, np.ndarray]:
    return {path: np.array(leaf) for path, leaf in parameters(model).items()}


def mask_of(path: str, shape: tuple[int, ...], trained: str) -> np.ndarray:
    """Which entries of a parameter are trained."""
    if trained == "full" or (trained == "lora" and "_lora_" in path):
        return np.ones(shape, bool)
    mask = np.zeros(shape, bool)
    if path in MATRICES:
        mask[ROWS] = True
    return mask


def by_numpy(config: Any, trained: str, steps: int) -> tuple[dict[str, np.ndarray], list[float]]:
    """AdamW in float64 on the masked gradient of the whole model; parameters and gradient norms."""
    model, batches = random_model(config), packed()
    values = {path: value.astype(np.float64) for path, value in numpy_values(model).items()}
    masks = {path: mask_of(path, value.shape, trained) for path, value in values.items()}
    first, second = ({path: np.zeros(value.shape) for path, value in values.items()} for _ in range(2))
    norms = []
    leaves, structure = jax.tree.flatten(model)
    assert len(leaves) == len(values)
    for step in range(steps):
        current = jax.tree.unflatten(structure, [value.astype(np.float32) for value in values.values()])
        slopes = numpy_values(full_gradient(current, batches.batch(step)))
        slopes = {path: slope * masks[path] for path, slope in slopes.items()}
        norms.append(float(np.sqrt(sum((slope.astype(np.float64) ** 2).sum() for slope in slopes.values()))))
        clip = min(1.0, 0.5 / norms[-1])
        for path, value in values.items():
            first[path] = 0.8 * first[path] + 0.2 * clip * slopes[path]
            second[path] = 0.9 * second[path] + 0.1 * (clip * slopes[path]) ** 2
            direction = first[path] / (1 - 0.8 ** (step + 1))
            scale = np.sqrt(second[path] / (1 - 0.9 ** (step + 1))) + 1e-4
            decay = 0.0 if "norm" in path or "bias" in path else 0.1
            values[path] = value - RATES[step] * masks[path] * (direction / scale + decay * value)
    return values, norms


@pytest.mark.parametrize(
    ("name", "trained"), [("untied", "full"), ("tied", "lora"), ("untied", "tool_rows"), ("biased", "lora")]
)
def test_three_steps(name: str, trained: str) -> None:
    config, batches = CONFIGS[name], packed()
    expected, expected_norms = by_numpy(config, trained, 3)
    assert min(expected_norms) > 0.5  # so that clipping matters
    before = numpy_values(random_model(config))
    optimizer = make_optimizer(OPTIMIZER, 4)
    state, step = initial_state(random_model(config), optimizer, trained), make_train_step(optimizer)
    for number in range(3):
        state, metrics = step(state, batches.batch(number))
        assert float(metrics["grad_norm"]) == pytest.approx(expected_norms[number], rel=1e-4)
    changed = set()
    for path, found in numpy_values(state.model).items():
        mask = mask_of(path, found.shape, trained)
        np.testing.assert_array_equal(found[~mask], before[path][~mask], err_msg=path)  # bit for bit
        moved = expected[path] - before[path]
        error = np.linalg.norm((found - expected[path])[mask]) / max(np.linalg.norm(moved), 1e-30)
        assert error <= 2e-4 or not mask.any(), f"{path}: {error:.1e}"
        changed |= {path} if mask.any() and (found != before[path])[mask].mean() > 0.99 else set()
    rows = {path for path in MATRICES if path in before}
    factors = {path for path in before if "_lora_" in path}
    assert len(factors) == 6
    assert changed == {"full": before.keys(), "lora": rows | factors, "tool_rows": rows}[trained]


def test_optimizer_state_holds_what_is_trained() -> None:
    """Two moments of four bytes each, and the step counts of AdamW and its schedule."""
    projections = L * (D * N * H + 2 * D * K * H + N * H * D + 3 * D * F)
    factors = L * R * ((D + N * H) + (N * H + D) + (F + D))
    full = 2 * 256 * D + projections + factors + (2 * L + 1) * D
    block = 128 * D  # of 9 tools: rows up to the next multiple of 128
    expected = {
        ("untied", "full"): (full, full),
        ("untied", "lora"): (factors + 2 * block, factors + 2 * T * D),
        ("untied", "tool_rows"): (2 * block, 2 * T * D),
        ("tied", "full"): (full - 256 * D, full - 256 * D),
        ("tied", "lora"): (factors + block, factors + T * D),
        ("tied", "tool_rows"): (block, T * D),
        ("biased", "tool_rows"): (2 * block + 128, 2 * T * D + T),
    }
    optimizer = make_optimizer(OPTIMIZER, 4)
    for (name, trained), (moments, count) in expected.items():
        model = abstract_model(lambda name=name: build_model(CONFIGS[name]))
        state = abstract_state(model, optimizer, trained, step=2)
        leaves = jax.tree.leaves(state.optimizer_state)
        assert sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) == 2 * moments * 4 + 2 * 4, (name, trained)
        assert trained_count(model, trained) == count, (name, trained)
        assert int(state.step) == 2


def products(compiled: Any) -> list[int]:
    """Sizes of the results of all matrix products in the program."""
    shapes = re.findall(r"= f32\[([\d,]+)\]\S* dot\(", compiled.as_text())
    return [math.prod(int(size) for size in shape.split(",")) for shape in shapes]


def test_frozen_weights_have_no_gradient() -> None:
    """In the compiled step: products with the size of a weight are there in full training, and gone otherwise.

    Activations have the size of 128 tokens, or of 32 supervised positions, times something that weights haven't. The
    whole state, frozen or not, stays in its memory.
    """
    d, n, h, f, rows, rank = 11, 3, 14, 17, 384, 2
    config = dataclasses.replace(
        CONFIG,
        hidden_size=d,
        num_attention_heads=n,
        num_key_value_heads=1,
        head_dim=h,
        intermediate_size=f,
        num_tools=130,
        padded_vocab_size=rows,
    )
    lora = lora_config(config, rank=rank, alpha=1.0, projections=("query", "down"))
    sizes = {
        "query, output": d * n * h,
        "key, value": d * h,
        "gate, up, down": d * f,
        "head": rows * d,
        "rows": 256 * d,
        "factors of query": n * h * rank,
        "factors of down": f * rank,
    }
    none, optimizer = dict.fromkeys(sizes, 0), make_optimizer(OPTIMIZER, 4)
    for trained, expected in {
        "full": none | {"query, output": 2, "key, value": 2, "gate, up, down": 3, "head": 1},
        "lora": none | {"rows": 1, "factors of query": 1, "factors of down": 1},
        "tool_rows": none | {"rows": 1},
    }.items():
        state = initial_state(random_model(lora if trained == "lora" else config), optimizer, trained)
        compiled = make_train_step(optimizer).lower(state, packed().batch(0)).compile()
        found = products(compiled)
        assert len(found) > 10
        assert {name: found.count(size) for name, size in sizes.items()} == expected, trained
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
        assert compiled.memory_analysis().alias_size_in_bytes == size


@pytest.mark.parametrize("name", CONFIGS)
def test_moments_of_factors_when_the_first_tool_comes_and_the_last_goes(name: str) -> None:
    optimizer = optax.adam(1e-3)
    bare = without_tool_rows(random_model(CONFIGS[name]))
    for before, after in ((bare, grown := with_name_rows(bare, [[1], [2, 3]])), (grown, bare)):
        state = jax.tree.map(lambda leaf: leaf + 7, initial_state(before, optimizer, "lora").optimizer_state)
        found = resized_optimizer_state(state, before.config, after)
        wanted = jax.eval_shape(optimizer.init, trained_part(after, "lora"))
        assert jax.tree.structure(found) == jax.tree.structure(wanted)
        for (path, leaf), shape in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
            assert leaf.shape == shape.shape and leaf.dtype == shape.dtype
            is_rows = any(name in jax.tree_util.keystr(path) for name in MATRICES)
            assert (np.asarray(leaf) == (0 if is_rows else 7)).all()


def test_parts_that_are_not_there() -> None:
    plain = random_model()
    with pytest.raises(ValueError, match="tool_rows are to be trained, but the model has no tools"):
        trained_part(plain, "tool_rows")
    with pytest.raises(ValueError, match="the model has none; with_lora adds them"):
        trained_part(plain, "lora")
    with pytest.raises(ValueError, match="trained part is 'head', expected one of full, lora, tool_rows"):
        trained_part(plain, "head")
    without_tools = random_model(lora_config(CONFIG, rank=2, alpha=1.0, projections=("key",)))
    part = trained_part(without_tools, "lora")
    assert isinstance(part, dict) and sorted(part) == ["blocks.key_lora_dr", "blocks.key_lora_rkh"]
