"""Properties that any port must have, checked on tiny random models of all of them. Parity is in the torch files."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.models import LanguageModel, LanguageModelConfig, padded_rows, parameters
from tests.tiny_models import CONFIGS, log_probs, logits, positions_of, random_model

V = 100


@pytest.fixture(scope="module", params=CONFIGS)
def config(request: pytest.FixtureRequest) -> LanguageModelConfig:
    return CONFIGS[request.param]


@functools.cache
def model_of(config: LanguageModelConfig) -> Any:
    return random_model(config)


@pytest.fixture
def model(config: LanguageModelConfig) -> Any:
    return model_of(config)


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(V, size=shape)


def test_padded_and_packed_samples_equal_samples_alone(model: LanguageModel) -> None:
    """Rows of (padding before, lengths of samples, padding behind)."""
    rows = [(0, [6, 9, 3], 2), (0, [11], 9), (9, [11], 0), (4, [3, 11], 2)]
    tokens, segments, alone = random_tokens(4, 20), np.zeros((4, 20), int), np.zeros((8, 11), int)
    places = []
    for row, (start, lengths, _) in enumerate(rows):
        for number, length in enumerate(lengths):
            place = (row, slice(start, start + length))
            segments[place] = number + 1
            places.append((*place, len(places)))
            alone[len(places) - 1, :length] = tokens[place]
            start += length
    found, samples = log_probs(model, tokens, segments), log_probs(model, alone)
    # Behind a sample stand zeros; that these can't matter is shown by the test of causality.
    for row, place, sample in places:
        expected = samples[sample, : place.stop - place.start]
        assert np.abs(found[row, place] - expected).max() <= 1e-5, (row, place)


def test_what_stands_in_padding_does_not_matter(model: LanguageModel) -> None:
    tokens, segments = random_tokens(2, 12), np.ones((2, 12), int)
    segments[0, 7:], segments[1, :4] = 0, 0
    other = np.where(segments, tokens, (tokens + 37) % V)
    first, second = log_probs(model, tokens, segments), log_probs(model, other, segments)
    np.testing.assert_array_equal(first[segments > 0], second[segments > 0])
    # No softmax of padding is empty: a NaN there would reach every gradient.
    assert np.isfinite(first).all()


@pytest.mark.parametrize("place", [0, 5, 11])
def test_causality(model: LanguageModel, place: int) -> None:
    tokens = random_tokens(2, 12)
    other = tokens.copy()
    other[:, place] = (other[:, place] + 1) % V
    first, second = log_probs(model, tokens), log_probs(model, other)
    np.testing.assert_array_equal(first[:, :place], second[:, :place])
    assert (np.abs(first - second).max(axis=-1)[:, place:] > 1e-3).all()


@pytest.mark.parametrize("config", ["qwen3", "gptj"], indirect=True)  # Llama's block is a part of Qwen3's
def test_kinds_of_remat_give_one_gradient(config: LanguageModelConfig) -> None:
    tokens = jnp.asarray(random_tokens(2, 12))
    positions, segments = jnp.broadcast_to(jnp.arange(12), (2, 12)), jnp.ones((2, 12), int)

    @jax.jit
    @jax.grad
    def gradient(model: LanguageModel) -> jax.Array:
        log_probs = jax.nn.log_softmax(model.logits(model(tokens, positions, segments)))
        return -jnp.mean(jnp.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], axis=-1))

    full, elementwise = (
        parameters(gradient(random_model(dataclasses.replace(config, remat=remat))))
        for remat in ("full", "elementwise")
    )
    for path, leaf in full.items():
        scale = float(jnp.linalg.norm(leaf))
        assert scale > 0, path
        assert float(jnp.linalg.norm(leaf - elementwise[path])) <= 1e-6 * scale, path


def test_bfloat16_compute_is_close_to_float32(config: LanguageModelConfig, model: LanguageModel) -> None:
    """Root mean square error of the log-probabilities below 4 % of their spread, near and far alike.

    8 bits of mantissa are 0.4 % for each rounding, and a few dozen roundings add up.
    """
    half = random_model(dataclasses.replace(config, compute_dtype="bfloat16"))
    # Long enough that rotary angles in bfloat16, where position 257 is 256, would show.
    tokens = random_tokens(1, 400)
    exact, found = log_probs(model, tokens), log_probs(half, tokens)
    error = np.sqrt(((found - exact) ** 2).mean(axis=-1))[0] / exact.std()
    assert 1e-3 < error[:200].mean() < 0.04 and 1e-3 < error[200:].mean() < 0.04, error


def test_bfloat16_parameters(config: LanguageModelConfig) -> None:
    model = random_model(dataclasses.replace(config, param_dtype="bfloat16", compute_dtype="bfloat16"))
    assert {leaf.dtype for leaf in parameters(model).values()} == {jnp.dtype(jnp.bfloat16)}
    assert logits(model, random_tokens(1, 3)).dtype == np.float32


def test_columns_without_an_id_have_no_probability(config: LanguageModelConfig) -> None:
    """Text rows that the tokenizer doesn't know, and padding behind the last tool."""
    model = random_model(dataclasses.replace(config, text_tokens=93, num_tools=7))
    assert model.config.rows == 128 == model.embedding_vd.shape[0]
    real = np.r_[0:93, 100:107]
    masked = np.setdiff1d(np.arange(128), real)
    tokens = random_tokens(1, 5)
    found = logits(model, tokens)
    assert found.shape == (1, 5, 128)
    assert np.isneginf(found[..., masked]).all() and np.isfinite(found[..., real]).all()
    # These rows are as large as any other: only the mask keeps them out.
    assert np.abs(np.asarray(model.head_rows())[masked]).max(axis=-1).min() > 0.2
    probabilities = np.exp(log_probs(model, tokens))
    assert (probabilities[..., masked] == 0).all()
    np.testing.assert_allclose(probabilities[..., real].sum(axis=-1), 1, rtol=1e-9)


