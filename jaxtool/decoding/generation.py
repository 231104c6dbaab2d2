"""Free generation in steps that callers put together: read tokens into rows, decode until something happens, go on.

All rows share a cache and a compiled loop; each has its own prompt, settings, limit and end. A row that has ended waits
until it is given something to read: the response of a tool, or another prompt. The rows themselves are in `rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxtool.decoding.capture import Capture, stacked
from jaxtool.decoding.constraint import Constraint
from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.rows import UNNAMED, Rows, by_row, put_rows, take_rows
from jaxtool.decoding.sampling import RowSampling, choose, penalised
from jaxtool.parallel import AxisRules


@jax.jit(donate_argnames="state", static_argnames=("draws", "last", "capture"))
def read(
    model: DecodeModel,
    state: Rows,
    tokens_ps: jax.Array,
    count_p: jax.Array,
    sampling: RowSampling,
    limit_b: jax.Array,
    stop_ids: jax.Array,
    *,
    draws: bool,
    row_p: jax.Array | None = None,
    copies: tuple[jax.Array, jax.Array] | None = None,
    constraint: Constraint | None = None,
    last: bool = True,
    capture: Capture | None = None,
) -> Rows:
    """Reads further tokens into rows and, behind them, generates one in the rows where there are any.

    A prompt can be read in parts: all but the last with `last=False`. What is appended to a row that has generated
    tokens begins with the last of these, which it hasn't read.

    Args:
        model: the model.
        state: the rows.
        tokens_ps: int32 [P, S]; behind a row's count of any value.
        count_p: int32, 0 to S; the cache must have a slot for each.
        sampling: settings of all B rows.
        limit_b: int32, tokens that a row generates at most, in all its turns; N where it is more.
        stop_ids: int32 [..] or [B, ..], tokens that end a row; they count as generated.
        draws: whether any row has a temperature.
        row_p: int32, different numbers of the rows that read; those that are none of a row (B, say) are for nobody.
            None: P is B, and each row reads its own. On a mesh as for `rows.take_rows`.
        copies: int32 (rows [Q], places [Q] in `row_p`), further samples of a prompt: rows that then hold what those at
            the places hold, as if they had read it all themselves; they must be empty. On a mesh as `row_p`.
        constraint: when rows name tools.
        last: whether the next tokens are chosen.
        capture: the one that the rows were made with.
    """
    rules, everyone = model.rules, state.count_b.shape[0]
    tokens_ps, count_p = by_row(rules, (tokens_ps, count_p))
    sampling, limit_b, stop_ids, constraint = _settings(model, (sampling, limit_b, stop_ids, constraint), everyone)
    own = state.cache
    if row_p is not None:
        row_p = by_row(rules, row_p)
        own = jax.tree.map(lambda x: take_rows(rules, x, row_p), own)
    hidden_psd, cache, captured, first = model.extend_captured(tokens_ps, count_p, own, capture)
    logits_pv = model.last_logits(hidden_psd, jnp.maximum(count_p, 1)) if last else None

    seen_pv = captured_pld = None
    if state.seen_bv.shape[1]:
        seen_pv = state.seen_bv if row_p is None else take_rows(rules, state.seen_bv, row_p)
        seen_pv = _marked(seen_pv, tokens_ps, jnp.arange(tokens_ps.shape[1]) < count_p[:, None])
    if capture is not None:
        old = state.captured_bld if row_p is None else take_rows(rules, state.captured_bld, row_p)
        captured_pld = capture.merged(old, own.length_b, stacked(captured, rules), count_p)
    first_bld = stacked(first, rules) if first else None

    which_b, logits_bv = count_p > 0, logits_pv
    if row_p is not None:
        others = None if copies is None else by_row(rules, copies)

        def put(x: jax.Array, new: jax.Array) -> jax.Array:
            x = put_rows(rules, x, row_p, new)
            return x if others is None else put_rows(rules, x, others[0], take_rows(rules, new, others[1]))

        cache = jax.tree.map(put, state.cache, cache)
        which_b = put(jnp.zeros_like(state.active_b), which_b)
        if seen_pv is not None:
            seen_pv = put(state.seen_bv, seen_pv)
        if captured_pld is not None:
            captured_pld = put(state.captured_bld, captured_pld)
        if first_bld is not None:
            first_bld = put(jnp.zeros_like(state.captured_bld, first_bld.dtype), first_bld)
        if logits_pv is not None:
            blank_bv = jnp.broadcast_to(jnp.zeros_like(state.count_b)[:, None], (everyone, logits_pv.shape[1]))
            logits_bv = put(blank_bv.astype(logits_pv.dtype), logits_pv)
    if first_bld is not None:  # what a row has generated last is the first that it reads
        state = _kept(state, state.unread_b & which_b, first_bld)
    state = replace(
        state,
        cache=cache,
        unread_b=state.unread_b & ~which_b,
        seen_bv=state.seen_bv if seen_pv is None else seen_pv,
        captured_bld=state.captured_bld if captured_pld is None else captured_pld,
    )
    if logits_bv is None:
        return state
    return _chosen(model.rules, state, logits_bv, which_b, sampling, limit_b, stop_ids, constraint, draws=draws)


@jax.jit(donate_argnames="state", static_argnames=("draws", "capture"))
def decode(
    model: DecodeModel,
    state: Rows,
    sampling: RowSampling,
    limit_b: jax.Array,
    stop_ids: jax.Array,
    steps: jax.Array,
    keep_active: jax.Array = 0,  # type: ignore[assignment]
    *,
    draws: bool,
    constraint: Constraint | None = None,
    capture: Capture | None = None,
) -> Rows:
    """Decodes active rows until at most `keep_active` of them are left or `steps` steps are done; see `read`.

    A row ends with a stop token, at its limit, or with a tool where the constraint says so.
    """
    everyone = state.count_b.shape[0]
    sampling, limit_b, stop_ids, constraint = _settings(model, (sampling, limit_b, stop_ids, constraint), everyone)

    def going_on(carry: tuple[jax.Array, Rows]) -> jax.Array:
        step, state = carry
        return (step < steps) & (jnp.sum(state.active_b) > keep_active)

    def turn(carry: tuple[jax.Array, Rows]) -> tuple[jax.Array, Rows]:
        step, state = carry
        active_b = state.active_b
        place_b = jnp.maximum(state.count_b - 1, 0)
        newest_b = jax.vmap(lambda row, at: row.at[at].get())(state.tokens_bn, place_b)
        count_b = active_b.astype(jnp.int32)
        hidden_bsd, cache, _, first = model.extend_captured(newest_b[:, None], count_b, state.cache, capture)
        state = replace(state, cache=cache)
        if first:
            state = _kept(state, active_b, stacked(first, model.rules))
        logits_bv = model.last_logits(hidden_bsd, jnp.ones_like(count_b))
        return step + 1, _chosen(
            model.rules, state, logits_bv, active_b, sampling, limit_b, stop_ids, constraint, draws=draws
        )

    return jax.lax.while_loop(going_on, turn, (jnp.int32(0), state))[1]


def _settings(
    model: DecodeModel, settings: tuple[RowSampling, jax.Array, jax.Array, Constraint | None], rows: int
) -> tuple[RowSampling, jax.Array, jax.Array, Constraint | None]:
    """Settings of rows cut like the rows; stop ids for all of them stay whole."""
    sampling, limit_b, stop_ids, constraint = settings
    sampling, limit_b = by_row(model.rules, (sampling, limit_b))
    stop_ids = jnp.asarray(stop_ids)
    if stop_ids.ndim == 2:
        stop_ids = by_row(model.rules, stop_ids)
    if constraint is not None and constraint.allowed_bt is not None:
        if len(constraint.allowed_bt) != rows:
            raise ValueError(f"allowed_bt has {len(constraint.allowed_bt)} rows, expected {rows}")
        constraint = replace(constraint, allowed_bt=by_row(model.rules, constraint.allowed_bt))
    return sampling, limit_b, stop_ids, constraint


def _chosen(
    rules: AxisRules,
    state: Rows,
    logits_bv: jax.Array,
    which_b: jax.Array,
    sampling: RowSampling,
    limit_b: jax.Array,
    stop_ids: jax.Array,
    constraint: Constraint | None,
    *,
    draws: bool,
) -> Rows:
    """The rows `which_b` with one more token each."""
    changed_bv = logits_bv
    if state.seen_bv.shape[1]:
        changed_bv = penalised(logits_bv, state.seen_bv, sampling.repetition_penalty_b)
    token_b = choose(changed_bv, sampling, state.count_b, draws=draws)
    stopped_b = jnp.any(token_b[:, None] == stop_ids, axis=-1)
    if constraint is not None:
        token_b, node_b, tool_b, inside_b = constraint.chosen(state, changed_bv, token_b, sampling, rules, draws=draws)
        # Within a tool's id a stop token is a token like others: END, as a rule.
        stopped_b = jnp.where(inside_b, False, stopped_b)
        if constraint.stop_at_tool:
            stopped_b |= tool_b != UNNAMED
        state = constraint.applied(state, which_b, node_b, tool_b)

    at_b = jnp.where(which_b, state.count_b, state.tokens_bn.shape[1])  # behind the end: nothing is written
    put = jax.vmap(lambda row, at, value: row.at[at].set(value, mode="drop"))
    log_probs_bn = state.log_probs_bn
    if log_probs_bn.shape[1]:
        chosen_b = jax.vmap(lambda row, at: row.at[at].get())(logits_bv, token_b)
        log_probs_bn = put(log_probs_bn, at_b, chosen_b - jax.nn.logsumexp(logits_bv, axis=-1))
    count_b = state.count_b + which_b
    ended_b = stopped_b | (count_b >= jnp.minimum(limit_b, state.tokens_bn.shape[1]))
    seen_bv = state.seen_bv
    if seen_bv.shape[1]:
        seen_bv = _marked(seen_bv, token_b[:, None], which_b[:, None])
    return replace(
        state,
        tokens_bn=put(state.tokens_bn, at_b, token_b),
        log_probs_bn=log_probs_bn,
        count_b=count_b,
        unread_b=state.unread_b | which_b,
        active_b=jnp.where(which_b, ~ended_b, state.active_b),
        seen_bv=seen_bv,
    )


def _kept(state: Rows, which_b: jax.Array, states_bld: jax.Array) -> Rows:
    """With the states of the last generated token of the rows `which_b`."""
    at_b = jnp.where(which_b, state.count_b - 1, state.tokens_bn.shape[1])
    put = jax.vmap(lambda row, at, value: row.at[at].set(value, mode="drop"))
    return replace(state, captured_bnld=put(state.captured_bnld, at_b, states_bld))


def _marked(seen_bv: jax.Array, tokens_bs: jax.Array, real_bs: jax.Array) -> jax.Array:
    at_bs = jnp.where(real_bs, tokens_bs, seen_bv.shape[1])
    return jax.vmap(lambda row, at: row.at[at].set(True, mode="drop"))(seen_bv, at_bs)


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
