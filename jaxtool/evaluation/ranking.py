"""Scores of ranked tool lists: NDCG in two variants, recall, completeness and reciprocal rank.

Works on integer tool ids only; how a ranking was made, and how scores are shown, is no matter of this file.
`ndcg` is the standard metric; `official_ndcg` is the one of the published ToolGen tables, which is kinder:
its ideal ranking holds only those gold tools that were returned, so a gold tool that was missed is free.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, kw_only=True)
class RankingScores:
    """Scores of Q queries.

    Attributes:
        ks: the cut-offs, ascending and distinct.
        returned: how many of the ranked tools count as returned in `official_ndcg`.
        per_query: name -> float64 [Q], each in [0, 1]. For every k: `ndcg@k`, `official_ndcg@k`, `recall@k`
            (share of the gold tools in the first k) and `comp@k` (1 where all gold tools are in the first k);
            besides, `mrr` (1 / rank of the first gold tool in the whole list, 0 without one).
    """

    ks: tuple[int, ...]
    returned: int
    per_query: Mapping[str, NDArray[np.float64]]

    @property
    def queries(self) -> int:
        """The number of queries Q."""
        return len(self.per_query["mrr"])

    def mean(self, name: str) -> float:
        """The mean over the queries of one metric. Raises ValueError for a name that wasn't computed."""
        return float(self._values(name).mean())

    def standard_error(self, name: str) -> float:
        """The normal-theory standard error of `mean(name)`: sample deviation (Q - 1) over the root of Q.

        It covers the choice of queries, not of training seeds. NaN for a single query.
        """
        values_q = self._values(name)
        if len(values_q) < 2:
            return float("nan")
        return float(values_q.std(ddof=1) / np.sqrt(len(values_q)))

    def select(self, rows: ArrayLike) -> "RankingScores":
        """The scores of some queries only.

        Args:
            rows: a boolean mask [Q], or query positions.

        Raises:
            ValueError: a mask of another length, a position outside 0..Q-1, or no query left.
        """
        chosen = np.asarray(rows)
        positions = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        if chosen.dtype == np.bool_ and chosen.shape != (self.queries,):
            raise ValueError(f"select: the mask has shape {chosen.shape}; expected ({self.queries},)")
        if positions.size == 0:
            raise ValueError("select: no query is left; expected at least one")
        if not np.issubdtype(positions.dtype, np.integer) or positions.min() < 0 or positions.max() >= self.queries:
            raise ValueError(f"select: expected a boolean mask or query positions from 0 to {self.queries - 1}")
        picked = {name: values_q[positions] for name, values_q in self.per_query.items()}
        return RankingScores(ks=self.ks, returned=self.returned, per_query=picked)

    def _values(self, name: str) -> NDArray[np.float64]:
        if name not in self.per_query:
            raise ValueError(f"metric {name!r} was not computed; there are: {', '.join(self.per_query)}")
        return self.per_query[name]


def evaluate_rankings(
    ranked_qk: ArrayLike,
    valid_qk: ArrayLike,
    gold: Sequence[Collection[int]],
    ks: Sequence[int] = (1, 3, 5),
    returned: int | None = None,
) -> RankingScores:
    """Scores ranked tool ids against the sets of gold tools.

    Standard metrics take the list as it is. An invalid entry uses up its rank and hits nothing; a repeated
    tool counts at its first rank only. Ranks beyond the list (k > K) hit nothing.

    `official_ndcg` follows the scorer behind the tables of ToolGen (arXiv 2410.03439): of the first
    `returned` entries, invalid ones are taken out and the rest moves up; a repeated tool keeps its *last*
    place; the ideal holds the returned gold tools only; 0 where none was returned.

    Args:
        ranked_qk: integer tool ids [Q, K], best first. Ids of invalid entries are not looked at.
        valid_qk: boolean [Q, K], False where the entry names no tool (padding, a dead beam, a made-up name).
        gold: the gold tool ids of each query; repeated ids count once.
        ks: the cut-offs, positive; sorted, repeated ones count once.
        returned: n of the official metric (the published ToolGen numbers: 5). None: the whole list, K.

    Raises:
        ValueError: wrong shapes or types, no query, a query without gold tools, a negative id, a cut-off
            below 1, or `returned` outside 1..K (a longer list would have scored differently).
    """
    ranked_qk, valid_qk = _checked_rankings(ranked_qk, valid_qk)
    query_count, width = ranked_qk.shape
    cutoffs = tuple(sorted({int(k) for k in ks}))
    if not cutoffs or cutoffs[0] < 1:
        raise ValueError(f"ks is {tuple(ks)}; expected at least one cut-off, each 1 or more")
    returned = width if returned is None else returned
    if not 1 <= returned <= width:
        raise ValueError(f"returned is {returned}; expected 1 to {width}, the number of ranked tools per query")
    gold_sets = _checked_gold(gold, query_count)
    gold_count_q = np.array([len(tools) for tools in gold_sets], dtype=np.int64)

    relevant_qk = _relevance(ranked_qk, valid_qk, gold_sets)
    hit_qk = relevant_qk & _occurrence(ranked_qk, valid_qk, last=False)
    rank_qk = np.broadcast_to(np.arange(1, width + 1), hit_qk.shape)

    # The official list: last occurrences among the returned entries, ranks counted over them alone.
    kept_qn = _occurrence(ranked_qk[:, :returned], valid_qk[:, :returned], last=True)
    official_rank_qn = np.cumsum(kept_qn, axis=1, dtype=np.int64)
    official_hit_qn = kept_qn & relevant_qk[:, :returned]
    seen_count_q = np.count_nonzero(official_hit_qn, axis=1)

    per_query: dict[str, NDArray[np.float64]] = {}
    for k in cutoffs:
        hits_q = np.count_nonzero(hit_qk[:, :k], axis=1)
        per_query[f"ndcg@{k}"] = _ndcg(hit_qk, rank_qk, gold_count_q, k)
        per_query[f"official_ndcg@{k}"] = _ndcg(official_hit_qn, official_rank_qn, seen_count_q, k)
        per_query[f"recall@{k}"] = hits_q / gold_count_q
        per_query[f"comp@{k}"] = (hits_q == gold_count_q).astype(np.float64)
    first_q = hit_qk.argmax(axis=1)
    per_query["mrr"] = np.where(hit_qk.any(axis=1), 1.0 / (first_q + 1), 0.0)
    return RankingScores(ks=cutoffs, returned=returned, per_query=per_query)


