"""Norms against closed forms in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from jaxtool.models.norms import layer_norm, rms_norm

NORMED = np.random.default_rng(0).standard_normal((4, 16)) * [[1e-3], [1], [50], [1e4]] + [[0], [1], [9], [-1e4]]
SCALE, BIAS = np.random.default_rng(1).standard_normal((2, 16))


def test_rms_norm() -> None:
    expected = NORMED / np.sqrt((NORMED**2).mean(axis=-1, keepdims=True) + 1e-5) * SCALE
    found = rms_norm(jnp.asarray(NORMED, jnp.float32), jnp.asarray(SCALE, jnp.float32), 1e-5)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_layer_norm() -> None:
    centred = NORMED - NORMED.mean(axis=-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * SCALE + BIAS
    x, scale, bias = (jnp.asarray(array, jnp.float32) for array in (NORMED, SCALE, BIAS))
    np.testing.assert_allclose(layer_norm(x, scale, bias, 1e-5), expected, rtol=1e-5, atol=2e-6)
    assert layer_norm(x.astype(jnp.bfloat16), scale, bias, 1e-5).dtype == jnp.bfloat16
