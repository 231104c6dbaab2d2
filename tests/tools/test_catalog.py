"""Catalogues: order, identity, merging, and a file format that notices damage."""

import gzip
import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.tools import CatalogError, Tool, ToolCatalog, ToolDocument, read_catalog

HOSTILE = [
    "a\tb",
    "<b>>>",
    "x&&y&&z",
    "line\nbreak",
    "a\u2028b",
    "<<Finish>>",
    " led",
    "led ",
    "LED ",
    '"',
    "😀",
]

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
schemas = st.dictionaries(text, st.recursive(scalars, lambda x: st.lists(x) | st.dictionaries(text, x)), max_size=3)
documents = st.builds(ToolDocument, description=text, parameters=schemas, source=text)
tools = st.builds(
    Tool,
    name=text.filter(str.strip),
    description=text,
    parameters=schemas,
    source=text,
    collection=text,
    collection_description=text,
    documents=st.lists(documents, max_size=2).map(tuple),
)


@given(st.lists(tools, max_size=4, unique_by=lambda tool: tool.name), st.lists(text, max_size=2))
def test_a_saved_catalogue_loads_equal(tmp_path_factory, some_tools, notes) -> None:
    path = tmp_path_factory.getbasetemp() / "catalog.jsonl"
    catalog = ToolCatalog(some_tools, notes=notes)
    catalog.save(path)
    loaded = ToolCatalog.load(path)
    assert loaded == catalog
    assert loaded.notes == catalog.notes
    assert loaded.fingerprint == catalog.fingerprint
    if some_tools:
        assert read_catalog(path) == catalog


def test_ids_are_positions_and_names_are_exact(tmp_path: Path) -> None:
    catalog = ToolCatalog(Tool(name=name) for name in HOSTILE)
    catalog.save(tmp_path / "c.jsonl.gz")
    assert (tmp_path / "c.jsonl.gz").read_bytes()[:2] == b"\x1f\x8b"
    loaded = ToolCatalog.load(tmp_path / "c.jsonl.gz")
    assert [loaded.index(name) for name in HOSTILE] == list(range(len(HOSTILE)))
    assert [tool.name for tool in loaded] == HOSTILE
    assert "led" not in loaded
    with pytest.raises(CatalogError, match="no tool named 'Led' among 11; did you mean ' led', 'led ', 'LED '"):
        loaded.index("Led")


def test_the_nearest_names_are_suggested() -> None:
    names = ["get_weather", "get_tides", "Sea&&rent_boat", "rent boats", "x"]
    catalog = ToolCatalog(Tool(name=name) for name in names)
    assert catalog.nearest("GET_weather ") == ("get_weather",)
    assert catalog.nearest("get_wether")[0] == "get_weather"
    assert catalog.nearest("rent_boat") == ("rent boats", "Sea&&rent_boat")  # spelled alike, then as a part
    assert catalog.nearest("rent_boat", most=1) == ("rent boats",)
    assert catalog.nearest("unrelated") == catalog.nearest("") == ()
    with pytest.raises(CatalogError, match=r"no tool named 'get_tide' among 5; did you mean 'get_tides'\?$"):
        catalog.index("get_tide")


def test_the_fingerprint_is_sha256_over_length_and_name() -> None:
    digest = hashlib.sha256(b"\0\0\0\0\0\0\0\x02\xc3\xa9\0\0\0\0\0\0\0\x01b").hexdigest()
    assert ToolCatalog([Tool(name="é"), Tool(name="b")]).fingerprint == digest
    a = ToolCatalog([Tool(name="ab"), Tool(name="c")])
    assert a.fingerprint != ToolCatalog([Tool(name="a"), Tool(name="bc")]).fingerprint
    assert a.fingerprint != ToolCatalog([Tool(name="c"), Tool(name="ab")]).fingerprint
    assert a.fingerprint == ToolCatalog([Tool(name="ab", description="new"), Tool(name="c")]).fingerprint


def test_duplicates_are_refused_with_both_places() -> None:
    some = [
        Tool(name="a", source="f:1"),
        Tool(name="A", source="f:2"),
        Tool(name="a", source="g:7"),
        Tool(name="A"),
    ]
    with pytest.raises(CatalogError) as caught:
        ToolCatalog(some)
    assert "2 tools with a name" in str(caught.value)
    assert "'a': f:1 and g:7" in str(caught.value)
    assert "'A': f:2 and tool 3" in str(caught.value)


