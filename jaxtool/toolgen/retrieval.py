"""Retrieval with atomic tool ids: one prefill of packed prompts, the tool rows of the head, `top_k`.

For ids of one token this equals the constrained beam search of ToolGen's evaluation (its first step; the second can
only append the end of the turn) and gives any k. Multi-token ids need the decode engine, not this.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtool.data import ChatPrompts
from jaxtool.decoding import DecodeModel, KVCache, decode_model
from jaxtool.decoding.packed_prefill import packed_states
from jaxtool.decoding.prefix import read_prefix
from jaxtool.models import LanguageModel
from jaxtool.parallel import einsum, reshard

SHORTEST_ROW = 32
LONGEST_SHARING = 512  # tokens; behind the beginnings of longer prompts little is saved
_SHORTEST_PLACE = 8  # tokens; bounds the prompts of a row
_PAIR_COST = 6  # of a key to a query, in multiplications by head and size: two, and the time of four for the softmax


@dataclass(frozen=True, kw_only=True)
class _Prefill:
    """One forward pass: which prompts lie in which row.

    Attributes:
        rows: numbers of the prompts of each row.
        shape: rows and tokens of a row; rows behind the last one given are padding.
    """

    rows: list[list[int]]
    shape: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Retrieved:
    """Ranked tools of a list of queries.

    Attributes:
        tools_qk: tool ids, best first, int32 [Q, k]; -1 where invalid.
        log_probs_qk: natural log of the probability among the allowed tools, float32 [Q, k]; -inf where invalid.
        valid_qk: False in the places behind the last allowed tool.
        cut: number of queries whose text did not fit the maximal prompt length and was cut.
    """

    tools_qk: np.ndarray
    log_probs_qk: np.ndarray
    valid_qk: np.ndarray
    cut: int


class ToolRetriever:
    """Ranks the tools of a model for texts.

    Prompts of different lengths share rows, so that little of a prefill is padding, and the tokens of the template that
    all prompts begin with are read once, here. Segment ids keep the prompts apart: a query's result is that of its
    prompt alone. Row lengths are powers of two or half-way between two, and a prefill has batch_size rows or a half, a
    quarter, ... of them, so that few compiled programs serve all queries.

    Args:
        model: a model with tool rows, its parameters on `mesh`. Its layers are taken apart here (see `decode_model`),
            its tool rows of the head cut out.
        prompts: renders the prompts as in training.
        mesh: the mesh of the model.
        batch_size: bounds the memory of a prefill to the tokens of this many prompts as long as the longest of a call
            (rounded up to such a length, at least `SHORTEST_ROW`). Shorter prompts give more queries in one prefill,
            fewer queries a smaller one. Must divide by the batch axes of the mesh.
        donate: give up the memory of the model's layers, which must not be used again; without, they exist twice.
    """

    def __init__(
        self, model: LanguageModel, prompts: ChatPrompts, mesh: Mesh, *, batch_size: int = 16, donate: bool = False
    ) -> None:
        if model.config.num_tools == 0:
            raise ValueError("the model has no tool rows, there is nothing to retrieve")
        self.config, self.prompts, self.mesh, self.batch_size = model.config, prompts, mesh, batch_size
        self._parts = NamedSharding(mesh, model.rules.spec("batch", None)).num_devices // mesh.shape["model"]
        if batch_size < 1 or batch_size % self._parts:
            raise ValueError(
                f"batch_size {batch_size} is not a positive multiple of the {self._parts} devices that share a batch"
            )
        prompts.check_within(model.config.vocab_size, prompts.beginning)
        with jax.set_mesh(mesh):
            self._tools_td, self._bias_t = _tool_head(model)
            self._model: DecodeModel = decode_model(model, donate=donate)
            self._prefix: KVCache | None = None
            if prompts.beginning:
                self._prefix = read_prefix(self._model, prompts.beginning)

    def retrieve(
        self,
        texts: Sequence[str],
        k: int,
        *,
        allowed: Collection[int] | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Retrieved:
        """The k most probable tools of each text, ties by tool id.

        Args:
            texts: user queries.
            k: places to fill; more than the allowed tools gives invalid places at the end.
            allowed: tool ids to choose from (None: all). Probabilities are relative to them.
            progress: called with the number of queries of each finished prefill.

        Raises:
            ValueError: an empty text, k below 1, `allowed` empty or with an unknown id, or scores that aren't finite.
        """
        encoded = []
        for number, text in enumerate(texts):
            try:
                encoded.append(self.prompts.prompt(text))
                self.prompts.check_within(self.config.vocab_size, encoded[-1].ids)
            except ValueError as error:
                raise ValueError(f"query {number}: {error}") from error
        mask_1t = None
        if allowed is not None:
            tools = self.config.num_tools
            ids = np.fromiter(allowed, np.int64, len(allowed))
            if not ids.size or ids.min() < 0 or ids.max() >= tools:
                raise ValueError(f"allowed tools must be a non-empty set of ids from 0 to {tools - 1}")
            mask_1t = np.zeros((1, tools), bool)
            mask_1t[:, ids] = True
        found = self.rank([prompt.ids for prompt in encoded], k, allowed_qt=mask_1t, progress=progress)
        return replace(found, cut=sum(prompt.cut > 0 for prompt in encoded))

    def rank(
        self,
        prompts: Sequence[Sequence[int]],
        k: int,
        *,
        allowed_qt: np.ndarray | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Retrieved:
        """The k most probable tools behind each prompt, ties by tool id.

        Args:
            prompts: token ids, none empty.
            k: places to fill.
            allowed_qt: bool [Q, T], at least one tool for each prompt; or [1, T] for all of them (None: all tools).
            progress: called with the number of prompts of each finished prefill.

        Raises:
            ValueError: k below 1, a mask of another shape or without a tool, or scores that aren't finite.
        """
        if k < 1:
            raise ValueError(f"k is {k}, expected at least 1")
        count, tools = len(prompts), self.config.num_tools
        mask_qt = np.ones((1, tools), bool) if allowed_qt is None else allowed_qt
        if mask_qt.shape not in ((1, tools), (count, tools)) or mask_qt.dtype != np.bool_:
            raise ValueError(f"allowed_qt is {mask_qt.dtype} {mask_qt.shape}, expected bool {(count, tools)}")
        if not mask_qt.any(axis=1).all():
            raise ValueError(f"prompt {int(np.argmin(mask_qt.any(axis=1)))}: no tool is allowed, expected at least one")
        found = Retrieved(
            tools_qk=np.full((count, k), -1, np.int32),
            log_probs_qk=np.full((count, k), -np.inf, np.float32),
            valid_qk=np.zeros((count, k), bool),
            cut=0,
        )
        beginning = self.prompts.beginning
        shared = len(beginning)
        behind = [
            self._prefix is not None and shared < len(ids) <= LONGEST_SHARING and list(ids[:shared]) == beginning
            for ids in prompts
        ]
        for sharing in (True, False):
            numbers = [number for number in range(count) if behind[number] == sharing]
            if numbers:
                self._rank_some(prompts, numbers, self._prefix if sharing else None, mask_qt, found, progress)
        found.valid_qk[:] = np.isfinite(found.log_probs_qk)
        if not found.valid_qk[:, 0].all():
            raise ValueError(
                f"query {int(np.argmin(found.valid_qk[:, 0]))}: the model's scores are not finite, its weights are "
                "damaged"
            )
        found.tools_qk[~found.valid_qk] = -1
        return found

    def _rank_some(
        self,
        prompts: Sequence[Sequence[int]],
        numbers: Sequence[int],
        prefix: KVCache | None,
        mask_qt: np.ndarray,
        found: Retrieved,
        progress: Callable[[int], object] | None,
    ) -> None:
        """Writes tools and log-probabilities of the prompts with these numbers, which begin with the prefix."""
        k, shared = min(found.tools_qk.shape[1], self.config.num_tools), prefix.slots if prefix else 0
        own = [prompts[number][shared:] for number in numbers]
        for prefill in self._prefills([len(ids) for ids in own], shared):
            places = [place for row in prefill.rows for place in row]
            hidden_qd = self._last_hidden(prefill, prefix, own)
            for first in range(0, len(places), self.batch_size):
                some = [numbers[place] for place in places[first : first + self.batch_size]]
                mask = mask_qt if len(mask_qt) == 1 else mask_qt[some]
                scores, ranked = self._rank(hidden_qd[first : first + self.batch_size], mask, k)
                found.log_probs_qk[some, :k], found.tools_qk[some, :k] = scores, ranked
            if progress is not None:
                progress(len(places))

    def _prefills(self, lengths: Sequence[int], shared: int) -> list[_Prefill]:
        """Prompts with these numbers of tokens behind `shared` common ones, in the row length that makes least work."""
        longest = max(lengths, default=1)
        shortest_row = max(SHORTEST_ROW, 1 << (longest - 1).bit_length())
        # Half-way between two powers where that is enough; splash attention works on blocks of powers of two.
        if longest <= shortest_row * 3 // 4 >= SHORTEST_ROW and (shared or self.config.attention != "splash"):
            shortest_row = shortest_row * 3 // 4
        c = self.config
        per_token = sum(leaf.size for leaf in jax.tree.leaves(self._model.layers)) / c.num_hidden_layers
        per_pair = _PAIR_COST * c.num_attention_heads * c.head_dim
        best: tuple[float, list[_Prefill]] = (np.inf, [])
        for row_length in (shortest_row, 2 * shortest_row, 4 * shortest_row):
            most = self.batch_size * shortest_row // row_length // self._parts * self._parts
            if most == 0:
                break
            rows, prefills = _packed(lengths, row_length), []
            for start in range(0, len(rows), most):
                members = rows[start : start + most]
                prefills.append(_Prefill(rows=members, shape=(self._enough(most, len(members)), row_length)))
            tokens = row_length * sum(prefill.shape[0] for prefill in prefills)
            work = tokens * (per_token + per_pair * (shared + row_length))
            best = min(best, (work, prefills), key=lambda plan: plan[0])
        return best[1]

    def _enough(self, most: int, needed: int) -> int:
        """The smallest of most, a half of it, a quarter, ... that is at least `needed` and divides by the devices."""
        while most % (2 * self._parts) == 0 and most // 2 >= needed:
            most //= 2
        return most

    def _last_hidden(self, prefill: _Prefill, prefix: KVCache | None, own: Sequence[Sequence[int]]) -> np.ndarray:
        """Hidden states [Q, D] at the end of the prompts of `prefill`, in the order of its rows."""
        rows, length = prefill.shape
        tokens_bs, positions_bs, segments_bs = (np.zeros((rows, length), np.int32) for _ in range(3))
        last_bp = np.zeros((rows, length // _SHORTEST_PLACE), np.int32)
        shared = prefix.slots if prefix else 0
        places = []
        for row, members in enumerate(prefill.rows):
            start = 0
            for segment, number in enumerate(members):
                end = start + len(own[number])
                tokens_bs[row, start:end] = own[number]
                positions_bs[row, start:end] = np.arange(shared, shared + end - start)
                segments_bs[row, start:end] = segment + 1
                last_bp[row, segment] = end - 1
                places.append((row, segment))
                start = end
        with jax.set_mesh(self.mesh):
            batch = NamedSharding(self.mesh, self._model.rules.spec("batch", None))
            arrays = jax.device_put((tokens_bs, positions_bs, segments_bs, last_bp), batch)
            hidden_bpd = np.asarray(_hidden_at(self._model, prefix, *arrays))
        return hidden_bpd[tuple(np.array(places).T)]

    def _rank(self, hidden_qd: np.ndarray, mask_qt: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities and ids [Q, k] of at most batch_size hidden states [Q, D]; the mask is [Q, T] or [1, T]."""
        queries = len(hidden_qd)
        missing = self._enough(self.batch_size, queries) - queries
        hidden_bd = np.pad(hidden_qd, ((0, missing), (0, 0)))
        rows = self._model.rules.spec("batch", None)
        whole = PartitionSpec(None, None)
        if len(mask_qt) > 1:
            mask_qt = np.pad(mask_qt, ((0, missing), (0, 0)), mode="edge")
        with jax.set_mesh(self.mesh):
            hidden = jax.device_put(hidden_bd, NamedSharding(self.mesh, rows))
            mask = jax.device_put(mask_qt, NamedSharding(self.mesh, rows if len(mask_qt) > 1 else whole))
            scores, ids = _top_tools(hidden, self._tools_td, self._bias_t, mask, k, rows)
        return np.asarray(scores)[:queries], np.asarray(ids)[:queries]


