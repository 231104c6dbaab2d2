"""The mask and the XLA implementation, whole and in blocks, against loops in float64."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.config import MeshConfig
from jaxtool.models import xla_attention as module
from jaxtool.models.xla_attention import attend_in_blocks, attention_mask, xla_attention
from jaxtool.parallel import AxisRules, make_mesh
from tests.models.attention_truth import case, check, on_mesh, result_and_gradients, sees, truth

RULES = AxisRules()


@pytest.mark.parametrize("segments", [[0, 1, 1, 2, 2, 2, 0, 0], [3, 1, 1, 0, 1, 2, 0, 2]])
def test_attention_mask(segments: list[int]) -> None:
    expected = [[sees(segments, s, t) for t in range(8)] for s in range(8)]
    keys = jnp.array([segments])
    np.testing.assert_array_equal(attention_mask(keys)[0], expected)
    np.testing.assert_array_equal(attention_mask(keys, keys[:, 3:6], 3)[0], expected[3:6])


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
def test_query_heads_share_key_value_heads(kv_heads: int) -> None:
    inputs, segments, expected = case("short", 6, kv_heads, 4)
    check(result_and_gradients(lambda *x: xla_attention(*x, RULES), inputs, segments), expected, segments, 2e-6)


@pytest.mark.parametrize("block", [64, 200])
def test_blocks_of_queries(block: int) -> None:
    """150 tokens: the last block is not full, or there is but one."""
    inputs, segments, expected = case("packed", 4, 2, 8)
    found = result_and_gradients(lambda *x: attend_in_blocks(*x, RULES, block), inputs, segments)
    check(found, expected, segments, 4e-6)


def test_long_rows_are_computed_in_blocks_and_only_they(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest array of a program's text, in elements of scores of one head: S x S, or block x S."""
    monkeypatch.setattr(module, "LONGEST_WHOLE", 64)
    monkeypatch.setattr(module, "attend_in_blocks", lambda *x: attend_in_blocks(*x, block=16))

    def text(length: int) -> str:
        q, k = jnp.zeros((1, length, 2, 4)), jnp.zeros((1, length, 1, 4))
        segments = jnp.ones((1, length), jnp.int32)
        loss = jax.grad(lambda q: jnp.sum(xla_attention(q, k, k, segments, RULES)))
        return jax.jit(loss).lower(q).as_text()

    assert "1x1x128x64xf32" in text(64)  # two query heads of one key-value head
    assert "1x1x32x96xf32" in text(96) and "192x96" not in text(96)


def test_blocks_on_eight_devices() -> None:
    inputs, segments, expected = case("packed", 4, 2, 8)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    with jax.set_mesh(mesh):
        cut = on_mesh(mesh, RULES, inputs, segments)
        check(result_and_gradients(lambda *x: attend_in_blocks(*x, RULES, 64), *cut), expected, segments, 4e-6)


def test_softmax_is_taken_in_float32() -> None:
    """Scores 30 and 30.05 of bfloat16 queries and keys: rounded to bfloat16 both would be 30."""
    q = jnp.asarray([[[[8.0, 2.0]], [[8.0, 2.0]]]], jnp.bfloat16)
    k = jnp.asarray([[[[5.0, 1.2109375]], [[5.0, 1.25]]]], jnp.bfloat16)
    v = jnp.asarray([[[[0.0, 0.0]], [[1.0, 1.0]]]], jnp.bfloat16)
    scores = (8 * 5 + 2 * np.array([1.2109375, 1.25])) / np.sqrt(2)
    share = np.exp(scores[1]) / np.exp(scores).sum()
    assert abs(share - 0.5) > 0.01
    segments = jnp.ones((1, 2), jnp.int32)
    for found in (xla_attention(q, k, v, segments, RULES), attend_in_blocks(q, k, v, segments, RULES, 1)):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found[0, 1, 0], np.float64), share, atol=2.0**-9)


def test_gradients_of_many_blocks_are_summed_in_float32() -> None:
    """Sums of 150 blocks in bfloat16 would lose bits: the error stays near that of whole rows."""
    inputs, segments, _ = case("packed", 4, 2, 8)
    inputs = tuple(np.asarray(jnp.asarray(x[1:2], jnp.bfloat16), np.float64) for x in inputs)
    _, expected = truth(*inputs, segments[1:2])

    def errors(attention: Any) -> list[float]:
        _, found = result_and_gradients(attention, inputs, segments[1:2], "bfloat16")
        return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found, expected, strict=True)]

    whole = errors(lambda *x: xla_attention(*x, RULES))
    in_blocks = errors(lambda *x: attend_in_blocks(*x, RULES, 1))
    assert max(whole) < 0.01
    assert all(b < 1.6 * w for w, b in zip(whole, in_blocks, strict=True)), (whole, in_blocks)
