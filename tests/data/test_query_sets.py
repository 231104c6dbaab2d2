"""Labelled queries, and what a split promises, checked against plain counting."""

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.data import assets
from jaxtool.data.query_sets import (
    HeldOut,
    LabelledQuery,
    QuerySetError,
    RetrievalSet,
    load_retrieval_set,
    split_queries,
)
from jaxtool.tools import Tool, ToolCatalog


def make(labels: list[set[int]], sources: str = "ab") -> list[LabelledQuery]:
    return [
        LabelledQuery(query_id=f"q{i}", text=f"text {i}", tools=tuple(sorted(t)), source=sources[i % len(sources)])
        for i, t in enumerate(labels)
    ]


# Few tools asked for often, many asked for rarely, as in real sets.
tool_ids = st.one_of(st.integers(0, 4), st.integers(5, 60))
label_sets = st.lists(st.sets(tool_ids, min_size=1, max_size=3), max_size=80)
held_outs = st.builds(
    HeldOut,
    fraction=st.floats(0, 0.9),
    min_queries=st.integers(2, 5),
    max_per_tool=st.integers(0, 6),
    unseen_queries=st.integers(0, 30),
)


@given(label_sets, held_outs, st.integers(0, 5))
def test_a_split_keeps_its_promises(labels: list[set[int]], held_out: HeldOut, seed: int) -> None:
    queries = make(labels)
    train, seen, unseen = split_queries(queries, seed=seed, held_out=held_out)
    position = {query.query_id: i for i, query in enumerate(queries)}
    for part in (train, seen, unseen):
        places = [position[query.query_id] for query in part]
        assert places == sorted(places)
    assert sorted([*train, *seen, *unseen], key=lambda q: position[q.query_id]) == queries

    trained = Counter(tool for query in train for tool in query.tools)
    all_queries = Counter(tool for query in queries for tool in query.tools)
    assert all(trained[tool] >= 1 for query in seen for tool in query.tools)
    assert not any(trained[tool] for query in unseen for tool in query.tools)
    assert all(all_queries[tool] < held_out.min_queries for query in unseen for tool in query.tools)
    assert len(unseen) <= held_out.unseen_queries
    given_up = Counter(tool for query in seen for tool in query.tools)
    for tool, count in given_up.items():
        if all_queries[tool] >= held_out.min_queries:
            assert count <= held_out.max_per_tool
            assert count <= held_out.fraction * all_queries[tool] + 0.5
    for query in seen:
        assert any(all_queries[tool] >= held_out.min_queries for tool in query.tools)
    assert split_queries(queries, seed=seed, held_out=held_out) == (train, seen, unseen)


def test_single_tool_sets_are_split_by_exactly_the_fraction() -> None:
    queries = make([{0}] * 40 + [{1}] * 8 + [{2}] * 3 + [{i} for i in range(10, 30)])
    held_out = HeldOut(fraction=0.25, min_queries=3, max_per_tool=100, unseen_queries=7)
    train, seen, unseen = split_queries(queries, seed=3, held_out=held_out)
    assert Counter(tool for query in seen for tool in query.tools) == {0: 10, 1: 2, 2: 1}
    assert len(unseen) == 7
    assert len(train) == 71 - 13 - 7


def test_other_seeds_hold_out_other_queries_and_sources_share_evenly() -> None:
    queries = make([{i} for i in range(300)], sources="aab")
    parts = [split_queries(queries, seed=s, held_out=HeldOut(unseen_queries=60))[2] for s in (0, 1)]
    assert set(parts[0]) != set(parts[1])
    for part in parts:
        assert 39 <= sum(query.source == "a" for query in part) <= 41


def test_queries_linked_by_tools_stay_together() -> None:
    linked = [{0, 1}, {1, 2}, {2, 3}]
    others = [{i} for i in range(10, 20)]
    for seed in range(10):
        parts = split_queries(make(linked + others), seed=seed, held_out=HeldOut(unseen_queries=6))
        unseen_ids = {query.query_id for query in parts[2]}
        assert len(unseen_ids & {"q0", "q1", "q2"}) in (0, 3)
        assert len(unseen_ids) == 6


def test_ids_must_be_distinct() -> None:
    query = LabelledQuery(query_id="a", text="t", tools=(0,))
    with pytest.raises(QuerySetError, match="query id 'a' appears more than once"):
        split_queries([query, query], seed=0, held_out=HeldOut())


@pytest.mark.parametrize("tools", [(), (1, 1), (2, 1)])
def test_labels_are_distinct_and_ascending(tools: tuple[int, ...]) -> None:
    with pytest.raises(QuerySetError, match=r"query 'a' of f.json: field tools"):
        LabelledQuery(query_id="a", text="t", tools=tools, source="f.json")


def test_blank_queries_and_unknown_tools_are_refused() -> None:
    with pytest.raises(QuerySetError, match="blank text"):
        LabelledQuery(query_id="a", text=" \n", tools=(0,))
    catalog = ToolCatalog([Tool(name="one")])
    for bad in ((1,), (-1, 0)):
        query = LabelledQuery(query_id="a", text="t", tools=bad)
        with pytest.raises(QuerySetError, match="outside of a catalogue of 1 tools"):
            RetrievalSet(catalog=catalog, train=(), test=(), test_unseen=(query,))


@pytest.mark.parametrize(
    ("field", "value"), [("fraction", 1.0), ("fraction", -0.1), ("min_queries", 1), ("unseen_queries", -1)]
)
def test_held_out_values_have_ranges(field: str, value: float) -> None:
    with pytest.raises(QuerySetError, match=f"field {field}: expected"):
        HeldOut(**{field: value})  # type: ignore[arg-type]


def test_sources_that_are_neither_are_told(tmp_path: Path) -> None:
    with pytest.raises(QuerySetError, match=r'no such file or folder; expected "bfcl", a folder in BEIR format'):
        load_retrieval_set("toolens")
    with pytest.raises(QuerySetError, match=r"a folder without corpus\.jsonl and without tools\.json; expected"):
        load_retrieval_set(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(QuerySetError, match=r"file': is a file; a catalogue of tools goes with its labelled queries"):
        load_retrieval_set(str(tmp_path / "file"))


def test_bfcl_is_fetched_by_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise assets.AssetError("fetched")

    monkeypatch.setattr(assets, "bfcl", refuse)
    with pytest.raises(assets.AssetError, match="fetched"):
        load_retrieval_set("bfcl")
    with pytest.raises(QuerySetError):
        load_retrieval_set(str(tmp_path / "bfcl"))
