"""The mask, attention over grouped heads and the norms, against loops and closed forms in float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.models.attention import SHARED_PREFIX, attend, attention_mask, layer_norm, rms_norm
from jaxtool.parallel import AxisRules


def test_attention_mask() -> None:
    segments = [0, 1, 1, 2, 2, 2, 0, 0]
    expected = [
        [s == t or (s >= t and segments[s] == segments[t] != 0) for t in range(len(segments))]
        for s in range(len(segments))
    ]
    np.testing.assert_array_equal(attention_mask(jnp.array([segments]))[0], expected)


def test_a_shared_prefix_is_seen_by_the_segments_behind_it() -> None:
    segments = [3, SHARED_PREFIX, SHARED_PREFIX, 1, 1, 2, 0, 2]
    prefix = {1, 2}
    expected = [
        [s == t or (s > t and segments[s] != 0 and (segments[s] == segments[t] or t in prefix)) for t in range(8)]
        for s in range(8)
    ]
    np.testing.assert_array_equal(attention_mask(jnp.array([segments]))[0], expected)


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_query_heads_share_key_value_heads(kv_heads: int) -> None:
    """Head n of 6 attends with the keys and values of head n // (6 / K); every query in a loop of its own."""
    rng = np.random.default_rng(0)
    size, length, heads = 4, 5, 6
    q = rng.standard_normal((2, length, heads, size))
    k, v = rng.standard_normal((2, 2, length, kv_heads, size))
    segments = np.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 1]])
    mask = np.asarray(attention_mask(jnp.asarray(segments)))
    expected = np.empty_like(q)
    for b, s, n in np.ndindex(2, length, heads):
        shared = n // (heads // kv_heads)
        weights = np.exp([q[b, s, n] @ k[b, t, shared] / np.sqrt(size) for t in range(length)]) * mask[b, s]
        expected[b, s, n] = weights / weights.sum() @ v[b, :, shared]
    arrays = (jnp.asarray(array, jnp.float32) for array in (q, k, v))
    np.testing.assert_allclose(attend(*arrays, jnp.asarray(mask), AxisRules()), expected, atol=1e-5)


def test_softmax_is_taken_in_float32() -> None:
    """Scores 30 and 30.05 of bfloat16 queries and keys: rounded to bfloat16 both would be 30."""
    q = jnp.asarray([[[[8.0, 2.0]], [[8.0, 2.0]]]], jnp.bfloat16)
    k = jnp.asarray([[[[5.0, 1.2109375]], [[5.0, 1.25]]]], jnp.bfloat16)
    v = jnp.asarray([[[[0.0, 0.0]], [[1.0, 1.0]]]], jnp.bfloat16)
    scores = (8 * 5 + 2 * np.array([1.2109375, 1.25])) / np.sqrt(2)
    share = np.exp(scores[1]) / np.exp(scores).sum()
    assert abs(share - 0.5) > 0.01
    found = attend(q, k, v, jnp.asarray([[[True, False], [True, True]]]), AxisRules())
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(found[0, 1, 0], np.float64), share, atol=2.0**-9)


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
