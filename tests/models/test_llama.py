"""Properties that any Llama must have, checked on a tiny random one. Parity with torch is in the other files."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.models import Llama, padded_rows, parameters, with_parameters
from jaxtool.models.llama import apply_rotary, attention_mask, rms_norm, rotary_tables
from tests.tiny_models import CONFIG, log_probs, logits, random_model


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_model()


def changed(**changes: Any) -> Llama:
    return random_model(dataclasses.replace(CONFIG, **changes))


def random_tokens(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(CONFIG.vocab_size, size=shape)


def test_packed_samples_equal_samples_alone(model: Llama) -> None:
    lengths = [[6, 9, 3], [11, 8]]
    samples = [[random_tokens(n, seed=10 * row + n) for n in ns] for row, ns in enumerate(lengths)]
    tokens, segments = np.zeros((2, 20), int), np.zeros((2, 20), int)
    for row, members in enumerate(samples):
        flat = np.concatenate(members)
        tokens[row, : len(flat)] = flat
        segments[row, : len(flat)] = np.repeat(np.arange(len(members)) + 1, [len(m) for m in members])
    packed = log_probs(model, tokens, segments)
    for row, members in enumerate(samples):
        start = 0
        for sample in members:
            alone = log_probs(model, sample[None])[0]
            assert np.abs(packed[row, start : start + len(sample)] - alone).max() <= 1e-5
            start += len(sample)


def test_what_stands_in_padding_does_not_matter(model: Llama) -> None:
    tokens, segments = random_tokens(2, 12), np.ones((2, 12), int)
    segments[0, 7:], segments[1, 4:] = 0, 0
    other = np.where(segments, tokens, (tokens + 37) % CONFIG.vocab_size)
    first, second = log_probs(model, tokens, segments), log_probs(model, other, segments)
    np.testing.assert_array_equal(first[segments > 0], second[segments > 0])
    # No softmax of padding is empty: a NaN there would reach every gradient.
    assert np.isfinite(first).all()


@pytest.mark.parametrize("place", [0, 5, 11])
def test_causality(model: Llama, place: int) -> None:
    tokens = random_tokens(1, 12)
    other = tokens.copy()
    other[0, place] = (other[0, place] + 1) % CONFIG.vocab_size
    first, second = log_probs(model, tokens)[0], log_probs(model, other)[0]
    np.testing.assert_array_equal(first[:place], second[:place])
    assert (np.abs(first - second).max(axis=-1)[place:] > 1e-3).all()


def test_attention_mask() -> None:
    segments = [0, 1, 1, 2, 2, 2, 0, 0]
    expected = [
        [s == t or (s >= t and segments[s] == segments[t] != 0) for t in range(len(segments))]
        for s in range(len(segments))
    ]
    np.testing.assert_array_equal(attention_mask(jnp.array([segments]))[0], expected)


def test_kinds_of_remat_give_one_gradient() -> None:
    tokens = jnp.asarray(random_tokens(2, 12))
    positions, segments = jnp.broadcast_to(jnp.arange(12), (2, 12)), jnp.ones((2, 12), int)

    def loss(model: Llama) -> jax.Array:
        log_probs = jax.nn.log_softmax(model.logits(model(tokens, positions, segments)))
        return -jnp.mean(jnp.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], axis=-1))

    full, elementwise = (jax.jit(jax.grad(loss))(changed(remat=remat)) for remat in ("full", "elementwise"))
    others = parameters(elementwise)
    for path, leaf in parameters(full).items():
        scale = float(jnp.linalg.norm(leaf))
        assert scale > 0, path
        assert float(jnp.linalg.norm(leaf - others[path])) <= 1e-6 * scale, path


def test_bfloat16_compute_is_close_to_float32(model: Llama) -> None:
    half = with_parameters(changed(compute_dtype="bfloat16"), parameters(model))
    # Long enough that rotary angles in bfloat16, where position 257 is 256, would show.
    tokens = random_tokens(1, 400)
    exact, found = log_probs(model, tokens), log_probs(half, tokens)
    error = np.sqrt(((found - exact) ** 2).mean(axis=-1))[0] / exact.std()
    # 8 bits of mantissa are 0.4 % a rounding, and a few roundings add up.
    assert 1e-3 < error[:200].mean() < 0.04 and 1e-3 < error[200:].mean() < 0.04, error


def test_bfloat16_parameters() -> None:
    model = changed(param_dtype="bfloat16", compute_dtype="bfloat16")
    assert {leaf.dtype for leaf in parameters(model).values()} == {jnp.dtype(jnp.bfloat16)}
    assert logits(model, random_tokens(1, 3)).dtype == np.float32


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
def test_rotary_angles_at_far_positions(theta: float) -> None:
    """The published closed form in float64: cos and sin of position x theta^(-2i/H)."""
    size = 64
    positions = np.array([[0, 1, 257, 8_191, 8_193, 20_001, 131_071]])
    cos, sin = rotary_tables(jnp.asarray(positions), size, theta)
    assert cos.dtype == sin.dtype == jnp.float32 and cos.shape == sin.shape == (1, 7, size // 2)
    angles = positions[..., None] * np.float64(theta) ** (-2 * np.arange(size // 2) / size)
    # An angle of a radians has float32 steps of about a x 2^-23; frequency and product take a few of them.
    bound = 4 * angles * 2.0**-23 + 1e-6
    assert (np.abs(cos - np.cos(angles)) <= bound).all()
    assert (np.abs(sin - np.sin(angles)) <= bound).all()


def test_rotation_pairs_are_half_split() -> None:
    """Entry i and entry i + H/2 are the real and imaginary part of a number times exp(i angle)."""
    x = np.random.default_rng(0).standard_normal((1, 3, 2, 8)).astype(np.float32)
    positions = np.array([[3, 500, 9_000]])
    tables = rotary_tables(jnp.asarray(positions), 8, 10_000.0)
    turn = np.exp(1j * positions[..., None] * 10_000.0 ** (-np.arange(4) / 4))[:, :, None]
    turned = (x[..., :4] + 1j * x[..., 4:]) * turn
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(apply_rotary(jnp.asarray(x), *tables), expected, atol=5e-3)
    np.testing.assert_allclose(apply_rotary(jnp.asarray(x), *tables)[:, :2], expected[:, :2], atol=3e-4)
    assert apply_rotary(jnp.asarray(x, jnp.bfloat16), *tables).dtype == jnp.bfloat16


def test_rms_norm() -> None:
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((4, 16)) * [[1e-3], [1], [50], [1e4]], rng.standard_normal(16)
    expected = x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5) * scale
    found = rms_norm(jnp.asarray(x, jnp.float32), jnp.asarray(scale, jnp.float32), 1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("tied", [False, True])
def test_padded_columns_have_no_probability(tied: bool) -> None:
    model = changed(num_tools=7, tie_word_embeddings=tied)
    assert model.config.rows == 128 == model.embedding_vd.shape[0]
    tokens = random_tokens(1, 5)
    found = logits(model, tokens)
    assert found.shape == (1, 5, 128)
    assert np.isneginf(found[..., 107:]).all() and np.isfinite(found[..., :107]).all()
    # These rows are as large as any other: only the mask keeps them out.
    assert np.abs(np.asarray(model.head_rows())[107:]).max() > 0.5
    probabilities = np.exp(log_probs(model, tokens))
    assert (probabilities[..., 107:] == 0).all()
    np.testing.assert_allclose(probabilities[..., :107].sum(axis=-1), 1, rtol=1e-9)


def test_tied_head_is_the_embedding() -> None:
    tied, untied = changed(tie_word_embeddings=True), random_model()
    assert parameters(untied).keys() - parameters(tied).keys() == {"head_vd"}
    assert tied.head_rows() is tied.embedding_vd[...]
    assert untied.head_rows() is untied.head_vd[...]
    # Equal to an untied model whose head is a copy, and different from one with another head.
    values = parameters(tied) | {"head_vd": tied.embedding_vd[...]}
    tokens = random_tokens(1, 5)
    found = logits(tied, tokens)
    np.testing.assert_allclose(found, logits(with_parameters(untied, values), tokens), atol=1e-5)
    assert np.abs(found - logits(untied, tokens)).max() > 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"remat": True}, "remat is True, expected one of elementwise, full"),
        ({"remat": "none"}, "remat is 'none'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim is 7, rotary embedding needs an even number"),
        ({"num_tools": 29, "padded_vocab_size": 128}, "padded_vocab_size 128 is below vocab_size"),
        ({"padded_vocab_size": 99}, "padded_vocab_size 99 is below vocab_size"),
    ],
)
def test_config_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **changes)


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
def test_padded_rows(vocab_size: int, tools: int, multiple: int, rows: int) -> None:
    assert padded_rows(vocab_size, tools, multiple) == rows
    if multiple == 128:
        assert dataclasses.replace(CONFIG, vocab_size=vocab_size, num_tools=tools).rows == rows
