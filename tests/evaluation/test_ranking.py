import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.evaluation.ranking import evaluate_rankings

A, B, C, D, X, Y, Z = range(7)


def score(ranking, gold, *, invalid=(), **options):
    """Scores of one query as floats; `invalid` are positions."""
    valid = np.ones((1, len(ranking)), dtype=bool)
    valid[0, list(invalid)] = False
    scores = evaluate_rankings(np.array([ranking]), valid, [gold], **options)
    return {name: float(values[0]) for name, values in scores.per_query.items()}


# Worked example: gold a, b, c, d; ranking a, x, b, y, z, c. Values computed by hand.
@pytest.mark.parametrize(
    ("returned", "official"),
    [(5, (1.0, 0.9197, 0.9197)), (6, (1.0, 0.7039, 0.7039)), (None, (1.0, 0.7039, 0.7039))],
)
def test_worked_example(returned, official):
    scores = score([A, X, B, Y, Z, C], [A, B, C, D], returned=returned)
    assert [scores[f"ndcg@{k}"] for k in (1, 3, 5)] == pytest.approx([1.0, 0.7039, 0.5856], abs=5e-5)
    assert [scores[f"official_ndcg@{k}"] for k in (1, 3, 5)] == pytest.approx(official, abs=5e-5)
    assert [scores[f"recall@{k}"] for k in (1, 3, 5)] == [0.25, 0.5, 0.5]
    assert [scores[f"comp@{k}"] for k in (1, 3, 5)] == [0.0, 0.0, 0.0]
    assert scores["mrr"] == 1.0


def test_single_gold_tool_has_closed_forms():
    for rank in range(1, 8):
        ranking = list(range(10, 17))
        scores = score(ranking, [ranking[rank - 1]], ks=(1, 3, 5))
        for k in (1, 3, 5):
            assert scores[f"ndcg@{k}"] == pytest.approx(1 / math.log2(rank + 1) if rank <= k else 0.0)
            assert scores[f"official_ndcg@{k}"] == pytest.approx(scores[f"ndcg@{k}"])
            assert scores[f"recall@{k}"] == scores[f"comp@{k}"] == (1.0 if rank <= k else 0.0)
        assert scores["mrr"] == pytest.approx(1 / rank)


def test_invalid_entry_uses_up_a_rank_only_in_the_standard_metrics():
    scores = score([A, X, B], [B], invalid=[0], ks=(1, 2, 3))
    assert [scores[f"ndcg@{k}"] for k in (1, 2, 3)] == pytest.approx([0.0, 0.0, 0.5])
    assert [scores[f"official_ndcg@{k}"] for k in (1, 2, 3)] == pytest.approx([0.0, 1 / math.log2(3), 1 / math.log2(3)])
    assert scores["mrr"] == pytest.approx(1 / 3)


def test_invalid_gold_id_hits_nothing():
    assert set(score([A, X], [A], invalid=[0]).values()) == {0.0}


def test_repeated_tool_counts_first_in_standard_and_last_in_official():
    scores = score([A, X, A], [A], ks=(1, 2, 3))
    assert [scores[f"ndcg@{k}"] for k in (1, 2, 3)] == [1.0, 1.0, 1.0]
    # The official list is x, a.
    assert [scores[f"official_ndcg@{k}"] for k in (1, 2, 3)] == pytest.approx([0.0, 1 / math.log2(3), 1 / math.log2(3)])
    assert [scores[f"recall@{k}"] for k in (1, 2, 3)] == [1.0, 1.0, 1.0]


def test_cutoff_beyond_the_list_counts_misses():
    scores = score([A, X], [A, B, C], ks=(10,))
    ideal = 1 + 1 / math.log2(3) + 1 / 2
    assert scores["ndcg@10"] == pytest.approx(1 / ideal)
    assert scores["recall@10"] == pytest.approx(1 / 3)


def test_repeated_gold_and_repeated_cutoffs_count_once():
    assert score([A, X, B], [A, A, B], ks=(3, 1, 3)) == score([A, X, B], {A, B}, ks=(1, 3))


def test_means_errors_and_selection():
    scores = evaluate_rankings(
        np.array([[A], [A], [A], [A]]), np.ones((4, 1), dtype=bool), [[A], [A], [B], [A]], ks=(1,)
    )
    assert scores.mean("ndcg@1") == 0.75
    # Sample variance of (1, 1, 0, 1) is 0.25.
    assert scores.standard_error("ndcg@1") == pytest.approx(math.sqrt(0.25 / 4))
    part = scores.select(np.array([False, True, True, False]))
    assert (part.queries, part.mean("recall@1")) == (2, 0.5)
    assert math.isnan(scores.select([2]).standard_error("mrr"))
    bad_rows = [
        (np.zeros(4, dtype=bool), "no query is left"),
        ([], "no query is left"),
        ([True], r"shape \(1,\)"),
        ([4], "0 to 3"),
        ([-1], "0 to 3"),
        ([0.5], "0 to 3"),
    ]
    for rows, message in bad_rows:
        with pytest.raises(ValueError, match=message):
            scores.select(rows)
    with pytest.raises(ValueError, match="'ndcg@7' was not computed"):
        scores.mean("ndcg@7")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranked": np.array([A, B])}, r"shape \(2,\)"),
        (
            {"ranked": np.zeros((0, 2), dtype=int), "valid": np.ones((0, 2), dtype=bool), "gold": []},
            r"shape \(0, 2\)",
        ),
        ({"ranked": np.array([[0.0, 1.0]])}, "type float64"),
        ({"valid": np.ones((1, 3), dtype=bool)}, r"shape \(1, 3\)"),
        ({"valid": np.ones((1, 2), dtype=int)}, "type int64"),
        ({"ranked": np.array([[0, -1]])}, r"ranked_qk\[0, 1\] is -1"),
        ({"gold": [[A], [B]]}, "gold has 2 entries; expected 1"),
        ({"gold": [[]]}, r"gold\[0\] is empty"),
        ({"gold": [[-3]]}, r"gold\[0\] holds -3"),
        ({"ks": ()}, "at least one cut-off"),
        ({"ks": (0, 1)}, "1 or more"),
        ({"returned": 3}, "returned is 3; expected 1 to 2"),
        ({"returned": 0}, "returned is 0"),
    ],
)
def test_bad_input_is_named(change, message):
    options = {"ranked": np.array([[A, B]]), "valid": np.ones((1, 2), dtype=bool), "gold": [[A]]} | change
    ranked, valid, gold = options.pop("ranked"), options.pop("valid"), options.pop("gold")
    with pytest.raises(ValueError, match=message):
        evaluate_rankings(ranked, valid, gold, **options)


