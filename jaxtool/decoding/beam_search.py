"""Beam search over the trie of tool ids: the most probable tools of each row, never an id that is no tool's.

Beams share the keys and values of their prompt; only the few tokens of an id are a beam's own. A finished beam stays in
the pool with its score, and a beam that has nowhere to go is dead: it is never returned, and what was asked for beyond
the tools that can be reached comes back as invalid.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.kv_cache import KVCache
from jaxtool.decoding.tool_trie import DEAD_NODE, ROOT_NODE, ToolTrie, take
from jaxtool.models.rotary import rotary_tables
from jaxtool.parallel import einsum, reshape, reshard

NORMALIZE = ("full", "slice", "allowed")
# Levels whose widest node has more children than this are steps of their own, so that others don't gather as many.
_WIDE = 256


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RankedTools:
    """The k best tools of B rows, best first.

    Attributes:
        tools_bk: int32 tool ids; -1 where invalid.
        scores_bk: float32 log-probabilities as `normalize` defines them, over length^exponent; -inf where invalid.
        valid_bk: bool, False behind the last tool that was reached.
        count_b: int32, the number of valid ones.
        normalize: what probabilities are relative to.
    """

    tools_bk: jax.Array
    scores_bk: jax.Array
    valid_bk: jax.Array
    count_b: jax.Array
    normalize: str = field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Beams:
    """M beams of B rows.

    Attributes:
        node_bm: where they are in the trie; dead ones at `DEAD_NODE`.
        score_bm: float32 sum of log-probabilities, -inf for dead ones.
        tool_bm: the tool of a finished beam, -1 for others.
        length_bm: tokens that were scored.
        token_bm: the newest token, not read yet.
        keys: of each layer, the beams' own keys [B, M, K, T, H], T as deep as the trie.
        values: the same.
    """

    node_bm: jax.Array
    score_bm: jax.Array
    tool_bm: jax.Array
    length_bm: jax.Array
    token_bm: jax.Array
    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]


@jax.jit(static_argnames=("beams", "keep", "normalize", "length_exponent"))
def rank_tools(
    model: DecodeModel,
    trie: ToolTrie,
    cache: KVCache,
    hidden_bd: jax.Array,
    allowed_bt: jax.Array | None = None,
    *,
    beams: int,
    keep: int,
    normalize: str = "full",
    length_exponent: float = 0.0,
) -> RankedTools:
    """The `keep` best tools behind the prompts that `cache` holds.

    With at least as many beams as tools this is the exact ranking. Ties go to the lower id: in a step to the better
    beam and then the lower token, in the result to the lower tool.

    Args:
        model: the model.
        trie: the ids of the tools; END is scored where the trie has END edges.
        cache: the prompts, each read to its end.
        hidden_bd: final normed hidden states of the prompts' last tokens.
        allowed_bt: bool, the tools that each row may name (None: all).
        beams: M.
        keep: k, at most M.
        normalize: log-probabilities are relative to all that the model can predict ("full"), to the tokens that occur
            in ids ("slice"), or to the tokens that may come next ("allowed"; forced tokens are then certain, and a
            beam whose rest is forced has finished).
        length_exponent: scores are divided by (scored tokens)^exponent at the end.

    Raises:
        ValueError: `normalize` is unknown, or not 1 <= keep <= beams.
    """
    if normalize not in NORMALIZE:
        raise ValueError(f"normalize is {normalize!r}, expected one of {', '.join(NORMALIZE)}")
    if not 1 <= keep <= beams:
        raise ValueError(f"keep is {keep} and beams {beams}, expected 1 <= keep <= beams")
    rules, rows = model.rules, len(hidden_bd)
    reach_bn = None if allowed_bt is None else reshard(trie.reachable(allowed_bt), rules.spec("batch", None))

    def filled(value: float, dtype: str, *shape: int) -> jax.Array:
        return reshard(jnp.full((rows, *shape), value, dtype), rules.spec("batch", *[None] * len(shape)))

    root_b1 = filled(ROOT_NODE, "int32", 1)
    if reach_bn is not None:
        root_b1 = jnp.where(reach_bn[:, ROOT_NODE : ROOT_NODE + 1], root_b1, DEAD_NODE)
    own = (rows, beams, model.config.kv_heads, max(trie.max_depth - 1, 1), model.config.head_dim)
    layout = rules.spec("batch", None, "kv_heads", None, "head_size")
    empty = reshard(jnp.zeros(own, model.config.compute_dtype), layout)
    state = _Beams(
        node_bm=root_b1,
        score_bm=jnp.where(root_b1 == DEAD_NODE, -jnp.inf, 0.0),
        tool_bm=filled(-1, "int32", 1),
        length_bm=filled(0, "int32", 1),
        token_bm=filled(0, "int32", 1),
        keys=(empty,) * model.config.num_hidden_layers,
        values=(empty,) * model.config.num_hidden_layers,
    )
    head_ad, bias_a = _head(model, trie)  # here, not in every turn of the loop
    choose = _Chooser(
        model=model,
        trie=trie,
        head_ad=head_ad,
        bias_a=bias_a,
        reach_bn=reach_bn,
        beams=beams,
        normalize=normalize,
    )
    state = choose(state, hidden_bd[:, None], trie.level_children[0])

    depth, deepest = 1, trie.max_depth
    while depth < deepest and max(trie.level_children[depth:]) > _WIDE:
        hidden_bmd, state = _read(model, state, cache, jnp.int32(depth - 1))
        state = choose(state, hidden_bmd, trie.level_children[depth])
        depth += 1
    if depth < deepest:
        width = max(trie.level_children[depth:])

        def going_on(carry: tuple[jax.Array, _Beams]) -> jax.Array:
            return jnp.any((carry[1].node_bm != DEAD_NODE) & (carry[1].tool_bm < 0))

        def turn(carry: tuple[jax.Array, _Beams]) -> tuple[jax.Array, _Beams]:
            step, state = carry
            hidden_bmd, state = _read(model, state, cache, step)
            return step + 1, choose(state, hidden_bmd, width)

        _, state = jax.lax.while_loop(going_on, turn, (jnp.int32(depth - 1), state))

    score_bm = jnp.where(state.tool_bm >= 0, state.score_bm, -jnp.inf)
    score_bm = score_bm / jnp.maximum(state.length_bm, 1).astype(jnp.float32) ** length_exponent
    score_bm, tool_bm = jax.lax.sort(
        (-score_bm, jnp.where(score_bm > -jnp.inf, state.tool_bm, trie.num_tools)), num_keys=2
    )
    scores_bk, tools_bk = -score_bm[:, :keep], tool_bm[:, :keep]
    valid_bk = tools_bk < trie.num_tools
    return RankedTools(
        tools_bk=jnp.where(valid_bk, tools_bk, -1),
        scores_bk=jnp.where(valid_bk, scores_bk, -jnp.inf),
        valid_bk=valid_bk,
        count_b=jnp.sum(valid_bk, axis=-1, dtype=jnp.int32),
        normalize=normalize,
    )


@dataclass(frozen=True, kw_only=True)
class _Chooser:
    """One step of the search: beams to their best continuations."""

    model: DecodeModel
    trie: ToolTrie
    head_ad: jax.Array
    bias_a: jax.Array | None
    reach_bn: jax.Array | None
    beams: int
    normalize: str

    def __call__(self, state: _Beams, hidden_bmd: jax.Array, width: int) -> _Beams:
        """The best of all children of all beams, and of the beams that have finished; `width` children at most."""
        trie, m = self.trie, state.node_bm.shape[1]
        column_bmk, child_bmk, valid_bmk = trie.children(state.node_bm, width)
        if self.reach_bn is not None:
            reached = jax.vmap(lambda reach_n, node: reach_n.at[node].get())
            valid_bmk &= reached(self.reach_bn, child_bmk)
        log_probs_bmk = self._log_probs(hidden_bmd, column_bmk, valid_bmk)
        # The mask comes first; finished beams compete with the score that they have.
        open_bm1 = ((state.tool_bm < 0) & (state.node_bm != DEAD_NODE))[..., None]
        grown_bmk = jnp.where(valid_bmk & open_bm1, state.score_bm[..., None] + log_probs_bmk, -jnp.inf)
        stay_bm1 = jnp.where(state.tool_bm >= 0, state.score_bm, -jnp.inf)[..., None]
        pool_bx = jnp.concatenate([grown_bmk, stay_bm1], axis=-1)
        pool_bx = reshape(pool_bx, (len(pool_bx), m * (width + 1)), self._rows(2))
        if pool_bx.shape[1] < self.beams:
            pool_bx = jnp.pad(pool_bx, ((0, 0), (0, self.beams - pool_bx.shape[1])), constant_values=-jnp.inf)
        score_bm, place_bm = jax.lax.top_k(pool_bx, self.beams)
        alive_bm = score_bm > -jnp.inf
        parent_bm = jnp.minimum(place_bm // (width + 1), m - 1)
        which_bm = place_bm % (width + 1)

        def of_parent(x_bm: jax.Array) -> jax.Array:  # [B, M, ...]
            return jax.vmap(lambda x_m, parent_m: x_m.at[parent_m].get())(x_bm, parent_bm)

        stays_bm = which_bm == width
        pick = jax.vmap(lambda x_mk, parent_m, which_m: x_mk.at[parent_m, jnp.minimum(which_m, width - 1)].get())
        child_bm = jnp.where(stays_bm, of_parent(state.node_bm), pick(child_bmk, parent_bm, which_bm))
        child_bm = jnp.where(alive_bm, child_bm, DEAD_NODE)
        end_bm = take(trie.run_end, child_bm) if self.normalize == "allowed" and self.reach_bn is None else child_bm
        tool_bm = take(trie.node_tool, end_bm)
        return _Beams(
            node_bm=child_bm,
            score_bm=score_bm,
            tool_bm=jnp.where(stays_bm, of_parent(state.tool_bm), tool_bm) * alive_bm - ~alive_bm,
            length_bm=of_parent(state.length_bm) + (~stays_bm & alive_bm),
            token_bm=jnp.where(stays_bm, 0, take(trie.alphabet, pick(column_bmk, parent_bm, which_bm))),
            keys=tuple(map(of_parent, state.keys)),
            values=tuple(map(of_parent, state.values)),
        )

    def _log_probs(self, hidden_bmd: jax.Array, column_bmk: jax.Array, valid_bmk: jax.Array) -> jax.Array:
        """float32 log-probabilities of the children; of any value where there is none."""
        gather = jax.vmap(jax.vmap(lambda x_v, at_k: x_v.at[at_k].get()))
        if self.normalize == "full":
            logits_bmv = reshard(self.model.outside.logits(hidden_bmd), self._rows(3))
            found_bmk = gather(logits_bmv, take(self.trie.alphabet, column_bmk))
            return found_bmk - jax.nn.logsumexp(logits_bmv, axis=-1, keepdims=True)
        logits_bma = einsum("bmd,ad->bma", hidden_bmd, self.head_ad, out=self._rows(3), result_dtype="float32")
        if self.bias_a is not None:
            logits_bma += self.bias_a
        found_bmk = gather(logits_bma, column_bmk)
        if self.normalize == "slice":
            return found_bmk - jax.nn.logsumexp(logits_bma, axis=-1, keepdims=True)
        # A dead beam has no child: the sum of nothing is kept finite.
        any_bm1 = jnp.any(valid_bmk, axis=-1, keepdims=True)
        masked_bmk = jnp.where(valid_bmk, found_bmk, jnp.where(any_bm1, -jnp.inf, 0.0))
        return found_bmk - jax.nn.logsumexp(masked_bmk, axis=-1, keepdims=True)

    def _rows(self, axes: int) -> PartitionSpec:
        return self.model.rules.spec("batch", *[None] * (axes - 1))


def _head(model: DecodeModel, trie: ToolTrie) -> tuple[jax.Array, jax.Array | None]:
    """The rows of the head for the tokens of the alphabet [A, D] and their bias [A], whole on every device."""
    outside, alphabet = model.outside, jnp.asarray(trie.alphabet)
    rows_ad = reshard(outside.head_rows(), PartitionSpec(None, None)).at[alphabet].get()
    rows_ad = rows_ad.astype(model.config.compute_dtype)
    if not model.config.head_bias:
        return rows_ad, None
    return rows_ad, reshard(outside.head_bias_v[...], PartitionSpec(None)).at[alphabet].get().astype(jnp.float32)


def _read(model: DecodeModel, state: _Beams, cache: KVCache, step: jax.Array) -> tuple[jax.Array, _Beams]:
    """Reads the newest token of each beam, the `step`-th of its id: hidden states [B, M, D]."""
    b, m = state.token_bm.shape
    position_bm = jnp.broadcast_to((cache.length_b + step)[:, None], (b, m))
    rotary = rotary_tables(position_bm, model.config.frequencies())
    x_bmd = model.outside.embed(state.token_bm)
    seen_bt = jnp.arange(cache.slots, dtype=jnp.int32) < cache.length_b[:, None]
    keys, values = [], []
    for number, layer in enumerate(model.layers):

        def attend(q_bmnh: jax.Array, k_bmkh: jax.Array, v_bmkh: jax.Array, number: int = number) -> jax.Array:
            def put(own: jax.Array, new_bmkh: jax.Array) -> jax.Array:
                return jax.lax.dynamic_update_slice_in_dim(own, new_bmkh[:, :, :, None], step, axis=3)

            keys.append(put(state.keys[number], k_bmkh))
            values.append(put(state.values[number], v_bmkh))
            kv = k_bmkh.shape[2]
            q_bmkgh = q_bmnh.reshape(b, m, kv, -1, q_bmnh.shape[-1])
            scale = q_bmnh.shape[-1] ** -0.5
            of_prompt = jnp.einsum(
                "bmkgh,bkht->bmkgt", q_bmkgh, cache.keys_bkht[number], preferred_element_type="float32"
            )
            of_own = jnp.einsum("bmkgh,bmkth->bmkgt", q_bmkgh, keys[-1], preferred_element_type="float32")
            of_prompt = jnp.where(seen_bt[:, None, None, None], of_prompt * scale, -jnp.inf)
            of_own = jnp.where(jnp.arange(of_own.shape[-1]) <= step, of_own * scale, -jnp.inf)
            weights = jax.nn.softmax(jnp.concatenate([of_prompt, of_own], axis=-1), axis=-1).astype(q_bmnh.dtype)
            split = of_prompt.shape[-1]
            mixed = jnp.einsum("bmkgt,bkth->bmkgh", weights[..., :split], cache.values_bkth[number])
            mixed += jnp.einsum("bmkgt,bmkth->bmkgh", weights[..., split:], values[-1])
            return mixed.reshape(q_bmnh.shape)

        x_bmd = layer(x_bmd, attend, rotary)
    return model.outside.final_norm(x_bmd), replace(state, keys=tuple(keys), values=tuple(values))
