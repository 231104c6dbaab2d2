"""Which files a source names, and what is read from files that are fine and that aren't."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from jaxtool.data import data_files
from jaxtool.data.data_files import json_records, lines_of, source_files, strict_json
from jaxtool.data.sample_writer import SampleError
from jaxtool.tools.json_records import Problems

ENDINGS = (".txt", ".jsonl")


def test_files_of_a_folder_in_the_order_of_their_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.jsonl.gz", "a/sub/x.TXT", "a.jsonl", "README.md", "a/data.parquet"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    assert [file.name for file in source_files(f"{tmp_path}/**/*.jsonl*", ENDINGS).files] == ["a.jsonl", "z.jsonl.gz"]
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    found = source_files(tmp_path, ENDINGS)
    assert [file.relative_to(tmp_path).as_posix() for file in found.files] == [
        "a.jsonl",
        "a/sub/x.TXT",
        "a/z.jsonl.gz",
        "b.txt",
    ]
    assert found.notes == ("2 files of other kinds left out: README.md, data.parquet",)
    assert source_files(tmp_path / "b.txt", ENDINGS).files == (tmp_path / "b.txt",)


def test_sources_that_name_nothing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        source_files(tmp_path / "absent", ENDINGS)
    with pytest.raises(FileNotFoundError, match="no file matches this pattern"):
        source_files(f"{tmp_path}/*.txt", ENDINGS)
    with pytest.raises(SampleError, match=r"nothing; expected .txt, .jsonl \(each also with .gz\)"):
        source_files(tmp_path, ENDINGS)
    (tmp_path / "x.parquet").write_text("x")
    with pytest.raises(SampleError, match=r"x.parquet: x.parquet; expected .txt"):
        source_files(tmp_path / "x.parquet", ENDINGS)


def read(path: Path, content: bytes) -> tuple[list[tuple[int, object]], list[str], int]:
    path.write_bytes(content)
    problems, counts = Problems(), Counter[str]()
    found = [(record.line, record.value) for record in json_records(path, problems, counts)]
    return found, [message.removeprefix(str(path)) for message in problems.messages], counts["empty line"]


@pytest.mark.parametrize("packed", [False, True])
def test_json_lines(tmp_path: Path, packed: bool) -> None:
    content = '\ufeff{"a": 1}\r\n\r\n  \n{"a": "\u2028é"}\n[1]\n"x"'.encode()
    path = tmp_path / ("x.jsonl.gz" if packed else "x.jsonl")
    found, problems, empty = read(path, gzip.compress(content) if packed else content)
    assert found == [(1, {"a": 1}), (4, {"a": "\u2028é"}), (5, [1]), (6, "x")]
    assert (problems, empty) == ([], 2)


@pytest.mark.parametrize("name", ["x.json", "x.jsonl"])
def test_json_arrays(tmp_path: Path, name: str) -> None:
    found, problems, _ = read(tmp_path / name, b'\n [{"a": 1},\n {"a": 2}]\n')
    assert (found, problems) == ([(2, {"a": 1}), (3, {"a": 2})], [])


def test_every_bad_line_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    lines = [
        b'{"a": 1}',
        b'{"a": 1',
        b'{"a": 1, "a": 2}',
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": 1} {"a": 2}',
        b"[" * 100_000,
        b'{"a": "\\ud83d\\ude00"}',
    ]
    found, problems, _ = read(tmp_path / "x.jsonl", b"\n".join(lines))
    assert found == [(1, {"a": 1}), (10, {"a": "😀"})]
    assert problems == [
        ":2: not valid JSON: Expecting ',' delimiter (column 8)",
        ":3: key 'a' appears more than once in an object",
        ":4: NaN is not JSON",
        ":5: number 1e999 is too large",
        ":6: expected UTF-8 text, found byte 0xff",
        ":7: holds a lone surrogate escape, which is not valid Unicode text",
        ":8: not valid JSON: Extra data (column 10)",
        ":9: JSON nested too deeply",
    ]


def test_files_that_cannot_be_read_to_their_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gzip.compress(b"".join(b'{"a": %d}\n' % i for i in range(20_000)))
    found, problems, _ = read(tmp_path / "cut.jsonl.gz", whole[: len(whole) // 2])
    assert 0 < len(found) < 20_000 and [value for _, value in found] == [{"a": i} for i in range(len(found))]
    assert len(problems) == 1 and "damaged or cut gzip file" in problems[0]
    found, problems, _ = read(tmp_path / "bad.jsonl.gz", whole[:20] + bytes(50) + whole[70:])
    assert len(problems) == 1 and "damaged or cut gzip file" in problems[0]
    found, problems, _ = read(tmp_path / "x.jsonl", '{"a": 1}'.encode("utf-16"))
    assert (found, problems) == ([], [":1: expected UTF-8 text, found UTF-16"])
    monkeypatch.setattr(data_files, "MOST_LINE_BYTES", 100)
    found, problems, _ = read(tmp_path / "y.jsonl", b'{"a": 1}\n"%s"\n{"a": 2}' % (b"x" * 200))
    assert (found, problems) == ([(1, {"a": 1})], [":2: a line of more than 100 bytes"])


def test_lines(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\rc\n\n d")
    problems = Problems()
    assert list(lines_of(tmp_path / "x.txt", problems)) == [(1, b"a"), (2, b"b\rc"), (3, b""), (4, b" d")]
    (tmp_path / "empty.txt").write_bytes(b"")
    assert list(lines_of(tmp_path / "empty.txt", problems)) == [] and not problems


def test_strict_json() -> None:
    assert strict_json('{"a": [1.5, null, "\\u00e9"]}') == json.loads('{"a": [1.5, null, "\\u00e9"]}')
    with pytest.raises(ValueError, match="not valid JSON"):
        strict_json("{'a': 1}")
