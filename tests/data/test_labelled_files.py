"""A user's own catalogue and labelled queries."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxtool.data import HeldOut, QuerySetError, RetrievalSet, load_labelled, load_labelled_folder, load_retrieval_set
from jaxtool.tools import CatalogError, Tool, ToolCatalog

WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "Weather of a place"}}
TIDES = {"name": "get_tides", "description": "High and low water"}
BOAT = {"name": "rent_boat"}


def write(path: Path, *values: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def row(query: Any, *tools: Any, **fields: Any) -> dict[str, Any]:
    return {"query": query, "tools": list(tools), **fields}


@pytest.fixture
def catalog(tmp_path: Path) -> Path:
    return write(tmp_path / "tools.json", WEATHER, TIDES, BOAT)


def labels(queries: Any) -> list[tuple[str, tuple[int, ...], str]]:
    return [(query.text, query.tools, query.source) for query in queries]


def test_rows_become_queries_and_everything_merged_is_counted(tmp_path: Path, catalog: Path) -> None:
    train = write(
        tmp_path / "train.jsonl",
        row("Rain in Oslo?", "get_weather"),
        row("A boat at high water", "rent_boat", "get_tides", "rent_boat", lang="en"),
        row("rain in  OSLO?", "get_weather"),
        row("Rain in Oslo?", "get_tides", id=3, lang="no"),
        row("Good morning"),
    )
    test = write(tmp_path / "other.jsonl", row("RAIN in oslo?", "get_weather"), row("Tides?", "get_tides"))
    found = load_labelled(catalog, train, test, seed=1)
    assert [tool.name for tool in found.catalog] == ["get_weather", "get_tides", "rent_boat"]
    assert labels(found.train) == [
        ("Rain in Oslo?", (0, 1), "train.jsonl"),
        ("A boat at high water", (1, 2), "train.jsonl"),
    ]
    assert labels(found.test) == [("RAIN in oslo?", (0,), "other.jsonl"), ("Tides?", (1,), "other.jsonl")]
    assert found.test_unseen == ()
    assert found.notes == (
        "train.jsonl: 5 rows, 2 queries of different text; 2 rows with a text that came before merged, which united "
        "the tools of 1 query; 1 row without a tool left out; 1 repeated name in a row counted once",
        "train.jsonl: fields that are not read, with the number of rows: id (1), lang (2)",
        "other.jsonl: 2 rows, 2 queries of different text",
        "1 test query with a text that is also in train",
    )


def test_tools_of_one_name_are_one_tool(tmp_path: Path) -> None:
    tools = write(tmp_path / "t.jsonl", TIDES, TIDES, TIDES | {"description": "Other"}, BOAT)
    train = write(tmp_path / "q.jsonl", row("a", "get_tides"))
    found = load_labelled(tools, train, write(tmp_path / "p.jsonl", row("b", "rent_boat")))
    assert [len(tool.documents) for tool in found.catalog] == [1, 0]
    assert "1 identical copy counted once" in found.notes[0]
    assert found.notes[-1] == (
        "1 of 2 tools without a training query, learned from their documents alone and found badly; 1 test query with "
        "such a tool"
    )


def split(folder: Path, catalog: Path, rows: list[dict[str, Any]], seed: int = 0) -> RetrievalSet:
    return load_labelled(catalog, write(folder / "rows.jsonl", *rows), seed=seed)


def test_a_part_is_held_out_where_there_are_no_test_queries(tmp_path: Path, catalog: Path) -> None:
    rows = [row(f"weather {i}", "get_weather") for i in range(20)] + [row(f"tide {i}", "get_tides") for i in range(8)]
    rows += [row("boat 1", "rent_boat"), row("boat 2", "rent_boat")]
    found = split(tmp_path, catalog, rows)
    assert len(found.train) + len(found.test) == 30
    assert Counter(query.tools[0] for query in found.test) == {0: 5, 1: 2}  # a quarter, and none of a tool with two
    assert not found.test_unseen
    assert "no file of test queries: of 30 queries, 7 are held out with seed 0 and 23 trained on" in found.notes
    held = {query.text for query in found.test}
    # The same whatever the order and the letter case, and more rows of other tools change nothing.
    shuffled = [*reversed(rows), row("boat 3", "rent_boat"), *(row(f"WEATHER  {i}", "get_weather") for i in range(20))]
    again = split(tmp_path, catalog, shuffled)
    assert {query.text.casefold() for query in again.test if query.tools != (2,)} == held
    assert {query.text for query in split(tmp_path, catalog, rows, seed=1).test} != held
    few = split(tmp_path, catalog, rows[-2:])
    assert not few.test and "2 trained on (a tool needs 3 queries to give one)" in few.notes[-2]
    all_trained = load_labelled(catalog, tmp_path / "rows.jsonl", held_out=HeldOut(fraction=0, unseen_queries=0))
    assert len(all_trained.train) == 2


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (["Rain?", ["get_weather"]], 'expected an object like {"query": "...", "tools": ["name", ...]}, found a list'),
        ({"text": "Rain?", "tools": []}, "field query: missing; expected the request as text, found the fields text, "),
        (row(7, "get_weather"), "field query: expected text, found a number"),
        (row(" ", "get_weather"), "field query: blank; expected the request as text"),
        ({"query": "Rain?"}, "field tools: missing; expected a list of tool names, found the fields query"),
        ({"query": "Rain?", "tools": "get_weather"}, "field tools: expected a list of tool names, found text"),
        (row("Rain?", "get_weather", {"name": "x"}), "field tools[1]: expected a name, found an object"),
        (
            row("Rain?", "get_wether"),
            "field tools[0]: no tool named 'get_wether' among 3 tools; nearest: 'get_weather', 'get_tides'",
        ),
        (row("Rain?", "Boat"), "field tools[0]: no tool named 'Boat' among 3 tools; nearest: 'rent_boat'"),
        (row("Rain?", "zzz"), "field tools[0]: no tool named 'zzz' among 3 tools; no name is like it"),
    ],
)
def test_problems_name_file_line_and_field(tmp_path: Path, catalog: Path, value: object, problem: str) -> None:
    train = write(tmp_path / "train.jsonl", row("Tides?", "get_tides"), value)
    test = write(tmp_path / "test.jsonl", row("Boats?", "rent_boat"), value)
    with pytest.raises(QuerySetError) as caught:
        load_labelled(catalog, train, test)
    assert f"{train}:2: {problem}" in str(caught.value) and f"{test}:2: {problem}" in str(caught.value)
    assert ": 2 problems\n" in str(caught.value)


def test_files_without_a_query_to_use_are_told(tmp_path: Path, catalog: Path) -> None:
    with pytest.raises(QuerySetError, match=r"t\.jsonl: no query to use \(the file is empty\), expected rows like"):
        load_labelled(catalog, write(tmp_path / "t.jsonl"))
    with pytest.raises(QuerySetError, match=r"no query to use \(its 2 rows have no tools\)"):
        load_labelled(catalog, write(tmp_path / "t.jsonl", row("a"), row("b")))
    with pytest.raises(QuerySetError, match="is a folder, expected the file of train queries"):
        load_labelled(catalog, tmp_path)
    with pytest.raises(FileNotFoundError, match=r"none\.jsonl: no such file of test queries"):
        load_labelled(catalog, write(tmp_path / "t.jsonl", row("a", "rent_boat")), tmp_path / "none.jsonl")
    with pytest.raises(CatalogError, match=r"t\.jsonl:1: not a known catalogue format"):
        load_labelled(tmp_path / "t.jsonl", catalog)


TOOLBENCH = {"tool_name": "Sea", "api_list": [{"name": "tides"}, {"name": "boats"}]}


@pytest.mark.parametrize("kind", ["openai array", "toolbench", "toolbench folder", "own", "gzip"])
def test_every_format_of_catalogues_is_taken(tmp_path: Path, kind: str) -> None:
    names = ["Sea&&tides", "Sea&&boats"] if kind.startswith("toolbench") else ["get_weather", "get_tides"]
    path = tmp_path / "tools.json"
    if kind == "openai array":
        path.write_text(json.dumps([WEATHER, TIDES], indent=2))
    elif kind == "gzip":
        path = tmp_path / "tools.jsonl.gz"
        path.write_bytes(gzip.compress(json.dumps([WEATHER, TIDES]).encode()))
    elif kind == "own":
        ToolCatalog([Tool(name=name) for name in names]).save(path := tmp_path / "tools.jsonl")
    else:
        path = tmp_path / "tools" if "folder" in kind else path
        write(path / "sea/sea.json" if "folder" in kind else path, TOOLBENCH)
    train = tmp_path / "train.json"
    train.write_text(json.dumps([row("one", names[0]), row("both", *names)]))
    pair = load_retrieval_set(str(path), train_queries=str(train))
    folder = load_retrieval_set(str(tmp_path))
    for found in (pair, folder):
        assert [tool.name for tool in found.catalog] == names
        assert labels(found.train) == [("one", (0,), "train.json"), ("both", (0, 1), "train.json")]


def test_a_folder_has_one_file_of_each(tmp_path: Path, catalog: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"train\.jsonl: missing; it holds the queries to train on, rows like"):
        load_retrieval_set(str(tmp_path))
    write(tmp_path / "train.jsonl", row("Tides?", "get_tides"))
    write(tmp_path / "test.json", row("Boats?", "rent_boat"))
    (tmp_path / "notes.md").write_text("x")
    found = load_retrieval_set(str(tmp_path))
    assert labels(found.test) == [("Boats?", (2,), "test.json")]
    assert found.notes[-1] == f"left unread in {tmp_path}: notes.md"
    write(tmp_path / "train.json.gz")
    with pytest.raises(QuerySetError, match=r"has train\.jsonl and train\.json\.gz, expected one of them"):
        load_retrieval_set(str(tmp_path))
    (tmp_path / "tools").mkdir()
    with pytest.raises(QuerySetError, match=r"has tools\.json and tools, expected one of them"):
        load_retrieval_set(str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"tools\.json: missing"):
        load_labelled_folder(tmp_path / "tools")


def test_sources_that_do_not_go_together_are_told(tmp_path: Path, catalog: Path) -> None:
    train = str(write(tmp_path / "train.jsonl", row("Tides?", "get_tides")))
    with pytest.raises(QuerySetError, match=r"tools\.json': is a file; a catalogue of tools goes with its labelled qu"):
        load_retrieval_set(str(catalog))
    with pytest.raises(QuerySetError, match=r"data\.test_queries is set without data\.train_queries"):
        load_retrieval_set(str(catalog), test_queries=train)
    with pytest.raises(QuerySetError, match=r'data\.source is "bfcl", which has queries of its own'):
        load_retrieval_set("bfcl", train_queries=train)
    with pytest.raises(QuerySetError, match=r"a folder with tools\.json has its queries beside it"):
        load_retrieval_set(str(tmp_path), train_queries=train)
