"""Catalogues from OpenAI-style and ToolBench files."""

import gzip
import json
from pathlib import Path

import pytest

from jaxtool.tools import CatalogError, Tool, ToolCatalog, read_catalog

BARE = {"name": "get_time", "description": "The time", "parameters": {"type": "dict", "properties": {}}}
WRAPPED = {"type": "function", "function": {"name": "Get_Time", "description": "Also the time"}}
TOOLBENCH = {
    "tool_name": "Gas Price",
    "tool_description": "Prices of fuel",
    "title": "Gas",
    "api_list": [
        {
            "name": "usa",
            "description": None,
            "method": "GET",
            "required_parameters": [{"name": "state", "type": "STRING", "description": "Code", "default": "WA"}],
            "optional_parameters": [],
        },
        {"name": "x&&y", "description": "Two"},
    ],
}
FLAT = {
    "tool_name": "Gas Price", "api_name": "eu",
    "tool_description": "Prices of fuel", "api_description": "Europe",
    "optional_parameters": [{"name": "day", "type": "DATE (YYYY-MM-DD)"}, {"name": "day", "type": "STRING"}],
}  # fmt: skip


def write(path: Path, *values: object) -> Path:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


@pytest.mark.parametrize("layout", ["lines", "array", "pretty", "gzip"])
def test_openai_functions(tmp_path: Path, layout: str) -> None:
    path = write(tmp_path / "tools.json", BARE, WRAPPED)
    if layout in ("array", "pretty"):
        path.write_text(json.dumps([BARE, WRAPPED], indent=4 if layout == "pretty" else None))
    if layout == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes()))
    catalog = read_catalog(path)
    assert [(t.name, t.description, t.parameters) for t in catalog] == [
        ("get_time", "The time", {"type": "dict", "properties": {}}),
        ("Get_Time", "Also the time", {}),
    ]
    line = {"array": 1, "pretty": 10}.get(layout, 2)
    assert catalog[1].source == f"{path}:{line}"
    assert catalog.notes == ()


def test_one_object_is_a_catalogue_of_one(tmp_path: Path) -> None:
    (tmp_path / "tool.json").write_text(json.dumps(WRAPPED, indent=1))
    assert [tool.name for tool in read_catalog(tmp_path / "tool.json")] == ["Get_Time"]


def test_what_a_tool_does_not_carry_is_counted(tmp_path: Path) -> None:
    wrapped = {"type": "function", "cache": 1, "function": {"name": "a", "strict": True, "parameters": None}}
    catalog = read_catalog(write(tmp_path / "f", wrapped, {"name": "b", "strict": False}))
    assert catalog.notes == (
        "fields that a tool does not carry, with the number of records: cache (1), function.strict (1), strict (1)",
    )


def test_toolbench_files(tmp_path: Path) -> None:
    catalog = read_catalog(write(tmp_path / "f.json", TOOLBENCH, FLAT, {"tool_name": "T", "api_list": []}))
    usa, xy, eu = catalog
    assert usa == Tool(
        name="Gas Price&&usa",
        collection="Gas Price",
        collection_description="Prices of fuel",
        parameters={
            "type": "object",
            "properties": {"state": {"type": "string", "description": "Code", "default": "WA"}},
            "required": ["state"],
        },
        source=f"{tmp_path / 'f.json'}:1 api_list[0]",
    )
    assert (xy.name, xy.description, xy.parameters) == ("Gas Price&&x&&y", "Two", {})
    assert (eu.name, eu.description) == ("Gas Price&&eu", "Europe")
    assert eu.parameters["properties"] == {"day": {"type": "string", "x-type": "DATE (YYYY-MM-DD)"}}
    assert [note.split(",")[0] for note in catalog.notes] == [
        "fields that a tool does not carry",
        "1 ToolBench tool with an empty api_list",
        "1 API with a repeated parameter name",
    ]
    assert "api_list[].method (1), title (1)" in catalog.notes[0]


def test_a_folder_is_read_in_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b/one.json", "a/two.json", "c.jsonl", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path / name, {"tool_name": name, "api_list": [{"name": "n"}]})
    catalog = read_catalog(tmp_path)
    assert [tool.collection for tool in catalog] == ["a/two.json", "b/one.json", "c.jsonl"]
    assert catalog.notes == (f"1 file of another kind left unread in {tmp_path}",)


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    write(
        path,
        BARE,
        {"description": "no name"},
        {"name": 3},
        {"name": " "},
        {"name": "a", "description": 1, "parameters": "none"},
        {"type": "web_search", "name": "b"},
        {"type": "function", "function": "c"},
        4,
    )
    with path.open("a") as file:
        file.write("{broken\n")
    with pytest.raises(CatalogError) as caught:
        read_catalog(path)
    message = str(caught.value)
    assert "9 problems" in message
    for line, problem in [
        (2, "field name: missing"),
        (3, "field name: expected text, found a number"),
        (4, "field name: blank"),
        (5, "field description: expected text, found a number"),
        (5, "field parameters: expected an object (JSON schema), found text"),
        (6, "field type: expected \"function\", found 'web_search'"),
        (7, "field function: expected an object, found text"),
        (8, "expected an object, found a number"),
        (9, "not valid JSON"),
    ]:
        assert f"{path}:{line}: {problem}" in message


