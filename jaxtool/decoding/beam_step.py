"""One step of the beam search: beams read a run of tokens, what may follow is scored, the best go on.

How a search is set up, and the loop over steps, are in `beam_search`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxtool.decoding.beam_cache import BeamCache, read_chunks
from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.kv_cache import KVCache
from jaxtool.decoding.tool_subset import ToolSubset
from jaxtool.decoding.tool_trie import DEAD_NODE, take, take_each
from jaxtool.decoding.trie_head import HeadSlice
from jaxtool.parallel import reshape, reshard


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Beams:
    """M beams of B rows. They may be at different depths.

    Attributes:
        node_bm: where they are in the trie; dead ones at `DEAD_NODE`.
        score_bm: float32 sum of log-probabilities, -inf for dead ones.
        tool_bm: the tool of a finished beam, -1 for others.
        column_bm: the newest token, as a column of the trie's alphabet; it leads to the node and isn't read yet.
        cache: what they have read.
        found_scores_bm: with a pool of their own, the scores of the best finished tools so far, -inf where there is
            none, lengths taken into account; without, None.
        found_tools_bm: these tools, -1 where there is none; None.
    """

    node_bm: jax.Array
    score_bm: jax.Array
    tool_bm: jax.Array
    column_bm: jax.Array
    cache: BeamCache
    found_scores_bm: jax.Array | None
    found_tools_bm: jax.Array | None

    @property
    def open_bm(self) -> jax.Array:
        """bool, which beams can go on."""
        return (self.tool_bm < 0) & (self.node_bm != DEAD_NODE)

    def padded(self, beams: int, slots: int) -> Beams:
        """With dead beams added, and slots to read into."""
        more = ((0, 0), (0, beams - self.node_bm.shape[1]))
        return replace(
            self,
            node_bm=jnp.pad(self.node_bm, more, constant_values=DEAD_NODE),
            score_bm=jnp.pad(self.score_bm, more, constant_values=-jnp.inf),
            tool_bm=jnp.pad(self.tool_bm, more, constant_values=-1),
            column_bm=jnp.pad(self.column_bm, more),
            cache=self.cache.padded(beams, slots),
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Read:
    """What beams have read in a step.

    Attributes:
        hidden_bmcd: hidden states behind each of at most C tokens.
        columns_bmc: these tokens; the first was chosen, the others are forced.
        count_bm: how many they are; 0 for beams that are finished or dead.
        depth_bm: the depth behind the first of them.
    """

    hidden_bmcd: jax.Array
    columns_bmc: jax.Array
    count_bm: jax.Array
    depth_bm: jax.Array


@dataclass(frozen=True, kw_only=True)
class BeamStep:
    """The parts of a search that no step changes.

    Attributes:
        model: the model.
        subset: the trie, and what each row may name of it.
        normalize: what log-probabilities are relative to.
        score_end: whether END counts.
        length_exponent: of a finished tool's length.
        beams: M, at most.
    """

    model: DecodeModel
    subset: ToolSubset
    normalize: str
    score_end: bool
    length_exponent: float
    beams: int

    def read(self, beams: Beams, prompt: KVCache, width: int) -> tuple[Read, Beams]:
        """Each open beam's newest token and the forced ones behind it, up to a decision or `width` tokens.

        A leaf isn't read: its token is left to the choice that follows, so that no run goes past an end.
        """
        trie = self.subset.trie
        node, columns, count = beams.node_bm, [beams.column_bm], beams.open_bm.astype(jnp.int32)
        for place in range(1, width):
            child = self.subset.only_child(node)
            goes_on = (count == place) & (child != DEAD_NODE) & (take(trie.node_tool, child) < 0)
            node = jnp.where(goes_on, child, node)
            columns.append(jnp.where(goes_on, trie.column_to(child), 0))
            count += goes_on
        columns_bmc = jnp.stack(columns, axis=-1)
        depth_bm = beams.cache.read_bm + 1
        tokens_bmc = take(trie.alphabet, columns_bmc)
        hidden_bmcd, cache = read_chunks(self.model, prompt, beams.cache, tokens_bmc, count)
        read = Read(hidden_bmcd=hidden_bmcd, columns_bmc=columns_bmc, count_bm=count, depth_bm=depth_bm)
        return read, replace(beams, node_bm=node, cache=cache)

    def choose(self, beams: Beams, read: Read, head: HeadSlice | None, width: int) -> Beams:
        """The best continuations of all beams, which have `width` children at most.

        The mask comes first: what the trie or the row's subset doesn't have never competes.
        """
        m = beams.node_bm.shape[1]
        column_bmk, child_bmk, valid_bmk = self.subset.trie.children(beams.node_bm, width)
        if self.subset.before_bt is not None:
            valid_bmk &= self.subset.count(child_bmk) > 0
        run_bm, next_bmk = self._log_probs(read, head, column_bmk, child_bmk, valid_bmk)
        valid_bmk &= beams.open_bm[..., None] & (next_bmk > -jnp.inf)
        score_bm = beams.score_bm + jnp.where(beams.open_bm, run_bm, 0.0)
        grown_bmk = jnp.where(valid_bmk, score_bm[..., None] + next_bmk, -jnp.inf)
        most = min(self.beams, m * width, self.subset.trie.num_tools)
        if beams.found_scores_bm is None:
            return self._one_pool(beams, grown_bmk, column_bmk, child_bmk, most)
        return self._two_pools(beams, grown_bmk, column_bmk, child_bmk, most)

    def _one_pool(
        self, beams: Beams, grown_bmk: jax.Array, column_bmk: jax.Array, child_bmk: jax.Array, most: int
    ) -> Beams:
        """Finished beams compete with the score that they have, against beams that go on."""
        width = grown_bmk.shape[-1]
        stay_bm1 = jnp.where(beams.tool_bm >= 0, beams.score_bm, -jnp.inf)[..., None]
        pool_bx = self._flat(jnp.concatenate([grown_bmk, stay_bm1], axis=-1))
        score_bm, place_bm = jax.lax.top_k(pool_bx, most)
        parent_bm, which_bm = place_bm // (width + 1), place_bm % (width + 1)
        alive_bm, stays_bm = score_bm > -jnp.inf, which_bm == width
        edge_bm = parent_bm * width + jnp.minimum(which_bm, width - 1)
        child_bm = take_each(self._flat(child_bmk), edge_bm, 1)
        node_bm = jnp.where(stays_bm, take_each(beams.node_bm, parent_bm, 1), child_bm)
        tool_bm = jnp.where(stays_bm, take_each(beams.tool_bm, parent_bm, 1), self._tool(child_bm))
        return replace(
            beams,
            node_bm=jnp.where(alive_bm, node_bm, DEAD_NODE),
            score_bm=score_bm,
            tool_bm=jnp.where(alive_bm, tool_bm, -1),
            column_bm=take_each(self._flat(column_bmk), edge_bm, 1),
            cache=beams.cache.of_parents(parent_bm),
        )

    def _two_pools(
        self, beams: Beams, grown_bmk: jax.Array, column_bmk: jax.Array, child_bmk: jax.Array, most: int
    ) -> Beams:
        """As in transformers: of the best 2M continuations, ends among the first M join a pool of finished tools.

        The best M of the others go on.
        """
        width = grown_bmk.shape[-1]
        assert beams.found_scores_bm is not None and beams.found_tools_bm is not None
        pool_bx = self._flat(grown_bmk)
        score_bc, edge_bc = jax.lax.top_k(pool_bx, min(2 * self.beams, pool_bx.shape[1]))
        child_bc = take_each(self._flat(child_bmk), edge_bc, 1)
        tool_bc = jnp.where(score_bc > -jnp.inf, self._tool(child_bc), -1)
        first_c = jnp.arange(score_bc.shape[1]) < self.beams
        ended_bc = jnp.where((tool_bc >= 0) & first_c, self.final_scores(score_bc, tool_bc), -jnp.inf)
        found_bx = jnp.concatenate([beams.found_scores_bm, ended_bc], axis=1)
        found_scores_bm, found_bm = jax.lax.top_k(found_bx, beams.found_scores_bm.shape[1])
        tools_bx = jnp.concatenate([beams.found_tools_bm, tool_bc], axis=1)
        found_tools_bm = jnp.where(found_scores_bm > -jnp.inf, take_each(tools_bx, found_bm, 1), -1)

        score_bm, place_bm = jax.lax.top_k(jnp.where(tool_bc < 0, score_bc, -jnp.inf), most)
        edge_bm, alive_bm = take_each(edge_bc, place_bm, 1), score_bm > -jnp.inf
        return Beams(
            node_bm=jnp.where(alive_bm, take_each(self._flat(child_bmk), edge_bm, 1), DEAD_NODE),
            score_bm=score_bm,
            tool_bm=jnp.full_like(edge_bm, -1),
            column_bm=take_each(self._flat(column_bmk), edge_bm, 1),
            cache=beams.cache.of_parents(edge_bm // width),
            found_scores_bm=found_scores_bm,
            found_tools_bm=found_tools_bm,
        )

    def final_scores(self, score_bm: jax.Array, tool_bm: jax.Array) -> jax.Array:
        """Scores of finished tools over length^exponent, the length in tokens that count."""
        if self.length_exponent == 0:
            return score_bm
        trie = self.subset.trie
        length_bm = take(trie.tool_depth, tool_bm) - int(trie.end_token is not None and not self.score_end)
        return score_bm / jnp.maximum(length_bm, 1).astype(jnp.float32) ** self.length_exponent

    def _tool(self, node_bm: jax.Array) -> jax.Array:
        """The tool with which a beam ends that has come to a node, -1 where it goes on.

        Besides at leaves it ends where nothing that is left counts: forced tokens under "allowed", an END that isn't
        scored.
        """
        trie = self.subset.trie
        tool_bm = take(trie.node_tool, node_bm)
        if self.normalize == "allowed":
            only_bm = take(trie.leaf_order, self.subset.first_place(node_bm))
            return jnp.where(self.subset.count(node_bm) == 1, only_bm, tool_bm)
        if trie.end_token is not None and not self.score_end:
            return jnp.maximum(tool_bm, take(trie.node_tool, self.subset.only_child(node_bm)))
        return tool_bm

    def _log_probs(
        self,
        read: Read,
        head: HeadSlice | None,
        column_bmk: jax.Array,
        child_bmk: jax.Array,
        valid_bmk: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """float32 log-probabilities of the forced tokens that were read [B, M] and of the children [B, M, K].

        They are of any value for beams that aren't open and where there is no child.
        """
        b, m, c, d = read.hidden_bmcd.shape
        last_bm = jnp.maximum(read.count_bm - 1, 0)
        if self.normalize == "allowed":
            run_bm = jnp.zeros_like(last_bm, jnp.float32)
            next_bmk = self._among_children(read, last_bm, head, column_bmk, valid_bmk)
        else:
            flat_bsd = reshape(read.hidden_bmcd, (b, m * c, d), self._rows(3))
            if head is None:
                logits_bsx = reshard(self.model.outside.logits(flat_bsd), self._rows(3))
                place_a = jnp.asarray(self.subset.trie.alphabet)
            else:
                logits_bsx, place_a = head.logits(flat_bsd, self._rows(3)), head.place_a
            logits_bmcx = reshape(logits_bsx, (b, m, c, logits_bsx.shape[-1]), self._rows(4))
            counted = logits_bmcx
            if head is not None and head.at_depth is not None:
                depth_bmc = read.depth_bm[..., None] + jnp.arange(c, dtype=jnp.int32)
                counted = jnp.where(take(head.at_depth, depth_bmc), logits_bmcx, -jnp.inf)
            norm_bmc = _log_sum(counted)
            at = jax.vmap(jax.vmap(lambda x_cx, last, place: x_cx.at[last, place].get()))
            next_bmk = at(logits_bmcx, last_bm, take(place_a, column_bmk)) - take_each(norm_bmc, last_bm, 2)[..., None]
            forced_bmc = take_each(logits_bmcx[:, :, : c - 1], take(place_a, read.columns_bmc[:, :, 1:]), 3)
            is_run_bmc = jnp.arange(1, c, dtype=jnp.int32) < read.count_bm[..., None]
            run_bm = jnp.sum(jnp.where(is_run_bmc, forced_bmc - norm_bmc[:, :, : c - 1], 0.0), axis=-1)
        trie = self.subset.trie
        if trie.end_token is not None and not self.score_end:
            next_bmk = jnp.where(take(trie.node_tool, child_bmk) >= 0, 0.0, next_bmk)
        return run_bm, next_bmk

    def _among_children(
        self, read: Read, last_bm: jax.Array, head: HeadSlice | None, column_bmk: jax.Array, valid_bmk: jax.Array
    ) -> jax.Array:
        """Log-probabilities relative to the children that exist; a single one is certain."""
        assert head is not None
        logits_bmx = head.logits(take_each(read.hidden_bmcd, last_bm, 2), self._rows(3))
        found_bmk = take_each(logits_bmx, take(head.place_a, column_bmk), 2)
        single_bm1 = jnp.sum(valid_bmk, axis=-1, keepdims=True) == 1
        norm_bm = _log_sum(jnp.where(valid_bmk, found_bmk, -jnp.inf))
        return jnp.where(single_bm1, 0.0, found_bmk - norm_bm[..., None])

    def _flat(self, x_bmk: jax.Array) -> jax.Array:
        return reshape(x_bmk, (len(x_bmk), x_bmk.shape[1] * x_bmk.shape[2]), self._rows(2))

    def _rows(self, axes: int) -> PartitionSpec:
        return self.model.rules.spec("batch", *[None] * (axes - 1))


def _log_sum(x: jax.Array) -> jax.Array:
    """log of the sum of exponentials along the last axis; 0 where all are -inf, which nothing may use."""
    return jnp.where(jnp.any(x > -jnp.inf, axis=-1), jax.nn.logsumexp(x, axis=-1), 0.0)
