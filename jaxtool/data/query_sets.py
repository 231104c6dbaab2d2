"""Queries labelled with the tools that answer them, their split into train and test, and loading by name.

The formats themselves are read in bfcl.py, beir.py and labelled_files.py.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxtool.tools import ToolCatalog


class QuerySetError(ValueError):
    """A data set of queries that cannot be used as it is."""


@dataclass(frozen=True, kw_only=True)
class LabelledQuery:
    """A user's request and the tools that it needs.

    Attributes:
        query_id: The data set's own id of the query.
        text: The request, as the user wrote it.
        tools: Ids of the tools in the catalogue: at least one, distinct, ascending. All are needed (the
            labels carry no order and no alternatives).
        source: The file of the data set that it comes from.

    Raises:
        QuerySetError: The text is blank, or the tool ids are not distinct and ascending.
    """

    query_id: str
    text: str
    tools: tuple[int, ...]
    source: str = ""

    def __post_init__(self) -> None:
        where = f"query {self.query_id!r} of {self.source or 'unknown source'}"
        if not self.text.strip():
            raise QuerySetError(f"{where}: blank text")
        if not self.tools or list(self.tools) != sorted(set(self.tools)):
            raise QuerySetError(
                f"{where}: field tools: expected distinct ascending ids, at least one, found {self.tools}"
            )


@dataclass(frozen=True, kw_only=True)
class RetrievalSet:
    """A catalogue with labelled queries in train and test parts.

    Attributes:
        catalog: All tools that can be retrieved, also those that no query asks for.
        train: Queries to train on.
        test: Held-out queries. In sets that we split, each of their tools also has a training query.
        test_unseen: Held-out queries with tools that no training query asks for; empty in sets that come
            split.
        notes: Counts of everything that was merged, skipped or left out, and why.

    Raises:
        QuerySetError: A query names a tool id outside of the catalogue.
    """

    catalog: ToolCatalog
    train: tuple[LabelledQuery, ...]
    test: tuple[LabelledQuery, ...]
    test_unseen: tuple[LabelledQuery, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for query in (*self.train, *self.test, *self.test_unseen):
            if query.tools[0] < 0 or query.tools[-1] >= len(self.catalog):
                raise QuerySetError(
                    f"query {query.query_id!r} of {query.source or 'unknown source'}: field tools: "
                    f"{query.tools} outside of a catalogue of {len(self.catalog):,} tools"
                )


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """How much of a set without its own split to hold out for testing.

    Attributes:
        fraction: Part of a tool's queries (0 to 1, below 1) to hold out, rounded to the nearest number.
        min_queries: Tools with at least this many queries give some to the seen part, tools with fewer may be
            in the unseen part (at least 2).
        max_per_tool: Most queries that one tool gives to the seen part, so that no tool dominates the score.
        unseen_queries: Number of queries to hold out together with all queries of their tools.

    Raises:
        QuerySetError: A value is out of its range.
    """

    fraction: float = 0.25
    min_queries: int = 3
    max_per_tool: int = 10
    unseen_queries: int = 200

    def __post_init__(self) -> None:
        ranges = {
            "fraction": (0 <= self.fraction < 1, "a number from 0 to below 1"),
            "min_queries": (self.min_queries >= 2, "at least 2"),
            "max_per_tool": (self.max_per_tool >= 0, "at least 0"),
            "unseen_queries": (self.unseen_queries >= 0, "at least 0"),
        }
        for field, (holds, expected) in ranges.items():
            if not holds:
                raise QuerySetError(f"field {field}: expected {expected}, found {getattr(self, field)}")


def split_queries(
    queries: Sequence[LabelledQuery], *, seed: int, held_out: HeldOut
) -> tuple[tuple[LabelledQuery, ...], tuple[LabelledQuery, ...], tuple[LabelledQuery, ...]]:
    """Split into train, seen test and unseen test; each part keeps the given order, no query is left out.

    Queries that share a tool, directly or through others, form a group. The unseen part is made of whole
    groups in which every tool has fewer than `min_queries` queries: so no tool of an unseen query has a
    training query.

    Of the rest, a tool with n >= `min_queries` queries gives about `fraction` x n, at most `max_per_tool`, to
    the seen part; a query that also needs tools with fewer queries may be among them. No tool gives its last
    training query. Both parts are drawn evenly from all sources.

    The result is a function of the queries and the seed alone. The texts must be distinct, else a test query
    could be trained on.

    Raises:
        QuerySetError: A query id appears more than once.
    """
    ids = Counter(query.query_id for query in queries)
    repeated = [query_id for query_id, count in ids.items() if count > 1]
    if repeated:
        raise QuerySetError(f"query id {repeated[0]!r} appears more than once ({len(repeated):,} such ids)")
    per_tool = Counter(tool for query in queries for tool in query.tools)

    unseen: set[str] = set()
    groups = [
        group
        for group in _groups(queries)
        if all(per_tool[tool] < held_out.min_queries for query in group for tool in query.tools)
    ]
    order = _draw([group[0] for group in groups], seed)
    by_first = {group[0].query_id: group for group in groups}
    for first in order:
        group = by_first[first.query_id]
        # Passing over a group that is too large, instead of ending, meets the number exactly.
        if len(unseen) + len(group) <= held_out.unseen_queries:
            unseen.update(query.query_id for query in group)

    remaining = dict(per_tool)
    spare = {
        tool: min(held_out.max_per_tool, int(held_out.fraction * count + 0.5))
        for tool, count in per_tool.items()
        if count >= held_out.min_queries
    }
    seen: set[str] = set()
    for query in _draw([query for query in queries if query.query_id not in unseen], seed):
        giving = [tool for tool in query.tools if tool in spare]
        if not giving or any(spare[tool] == 0 for tool in giving):
            continue
        if all(remaining[tool] > 1 for tool in query.tools):
            seen.add(query.query_id)
            for tool in query.tools:
                remaining[tool] -= 1
            for tool in giving:
                spare[tool] -= 1
    return (
        tuple(query for query in queries if query.query_id not in seen | unseen),
        tuple(query for query in queries if query.query_id in seen),
        tuple(query for query in queries if query.query_id in unseen),
    )


def _groups(queries: Sequence[LabelledQuery]) -> list[list[LabelledQuery]]:
    """The connected components of the graph that joins queries with their tools."""
    parent: dict[int, int] = {}

    def root(tool: int) -> int:
        parent.setdefault(tool, tool)
        while parent[tool] != tool:
            parent[tool] = tool = parent[parent[tool]]
        return tool

    for query in queries:
        for tool in query.tools:
            parent[root(tool)] = root(query.tools[0])
    groups: dict[int, list[LabelledQuery]] = defaultdict(list)
    for query in queries:
        groups[root(query.tools[0])].append(query)
    return list(groups.values())


def _draw(queries: Iterable[LabelledQuery], seed: int) -> list[LabelledQuery]:
    """The queries in a random order of which every beginning holds each source in about its proportion."""
    by_source: dict[str, list[tuple[bytes, LabelledQuery]]] = defaultdict(list)
    for query in queries:
        # A hash, not a generator: the same on every version of Python, and stable when queries are added.
        key = hashlib.sha256(f"{seed}:{query.query_id}".encode()).digest()
        by_source[query.source].append((key, query))
    placed = []
    for members in by_source.values():
        members.sort(key=lambda member: member[0])
        placed += [((i + 0.5) / len(members), key, query) for i, (key, query) in enumerate(members)]
    return [query for _, _, query in sorted(placed, key=lambda member: member[:2])]


def load_retrieval_set(
    source: str, seed: int = 0, *, train_queries: str | None = None, test_queries: str | None = None
) -> RetrievalSet:
    """A catalogue with its labelled queries, by the fields `source`, `train_queries` and `test_queries` of `data`.

    Args:
        source: "bfcl" (fetched on first use), a folder in BEIR format (corpus.jsonl, queries.jsonl, qrels/), a folder
            with tools.json and train.jsonl (see `load_labelled_folder`) or, with `train_queries`, a catalogue: a file,
            or a folder of ToolBench files. A folder that is called bfcl: "./bfcl".
        seed: Chooses the held-out part of "bfcl" and of labelled files without test queries; the others come split.
        train_queries: File of labelled queries for the catalogue (see `load_labelled`).
        test_queries: The same, held out.

    Raises:
        QuerySetError: None of these, or something is wrong in the queries.
        CatalogError: Something is wrong in the catalogue.
        FileNotFoundError: Something that belongs to them is missing.
        AssetError: "bfcl" can't be fetched.
    """
    # The formats build on this module's types, so they can only be imported when it is complete.
    from jaxtool.data.assets import bfcl
    from jaxtool.data.beir import load_beir
    from jaxtool.data.bfcl import load_bfcl
    from jaxtool.data.labelled_files import labelled_catalog, load_labelled, load_labelled_folder

    if train_queries is None and test_queries is not None:
        raise QuerySetError("data.test_queries is set without data.train_queries, expected both or neither")
    if source == "bfcl":
        if train_queries is not None:
            raise QuerySetError(
                'data.train_queries is set, but data.source is "bfcl", which has queries of its own; '
                "expected a catalogue of tools as data.source"
            )
        return load_bfcl(bfcl(), seed=seed)
    path = _expanded(source)
    if not path.exists():
        raise QuerySetError(f"data.source {source!r}: no such file or folder; {_EXPECTED}")
    if train_queries is not None:
        catalog = labelled_catalog(path) if path.is_dir() else None
        if catalog is not None:
            raise QuerySetError(
                f"data.source {source!r}: a folder with {catalog.name} has its queries beside it; "
                "expected no data.train_queries, or the catalogue itself as data.source"
            )
        test = None if test_queries is None else _expanded(test_queries)
        return load_labelled(path, _expanded(train_queries), test, seed=seed)
    if not path.is_dir():
        raise QuerySetError(
            f"data.source {source!r}: is a file; a catalogue of tools goes with its labelled queries, "
            "data.train_queries (and data.test_queries)"
        )
    if (path / "corpus.jsonl").exists():
        return load_beir(path)
    if labelled_catalog(path) is None:
        raise QuerySetError(
            f"data.source {source!r}: a folder without corpus.jsonl and without tools.json; {_EXPECTED}"
        )
    return load_labelled_folder(path, seed=seed)


_EXPECTED = (
    'expected "bfcl", a folder in BEIR format (corpus.jsonl, queries.jsonl, qrels/), a folder with tools.json and '
    "train.jsonl, or a catalogue of tools together with data.train_queries"
)


def _expanded(path: str) -> Path:
    return Path(os.path.expanduser(path))  # Path.expanduser raises where there is no such user
