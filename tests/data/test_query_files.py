"""Query files: every line is a query or an error that names it."""

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxtool.data import QuerySetError, read_queries


def test_text_file(tmp_path: Path) -> None:
    file = tmp_path / "queries.txt"
    file.write_bytes("\ufeffbook a flight\r\nwhat's new?\u2028same query\n".encode())
    assert read_queries(file) == ["book a flight", "what's new?\u2028same query"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip), min_size=1))
def test_json_lines_round_trip(tmp_path: Path, texts: list[str]) -> None:
    file = tmp_path / "queries.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert read_queries(file) == texts


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("q.txt", b"", "no query"),
        ("q.txt", b"one\n\ntwo\n", r"q\.txt:2: the query is empty"),
        ("q.txt", b"one\n \xff\n", "not UTF-8"),
        ("q.jsonl", b'{"text": "a"}\n{"text": 1}\n', r"q\.jsonl:2: field text"),
        ("q.jsonl", b'{"text": "a"}\n["b"]\n', r"q\.jsonl:2: field text"),
        ("q.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"q\.jsonl:2: expected a JSON object"),
        ("q.jsonl", b'{"text": " "}\n', r"q\.jsonl:1: the query is empty"),
        ("q.jsonl", b'{"text": "\\ud800"}\n', r"q\.jsonl:1: .*lone surrogate"),
        ("q.jsonl", b"[" * 100_000, r"q\.jsonl:1: expected a JSON object"),
    ],
)
def test_errors(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(QuerySetError, match=said):
        read_queries(tmp_path / name)


def test_all_problems_are_counted(tmp_path: Path) -> None:
    file = tmp_path / "q.txt"
    file.write_text("a\n" + "\n" * 30 + "b\n")
    with pytest.raises(QuerySetError, match=r"30 of 32 lines(.|\n)*and 10 more"):
        read_queries(file)


def test_absent(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="absent"):
        read_queries(tmp_path / "absent.txt")
