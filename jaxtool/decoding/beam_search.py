"""Beam search over the trie of tool ids: the most probable tools of each row, never an id that is no tool's.

Beams share the keys and values of their prompt; only the few tokens of an id are a beam's own. A beam that has nowhere
to go is dead: it is never returned, and what was asked for beyond the tools that can be reached comes back as invalid.
A step is in `beam_step`, reading in `beam_cache`, the rows of the head in `trie_head`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from jaxtool.decoding.beam_cache import BeamCache
from jaxtool.decoding.beam_step import Beams, BeamStep, Read
from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.kv_cache import KVCache
from jaxtool.decoding.tool_subset import ToolSubset
from jaxtool.decoding.tool_trie import DEAD_NODE, ROOT_NODE, ToolTrie
from jaxtool.decoding.trie_head import NORMALIZE, HeadSlice, TrieHead, search_levels
from jaxtool.parallel import reshard

FINISHED_POOLS = ("single", "two")


@dataclass(frozen=True, kw_only=True)
class BeamSearch:
    """How tools are searched for. The defaults rank by the model's own probability of the whole id.

    Attributes:
        beams: M; with at least as many as tools the ranking is exact.
        keep: k, the tools that are returned, at most M.
        normalize: log-probabilities are relative to all that the model can predict ("full"), to the tokens that occur
            in ids at that depth ("slice"), or to the tokens that may come next ("allowed"; forced tokens are then
            certain, and a beam whose rest is forced has finished).
        score_end: whether the probability of END counts, where the trie has END edges.
        length_exponent: scores are divided by (tokens of the id, END included if it counts)^exponent.
        finished_pool: "single": finished beams keep their places among the M with the score that they have. "two":
            they move to a pool of M of their own, as in transformers.
        chunk: most tokens that a beam reads at once: the chosen one and those that are forced behind it. Saves passes,
            which at few rows each take as long as reading the model; at many rows, where positions count, give 1.
    """

    beams: int
    keep: int
    normalize: str = "full"
    score_end: bool = True
    length_exponent: float = 0.0
    finished_pool: str = "single"
    chunk: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.keep <= self.beams:
            raise ValueError(f"keep is {self.keep} and beams {self.beams}, expected 1 <= keep <= beams")
        for name, names in (("normalize", NORMALIZE), ("finished_pool", FINISHED_POOLS)):
            if getattr(self, name) not in names:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(names)}")
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}, expected at least 1")
        if not 0 <= self.length_exponent < float("inf"):
            raise ValueError(f"length_exponent is {self.length_exponent}, expected a number from 0")

    @classmethod
    def hf_parity(cls, beams: int = 5, keep: int = 5) -> BeamSearch:
        """The search of transformers: `num_beams`, `num_return_sequences`, `prefix_allowed_tokens_fn` over a trie.

        Equals `generate(..., early_stopping="never", length_penalty=1.0)` where its `max_new_tokens` leaves room for
        the longest id; build the trie with the model's EOS as `end_token`.
        """
        return cls(beams=beams, keep=keep, normalize="full", length_exponent=1.0, finished_pool="two", chunk=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RankedTools:
    """The k best tools of B rows, best first.

    Attributes:
        tools_bk: int32 tool ids; -1 where invalid.
        scores_bk: float32 scores as `search` defines them; -inf where invalid.
        valid_bk: bool, False behind the last tool that was reached.
        count_b: int32, the number of valid ones.
        passes: int32, passes of the model that the search took one after the other, prefill not counted.
        search: what the scores are.
    """

    tools_bk: jax.Array
    scores_bk: jax.Array
    valid_bk: jax.Array
    count_b: jax.Array
    passes: jax.Array
    search: BeamSearch = field(metadata={"static": True})


def rank_tools(
    model: DecodeModel,
    trie: ToolTrie,
    cache: KVCache,
    hidden_bd: jax.Array,
    search: BeamSearch,
    allowed_bt: jax.Array | None = None,
    *,
    head: TrieHead | None = None,
) -> RankedTools:
    """The best tools behind the prompts that `cache` holds.

    Ties go to the lower id: in a step to the better beam and then the lower token, in the result to the lower tool.

    Args:
        model: the model.
        trie: the ids of the tools.
        cache: the prompts, each read to its end.
        hidden_bd: final normed hidden states of the prompts' last tokens.
        search: beams, scores, what is returned.
        allowed_bt: bool, the tools that each row may name (None: all).
        head: `TrieHead.build(model, trie, search.normalize)`, made once for many calls; None: made here.

    Raises:
        ValueError: `head` is for another normaliser or trie, or `allowed_bt` isn't bool [B, T].
    """
    if head is None:
        head = TrieHead.build(model, trie, search.normalize)
    elif head.normalize != search.normalize:
        raise ValueError(f"head is made for normalize {head.normalize!r}, the search has {search.normalize!r}")
    elif head.slices and head.slices[0].place_a.shape != trie.alphabet.shape:
        raise ValueError("head is made for another trie, with other tokens")
    if allowed_bt is not None and allowed_bt.shape[0] != len(hidden_bd):
        raise ValueError(f"allowed_bt has {allowed_bt.shape[0]} rows, expected {len(hidden_bd)}")
    return _rank_tools(model, trie, cache, hidden_bd, allowed_bt, head, search=search)


@jax.jit(static_argnames="search")
def _rank_tools(
    model: DecodeModel,
    trie: ToolTrie,
    cache: KVCache,
    hidden_bd: jax.Array,
    allowed_bt: jax.Array | None,
    head: TrieHead,
    *,
    search: BeamSearch,
) -> RankedTools:
    subset = ToolSubset.of(trie, allowed_bt, model.rules)
    step = BeamStep(
        model=model,
        subset=subset,
        normalize=search.normalize,
        score_end=search.score_end,
        length_exponent=search.length_exponent,
        beams=search.beams,
    )
    steps, last = search_levels(trie, search.normalize)
    beams = _first_beams(model, subset, len(hidden_bd), search)
    nothing_bm = jnp.zeros_like(beams.node_bm)
    prompt = Read(
        hidden_bmcd=hidden_bd[:, None, None],
        columns_bmc=nothing_bm[..., None],
        count_bm=nothing_bm + 1,
        depth_bm=nothing_bm,
    )
    beams = step.choose(beams, prompt, _slice(head, 0), trie.level_children[0])
    for depth in range(1, steps):
        read, beams = step.read(beams.padded(beams.node_bm.shape[1], depth), cache, 1)
        beams = step.choose(beams, read, _slice(head, depth), trie.level_children[depth])
    passes = jnp.int32(steps - 1)
    if steps <= last:
        most = max(trie.level_children[steps : last + 1])
        width = _chunk_width(trie, search, subsets=allowed_bt is not None)

        def going_on(carry: tuple[jax.Array, Beams]) -> jax.Array:
            return jnp.any(carry[1].open_bm)

        def turn(carry: tuple[jax.Array, Beams]) -> tuple[jax.Array, Beams]:
            passes, beams = carry
            read, beams = step.read(beams, cache, width)
            return passes + 1, step.choose(beams, read, _slice(head, steps), most)

        beams = beams.padded(min(search.beams, trie.num_tools), last)
        passes, beams = jax.lax.while_loop(going_on, turn, (passes, beams))
    return _best(step, beams, passes, search)


def _first_beams(model: DecodeModel, subset: ToolSubset, rows: int, search: BeamSearch) -> Beams:
    """One beam at the root, or dead where nothing is allowed; no two beams can then become the same."""
    rules = model.rules

    def filled(value: float, dtype: str, beams: int = 1) -> jax.Array:
        return reshard(jnp.full((rows, beams), value, dtype), rules.spec("batch", None))

    root_b1 = filled(ROOT_NODE, "int32")
    alive_b1 = subset.count(root_b1) > 0
    two, most = search.finished_pool == "two", min(search.beams, subset.trie.num_tools)
    return Beams(
        node_bm=jnp.where(alive_b1, root_b1, DEAD_NODE),
        score_bm=jnp.where(alive_b1, 0.0, -jnp.inf).astype(jnp.float32),
        tool_bm=filled(-1, "int32"),
        column_bm=filled(0, "int32"),
        cache=BeamCache.empty(model, rows),
        found_scores_bm=filled(-jnp.inf, "float32", most) if two else None,
        found_tools_bm=filled(-1, "int32", most) if two else None,
    )


def _chunk_width(trie: ToolTrie, search: BeamSearch, *, subsets: bool) -> int:
    """Tokens of a chunk: no more than a run can have, which in the trie of a subset may be longer than in the whole."""
    if subsets:
        return min(search.chunk, trie.max_depth)
    runs = trie.longest_run if search.normalize == "allowed" else max(trie.longest_run, trie.longest_tail)
    return min(search.chunk, runs + 1)


def _slice(head: TrieHead, number: int) -> HeadSlice | None:
    return head.slices[number] if head.slices else None


def _best(step: BeamStep, beams: Beams, passes: jax.Array, search: BeamSearch) -> RankedTools:
    """The best `keep` finished tools, by score and then by id."""
    tools = step.subset.trie.num_tools
    score_bm, tool_bm = beams.found_scores_bm, beams.found_tools_bm
    if score_bm is None or tool_bm is None:
        tool_bm = beams.tool_bm
        score_bm = jnp.where(tool_bm >= 0, step.final_scores(beams.score_bm, tool_bm), -jnp.inf)
    tool_bm = jnp.where(score_bm > -jnp.inf, tool_bm, tools)
    score_bm, tool_bm = jax.lax.sort((-score_bm, tool_bm), num_keys=2)
    missing = ((0, 0), (0, max(search.keep - score_bm.shape[1], 0)))
    scores_bk = jnp.pad(-score_bm, missing, constant_values=-jnp.inf)[:, : search.keep]
    tools_bk = jnp.pad(tool_bm, missing, constant_values=tools)[:, : search.keep]
    valid_bk = tools_bk < tools
    return RankedTools(
        tools_bk=jnp.where(valid_bk, tools_bk, -1),
        scores_bk=jnp.where(valid_bk, scores_bk, -jnp.inf),
        valid_bk=valid_bk,
        count_b=jnp.sum(valid_bk, axis=-1, dtype=jnp.int32),
        passes=passes,
        search=search,
    )
