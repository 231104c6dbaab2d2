"""Retrieval sets from a user's own files: a catalogue of tools, and queries labelled with the tools' names.

A row of queries is `{"query": "How warm is it in Oslo?", "tools": ["get_weather"]}`. The formats of catalogues are read
in jaxtool.tools, the rule of the split is in query_sets.py, queries without labels are read in query_files.py.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxtool.data.query_sets import HeldOut, LabelledQuery, QuerySetError, RetrievalSet, split_queries
from jaxtool.tools import ToolCatalog, read_catalog
from jaxtool.tools.json_records import Problems, counted, json_kind, read_records

ROW = '{"query": "...", "tools": ["name", ...]}'
_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
# Name comparisons that the suggestions of one error may cost, about eight seconds.
_COMPARISONS = 200_000


def load_labelled(
    catalog: str | Path,
    train: str | Path,
    test: str | Path | None = None,
    *,
    seed: int = 0,
    held_out: HeldOut | None = None,
) -> RetrievalSet:
    """Read a catalogue and its labelled queries.

    Tools that share a name are one tool with several documents. Queries of one file with the same text but for letter
    case and white space are one query, which needs the tools of all; its id is a hash of that text, so the order of the
    rows has no part in the split.

    Args:
        catalog: Whatever `read_catalog` reads: OpenAI-style functions, ToolBench JSON (a folder too), our own files.
        train: JSON Lines (or a JSON array) of objects with `query`, a text, and `tools`, names of the catalogue.
        test: The same, held out. None: part of `train` is held out.
        seed: Chooses the held-out queries where there is no `test`.
        held_out: How many (default: a quarter of a tool's queries where it has at least 3, at most 10 of a tool, and no
            queries of tools that would be left without).

    Raises:
        FileNotFoundError: A file is missing.
        CatalogError: Everything that is wrong in the catalogue, with file and line.
        QuerySetError: Everything that is wrong in the queries, with file, line and field; unknown names come with the
            nearest ones of the catalogue.
    """
    tools = read_catalog(catalog, on_duplicate="merge")
    problems = Problems()
    reader = _RowReader(tools, problems)
    paths = [_file(path, field) for path, field in ((train, "train"), (test, "test")) if path is not None]
    read = [reader.read(path) for path in paths]
    problems.raise_if_any(QuerySetError, f"{' and '.join(map(str, paths))} can't be used as labelled queries")
    notes = [*tools.notes, *(note for part in read for note in part.notes)]
    queries = read[0].queries
    if test is not None:
        parts = (queries, read[1].queries)
        trained = {query.query_id for query in queries}
        shared = sum(query.query_id in trained for query in parts[1])
        notes.append(f"{counted(shared, 'test query', 'test queries')} with a text that is also in train")
    else:
        train_part, test_part, _ = split_queries(queries, seed=seed, held_out=held_out or HeldOut(unseen_queries=0))
        parts = (train_part, test_part)
        few = "" if test_part else " (a tool needs 3 queries to give one)"
        notes.append(
            f"no file of test queries: of {counted(len(queries), 'query', 'queries')}, {len(test_part):,} are held "
            f"out with seed {seed} and {len(train_part):,} trained on{few}"
        )
    asked = {tool for query in parts[0] for tool in query.tools}
    if len(asked) < len(tools):
        unasked = sum(not asked.issuperset(query.tools) for query in parts[1])
        notes.append(
            f"{len(tools) - len(asked):,} of {counted(len(tools), 'tool')} without a training query, learned from "
            f"their documents alone and found badly; {counted(unasked, 'test query', 'test queries')} with such a tool"
        )
    return RetrievalSet(catalog=tools, train=parts[0], test=parts[1], notes=tuple(notes))


def load_labelled_folder(folder: str | Path, *, seed: int = 0) -> RetrievalSet:
    """`load_labelled` on the files of one folder.

    The catalogue is `tools.json` or `tools.jsonl`, or a folder `tools/`; the queries are `train.jsonl` and, where there
    is one, `test.jsonl`. All may end in .json or .jsonl, and .gz behind it.

    Raises:
        FileNotFoundError: There is no catalogue, or there are no queries.
        QuerySetError: One of them is there twice. Besides, see `load_labelled`.
    """
    folder = Path(folder)
    catalog = labelled_catalog(folder)
    train, test = (_only(folder, name, _SUFFIXES) for name in ("train", "test"))
    if catalog is None:
        raise FileNotFoundError(f"{folder / 'tools.json'}: missing; it holds the tools (or tools.jsonl, or tools/)")
    if train is None:
        raise FileNotFoundError(f"{folder / 'train.jsonl'}: missing; it holds the queries to train on, rows like {ROW}")
    read = load_labelled(catalog, train, test, seed=seed)
    unread = sorted(path.name for path in folder.iterdir() if path not in (catalog, train, test))
    note = [f"left unread in {folder}: {', '.join(unread)}"] if unread else []
    return replace(read, notes=(*read.notes, *note))


def labelled_catalog(folder: Path) -> Path | None:
    """The catalogue that makes a folder one of labelled files; None where there is none.

    Raises:
        QuerySetError: There are several.
    """
    return _only(folder, "tools", (*_SUFFIXES, ""))


def _only(folder: Path, name: str, suffixes: Sequence[str]) -> Path | None:
    found = [folder / f"{name}{suffix}" for suffix in suffixes if (folder / f"{name}{suffix}").exists()]
    if len(found) > 1:
        raise QuerySetError(f"{folder}: has {' and '.join(path.name for path in found)}, expected one of them")
    return found[0] if found else None


def _file(path: str | Path, part: str) -> Path:
    path = Path(path)
    if path.is_dir():
        raise QuerySetError(f"{path}: is a folder, expected the file of {part} queries, rows like {ROW}")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file of {part} queries")
    return path


@dataclass(frozen=True, kw_only=True)
class _Part:
    queries: tuple[LabelledQuery, ...]
    notes: tuple[str, ...]


class _RowReader:
    """Turns files of rows into queries; adds what is wrong to `problems`."""

    def __init__(self, catalog: ToolCatalog, problems: Problems) -> None:
        self.catalog, self.problems = catalog, problems
        self._hints: dict[str, str] = {}

    def read(self, path: Path) -> _Part:
        texts: dict[str, str] = {}
        tools: dict[str, set[int]] = {}
        counts: Counter[str] = Counter()
        unread: Counter[str] = Counter()
        united: set[str] = set()
        before = len(self.problems)
        for record in read_records(path, self.problems):
            counts["rows"] += 1
            row = self._row(record.value, f"{path}:{record.line}", counts, unread)
            if row is None:
                continue
            if not row[1]:
                counts["without tools"] += 1
                continue
            key = " ".join(row[0].split()).casefold()
            counts["repeated"] += key in texts
            texts.setdefault(key, row[0])
            if tools.setdefault(key, row[1]) != row[1]:
                united.add(key)
                tools[key] = tools[key] | row[1]
        if not texts and len(self.problems) == before:
            found = f"its {counts['rows']:,} rows have no tools" if counts["rows"] else "the file is empty"
            self.problems.add(str(path), f"no query to use ({found}), expected rows like {ROW}")
        queries = tuple(
            LabelledQuery(
                query_id=hashlib.sha256(key.encode()).hexdigest()[:16],
                text=text,
                tools=tuple(sorted(tools[key])),
                source=path.name,
            )
            for key, text in texts.items()
        )
        parts = [f"{counted(counts['rows'], 'row')}, {counted(len(queries), 'query', 'queries')} of different text"]
        if counts["repeated"]:
            parts.append(
                f"{counted(counts['repeated'], 'row')} with a text that came before merged, which united the tools of "
                f"{counted(len(united), 'query', 'queries')}"
            )
        if counts["without tools"]:
            parts.append(f"{counted(counts['without tools'], 'row')} without a tool left out")
        if counts["repeated names"]:
            parts.append(f"{counted(counts['repeated names'], 'repeated name')} in a row counted once")
        notes = [f"{path.name}: {'; '.join(parts)}"]
        if unread:
            fields = ", ".join(f"{field} ({count:,})" for field, count in sorted(unread.items()))
            notes.append(f"{path.name}: fields that are not read, with the number of rows: {fields}")
        return _Part(queries=queries, notes=tuple(notes))

    def _row(self, value: Any, where: str, counts: Counter[str], unread: Counter[str]) -> tuple[str, set[int]] | None:
        """Text and tool ids of a row, None where it has a problem."""
        if not isinstance(value, dict):
            self.problems.add(where, f"expected an object like {ROW}, found {json_kind(value)}")
            return None
        before = len(self.problems)
        text, names = value.get("query"), value.get("tools")
        if "query" not in value:
            self.problems.add(where, f"field query: missing; expected the request as text, found {_listed(value)}")
        elif not isinstance(text, str):
            self.problems.add(where, f"field query: expected text, found {json_kind(text)}")
        elif not text.strip():
            self.problems.add(where, "field query: blank; expected the request as text")
        ids: set[int] = set()
        if "tools" not in value:
            self.problems.add(where, f"field tools: missing; expected a list of tool names, found {_listed(value)}")
        elif not isinstance(names, list):
            self.problems.add(where, f"field tools: expected a list of tool names, found {json_kind(names)}")
        else:
            for place, name in enumerate(names):
                if not isinstance(name, str):
                    self.problems.add(where, f"field tools[{place}]: expected a name, found {json_kind(name)}")
                elif name not in self.catalog:
                    self.problems.add(where, f"field tools[{place}]: {self._unknown(name)}")
                else:
                    counts["repeated names"] += self.catalog.index(name) in ids
                    ids.add(self.catalog.index(name))
        if len(self.problems) > before or not isinstance(text, str):
            return None
        unread.update(value.keys() - {"query", "tools"})
        return text, ids

    def _unknown(self, name: str) -> str:
        if name not in self._hints:
            hint = ""
            if len(self._hints) * len(self.catalog) < _COMPARISONS:
                nearest = self.catalog.nearest(name)
                hint = f"; nearest: {', '.join(map(repr, nearest))}" if nearest else "; no name is like it"
            self._hints[name] = f"no tool named {name!r} among {counted(len(self.catalog), 'tool')}{hint}"
        return self._hints[name]


def _listed(value: dict[str, Any]) -> str:
    return f"the fields {', '.join(value)}" if value else "no field"
