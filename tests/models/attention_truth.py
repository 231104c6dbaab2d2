"""Attention and its gradients in float64, query by query, from the definition; and inputs to compare on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxtool.parallel import AxisRules

Expected = tuple[np.ndarray, list[np.ndarray]]

# Packed, with padding between and behind; one document; padding before it; padding only behind it.
PACKED = np.zeros((4, 150), np.int32)
PACKED[0, :50], PACKED[0, 50:120], PACKED[0, 123:141] = 1, 2, 3
PACKED[1] = 1
PACKED[2, 23:] = 1
PACKED[3, :77] = 1
ROWS = {
    "packed": PACKED,
    "one document": PACKED[[1, 3, 1, 3]],
    "short": PACKED[:, 40:61],
}


def sees(segments: list[int], query: int, key: int) -> bool:
    """Whether a token sees another one of its row."""
    return query == key or (key < query and segments[query] != 0 and segments[key] == segments[query])


@functools.cache
def case(rows: str, heads: int, kv_heads: int, size: int) -> tuple[tuple[np.ndarray, ...], np.ndarray, Expected]:
    """Queries, keys, values and the gradient of the result (zero in padding); segments; what is right."""
    segments = ROWS[rows]
    rng = np.random.default_rng(0)
    q, k, v, gradient = (rng.standard_normal((*segments.shape, n, size)) for n in (heads, kv_heads, kv_heads, heads))
    gradient *= (segments != 0)[..., None, None]
    return (q, k, v, gradient), segments, truth(q, k, v, gradient, segments)


def truth(q: np.ndarray, k: np.ndarray, v: np.ndarray, gradient: np.ndarray, segments: np.ndarray) -> Expected:
    """The result [B, S, N, H], and the gradients of queries, keys and values."""
    b, s, heads, size = q.shape
    out, dq, dk, dv = np.zeros_like(q), np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for row, query in np.ndindex(b, s):
        keys = [key for key in range(query + 1) if sees(segments[row].tolist(), query, key)]
        for n in range(heads):
            shared = n // (heads // k.shape[2])
            weights = np.exp(k[row, keys, shared] @ q[row, query, n] / np.sqrt(size))
            weights /= weights.sum()
            out[row, query, n] = weights @ v[row, keys, shared]
            upstream = gradient[row, query, n]
            dv[row, keys, shared] += np.outer(weights, upstream)
            d_scores = weights * ((v[row, keys, shared] - out[row, query, n]) @ upstream) / np.sqrt(size)
            dq[row, query, n] = d_scores @ k[row, keys, shared]
            dk[row, keys, shared] += np.outer(d_scores, q[row, query, n])
    return out, [dq, dk, dv]


def on_mesh(mesh: Mesh, rules: AxisRules, inputs: tuple[np.ndarray, ...], segments: np.ndarray) -> tuple[Any, Any]:
    """The inputs and segments in float32, cut as in a model."""

    def put(x: np.ndarray, *axes: str | None) -> jax.Array:
        return jax.device_put(x, NamedSharding(mesh, rules.spec("batch", None, *axes)))

    heads = ("heads", "kv_heads", "kv_heads", "heads")
    arrays = tuple(put(x.astype(np.float32), axis, None) for x, axis in zip(inputs, heads, strict=True))
    return arrays, put(segments)


def result_and_gradients(
    attention: Callable[..., jax.Array], inputs: tuple[Any, ...], segments: Any, dtype: str = "float32"
) -> Expected:
    """What `attention(q, k, v, segments)` computes, compiled, in the form of `truth`."""

    @jax.jit
    def compute(q: Any, k: Any, v: Any, gradient: Any, segments: Any) -> Any:
        out, backward = jax.vjp(lambda *qkv: attention(*qkv, segments), q, k, v)
        return out, backward(gradient)

    out, gradients = compute(*(jnp.asarray(x, dtype) for x in inputs), jnp.asarray(segments))
    return np.asarray(out, np.float64), [np.asarray(gradient, np.float64) for gradient in gradients]


def check(found: Expected, expected: Expected, segments: np.ndarray, tolerance: float) -> None:
    """Largest error of the result at real tokens and of each gradient, relative to its largest element."""
    real = segments != 0
    pairs = [(found[0][real], expected[0][real]), *zip(found[1], expected[1], strict=True)]
    for name, (array, right) in zip(("result", "dq", "dk", "dv"), pairs, strict=True):
        error = np.abs(array - right).max() / np.abs(right).max()
        assert error <= tolerance, (name, error)
