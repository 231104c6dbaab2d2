"""Free generation in steps that callers put together: read tokens into rows, decode until something happens, go on.

All rows share a cache and a compiled loop; each has its own prompt, settings, limit and end. A row that has ended waits
until it is given something to read: the response of a tool, or another prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.kv_cache import KVCache
from jaxtool.decoding.sampling import RowSampling, choose, penalised
from jaxtool.models import LanguageModelConfig
from jaxtool.parallel import AxisRules, reshard

Arrays = TypeVar("Arrays")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """B rows between two calls. Functions that take it take it over: it must not be used again.

    Attributes:
        cache: keys and values of what each row has read.
        tokens_bn: int32 [B, N], the tokens that were generated, in order; the last one has not been read yet.
        log_probs_bn: float32, their log-probabilities under the model, before temperature, filters and penalty.
        count_b: int32, how many there are.
        active_b: bool, whether the row goes on when decoded.
        seen_bv: bool, the tokens that each row holds; [B, 0] if no row has a repetition penalty.
    """

    cache: KVCache
    tokens_bn: jax.Array
    log_probs_bn: jax.Array
    count_b: jax.Array
    active_b: jax.Array
    seen_bv: jax.Array

    @classmethod
    def empty(cls, model: DecodeModel, *, rows: int, slots: int, most: int, penalty: bool = False) -> Rows:
        """Rows that hold nothing yet.

        Args:
            model: whose cache it is.
            rows: B.
            slots: tokens that a row can read, T: prompt, generated tokens and what is appended.
            most: tokens that a row can generate, N.
            penalty: whether any row will have a repetition penalty.
        """
        return _empty(model.config, model.rules, rows, slots, most, penalty)


@jax.jit(static_argnums=range(6))
def _empty(config: LanguageModelConfig, rules: AxisRules, rows: int, slots: int, most: int, penalty: bool) -> Rows:
    def filled(value: float, dtype: str, *shape: int) -> jax.Array:
        return reshard(jnp.full((rows, *shape), value, dtype), rules.spec("batch", *[None] * len(shape)))

    return Rows(
        cache=KVCache.empty(config, rules, rows, slots),
        tokens_bn=filled(-1, "int32", most),
        log_probs_bn=filled(0, "float32", most),
        count_b=filled(0, "int32"),
        active_b=filled(0, "bool"),
        seen_bv=filled(0, "bool", config.rows if penalty else 0),
    )


@jax.jit(donate_argnames="state")
def forget(model: DecodeModel, state: Rows, which_b: jax.Array) -> Rows:
    """The rows where bool `which_b` is set hold nothing any more, and can be given another prompt."""
    kept_b = ~_by_row(model.rules, which_b)
    return Rows(
        cache=replace(state.cache, length_b=state.cache.length_b * kept_b),
        tokens_bn=jnp.where(kept_b[:, None], state.tokens_bn, -1),
        log_probs_bn=state.log_probs_bn,
        count_b=state.count_b * kept_b,
        active_b=state.active_b & kept_b,
        seen_bv=state.seen_bv & kept_b[:, None],
    )


@jax.jit(donate_argnames="state", static_argnames=("draws", "last"))
def read(
    model: DecodeModel,
    state: Rows,
    tokens_bs: jax.Array,
    count_b: jax.Array,
    sampling: RowSampling,
    limit_b: jax.Array,
    stop_ids: jax.Array,
    *,
    draws: bool,
    last: bool = True,
) -> Rows:
    """Reads `count_b` further tokens into each row and, behind them, generates one in the rows where there are any.

    A prompt can be read in parts: all but the last with `last=False`. What is appended to a row that has generated
    tokens begins with the last of these, which it hasn't read.

    Args:
        model: the model.
        state: the rows.
        tokens_bs: int32 [B, S]; behind a row's count of any value.
        count_b: int32, 0 to S; the cache must have a slot for each.
        sampling: settings of the rows.
        limit_b: int32, tokens that a row generates at most, N at most.
        stop_ids: int32 [..], tokens that end a row; they count as generated.
        draws: whether any row has a temperature.
        last: whether the next tokens are chosen.
    """
    tokens_bs, count_b, sampling, limit_b = _by_row(model.rules, (tokens_bs, count_b, sampling, limit_b))
    hidden_bsd, cache = model.extend(tokens_bs, count_b, state.cache)
    seen_bv = state.seen_bv
    if seen_bv.shape[1]:
        read_bs = jnp.arange(tokens_bs.shape[1]) < count_b[:, None]
        seen_bv = _marked(seen_bv, tokens_bs, read_bs)
    state = replace(state, cache=cache, seen_bv=seen_bv)
    if not last:
        return state
    logits_bv = model.last_logits(hidden_bsd, jnp.maximum(count_b, 1))
    return _chosen(state, logits_bv, count_b > 0, sampling, limit_b, stop_ids, draws=draws)


@jax.jit(donate_argnames="state", static_argnames="draws")
def decode(
    model: DecodeModel,
    state: Rows,
    sampling: RowSampling,
    limit_b: jax.Array,
    stop_ids: jax.Array,
    steps: jax.Array,
    *,
    draws: bool,
) -> Rows:
    """Decodes active rows until all have ended or `steps` steps are done; arguments as for `read`.

    A row ends with a stop token or at its limit.
    """

    sampling, limit_b = _by_row(model.rules, (sampling, limit_b))

    def going_on(carry: tuple[jax.Array, Rows]) -> jax.Array:
        step, state = carry
        return (step < steps) & jnp.any(state.active_b)

    def turn(carry: tuple[jax.Array, Rows]) -> tuple[jax.Array, Rows]:
        step, state = carry
        active_b = state.active_b
        newest_b = jax.vmap(lambda row, at: row.at[at].get())(state.tokens_bn, jnp.maximum(state.count_b - 1, 0))
        count_b = active_b.astype(jnp.int32)
        hidden_bsd, cache = model.extend(newest_b[:, None], count_b, state.cache)
        logits_bv = model.last_logits(hidden_bsd, jnp.ones_like(count_b))
        state = replace(state, cache=cache)
        return step + 1, _chosen(state, logits_bv, active_b, sampling, limit_b, stop_ids, draws=draws)

    return jax.lax.while_loop(going_on, turn, (jnp.int32(0), state))[1]


def _chosen(
    state: Rows,
    logits_bv: jax.Array,
    which_b: jax.Array,
    sampling: RowSampling,
    limit_b: jax.Array,
    stop_ids: jax.Array,
    *,
    draws: bool,
) -> Rows:
    """The rows `which_b` with one more token each."""
    changed_bv = logits_bv
    if state.seen_bv.shape[1]:
        changed_bv = penalised(logits_bv, state.seen_bv, sampling.repetition_penalty_b)
    token_b = choose(changed_bv, sampling, state.count_b, draws=draws)
    chosen_b = jax.vmap(lambda row, at: row.at[at].get())(logits_bv, token_b)
    log_prob_b = chosen_b - jax.nn.logsumexp(logits_bv, axis=-1)

    at_b = jnp.where(which_b, state.count_b, state.tokens_bn.shape[1])  # behind the end: nothing is written
    put = jax.vmap(lambda row, at, value: row.at[at].set(value, mode="drop"))
    count_b = state.count_b + which_b
    ended_b = jnp.any(token_b[:, None] == stop_ids, axis=-1) | (count_b >= limit_b)
    seen_bv = state.seen_bv
    if seen_bv.shape[1]:
        seen_bv = _marked(seen_bv, token_b[:, None], which_b[:, None])
    return Rows(
        cache=state.cache,
        tokens_bn=put(state.tokens_bn, at_b, token_b),
        log_probs_bn=put(state.log_probs_bn, at_b, log_prob_b),
        count_b=count_b,
        active_b=jnp.where(which_b, ~ended_b, state.active_b),
        seen_bv=seen_bv,
    )


def _marked(seen_bv: jax.Array, tokens_bs: jax.Array, real_bs: jax.Array) -> jax.Array:
    at_bs = jnp.where(real_bs, tokens_bs, seen_bv.shape[1])
    return jax.vmap(lambda row, at: row.at[at].set(True, mode="drop"))(seen_bv, at_bs)


def _by_row(rules: AxisRules, arrays: Arrays) -> Arrays:
    """What the host hands in, cut over devices like the rows of the cache."""
    return jax.tree.map(lambda x: reshard(jnp.asarray(x), rules.spec("batch", *[None] * (x.ndim - 1))), arrays)


def padded(prompts: Sequence[Sequence[int]], length: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Prompts as int32 [B, S], filled up with 0 behind their ends, and their lengths [B].

    Args:
        prompts: token ids; some may be empty.
        length: S (0: that of the longest).

    Raises:
        ValueError: a prompt is longer.
    """
    count_b = np.array([len(prompt) for prompt in prompts], np.int32)
    longest = int(count_b.max(initial=0))
    if length and longest > length:
        raise ValueError(f"prompt {int(count_b.argmax())} has {longest:,} tokens, expected at most {length:,}")
    tokens_bs = np.zeros((len(prompts), length or max(longest, 1)), np.int32)
    for row, prompt in enumerate(prompts):
        tokens_bs[row, : len(prompt)] = prompt
    return tokens_bs, count_b
