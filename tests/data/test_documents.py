"""Documents from text files, JSON Lines and TFDS data sets that are made here."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from jaxtool.data.documents import Document, Documents
from jaxtool.data.sample_writer import SampleError


def texts(source: str | Path, **options: Any) -> list[tuple[str, int]]:
    return [(document.text, document.line) for document in Documents(source, **options)]


def test_a_folder_of_all_kinds(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n three\r\n")
    (tmp_path / "b.jsonl").write_text('{"text": " four ", "id": 3}\n\n{"text": " \\n"}\n{"text": "five"}\n')
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(b'[{"text": "six"}]'))
    (tmp_path / "d.txt").write_text(" \n")
    (tmp_path / "e.csv").write_text("x")
    documents = Documents(tmp_path)
    found = list(documents)
    assert found == [
        Document(text="one\ntwo\n\n three\n", file=str(tmp_path / "a.txt"), line=1),
        Document(text=" four ", file=str(tmp_path / "b.jsonl"), line=1),
        Document(text="five", file=str(tmp_path / "b.jsonl"), line=4),
        Document(text="six", file=str(tmp_path / "c.json.gz"), line=1),
    ]
    assert documents.notes == [
        "1 file of other kinds left out: e.csv",
        "1 empty line skipped",
        "2 documents without text skipped",
        "1 text file with \\r\\n at line ends, read as \\n",
    ]
    assert list(documents) == found and len(documents.notes) == 4


def test_lines_as_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\n\n  \n two\nthree")
    documents = Documents(tmp_path / "a.txt", text_files="line")
    assert [(x.text, x.line) for x in documents] == [("one", 1), (" two", 4), ("three", 5)]
    assert documents.notes == ["2 empty lines skipped"]
    with pytest.raises(SampleError, match="text_files is 'word', expected one of file, line"):
        Documents(tmp_path, text_files="word")


def test_fields(tmp_path: Path) -> None:
    rows = [
        {"content": "abcdef", "given": [[0, 2], [4, 6]]},
        {"content": "abc"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = list(Documents(tmp_path / "a.jsonl", text_field="content", unsupervised_field="given"))
    assert [x.unsupervised for x in found] == [((0, 2), (4, 6)), ()]


def test_bad_records_are_all_named(tmp_path: Path) -> None:
    rows = [
        '{"text": "fine"}',
        '{"body": "x", "id": 1}',
        '{"text": 3}',
        "[]",
        '{"text": "abc", "given": [[2, 1]]}',
        '{"text": "abc", "given": [[0, 4]]}',
        '{"text": "abc", "given": [[1, 2], [0, 1]]}',
        '{"text": "abc", "given": [[1, true]]}',
        '{"text": "abc", "given": 3}',
        "{",
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(rows))
    with pytest.raises(SampleError) as caught:
        list(Documents(path, unsupervised_field="given"))
    parts = "field 'given': expected parts [begin, end] of the 3 characters, ascending"
    assert str(caught.value).splitlines() == [
        f"{path} can't be used as a corpus: 9 problems",
        f"  {path}:2: field 'text' is missing; there are 'body', 'id'",
        f"  {path}:3: field 'text': expected text, found a number",
        f"  {path}:4: expected an object with a field 'text', found a list",
        *(f"  {path}:{line}: {parts}" for line in range(5, 10)),
        f"  {path}:10: not valid JSON: Expecting property name enclosed in double quotes (column 2)",
    ]


def test_an_unsupervised_field_that_no_record_has(tmp_path: Path) -> None:
    """A misspelt one would have all of the text learned; records without it have nothing to leave out."""
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n{"text": "b", "given": [[0, 1]]}\n')
    assert len(list(Documents(tmp_path / "a.jsonl", unsupervised_field="given"))) == 2
    with pytest.raises(SampleError, match=r"none of 2 documents has the field 'gvien' \(unsupervised_field\)"):
        list(Documents(tmp_path / "a.jsonl", unsupervised_field="gvien"))
    with pytest.raises(SampleError, match=r"unsupervised_field is 'given', but tfds:a:train has no JSON records"):
        Documents("tfds:a:train", unsupervised_field="given")


@pytest.mark.parametrize("form", ["file", "line"])
def test_text_files_that_are_not_text(tmp_path: Path, form: str) -> None:
    path = tmp_path / "a.txt"
    for content, words in (
        (b"one\ntw\xff", r"a.txt:2: expected UTF-8 text, found byte 0xff"),
        ("one".encode("utf-16"), r"a.txt:1: expected UTF-8 text, found"),
        ("one".encode("utf-16-le"), r"a.txt:1: holds a NUL character: expected UTF-8 text, found UTF-16 or binary"),
        (gzip.compress(b"one")[:-9], "damaged or cut gzip file"),
    ):
        path.write_bytes(content)
        with pytest.raises(SampleError, match=words):
            texts(path, text_files=form)


def test_tfds_names() -> None:
    with pytest.raises(SampleError, match=r"tfds:x: expected tfds:NAME\[/CONFIG\]\[:VERSION\]:SPLIT"):
        Documents("tfds:x")
    for source in ("tfds:a:train", "tfds:a/b.c:train[:10%]", "tfds:a/b:1.0.0:train[:10]+test[5:]"):
        Documents(source)


def test_tfds_data_sets(tmp_path: Path) -> None:
    tfds = pytest.importorskip("tensorflow_datasets")

    class TinyTexts(tfds.core.GeneratorBasedBuilder):
        VERSION = tfds.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {"text": tfds.features.Text(), "label": tfds.features.ClassLabel(num_classes=2)}
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
            )

        def _split_generators(self, dl_manager: Any) -> Any:
            return {"train": self._generate_examples(5), "test": self._generate_examples(1)}

        def _generate_examples(self, count: int) -> Any:
            for number in range(count):
                yield number, {"text": f"té {number}" if number != 3 else " ", "label": 0}

    with pytest.raises(FileNotFoundError, match="tfds:tiny_texts:train: not prepared in"):
        texts("tfds:tiny_texts:train", data_dir=tmp_path)
    TinyTexts(data_dir=str(tmp_path)).download_and_prepare(file_format="array_record")

    assert texts("tfds:tiny_texts:train", data_dir=tmp_path) == [("té 0", 1), ("té 1", 2), ("té 2", 3), ("té 4", 5)]
    assert texts("tfds:tiny_texts:1.0.0:train[1:3]", data_dir=tmp_path) == [("té 1", 1), ("té 2", 2)]
    for source, kind, words in (
        ("tfds:tiny_texts:dev", SampleError, "Unknown split 'dev'"),
        ("tfds:tiny_texts:2.0.0:train", SampleError, "cannot be loaded at version 2.0.0"),
        ("tfds:no_such_texts:train", FileNotFoundError, "TFDS has no such data set, and there is none in"),
    ):
        with pytest.raises(kind, match=words):
            texts(source, data_dir=tmp_path)
    with pytest.raises(SampleError, match=r"field 'body' is missing; there are 'label', 'text'"):
        texts("tfds:tiny_texts:train", data_dir=tmp_path, text_field="body")
    with pytest.raises(SampleError, match=r"field 'label': expected text, found"):
        texts("tfds:tiny_texts:train", data_dir=tmp_path, text_field="label")