def _packed(lengths: Sequence[int], row_length: int) -> list[list[int]]:
    """Rows of at most `row_length` tokens, as numbers of prompts: best fit, the longest prompts first."""
    rows: list[list[int]] = []
    with_room: list[list[list[int]]] = [[] for _ in range(row_length + 1)]  # rows by the tokens left in them
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        size = max(lengths[number], _SHORTEST_PLACE)
        room = next((room for room in range(size, row_length + 1) if with_room[room]), row_length)
        if with_room[room]:
            row = with_room[room].pop()
        else:
            row = []
            rows.append(row)
        row.append(number)
        with_room[room - size].append(row)
    return rows


@jax.jit
def _tool_head(model: LanguageModel) -> tuple[jax.Array, jax.Array | None]:
    return model.tool_head()


@jax.jit
def _hidden_at(
    model: DecodeModel,
    prefix: KVCache | None,
    tokens_bs: jax.Array,
    positions_bs: jax.Array,
    segment_ids_bs: jax.Array,
    at_bp: jax.Array,
) -> jax.Array:
    """Hidden states [B, P, D] at the given positions of each row, on every device."""
    spec = model.rules.spec
    hidden_bsd = packed_states(model, prefix, tokens_bs, positions_bs, segment_ids_bs)
    rows_b1 = jnp.arange(tokens_bs.shape[0])[:, None]
    hidden_bpd = hidden_bsd.at[rows_b1, at_bp].get(out_sharding=spec("batch", None, "activation"))
    return reshard(hidden_bpd, spec(None, None, None))


@jax.jit(static_argnames=("k", "rows"))
def _top_tools(
    hidden_bd: jax.Array,
    tools_td: jax.Array,
    bias_t: jax.Array | None,
    mask_bt: jax.Array,
    k: int,
    rows: PartitionSpec,
) -> tuple[jax.Array, jax.Array]:
    logits_bt = einsum("bd,td->bt", hidden_bd, tools_td, out=rows, result_dtype="float32")
    if bias_t is not None:
        logits_bt += bias_t
    # -inf enters where and the softmax of rows with at least one allowed tool only; float32 keeps ties rare, and top_k
    # breaks those that remain by the lower id.
    log_probs_bt = jax.nn.log_softmax(jnp.where(mask_bt, logits_bt, -jnp.inf), axis=-1)
    scores_bk, ids_bk = jax.lax.top_k(log_probs_bt, k)
    return reshard(scores_bk, PartitionSpec(None, None)), reshard(ids_bk, PartitionSpec(None, None))