def test_logits_are_products_with_the_tool_head(config: LanguageModelConfig) -> None:
    model = random_model(dataclasses.replace(config, num_tools=7))
    tokens = random_tokens(1, 5)
    ones = np.ones_like(tokens)
    hidden = jax.jit(lambda model, *batch: model(*batch))(model, tokens, positions_of(ones), ones)
    rows_td, bias_t = model.tool_head()
    assert rows_td.shape == (7, 32) and (bias_t is not None) == config.head_bias
    expected = np.einsum("bsd,td->bst", np.asarray(hidden, np.float64), np.asarray(rows_td, np.float64))
    if bias_t is not None:
        assert np.abs(bias_t).max() > 0.1
        expected = expected + np.asarray(bias_t)
    np.testing.assert_allclose(logits(model, tokens)[..., 100:107], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remat": True}, "remat is True, expected one of elementwise, full"),
        ({"remat": "none"}, "remat is 'none'"),
        ({"head_dim": 7}, "head_dim is 7, rotary embedding needs an even number"),
        ({"text_tokens": 101}, "text_tokens is 101, expected 0 to vocab_size 100"),
        ({"text_tokens": -1}, "text_tokens is -1"),
        ({"num_tools": 29, "padded_vocab_size": 128}, "padded_vocab_size 128 is below vocab_size"),
        ({"padded_vocab_size": 99}, "padded_vocab_size 99 is below vocab_size"),
        ({"lora_rank": 4}, "lora_rank is 4 with 0 projections"),
        ({"lora_projections": ("query",)}, "lora_rank is 0 with 1 projections"),
        ({"lora_rank": -1, "lora_projections": ("query",)}, "lora_rank is -1"),
        ({"lora_rank": 4, "lora_projections": ("query", "router")}, "lora_projections has router, .* has query, key"),
    ],
)
def test_config_errors(config: LanguageModelConfig, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
    ("vocab_size", "tools", "multiple", "rows"),
    [
        (49_153, 0, 128, 49_153),
        (128, 0, 128, 128),
        (100, 28, 128, 128),
        (100, 29, 128, 256),
        (128_256, 46_985, 128, 175_360),
        (128_256, 46_985, 1024, 176_128),
    ],
)
def test_padded_rows(config: LanguageModelConfig, vocab_size: int, tools: int, multiple: int, rows: int) -> None:
    assert padded_rows(vocab_size, tools, multiple) == rows
    if multiple == 128:
        assert dataclasses.replace(config, vocab_size=vocab_size, num_tools=tools).rows == rows