def test_merging_keeps_different_documents_and_counts_the_same_ones() -> None:
    catalog = ToolCatalog.from_tools(
        [
            Tool(name="b", description="one", source="1"),
            Tool(name="a", description="x", parameters={"p": 1, "q": 2}, source="2"),
            Tool(name="b", description="two", source="3", collection="C", collection_description="D"),
            Tool(name="a", description="x", parameters={"q": 2, "p": 1}, source="4"),
            Tool(name="b", description="one", source="5", collection="E"),
            Tool(name="b", description="two", source="6"),
            Tool(name="b", description="one", parameters={"p": 1}, source="7"),
        ],
        on_duplicate="merge",
        notes=["before"],
    )
    assert [tool.name for tool in catalog] == ["b", "a"]
    b, a = catalog
    assert (b.description, b.source, b.collection, b.collection_description) == ("one", "1", "C", "D")
    assert [(d.description, d.source) for d in b.documents] == [("two", "3"), ("one", "7")]
    assert a.documents == ()
    assert catalog.notes == (
        "before",
        "7 tool documents of 2 names merged: 3 identical copies counted once, 2 further different documents "
        "kept on 1 name",
        "1 merged tool had another collection: the first was kept",
    )
    again = ToolCatalog.from_tools([*catalog, *catalog], on_duplicate="merge")
    assert again == catalog


def saved(tmp_path: Path) -> tuple[Path, list[str]]:
    path = tmp_path / "c.jsonl"
    ToolCatalog([Tool(name=n, description=n.upper(), parameters={"type": "object"}) for n in "abc"]).save(path)
    return path, path.read_text().splitlines(keepends=True)


def test_an_edited_description_is_fine(tmp_path: Path) -> None:
    path, lines = saved(tmp_path)
    path.write_text("".join(lines).replace('"B"', '"better"'))
    assert ToolCatalog.load(path)[1].description == "better"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: lines[:3], "c.jsonl:1: field count: 2 tools in the file, but the header counts 3"),
        (lambda lines: [*lines[:3], lines[3][:9]], "c.jsonl:4: not valid JSON"),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], "field fingerprint"),
        (lambda lines: [*lines[:3], lines[3].replace('"c"', '"C"')], "field fingerprint"),
        (lambda lines: lines[1:], "expected a header line"),
        (lambda lines: [], "expected a header line"),
        (lambda lines: [lines[0].replace(": 1,", ": 2,"), *lines[1:]], "expected version 1, found 2"),
        (lambda lines: [*lines[:3], '{"name": "c", "colour": "red"}'], "c.jsonl:4: field colour: unknown"),
        (
            lambda lines: [*lines[:3], '{"name": "c", "parameters": []}'],
            "field parameters: expected an object, found a list",
        ),
        (lambda lines: [*lines[:3], '{"description": "c"}'], "c.jsonl:4: field name: missing"),
        (lambda lines: [*lines[:3], '{"name": ""}'], "c.jsonl:4: field name"),
        (
            lambda lines: [*lines[:3], '{"name": "c", "documents": [{"x": 1}]}'],
            r"documents\[0\]: field x: unknown",
        ),
        (lambda lines: [*lines[:3], "[]"], "c.jsonl:4: expected an object"),
    ],
)
def test_a_damaged_file_is_noticed(tmp_path: Path, change, message: str) -> None:
    path, lines = saved(tmp_path)
    path.write_text("".join(change(lines)))
    with pytest.raises(CatalogError, match=message):
        ToolCatalog.load(path)


@pytest.mark.parametrize("parameters", [{"a": float("nan")}, {"a": {1}}, {1: "a"}, {"a": ("b",)}, {"a": "\ud800"}])
def test_what_json_cannot_carry_is_refused_and_the_old_file_stays(tmp_path: Path, parameters) -> None:
    path, lines = saved(tmp_path)
    with pytest.raises(CatalogError, match="tool 't'"):
        ToolCatalog([Tool(name="t", parameters=parameters)]).save(path)
    assert path.read_text().splitlines(keepends=True) == lines
    assert [p.name for p in tmp_path.iterdir()] == ["c.jsonl"]


def test_files_are_the_same_bytes_each_time(tmp_path: Path) -> None:
    catalog = ToolCatalog([Tool(name="a")])
    for name in ("one.gz", "two.gz"):
        catalog.save(tmp_path / name)
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()
    header = json.loads(gzip.decompress((tmp_path / "one.gz").read_bytes()).splitlines()[0])
    assert header == {"jaxtool_catalog": 1, "count": 1, "fingerprint": catalog.fingerprint}


def test_a_missing_file_is_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        ToolCatalog.load(tmp_path / "none.jsonl")
