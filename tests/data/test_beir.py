"""BEIR folders, and documents in ToolLens layout."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.data.beir import load_beir, parse_toollens
from jaxtool.data.query_sets import QuerySetError, load_retrieval_set

HEADER = "query-id\tcorpus-id\tscore"


def toollens(
    tool: str,
    api: str,
    description: str = "",
    required: object = (),
    optional: object = (),
    schema: str = "{}",
) -> str:
    return (
        f"category_name:Food, tool_name:{tool}, api_name:{api}, api_description:{description}, "
        f"required_params: {json.dumps(required)}, optional_params: {json.dumps(optional)}, "
        f"return_schema: {schema}"
    )


def make(
    tmp_path: Path,
    corpus: list[object],
    queries: list[object],
    test: list[str],
    train: list[str] | None = None,
) -> Path:
    (tmp_path / "qrels").mkdir(exist_ok=True)
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in corpus))
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(row) + "\n" for row in queries))
    (tmp_path / "qrels" / "test.tsv").write_text("\n".join([HEADER, *test]) + "\n")
    if train is not None:
        (tmp_path / "qrels" / "train.tsv").write_text("\n".join([HEADER, *train]) + "\r\n")
    return tmp_path


def doc(document_id: str, text: str = "text", title: str = "") -> dict[str, object]:
    return {"_id": document_id, "title": title, "text": text, "metadata": {}}


def ask(query_id: str, text: str) -> dict[str, object]:
    return {"_id": query_id, "text": text}


def test_a_folder_becomes_a_retrieval_set(tmp_path: Path) -> None:
    folder = make(
        tmp_path,
        [doc("d1", "About tea"), doc("d2", "About oil", title="Oil"), {"_id": "d3", "text": "no title"}],
        [
            ask("q1", "Tea?"),
            ask("q2", "tea? "),
            ask("q3", "Oil and tea"),
            ask("q4", "none"),
            ask("q5", "unused"),
        ],
        ["q1\td1\t1", "q3\td2\t2", "q3\td1\t1", "q3\td1\t1", "q4\td1\t0"],
        ["q2\td3\t1"],
    )
    (tmp_path / "qrels" / "dev.tsv").write_text(HEADER)
    found = load_retrieval_set(str(folder), seed=1)
    assert [(t.name, t.description) for t in found.catalog] == [
        ("d1", "About tea"), ("Oil", "About oil"), ("d3", "no title")
    ]  # fmt: skip
    assert [(q.query_id, q.text, q.tools, q.source) for q in found.test] == [
        ("q1", "Tea?", (0,), "test.tsv"),
        ("q3", "Oil and tea", (0, 1), "test.tsv"),
    ]
    assert [(q.query_id, q.tools) for q in found.train] == [("q2", (2,))]
    assert found.test_unseen == ()
    assert found.notes == (
        "qrels/train.tsv: 1 row, 1 different pairs of 1 query; 0 rows with score 0 or less; 0 queries "
        "without a relevant document left out",
        "qrels/test.tsv: 5 rows, 4 different pairs of 3 queries; 1 rows with score 0 or less; 1 query "
        "without a relevant document left out",
        "left unread in qrels/: dev.tsv",
        "1 query in no qrels that were read: left out",
        "1 test query with a text that is also in train",
    )


def test_toollens_documents_become_tools(tmp_path: Path) -> None:
    required = [{"name": "q", "type": "STRING", "description": "a, b: c"}]
    folder = make(
        tmp_path,
        [
            doc("0", toollens("Gas, Price: EU", "get&&it", "First line,\nsecond: line", required)),
            doc("1", "plain"),
        ],
        [ask("q", "t")],
        ["q\t0\t1"],
    )
    found = load_beir(folder)
    tool, plain = found.catalog
    assert (tool.name, tool.collection) == ("Gas, Price: EU&&get&&it", "Gas, Price: EU")
    assert tool.description == "First line,\nsecond: line"
    assert tool.parameters == {
        "type": "object",
        "properties": {"q": {"type": "string", "description": "a, b: c"}},
        "required": ["q"],
    }
    assert (plain.name, plain.description) == ("1", "plain")
    assert any(note.startswith("1 of 2 documents in ToolLens layout") for note in found.notes)
    assert "no qrels/train.tsv: the train part is empty" in found.notes


parameters = st.lists(
    st.fixed_dictionaries({"name": st.text(min_size=1), "type": st.text(), "description": st.text()}),
    max_size=2,
)
keys = st.sampled_from(
    [
        ", required_params: ",
        ", required_params: []",
        ", optional_params: ",
        ", return_schema: ",
        ", api_name:",
        '"[',
    ]
)
plain_names = st.text(st.characters(exclude_characters=",:", exclude_categories=["Cs"]), min_size=1)


@given(
    plain_names.filter(str.strip),
    plain_names.filter(str.strip),
    st.lists(st.text() | keys, max_size=4).map("".join),
    parameters,
    parameters,
    st.text(),
)
def test_any_description_and_parameters_are_found_again(tool, api, description, required, optional, schema) -> None:
    fields = parse_toollens(toollens(tool, api, description, required, optional, schema))
    assert fields == {
        "category": "Food",
        "tool_name": tool,
        "api_name": api,
        "api_description": description,
        "required_parameters": required,
        "optional_parameters": optional,
        "return_schema": schema,
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda text: " " + text,
        lambda text: text.replace("category_name", "category"),
        lambda text: text.replace(", api_name:a", ""),
        lambda text: text.replace(", return_schema: {}", ""),
        lambda text: text.replace("optional_params: []", "optional_params: {}"),
        lambda text: text.replace("optional_params: []", "optional_params: [1]"),
        lambda text: text.replace("optional_params: []", "optional_params: ["),
        lambda text: text.replace("tool_name:t", "tool_name: "),
    ],
)
def test_any_other_layout_is_plain_text(change) -> None:
    text = toollens("t", "a")
    assert parse_toollens(text) is not None
    assert parse_toollens(change(text)) is None


def test_documents_of_one_name_are_told_apart_by_id(tmp_path: Path) -> None:
    same = toollens("T", "a")
    folder = make(
        tmp_path,
        [doc("0", same), doc("1", same), doc("2", title="T&&a [1]"), doc("3", title="other")],
        [ask("q", "t")],
        ["q\t1\t1", "q\t2\t1"],
    )
    found = load_beir(folder)
    assert [tool.name for tool in found.catalog] == ["T&&a [0]", "T&&a [1] [1]", "T&&a [1]", "other"]
    assert found.test[0].tools == (1, 2)
    assert "2 documents sharing a name with another: renamed with their _id" in found.notes


@pytest.mark.parametrize(
    ("corpus", "queries", "test", "problem"),
    [
        ([doc("d"), doc("d")], [], [], "corpus.jsonl:2: field _id: 'd' is also on line 1"),
        ([doc("d"), {"_id": "e"}], [], [], "corpus.jsonl:2: field text: expected text, found null"),
        (
            [doc("d"), {"_id": 4, "text": "t"}],
            [],
            [],
            "corpus.jsonl:2: field _id: expected text, found a number",
        ),
        ([doc("d"), doc(" ")], [], [], "corpus.jsonl:2: field _id: blank"),
        (
            [doc("d"), doc("e") | {"title": 1}],
            [],
            [],
            "corpus.jsonl:2: field title: expected text, found a number",
        ),
        ([doc("d"), []], [], [], "corpus.jsonl:2: expected an object, found a list"),
        ([], [], [], "corpus.jsonl:1: no documents"),
        ([doc("d")], [ask("q", "a"), ask("q", "b")], [], "queries.jsonl:2: field _id: 'q' appeared before"),
        ([doc("d")], [ask("q", " ")], [], "queries.jsonl:1: field text: blank"),
        ([doc("d")], [ask("q", "a")], ["r\td\t1"], "test.tsv:2: field query-id: 'r' is not in queries.jsonl"),
        ([doc("d")], [ask("q", "a")], ["q\te\t1"], "test.tsv:2: field corpus-id: 'e' is not in corpus.jsonl"),
        ([doc("d")], [ask("q", "a")], ["q\td\tyes"], "test.tsv:2: field score: expected a whole number"),
        ([doc("d")], [ask("q", "a")], ["q d 1"], "test.tsv:2: expected 3 fields between tabs, found 1"),
        (
            [doc("d")],
            [ask("q", "a")],
            ["q\td\t1", "q\td\t0"],
            "test.tsv:3: field score: 0, but 1 for this pair",
        ),
    ],
)
def test_problems_name_file_line_and_field(tmp_path: Path, corpus, queries, test, problem: str) -> None:
    with pytest.raises(QuerySetError) as caught:
        load_beir(make(tmp_path, corpus, queries, test))
    assert problem in str(caught.value)
    assert ": 1 problem\n" in str(caught.value)


def test_a_missing_header_is_a_problem(tmp_path: Path) -> None:
    make(tmp_path, [doc("d")], [ask("q", "a")], [])
    (tmp_path / "qrels" / "test.tsv").write_text("q\td\t1\n")
    with pytest.raises(QuerySetError, match=r"test\.tsv:1: expected the header"):
        load_beir(tmp_path)


@pytest.mark.parametrize("name", ["corpus.jsonl", "queries.jsonl", "qrels/test.tsv"])
def test_missing_files_are_told(tmp_path: Path, name: str) -> None:
    make(tmp_path, [doc("d")], [ask("q", "a")], ["q\td\t1"])
    (tmp_path / name).unlink()
    with pytest.raises(FileNotFoundError, match=f"{name}: missing"):
        load_beir(tmp_path)


def test_a_folder_in_the_place_of_a_file_is_told(tmp_path: Path) -> None:
    make(tmp_path, [doc("d")], [ask("q", "a")], ["q\td\t1"])
    (tmp_path / "queries.jsonl").unlink()
    (tmp_path / "queries.jsonl").mkdir()
    with pytest.raises(QuerySetError, match=r"queries\.jsonl: is a folder; in BEIR format it is a file"):
        load_beir(tmp_path)
