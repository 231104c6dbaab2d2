"""What all prompts of a job begin with (a system prompt, a list of tools): read once, copied into every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxtool.decoding.buckets import LONGEST_READ
from jaxtool.decoding.decode_model import DecodeModel, prefill
from jaxtool.decoding.kv_cache import KVCache
from jaxtool.decoding.rows import Rows, by_row, put_rows, repeat_rows, shares, take_rows

_WORTH = 16  # tokens: a shorter prefix isn't


def common_prefix(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The tokens that all prompts begin with, if it pays to share them, else none; never a whole prompt."""
    if len(prompts) < 2:
        return ()
    words = [list(prompt) for prompt in prompts]
    first, last = min(words), max(words)  # in the order of words: all others lie between them
    shortest = min(map(len, prompts)) - 1
    same = next((i for i in range(shortest) if first[i] != last[i]), shortest)
    return tuple(first[:same]) if same >= _WORTH else ()


def read_prefix(model: DecodeModel, tokens: Sequence[int]) -> KVCache:
    """The keys and values of the tokens: a cache with one row for each share of a batch, all alike."""
    rows = shares(model.rules)

    def part(first: int) -> tuple[np.ndarray, np.ndarray]:
        some = np.asarray(tokens[first : first + LONGEST_READ], np.int32)
        return np.tile(some, (rows, 1)), np.full(rows, len(some), np.int32)

    _, cache = prefill(model, *part(0), slots=len(tokens))
    for first in range(LONGEST_READ, len(tokens), LONGEST_READ):  # in parts: scores grow with the square of one
        cache = _read_on(model, *part(first), cache)
    return cache


@jax.jit(donate_argnames="cache")
def _read_on(model: DecodeModel, tokens_bs: jax.Array, count_b: jax.Array, cache: KVCache) -> KVCache:
    tokens_bs, count_b = by_row(model.rules, (tokens_bs, count_b))
    return model.extend(tokens_bs, count_b, cache)[1]


@jax.jit(donate_argnames="state")
def with_prefix(model: DecodeModel, state: Rows, prefix: KVCache, row_p: jax.Array) -> Rows:
    """The rows, with what the prefix holds in the rows `row_p` [P] (see `generation.read`); they must be empty."""
    rules = model.rules
    row_p = by_row(rules, row_p)

    def put(x: jax.Array, one: jax.Array, axis: int) -> jax.Array:
        own = take_rows(rules, x, row_p)
        new = jax.lax.dynamic_update_slice_in_dim(own, repeat_rows(rules, one, len(row_p)), 0, axis)
        return put_rows(rules, x, row_p, new)

    cache = KVCache(
        keys_bkht=tuple(put(x, one, 3) for x, one in zip(state.cache.keys_bkht, prefix.keys_bkht, strict=True)),
        values_bkth=tuple(put(x, one, 2) for x, one in zip(state.cache.values_bkth, prefix.values_bkth, strict=True)),
        length_b=put_rows(rules, state.cache.length_b, row_p, jnp.full_like(row_p, prefix.slots)),
    )
    return replace(state, cache=cache)
