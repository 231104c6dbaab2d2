"""Strict JSON reading: every value or a problem with its line, never a silent change."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.tools.json_records import Problems, listing, read_records

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
json_objects = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), json_values, max_size=3)


def read(path: Path, content: str | bytes) -> tuple[list[tuple[int, object]], list[str]]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    problems = Problems()
    records = read_records(path, problems)
    return [(r.line, r.value) for r in records], [m.removeprefix(str(path)) for m in problems.messages]


@given(st.lists(json_objects, max_size=4), st.sampled_from(["lines", "array", "pretty"]), st.booleans())
def test_reads_what_json_wrote(tmp_path_factory, values, layout, ascii_only) -> None:
    path = tmp_path_factory.getbasetemp() / "values.json"
    if layout == "lines":
        text = "".join(json.dumps(v, ensure_ascii=ascii_only) + "\n" for v in values)
    else:
        text = json.dumps(values, indent=2 if layout == "pretty" else None, ensure_ascii=ascii_only)
    records, problems = read(path, text)
    assert not problems
    assert [value for _, value in records] == values


def test_lines_are_counted_from_one_and_blank_lines_pass(tmp_path: Path) -> None:
    assert read(tmp_path / "f", '\n{"a": 1}\n\n  \r\n{"b": 2}')[0] == [(2, {"a": 1}), (5, {"b": 2})]
    assert read(tmp_path / "f", '[\n {"a":\n1},\n {"b": 2}\n]')[0] == [(2, {"a": 1}), (4, {"b": 2})]
    assert read(tmp_path / "f", '{\n "a": 1\n}')[0] == [(1, {"a": 1})]


def test_byte_order_mark_and_gzip(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a": "\xc3\xa9"}'
    assert read(tmp_path / "f", data) == ([(1, {"a": "é"})], [])
    assert read(tmp_path / "plain.json", gzip.compress(data)) == ([(1, {"a": "é"})], [])


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"a": 1, "a": 2}', "key 'a' appears more than once"),
        ('{"a": {"b": 1, "b": 1}}', "key 'b' appears more than once"),
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e999}', "number 1e999 is too large"),
        ('{"a": "\\ud800"}', "lone surrogate"),
        ('{"a": "x', "not valid JSON"),
        ('{"a": 1', "not valid JSON"),
        ("{'a': 1}", "not valid JSON"),
        ('{"a": 1} x', "not valid JSON"),
        ("rubbish", "not valid JSON"),
        ('{"a": ' + "[" * 100_000 + "}", "nested too deeply"),
        ('{"a": ' + "1" * 5000 + "}", "integer string"),
    ],
)
def test_a_bad_line_is_a_problem_and_the_others_are_read(tmp_path: Path, bad: str, message: str) -> None:
    records, problems = read(tmp_path / "f", f'{{"first": 1}}\n{bad}\n{{"last": 1}}\n')
    assert (1, {"first": 1}) in records
    assert (3, {"last": 1}) in records
    assert len(problems) == 1
    assert problems[0].startswith(":2: ")
    assert message in problems[0]


def test_surrogate_pairs_are_text(tmp_path: Path) -> None:
    assert read(tmp_path / "f", '{"a": "\\ud83d\\ude00"}') == ([(1, {"a": "😀"})], [])


@pytest.mark.parametrize(
    ("text", "line", "count"),
    [
        ('[{"a": 1},\n{"a": 2}', 2, 2),
        ('[{"a": 1},\n{"b":', 2, 1),
        ('[{"a": 1}]\nx', 2, 1),
        ('[{"a": 1}\n{}]', 2, 1),
    ],
)
def test_a_broken_array_is_a_problem(tmp_path: Path, text: str, line: int, count: int) -> None:
    records, problems = read(tmp_path / "f", text)
    assert len(records) == count
    assert len(problems) == 1
    assert problems[0].startswith(f":{line}: ")


def test_undecodable_files_are_problems_with_a_line(tmp_path: Path) -> None:
    assert read(tmp_path / "f", b'{"a": 1}\n{"b": "\xff"}')[1] == [":2: expected UTF-8 text, found byte 0xff"]
    cut = gzip.compress(b'{"a": 1}' * 100)[:-12]
    assert "gzip" in read(tmp_path / "f", cut)[1][0]


def test_listings_show_twenty_and_count_the_rest() -> None:
    lines = listing("heading", [str(i) for i in range(1030)]).splitlines()
    assert lines[:2] == ["heading", "  0"]
    assert lines[20:] == ["  19", "  ... and 1,010 more"]