def _ndcg(
    hit_qk: NDArray[np.bool_], rank_qk: NDArray[np.int64], ideal_count_q: NDArray[np.int64], k: int
) -> NDArray[np.float64]:
    """DCG@k over the DCG of min(k, ideal count) hits in front; 0 where the ideal is empty. [Q]"""
    # Rank 0 (before the first kept entry) is never a hit; the maximum only keeps log2 away from 0.
    gain_qk = 1.0 / np.log2(np.maximum(rank_qk, 1) + 1.0)
    dcg_q = np.where(hit_qk & (rank_qk <= k), gain_qk, 0.0).sum(axis=1)
    ideal = np.concatenate([[0.0], np.cumsum(1.0 / np.log2(np.arange(1, k + 1) + 1.0))])
    ideal_q = ideal[np.minimum(ideal_count_q, k)]
    return np.divide(dcg_q, ideal_q, out=np.zeros_like(dcg_q), where=ideal_q > 0)


def _relevance(
    ranked_qk: NDArray[np.int64], valid_qk: NDArray[np.bool_], gold_sets: list[list[int]]
) -> NDArray[np.bool_]:
    """Whether each entry is valid and gold. [Q, K]"""
    # Pairs (query, tool) become single numbers, so that one set look-up serves all queries.
    ids_qk = np.where(valid_qk, ranked_qk, 0)
    stride = 1 + max(int(ids_qk.max(initial=0)), max(max(tools) for tools in gold_sets))
    gold_keys = np.array([row * stride + tool for row, tools in enumerate(gold_sets) for tool in tools])
    keys_qk = np.arange(len(ids_qk))[:, None] * stride + ids_qk
    return np.isin(keys_qk, gold_keys) & valid_qk


def _occurrence(ranked_qk: NDArray[np.int64], valid_qk: NDArray[np.bool_], *, last: bool) -> NDArray[np.bool_]:
    """True at the first (or last) valid entry of each tool in its row. [Q, K]"""
    rows, columns = np.nonzero(valid_qk)
    if last:
        rows, columns = rows[::-1], columns[::-1]
    pairs = np.stack([rows, ranked_qk[rows, columns]], axis=1)
    _, first = np.unique(pairs, axis=0, return_index=True)
    chosen_qk = np.zeros(valid_qk.shape, dtype=np.bool_)
    chosen_qk[rows[first], columns[first]] = True
    return chosen_qk


def _checked_rankings(ranked_qk: ArrayLike, valid_qk: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    ranked, valid = np.asarray(ranked_qk), np.asarray(valid_qk)
    if ranked.ndim != 2 or 0 in ranked.shape:
        raise ValueError(f"ranked_qk has shape {ranked.shape}; expected [Q, K], both at least 1")
    if not np.issubdtype(ranked.dtype, np.integer):
        raise ValueError(f"ranked_qk has type {ranked.dtype}; expected integer tool ids")
    if valid.shape != ranked.shape or valid.dtype != np.bool_:
        raise ValueError(f"valid_qk has shape {valid.shape} and type {valid.dtype}; expected {ranked.shape} and bool")
    negative = np.argwhere(valid & (ranked < 0))
    if len(negative):
        row, column = negative[0]
        raise ValueError(
            f"ranked_qk[{row}, {column}] is {ranked[row, column]}; expected an id of 0 or more where valid"
        )
    return ranked.astype(np.int64), valid


def _checked_gold(gold: Sequence[Collection[int]], query_count: int) -> list[list[int]]:
    if len(gold) != query_count:
        raise ValueError(f"gold has {len(gold)} entries; expected {query_count}, one for each ranked query")
    sets = []
    for row, tools in enumerate(gold):
        distinct = {int(tool) for tool in tools}
        if not distinct:
            raise ValueError(f"gold[{row}] is empty; expected at least one tool id (leave such queries out)")
        if min(distinct) < 0:
            raise ValueError(f"gold[{row}] holds {min(distinct)}; expected tool ids of 0 or more")
        sets.append(sorted(distinct))
    return sets