def test_id_of_an_invalid_entry_may_be_anything():
    assert score([A, -1], [A], invalid=[1])["ndcg@1"] == 1.0


def slow_dcg(gains):
    return sum(gain / math.log2(rank + 1) for rank, gain in enumerate(gains, start=1))


def slow_ndcg(gains, ideal_gains, k):
    ideal = slow_dcg(sorted(ideal_gains, reverse=True)[:k])
    return slow_dcg(gains[:k]) / ideal if ideal else 0.0


def slow_official(ranking, valid, gold, n, k, tool_count):
    """The published procedure: a score and a relevance for every tool, then NDCG over all tools by score."""
    predicted, true = [0.0] * tool_count, [0.0] * tool_count
    for score_, (tool, ok) in zip(range(n, 0, -1), zip(ranking, valid, strict=True), strict=False):
        if ok:
            predicted[tool] = score_
            if tool in gold:
                true[tool] = 1.0
    order = sorted(range(tool_count), key=lambda tool: -predicted[tool])
    return slow_ndcg([true[tool] for tool in order], true, k)


@st.composite
def rankings(draw):
    tool_count, width = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    rows = draw(st.integers(1, 5))
    tools = st.integers(0, tool_count - 1)
    ranked = [draw(st.lists(tools, min_size=width, max_size=width)) for _ in range(rows)]
    valid = [draw(st.lists(st.booleans(), min_size=width, max_size=width)) for _ in range(rows)]
    gold = [draw(st.lists(tools, min_size=1, max_size=4)) for _ in range(rows)]
    return tool_count, ranked, valid, gold, draw(st.integers(1, width))


@given(rankings())
def test_equals_a_slow_reading_of_the_definitions(case):
    tool_count, ranked, valid, gold, returned = case
    ks = (1, 2, 3, 5, 9)
    scores = evaluate_rankings(np.array(ranked), np.array(valid), gold, ks=ks, returned=returned)
    for row, (ranking, ok, wanted) in enumerate(zip(ranked, valid, gold, strict=True)):
        wanted = set(wanted)
        gains, seen = [], set()
        for tool, usable in zip(ranking, ok, strict=True):
            gains.append(1.0 if usable and tool in wanted and tool not in seen else 0.0)
            if usable:
                seen.add(tool)
        for k in ks:
            found = {tool for tool, usable in zip(ranking[:k], ok[:k], strict=True) if usable} & wanted
            assert scores.per_query[f"ndcg@{k}"][row] == pytest.approx(slow_ndcg(gains, [1.0] * len(wanted), k))
            assert scores.per_query[f"recall@{k}"][row] == pytest.approx(len(found) / len(wanted))
            assert scores.per_query[f"comp@{k}"][row] == (found == wanted)
            official = slow_official(ranking, ok, wanted, returned, k, tool_count)
            assert scores.per_query[f"official_ndcg@{k}"][row] == pytest.approx(official)
        assert scores.per_query["mrr"][row] == pytest.approx(1 / (gains.index(1.0) + 1) if any(gains) else 0.0)


@given(rankings())
def test_official_is_never_below_standard_for_clean_lists(case):
    _, ranked, _, gold, returned = case
    ranked = np.array([list(dict.fromkeys(row + list(range(len(row) + 8))))[: len(row)] for row in ranked])
    scores = evaluate_rankings(ranked, np.ones(ranked.shape, dtype=bool), gold, ks=(1, 3), returned=returned)
    for k in (1, 3):
        if returned >= min(k, ranked.shape[1]):
            assert np.all(scores.per_query[f"official_ndcg@{k}"] >= scores.per_query[f"ndcg@{k}"] - 1e-12)


def test_standard_ndcg_equals_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(0)
    ranked = np.stack([rng.permutation(30) for _ in range(20)])
    gold = [rng.choice(30, size=rng.integers(1, 6), replace=False).tolist() for _ in range(20)]
    scores = evaluate_rankings(ranked, np.ones(ranked.shape, dtype=bool), gold)
    true, predicted = np.zeros((20, 30)), np.zeros((20, 30))
    for row in range(20):
        true[row, gold[row]] = 1
        predicted[row, ranked[row]] = np.arange(30, 0, -1)
    for k in (1, 3, 5):
        assert scores.mean(f"ndcg@{k}") == pytest.approx(metrics.ndcg_score(true, predicted, k=k))