def test_toolbench_problems_name_the_field(tmp_path: Path) -> None:
    def api(**fields: object) -> dict[str, object]:
        return {"tool_name": "t", "api_list": [{"name": "ok"}, fields]}

    path = write(
        tmp_path / "f",
        api(description="no name"),
        api(name="n", required_parameters={}),
        api(name="n", optional_parameters=[{"type": "STRING"}, "x", {"name": "p", "type": 1}]),
        {"tool_name": "t", "api_list": "none"},
        {"tool_name": "", "api_name": "n"},
        {"tool_name": "t", "api_list": [1]},
    )
    with pytest.raises(CatalogError) as caught:
        read_catalog(path)
    for problem in [
        ":1: field api_list[1].name: missing",
        ":2: field api_list[1].required_parameters: expected a list, found an object",
        ":3: field api_list[1].optional_parameters[0].name: missing",
        ":3: field api_list[1].optional_parameters[1]: expected an object, found text",
        ":3: field api_list[1].optional_parameters[2].type: expected text, found a number",
        ":4: field api_list: expected a list, found text",
        ":5: field tool_name: blank",
        ":6: field api_list[0]: expected an object, found a number",
    ]:
        assert problem in str(caught.value)
    assert "8 problems" in str(caught.value)


def test_a_long_list_of_problems_is_cut_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "f", BARE, *[{"name": i} for i in range(30)])
    with pytest.raises(CatalogError, match="30 problems") as caught:
        read_catalog(path)
    assert len(str(caught.value).splitlines()) == 1 + 20 + 1
    assert "... and 10 more" in str(caught.value)


def test_duplicates_are_errors_or_merged(tmp_path: Path) -> None:
    path = write(tmp_path / "f", BARE, WRAPPED, {**BARE, "description": "Other"}, BARE)
    with pytest.raises(CatalogError) as caught:
        read_catalog(path)
    assert f"'get_time': {path}:1 and {path}:3" in str(caught.value)
    assert f"'get_time': {path}:1 and {path}:4" in str(caught.value)
    catalog = read_catalog(path, on_duplicate="merge")
    assert [tool.name for tool in catalog] == ["get_time", "Get_Time"]
    assert [document.description for document in catalog[0].documents] == ["Other"]
    assert catalog[0].documents[0].source == f"{path}:3"
    assert "1 identical copy counted once" in catalog.notes[0]


def test_hostile_names_are_carried_unchanged(tmp_path: Path) -> None:
    names = ["a\tb", "<b onclick='x'>>>", "x&&y&&z", "line\nbreak", " padded ", "Café", "CAFÉ"]
    catalog = read_catalog(write(tmp_path / "f", *[{"name": name} for name in names]))
    assert [tool.name for tool in catalog] == names


def test_formats_can_be_named_and_own_files_are_recognised(tmp_path: Path) -> None:
    ToolCatalog([Tool(name="a")]).save(tmp_path / "own.jsonl")
    for format in ("auto", "jaxtool"):
        assert [t.name for t in read_catalog(tmp_path / "own.jsonl", format)] == ["a"]
    with pytest.raises(CatalogError, match="tool_name: missing"):
        read_catalog(write(tmp_path / "f", BARE), "toolbench")
    with pytest.raises(CatalogError, match='expected "auto"'):
        read_catalog(tmp_path / "f", "yaml")  # type: ignore[arg-type]
    with pytest.raises(CatalogError, match="on_duplicate"):
        read_catalog(tmp_path / "f", on_duplicate="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize("content", ['{"id": 1}\n', "3\n", "[[]]"])
def test_unknown_formats_are_told(tmp_path: Path, content: str) -> None:
    (tmp_path / "f").write_text(content)
    with pytest.raises(CatalogError, match="f:1: not a known catalogue format"):
        read_catalog(tmp_path / "f")


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        read_catalog(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no file in this folder"):
        read_catalog(tmp_path)
    (tmp_path / "f").write_text("[]")
    with pytest.raises(CatalogError, match="no tools found"):
        read_catalog(tmp_path / "f")
