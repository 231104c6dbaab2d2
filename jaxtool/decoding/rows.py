"""The rows of a generation between two calls: what each has read and written, and how rows are emptied and moved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxtool.decoding.capture import Capture
from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.kv_cache import KVCache, resized
from jaxtool.decoding.tool_trie import ROOT_NODE
from jaxtool.models import LanguageModelConfig
from jaxtool.parallel import AxisRules, active_mesh_axes, reshape, reshard

Arrays = TypeVar("Arrays")
FREE = 0  # the node of a row that writes free text; no row is ever at the trie's dead node
UNNAMED = -1  # instead of a tool: the row has named none yet
NO_TOOL = -2  # instead of a tool: the row has named the entry of the trie that stands for none (`Constraint.no_tool`)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Rows:
    """B rows between two calls. Functions that take it take it over: it must not be used again.

    Attributes:
        cache: keys and values of what each row has read.
        tokens_bn: int32 [B, N], the tokens that were generated, in order; the last one has not been read yet.
        log_probs_bn: float32, their log-probabilities under the model, before temperature, filters, penalty and
            constraint; [B, 0] if they weren't asked for.
        count_b: int32, how many there are.
        unread_b: bool, whether the last of them has not been read yet.
        active_b: bool, whether the row goes on when decoded.
        seen_bv: bool, the tokens that each row holds; [B, 0] if no row has a repetition penalty.
        node_b: int32, where the row is in the trie of tools, `FREE` (0) while it writes free text.
        tool_b: int32, the tool that the row named last; -1 (`UNNAMED`) if none yet, -2 (`NO_TOOL`) if the outcome was
            that it needs none.
        captured_bld: [B, L', D], what was captured of what the row has read (a mean in float32); [B, 0, 0] if nothing.
        captured_bnld: [B, N, L', D], of each generated token that was read; [B, 0, 0, 0] if that wasn't asked for.
    """

    cache: KVCache
    tokens_bn: jax.Array
    log_probs_bn: jax.Array
    count_b: jax.Array
    unread_b: jax.Array
    active_b: jax.Array
    seen_bv: jax.Array
    node_b: jax.Array
    tool_b: jax.Array
    captured_bld: jax.Array
    captured_bnld: jax.Array

    @classmethod
    def empty(
        cls,
        model: DecodeModel,
        *,
        rows: int,
        slots: int,
        most: int,
        penalty: bool = False,
        log_probs: bool = True,
        capture: Capture | None = None,
    ) -> Rows:
        """Rows that hold nothing yet.

        Args:
            model: whose cache it is.
            rows: B; on a mesh a multiple of the devices that share a batch.
            slots: tokens that a row can read, T: prompt, generated tokens and what is appended.
            most: tokens that a row can generate, N.
            penalty: whether any row will have a repetition penalty.
            log_probs: whether log-probabilities are kept.
            capture: what is captured of the states; not "all" tokens, which `DecodeModel.extend` hands out.

        Raises:
            ValueError: the capture has blocks that the model hasn't, or is of all tokens.
        """
        if capture is not None and capture.tokens == "all":
            raise ValueError("rows keep what was captured of one token or a mean, expected tokens 'last' or 'mean'")
        return _empty(model.config, model.rules, rows, slots, most, penalty, log_probs, capture)


@jax.jit(static_argnums=range(8))
def _empty(
    config: LanguageModelConfig,
    rules: AxisRules,
    rows: int,
    slots: int,
    most: int,
    penalty: bool,
    log_probs: bool,
    capture: Capture | None,
) -> Rows:
    def filled(value: float, dtype: str, *shape: int) -> jax.Array:
        return reshard(jnp.full((rows, *shape), value, dtype), rules.spec("batch", *[None] * len(shape)))

    dtype, running = (capture.dtype, capture.running_dtype) if capture else ("float32", "float32")
    kept = (len(capture.chosen(config.num_hidden_layers)), config.hidden_size) if capture else (0, 0)
    generated = (most, *kept) if capture and capture.generated else (0, 0, 0)
    return Rows(
        cache=KVCache.empty(config, rules, rows, slots),
        tokens_bn=filled(-1, "int32", most),
        log_probs_bn=filled(0, "float32", most if log_probs else 0),
        count_b=filled(0, "int32"),
        unread_b=filled(0, "bool"),
        active_b=filled(0, "bool"),
        seen_bv=filled(0, "bool", config.rows if penalty else 0),
        node_b=filled(FREE, "int32"),
        tool_b=filled(UNNAMED, "int32"),
        captured_bld=filled(0, running, *kept),
        captured_bnld=filled(0, dtype, *generated),
    )


@jax.jit(donate_argnames="state")
def forget(model: DecodeModel, state: Rows, which_b: jax.Array) -> Rows:
    """The rows where bool `which_b` is set hold nothing any more, and can be given another prompt."""
    kept_b = ~by_row(model.rules, which_b)
    return replace(
        state,
        cache=replace(state.cache, length_b=state.cache.length_b * kept_b),
        tokens_bn=jnp.where(kept_b[:, None], state.tokens_bn, -1),
        count_b=state.count_b * kept_b,
        unread_b=state.unread_b & kept_b,
        active_b=state.active_b & kept_b,
        seen_bv=state.seen_bv & kept_b[:, None],
        node_b=jnp.where(kept_b, state.node_b, FREE),
        tool_b=jnp.where(kept_b, state.tool_b, UNNAMED),
    )


@jax.jit(donate_argnames="state")
def stop(model: DecodeModel, state: Rows, which_b: jax.Array) -> Rows:
    """The rows where bool `which_b` is set don't go on, until something is read into them."""
    return replace(state, active_b=state.active_b & ~by_row(model.rules, which_b))


@jax.jit(donate_argnames="state")
def constrain(model: DecodeModel, state: Rows, which_b: jax.Array) -> Rows:
    """The rows where bool `which_b` is set name a tool next, as if they had just written a trigger."""
    return replace(state, node_b=jnp.where(by_row(model.rules, which_b), ROOT_NODE, state.node_b))


def resize(model: DecodeModel, state: Rows, *, slots: int) -> Rows:
    """The same rows with room for another number of tokens.

    Raises:
        ValueError: a row holds more.
    """
    held = int(np.asarray(state.cache.length_b).max())
    if slots < held:
        raise ValueError(f"slots is {slots:,}, but a row holds {held:,} tokens")
    cache = _resized(state.cache, model.rules, slots)
    for leaf in (*state.cache.keys_bkht, *state.cache.values_bkth):
        leaf.delete()  # of another size, so that donating it would be of no use
    return replace(state, cache=cache)


_resized = jax.jit(resized, static_argnums=(1, 2))


def keep_rows(model: DecodeModel, state: Rows, row_p: jax.Array | np.ndarray) -> Rows:
    """Only the rows `row_p` [P], int32, in that order; on a mesh as for `take_rows`. A step takes less time then.

    Raises:
        ValueError: a number is none of a row, or of a row of another device than the one that is to have it.
    """
    numbers_p, parts, rows = np.asarray(row_p), shares(model.rules), len(state.count_b)
    if numbers_p.ndim != 1 or not len(numbers_p) or len(numbers_p) % parts:
        raise ValueError(f"row_p has the shape {numbers_p.shape}, expected [P], P a multiple of {parts}")
    wanted_p = np.arange(len(numbers_p)) // (len(numbers_p) // parts)  # which share is to have the row
    if ((numbers_p < 0) | (numbers_p // (rows // parts) != wanted_p)).any():
        shared = f", the first {len(numbers_p) // parts} below {rows // parts} and so on" if parts > 1 else ""
        raise ValueError(f"row_p is {numbers_p.tolist()}, expected numbers of the {rows} rows{shared}")
    kept = _kept(model.rules, state, row_p)
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    return kept


@jax.jit(static_argnums=0)
def _kept(rules: AxisRules, state: Rows, row_p: jax.Array | np.ndarray) -> Rows:
    numbers_p = by_row(rules, jnp.asarray(row_p))
    return jax.tree.map(lambda x: take_rows(rules, x, numbers_p), state)


def by_row(rules: AxisRules, arrays: Arrays) -> Arrays:
    """What the host hands in, cut over devices like the rows of the cache."""
    return jax.tree.map(lambda x: reshard(jnp.asarray(x), rules.spec("batch", *[None] * (x.ndim - 1))), arrays)


def take_rows(rules: AxisRules, x: jax.Array, row_p: jax.Array) -> jax.Array:
    """Rows [P, ...] of an array [B, ...]; of any value where the number is none of a row.

    On a mesh each device holds B/n rows and gets P/n of the result: the first P/n numbers must be of the first
    device's rows, and so on, so that nothing has to travel.
    """
    shared, local_xp = _local(rules, x, row_p)
    found = jax.vmap(lambda x, row_p: x.at[row_p].get(mode="clip"))(shared, local_xp)
    return reshape(found, (len(row_p), *x.shape[1:]), _layout(x, whole=True))


def put_rows(rules: AxisRules, x: jax.Array, row_p: jax.Array, new: jax.Array) -> jax.Array:
    """The array [B, ...] with other rows; numbers that are none of a row are left out. On a mesh as `take_rows`."""
    shared, local_xp = _local(rules, x, row_p)
    new = reshape(new, (*local_xp.shape, *new.shape[1:]), _layout(x, whole=False))
    put = jax.vmap(lambda x, row_p, new: x.at[row_p].set(new, mode="drop"))(shared, local_xp, new)
    return reshape(put, x.shape, _layout(x, whole=True))


def repeat_rows(rules: AxisRules, x: jax.Array, rows: int) -> jax.Array:
    """One row for each share [n, ...] as the rows [P, ...] of all of them, P/n for each."""
    parts = len(x)
    shared = reshape(x, (parts, 1, *x.shape[1:]), _layout(x, whole=False))
    shared = jnp.broadcast_to(shared, (parts, rows // parts, *x.shape[1:]))
    return reshape(shared, (rows, *x.shape[1:]), _layout(x, whole=True))


def shares(rules: AxisRules) -> int:
    """Devices (or groups of them) that share the rows."""
    sizes = jax.sharding.get_abstract_mesh().shape if active_mesh_axes() else {}
    entry = rules.batch
    parts = 1
    for axis in (entry,) if isinstance(entry, str) else entry or ():
        parts *= sizes.get(axis, 1)
    return parts


def _local(rules: AxisRules, x: jax.Array, row_p: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The array as [shares, B/shares, ...] and the numbers [shares, P/shares] within a share; B/shares for none."""
    parts = shares(rules)
    each = len(x) // parts
    shared = reshape(x, (parts, each, *x.shape[1:]), _layout(x, whole=False))
    batch = rules.spec("batch", None)
    first_x1 = reshard(jnp.arange(parts, dtype=jnp.int32)[:, None] * each, batch)
    local_xp = reshape(row_p, (parts, len(row_p) // parts), batch) - first_x1
    return shared, jnp.where((local_xp >= 0) & (local_xp < each), local_xp, each)


def _layout(x: jax.Array, *, whole: bool) -> jax.sharding.PartitionSpec:
    if not active_mesh_axes():
        return jax.sharding.PartitionSpec()
    batch, *rest = jax.typeof(x).sharding.spec
    return jax.sharding.PartitionSpec(batch, *rest) if whole else jax.sharding.PartitionSpec(batch, None, *rest)
