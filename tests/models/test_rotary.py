"""Rotary frequencies, angles and both pairings, against closed forms in float64 and against torch."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.models import RopeScaling
from jaxtool.models.rotary import rotary_frequencies, rotary_tables, rotate_half_split, rotate_interleaved

POSITIONS = np.array([[0, 1, 257, 511, 2_047, 8_191, 8_193, 9_000, 20_001, 65_536, 130_000, 131_071]])
ULP = 2.0**-23

# (rotated dimensions, base, scaling) of the published models.
LLAMA_3_1 = RopeScaling(factor=8, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
LLAMA_3_2 = RopeScaling(factor=32, low_freq_factor=1, high_freq_factor=4, original_max_position_embeddings=8192)
PUBLISHED = {
    "GPT-J": (64, 10_000.0, None),
    "Llama 2": (128, 10_000.0, None),
    "Llama 3": (128, 500_000.0, None),
    "Llama 3.1": (128, 500_000.0, LLAMA_3_1),
    "Llama 3.2 1B": (64, 500_000.0, LLAMA_3_2),
    "Llama 3.2 3B": (128, 500_000.0, LLAMA_3_2),
    "Qwen3": (128, 1_000_000.0, None),
    "SmolLM2": (64, 100_000.0, None),
}
published = pytest.mark.parametrize(("size", "theta", "scaling"), list(PUBLISHED.values()), ids=list(PUBLISHED))


def exact_frequencies(size: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """The published definition in float64."""
    plain = np.float64(theta) ** (-2 * np.arange(size // 2) / size)
    if scaling is None:
        return plain
    found = []
    for frequency in plain:
        # Full turns within the original context.
        turns = scaling.original_max_position_embeddings * frequency / (2 * np.pi)
        if turns > scaling.high_freq_factor:
            found.append(frequency)
        elif turns < scaling.low_freq_factor:
            found.append(frequency / scaling.factor)
        else:
            share = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
            found.append((1 - share) * frequency / scaling.factor + share * frequency)
    return np.array(found)


@published
def test_frequencies_against_the_closed_form(size: int, theta: float, scaling: RopeScaling | None) -> None:
    found, expected = rotary_frequencies(size, theta, scaling), exact_frequencies(size, theta, scaling)
    assert found.dtype == np.float32 and found.shape == (size // 2,)
    # Rounding the exponent multiplies its error by log(theta) of at most 14; the blend adds a few roundings.
    np.testing.assert_allclose(found, expected, rtol=8 * ULP)


def test_all_three_cases_of_the_scaling_occur() -> None:
    ratio = rotary_frequencies(128, 500_000.0, LLAMA_3_1) / rotary_frequencies(128, 500_000.0)
    # In the published model 29 frequencies stay, 6 are blended and 29 are divided by 8.
    assert ((ratio == 1).sum(), ((ratio < 1) & (ratio > 1 / 8)).sum(), (ratio == 1 / 8).sum()) == (29, 6, 29)
    assert (np.diff(ratio) <= 0).all()


@published
def test_angles_at_far_positions(size: int, theta: float, scaling: RopeScaling | None) -> None:
    """cos and sin are exact to one rounding for the float32 angle, and that is off by the frequency's rounding only."""
    frequencies = rotary_frequencies(size, theta, scaling)
    cos, sin = rotary_tables(jnp.asarray(POSITIONS), frequencies)
    assert cos.dtype == sin.dtype == jnp.float32 and cos.shape == sin.shape == (1, POSITIONS.size, size // 2)
    angles = (POSITIONS[..., None].astype(np.float32) * frequencies).astype(np.float64)
    assert np.abs(cos - np.cos(angles)).max() <= ULP and np.abs(sin - np.sin(angles)).max() <= ULP
    # The whole error against float64: about 0.01 at position 131,071, from the frequencies' rounding, as in torch.
    exact = POSITIONS[..., None] * exact_frequencies(size, theta, scaling)
    bound = 8 * ULP * exact + ULP
    assert (np.abs(cos - np.cos(exact)) <= bound).all() and (np.abs(sin - np.sin(exact)) <= bound).all()
    assert np.abs(cos - np.cos(exact)).max() <= 0.02


def assert_equal_to_transformers(size: int, theta: float, scaling: RopeScaling | None) -> None:
    """Equal to the last bit wherever torch's power is correctly rounded, as ours is; elsewhere one unit off."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    rope = {"rope_theta": theta, "rope_type": "default"}
    if scaling is not None:
        rope |= {"rope_type": "llama3", **vars(scaling)}
    config = transformers.LlamaConfig(hidden_size=2 * size, num_attention_heads=2, rope_parameters=rope)
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config).inv_freq.numpy()
    ours = rotary_frequencies(size, theta, scaling)
    exponent = torch.arange(0, size, 2, dtype=torch.float32) / size
    rounded = (theta**exponent).numpy() == (np.float64(theta) ** exponent.double().numpy()).astype(np.float32)
    assert rounded.mean() > 0.9
    np.testing.assert_array_equal(theirs[rounded], ours[rounded])
    np.testing.assert_allclose(theirs, ours, rtol=4 * ULP)


@pytest.mark.torch
@published
def test_frequencies_against_transformers(size: int, theta: float, scaling: RopeScaling | None) -> None:
    assert_equal_to_transformers(size, theta, scaling)


@pytest.mark.torch
@pytest.mark.parametrize("size", [8, 22, 96])
@pytest.mark.parametrize(("factor", "low", "high"), [(8.0, 1.0, 4.0), (3.3, 0.7, 2.1), (32.0, 1.5, 1.6)])
def test_blended_frequencies_against_transformers(size: int, factor: float, low: float, high: float) -> None:
    scaling = RopeScaling(
        factor=factor, low_freq_factor=low, high_freq_factor=high, original_max_position_embeddings=777
    )
    assert_equal_to_transformers(size, 10_000.0, scaling)


def turned(pairs: np.ndarray, theta: float) -> np.ndarray:
    """Complex numbers [1, S, N, R] times exp(i angle), in float64."""
    count = pairs.shape[-1]
    return pairs * np.exp(1j * POSITIONS[..., None] * theta ** (-np.arange(count) / count))[:, :, None]


def random_heads(size: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((1, POSITIONS.size, 2, size)).astype(np.float32)


def test_rotation_pairs_are_half_split() -> None:
    """Entry i and entry i + H/2 are the real and imaginary part of a number."""
    x = random_heads(8)
    tables = rotary_tables(jnp.asarray(POSITIONS), rotary_frequencies(8, 10_000.0))
    expected = turned(x[..., :4] + 1j * x[..., 4:], 10_000.0)
    found = np.asarray(rotate_half_split(jnp.asarray(x), *tables))
    assert_rotated(found, np.concatenate([expected.real, expected.imag], axis=-1))
    assert rotate_half_split(jnp.asarray(x, jnp.bfloat16), *tables).dtype == jnp.bfloat16


@pytest.mark.parametrize("rotated", [6, 10])
def test_rotation_pairs_are_interleaved(rotated: int) -> None:
    """Entry 2i and entry 2i + 1 are the real and imaginary part of a number; behind `rotated` nothing changes."""
    x = random_heads(10)
    tables = rotary_tables(jnp.asarray(POSITIONS), rotary_frequencies(rotated, 10_000.0))
    expected = turned(x[..., 0:rotated:2] + 1j * x[..., 1:rotated:2], 10_000.0)
    found = np.asarray(rotate_interleaved(jnp.asarray(x), *tables))
    assert_rotated(found[..., 0:rotated:2], expected.real)
    assert_rotated(found[..., 1:rotated:2], expected.imag)
    np.testing.assert_array_equal(found[..., rotated:], x[..., rotated:])
    assert rotate_interleaved(jnp.asarray(x, jnp.bfloat16), *tables).dtype == jnp.bfloat16


def assert_rotated(found: np.ndarray, expected: np.ndarray) -> None:
    """Within what the float32 angle of each position allows."""
    bound = (1e-6 + 8 * ULP * POSITIONS[0])[:, None, None] * 4
    assert (np.abs(found[0] - expected[0]) <= bound).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"factor": 0.5}, "factor is 0.5, expected at least 1"),
        ({"low_freq_factor": 4.0}, r"low_freq_factor 4.0 and high_freq_factor 4.*expected 0 < low < high"),
        ({"low_freq_factor": 0.0}, "expected 0 < low < high"),
        ({"original_max_position_embeddings": 0}, "original_max_position_embeddings is 0"),
    ],
)
def test_scaling_errors(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RopeScaling(**(vars(LLAMA_3_1) | change))
