"""Query files: every line or value is a query, or an error that names it."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jaxtool.data import (
    ChatPrompts,
    LabelledQuery,
    Query,
    QuerySetError,
    check_readable,
    read_query_lines,
)

TEXTS = ["book a flight", "what's new?\u2028same query"]


def values(path: Path) -> list[tuple[int, Any]]:
    """Number and value of each line."""
    lines = read_query_lines(path)
    assert [line.row for line in lines] == list(range(len(lines)))
    return [(line.line, json.loads(line.text)) for line in lines]


def test_text_file(tmp_path: Path) -> None:
    file = tmp_path / "queries.txt"
    file.write_bytes("\ufeffbook a flight\r\n\nwhat's new?\u2028same query\n".encode())
    assert values(file) == list(zip([1, 3], TEXTS, strict=True))


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        ('"book a flight"\n\n"what\'s new?\\u2028same query"', [1, 3]),
        ('{"text": "book a flight", "_id": 4}\n{"query": "what\'s new?\\u2028same query", "tools": ["a"]}\n', [1, 2]),
        ('["book a flight",\n {"query":\n "what\'s new?\\u2028same query"}]', [1, 2]),
    ],
    ids=["texts", "objects", "array"],
)
@pytest.mark.parametrize("name", ["q.json", "q.jsonl", "q.jsonl.gz"])
def test_json_files(tmp_path: Path, name: str, content: str, lines: list[int]) -> None:
    if content.startswith("["):
        name = "q.json"
    file = tmp_path / name
    file.write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    found = [
        (line, value if isinstance(value, str) else value.get("query", value.get("text")))
        for line, value in values(file)
    ]
    assert found == list(zip(lines, TEXTS, strict=True))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"])).filter(str.strip), min_size=1))
def test_json_round_trip(tmp_path: Path, written: list[str]) -> None:
    (tmp_path / "queries.jsonl").write_text("".join(json.dumps(text) + "\n" for text in written))
    (tmp_path / "queries.json").write_text(json.dumps(written))
    for name in ("queries.jsonl", "queries.json"):
        assert [value for _, value in values(tmp_path / name)] == written


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("q.txt", b"", "no line in it"),
        ("q.json", b"[]", "no query in it; expected a text file with a query a line"),
        ("q.txt", b"one\n \xff\n", r"q\.txt:2: expected UTF-8 text, found byte 0xff"),
        ("q.txt", b'["one", "two"]\n', r"q\.txt:1: begins like JSON, but a file without the ending \.json or"),
        ("q", b'{"query": "one"}\n{"query": "two"}\n', r"q:1: begins like JSON"),
        ("q.json", b'{"text": "a", "text": "b"}', r"q\.json:1: key 'text' appears more than once"),
        ("q.json", b'["a"', r'q\.json:1: expected "," or "]" in the JSON array'),
        ("q.jsonl.gz", b"\x1f\x8bno", r"damaged or cut gzip file"),
    ],
)
def test_errors(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        read_query_lines(tmp_path / name)


def test_text_that_only_begins_with_a_bracket_is_text(tmp_path: Path) -> None:
    file = tmp_path / "q.txt"
    file.write_text("[urgent] find me a flight\n{city} weather\n")
    assert [value for _, value in values(file)] == ["[urgent] find me a flight", "{city} weather"]


def test_absent_files_and_folders_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"absent\.txt: no such file"):
        read_query_lines(tmp_path / "absent.txt")
    with pytest.raises(ValueError, match=r": is a folder, expected a file"):
        read_query_lines(tmp_path)


@pytest.fixture(scope="module")
def prompts() -> ChatPrompts:
    """Of a tokenizer that has a token for each byte but those of control characters below 0x10 and of é's second."""
    symbols = pre_tokenizers.ByteLevel.alphabet()
    lost = {chr(256 + byte) for byte in range(16)} | {"©"}
    vocabulary = {symbol: i for i, symbol in enumerate(["<end>", *sorted(set(symbols) - lost)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}!"
    fast: Any = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", chat_template=template)
    return ChatPrompts(fast, max_length=20)


def test_characters_without_a_token_are_counted_and_queries_of_them_refused(prompts: ChatPrompts) -> None:
    queries = [Query(text=text, where=f"q:{i}") for i, text in enumerate(["a\x01b", "\x01\x02c \n", "né"])]
    assert check_readable(queries, prompts) == [
        "the tokenizer has no token for '\\x01': the model reads 2 texts without it",
        "the tokenizer has no token for '\\x02': the model reads 1 text without it",
    ]
    assert check_readable(queries[2:], prompts) == []
    labelled = LabelledQuery(query_id="7", text="\x02 \x01", tools=(0,), source="train.jsonl")
    with pytest.raises(QuerySetError) as caught:
        check_readable([*queries, Query.of(labelled), Query(text="\x01", where="q:9")], prompts)
    assert str(caught.value) == (
        "2 queries that the model can't read\n"
        "  train.jsonl, query 7: the tokenizer has no token for any character of '\\x02 \\x01'\n"
        "  q:9: the tokenizer has no token for any character of '\\x01'"
    )
    # What is refused is what gives no prompt.
    with pytest.raises(ValueError, match="no token for any character"):
        prompts.prompt("\x01")
