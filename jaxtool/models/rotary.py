"""Rotary position embedding: frequencies, plain or rescaled (Llama 3.1), and both ways to pair dimensions.

Frequencies are computed once on the host and angles in float32: bfloat16 would turn position 257 into 256, and at
position 130,000 one unit in the last place of a frequency near 1 already turns the angle by 0.008.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3.1's rescaling of the rotary frequencies (Hugging Face `rope_type` "llama3").

    Wavelengths above `original_max_position_embeddings / low_freq_factor` positions are stretched by `factor`, those
    below `original_max_position_embeddings / high_freq_factor` stay, and between them the two are blended.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __post_init__(self) -> None:
        if self.factor < 1:
            raise ValueError(f"rope scaling: factor is {self.factor}, expected at least 1")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"rope scaling: low_freq_factor {self.low_freq_factor} and high_freq_factor {self.high_freq_factor}, "
                "expected 0 < low < high"
            )
        if self.original_max_position_embeddings < 1:
            raise ValueError(
                "rope scaling: original_max_position_embeddings is "
                f"{self.original_max_position_embeddings}, expected a positive number"
            )


def rotary_frequencies(size: int, theta: float, scaling: RopeScaling | None = None) -> np.ndarray:
    """Frequencies theta^(-2i / size) in radians per position, float32 [size / 2].

    Each step is rounded to float32 as in transformers: checkpoints were trained with those values, and far out every
    bit counts. Only the power may differ: here it is correctly rounded, torch's is one unit in the last place off for
    about 1 % of all sizes and bases (of the published models Qwen3, entry 37: 5e-6 radians at position 130,000).
    """
    exponent = np.arange(0, size, 2, dtype=np.float32) / np.float32(size)
    power = np.power(np.float64(np.float32(theta)), exponent.astype(np.float64)).astype(np.float32)
    frequency = np.float32(1) / power
    if scaling is None:
        return frequency
    # torch divides a number by a tensor as reciprocal and product, two roundings.
    one, factor = np.float32(1), np.float32(scaling.factor)
    original = scaling.original_max_position_embeddings
    wavelength = one / frequency * np.float32(2 * math.pi)
    share = (one / wavelength * np.float32(original) - np.float32(scaling.low_freq_factor)) / np.float32(
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (one - share) * frequency / factor + share * frequency
    scaled = np.where(wavelength > original / scaling.low_freq_factor, frequency / factor, blended)
    return np.where(wavelength < original / scaling.high_freq_factor, frequency, scaled).astype(np.float32)


def rotary_tables(positions_bs: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine [B, S, R] of the rotary angles for R frequencies, in float32."""
    angle = positions_bs[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def rotate_half_split(x_bsnh: jax.Array, cos_bsr: jax.Array, sin_bsr: jax.Array) -> jax.Array:
    """Rotates the pairs (i, i + H/2) of each head, as Llama in Hugging Face's row order; in float32, dtype kept."""
    first, second = jnp.split(x_bsnh.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos_bsr[:, :, None, :], sin_bsr[:, :, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_bsnh.dtype)


def rotate_interleaved(x_bsnh: jax.Array, cos_bsr: jax.Array, sin_bsr: jax.Array) -> jax.Array:
    """Rotates the pairs (2i, 2i + 1) of the first 2R dimensions of each head, as GPT-J; the rest passes through."""
    rotated = 2 * cos_bsr.shape[-1]
    turned, rest = x_bsnh[..., :rotated].astype(jnp.float32), x_bsnh[..., rotated:]
    # One product with a swapped copy instead of strided halves: strides of 2 in the last axis are slow everywhere.
    even_odd = turned.reshape(*turned.shape[:-1], -1, 2)
    swapped = jnp.stack([-even_odd[..., 1], even_odd[..., 0]], axis=-1).reshape(turned.shape)
    cos, sin = (jnp.repeat(table, 2, axis=-1)[:, :, None, :] for table in (cos_bsr, sin_bsr))
    return jnp.concatenate([(turned * cos + swapped * sin).astype(x_bsnh.dtype), rest], axis=-1)
