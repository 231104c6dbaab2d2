"""BFCL as a retrieval set, on files of its format that are written here."""

import json
from pathlib import Path

import pytest

from jaxtool.data.bfcl import load_bfcl
from jaxtool.data.query_sets import HeldOut, QuerySetError


def function(name: str, description: str = "does it") -> dict[str, object]:
    return {"name": name, "description": description, "parameters": {"type": "dict", "properties": {}}}


def row(question_id: str, text: str, *functions: dict[str, object], before: tuple[str, ...] = ()) -> dict[str, object]:
    messages = [{"role": role, "content": f"earlier {role}"} for role in before]
    messages.append({"role": "user", "content": text})
    return {"id": question_id, "question": [messages], "function": list(functions)}


def answer(question_id: str, *names: str) -> dict[str, object]:
    return {"id": question_id, "ground_truth": [{name: {"x": [1]}} for name in names]}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def make(tmp_path: Path) -> Path:
    add, sub, other = function("math.add"), function("sub"), function("other")
    write(
        tmp_path / "BFCL_v4_simple_python.json",
        [
            row("simple_0", "Add 1 and 2", add),
            row("simple_1", "Subtract  them", sub, before=("system",)),
            row("simple_2", "add 1 and 2 ", function("math.add", "another text")),
        ],
    )
    write(
        tmp_path / "possible_answer" / "BFCL_v4_simple_python.json",
        [answer("simple_2", "math.add"), answer("simple_0", "math.add"), answer("simple_1", "sub")],
    )
    write(
        tmp_path / "BFCL_v4_live_parallel_multiple.json",
        [row("live_0", "subtract them", add, sub, other), row("live_1", "Both, twice", add, sub)],
    )
    write(
        tmp_path / "possible_answer" / "BFCL_v4_live_parallel_multiple.json",
        [answer("live_0", "other"), answer("live_1", "sub", "math.add", "sub")],
    )
    write(tmp_path / "BFCL_v4_irrelevance.json", [row("irrelevance_0", "Hello", function("Other"))])
    write(tmp_path / "BFCL_v4_multi_turn_base.json", [{"id": "not read"}])
    (tmp_path / "BFCL_v4_format_sensitivity.json").write_text('{\n "not": ["read"]\n}')
    return tmp_path


def test_functions_queries_and_notes(tmp_path: Path) -> None:
    held_out = HeldOut(fraction=0, unseen_queries=0)
    found = load_bfcl(make(tmp_path), held_out=held_out)
    assert [tool.name for tool in found.catalog] == ["Other", "math.add", "sub", "other"]
    assert [d.description for d in found.catalog[1].documents] == ["another text"]
    assert found.catalog[1].parameters == {"type": "dict", "properties": {}}
    queries = [(q.query_id, q.text, q.tools, q.source) for q in found.train]
    assert queries == [
        # The same text in another file and letter case: one query that needs the tools of both.
        ("live_0", "subtract them", (2, 3), "BFCL_v4_live_parallel_multiple.json"),
        ("live_1", "Both, twice", (1, 2), "BFCL_v4_live_parallel_multiple.json"),
        ("simple_0", "Add 1 and 2", (1,), "BFCL_v4_simple_python.json"),
    ]
    assert found.test == found.test_unseen == ()
    notes = "\n".join(found.notes)
    assert "6 rows of 3 files read: 5 with an answer, 1 without" in notes
    assert "BFCL_v4_irrelevance.json 1" in notes
    assert "1 answered row with a system prompt" in notes
    assert "5 answered rows make 3 queries of different text: 2 texts in 4 rows merged, 1 of them with" in notes


def test_the_split_is_a_function_of_the_seed(tmp_path: Path) -> None:
    names = [f"f{i}" for i in range(40)]
    rows = [row(f"q{i}", f"question {i}", function(name)) for i, name in enumerate(names * 3)]
    write(tmp_path / "BFCL_v4_multiple.json", rows)
    answers = [answer(f"q{i}", name) for i, name in enumerate(names * 3)]
    write(tmp_path / "possible_answer" / "BFCL_v4_multiple.json", answers)
    one, two, three = (load_bfcl(tmp_path, seed=seed) for seed in (1, 1, 2))
    assert one == two
    assert len(one.test) == len(three.test) == 40
    assert one.test != three.test
    assert not {q.text for q in one.train} & {q.text for q in one.test}


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ({"question": [[]], "function": []}, "field id: expected text"),
        ({"id": "x", "function": []}, "field question: expected a list"),
        (row("x", "t") | {"function": None}, "field function: expected a list"),
        (row("x", "t", {"description": "nameless"}), "field name: missing"),
        ({"id": "x", "question": [], "function": []}, "field question: expected one turn"),
        ({"id": "x", "question": [["a"]], "function": []}, "field question: expected one turn"),
        (
            {"id": "x", "question": [[{"role": "system", "content": "c"}]], "function": []},
            "field question: expected a user message",
        ),
        (row("x", " "), "field question: expected text in the last user message"),
        (row("simple_9", "t", function("a")), "field function: the answer's 'b' is not among its names"),
    ],
)
def test_bad_rows_are_told_with_their_line(tmp_path: Path, bad: dict[str, object], problem: str) -> None:
    write(tmp_path / "BFCL_v4_multiple.json", [row("simple_0", "fine", function("a")), bad])
    write(
        tmp_path / "possible_answer" / "BFCL_v4_multiple.json",
        [answer("simple_0", "a")] + ([answer("simple_9", "b")] if bad.get("id") == "simple_9" else []),
    )
    with pytest.raises(QuerySetError) as caught:
        load_bfcl(tmp_path)
    assert "1 problem" in str(caught.value)
    assert f"BFCL_v4_multiple.json:2: {problem}" in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        (answer("unknown", "a"), "answer to 'unknown', which is not in BFCL_v4_multiple.json"),
        (answer("q0", "a"), ":2: field id: 'q0' was answered before"),
        (answer("q1"), ":2: field ground_truth"),
        ({"id": "q1", "ground_truth": [{"a": {}, "b": {}}]}, ":2: field ground_truth"),
        ({"id": "q1", "ground_truth": ["a()"]}, ":2: field ground_truth"),
        ({"id": "q1"}, ":2: field ground_truth: expected a list"),
    ],
)
def test_bad_answers_are_told(tmp_path: Path, bad: dict[str, object], problem: str) -> None:
    write(tmp_path / "BFCL_v4_multiple.json", [row("q0", "one", function("a")), row("q1", "two", function("a"))])
    write(tmp_path / "possible_answer" / "BFCL_v4_multiple.json", [answer("q0", "a"), bad])
    with pytest.raises(QuerySetError) as caught:
        load_bfcl(tmp_path)
    assert problem in str(caught.value)


def test_missing_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no single-turn"):
        load_bfcl(tmp_path)
    make(tmp_path)
    (tmp_path / "possible_answer" / "BFCL_v4_simple_python.json").unlink()
    with pytest.raises(FileNotFoundError, match="can't be used without its answers"):
        load_bfcl(tmp_path)
