"""The augmented corpus: out of JSON Lines, through TFDS on the local disk, and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.data.documents import Documents
from jaxtool.data.sample_writer import SampleError

tfds = pytest.importorskip("tensorflow_datasets")
corpus = pytest.importorskip("jaxtool.data.augmented_corpus")

PIECES = st.text("ab é.", max_size=8)


def augmented(pieces: list[str], calls: list[tuple[str, str, str]]) -> tuple[str, list[dict[str, Any]]]:
    """Pieces of a text with calls between them."""
    text, found = pieces[0], []
    for piece, (tool, asked, result) in zip(pieces[1:], calls, strict=True):
        call = f" [{tool}({asked}) ->{' ' + result if result else ''}]"
        found.append({"start": len(text), "end": len(text + call), "tool": tool, "input": asked, "result": result})
        text += call + piece
    return text, found


@given(calls=st.lists(st.tuples(st.sampled_from(["QA", "MT"]), PIECES, PIECES), max_size=4), data=st.data())
def test_taking_the_calls_out_gives_the_text_back(calls: list[tuple[str, str, str]], data: st.DataObject) -> None:
    pieces = [data.draw(PIECES) for _ in range(len(calls) + 1)]
    text, found = augmented(pieces, calls)
    assert corpus.without_calls(text, [corpus.InsertedCall(**call) for call in found]) == "".join(pieces)


def test_prepared_and_read_back(tmp_path: Path) -> None:
    text, calls = augmented(
        ["Emma was written by", " Jane Austen, in", " 1815."], [("QA", "Who?", "é"), ("Cal", "", "")]
    )
    rows = [
        {"text": text, "calls": calls, "source": "https://example.org/1"},
        {"text": "Without a call.", "calls": [], "source": ""},
        {"text": "Nothing else."},
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    folder = corpus.prepare_augmented_corpus({"train": path, "dev": path}, data_dir=tmp_path / "tfds")
    assert folder == tmp_path / "tfds" / "augmented_corpus" / "1.0.0"

    found = tfds.data_source("augmented_corpus", split="train", data_dir=tmp_path / "tfds")
    assert len(found) == 3
    for i, row in enumerate(rows):
        example = found[i]
        assert example["text"].decode() == row["text"] and example["source"].decode() == row.get("source", "")
        names = ("start", "end", "tool", "input", "result")
        columns = [[x.decode() if isinstance(x, bytes) else int(x) for x in example["calls"][name]] for name in names]
        assert [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)] == row.get("calls", [])
    documents = Documents("tfds:augmented_corpus:dev", data_dir=tmp_path / "tfds")
    assert [document.text for document in documents] == [row["text"] for row in rows]

    with pytest.raises(SampleError, match="is there already; remove it to prepare the corpus anew"):
        corpus.prepare_augmented_corpus({"train": path}, data_dir=tmp_path / "tfds")


def test_bad_records_are_all_named_and_nothing_is_written(tmp_path: Path) -> None:
    text, calls = augmented(["a", "b"], [("QA", "x", "y")])
    rows: list[Any] = [
        {"text": text, "calls": calls},
        {"text": 3, "source": None},
        {"text": "a", "margin": 1.0},
        {"text": text, "calls": [{"start": 0, "end": 1}]},
        {"text": text, "calls": [calls[0] | {"start": "1"}]},
        {"text": text, "calls": [calls[0] | {"result": "z"}]},
        {"text": text, "calls": [calls[0], calls[0]]},
        {"text": text, "calls": [calls[0] | {"end": 99}]},
        ["a"],
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(SampleError) as caught:
        corpus.prepare_augmented_corpus({"train": path}, data_dir=tmp_path / "tfds")
    assert [line.strip().removeprefix(str(path)) for line in str(caught.value).splitlines()[1:]] == [
        ":2: field text: expected text, found a number",
        ":2: field source: expected text, found null",
        ":3: field margin: expected only text, calls and source",
        ":4: field calls[0]: expected an object with start, end, tool, input, result, found start, end",
        ":5: field calls[0].start: expected a number, found '1'",
        ":6: field calls[0]: the text has ' [QA(x) -> y]', expected ' [QA(x) -> z]'",
        ":7: field calls[1]: 1 to 14 is not a part of the 15 characters that lies behind the call before",
        ":8: field calls[0]: 1 to 99 is not a part of the 15 characters that lies behind the call before",
        ":9: expected an object with text, calls and source, found a list",
    ]
    assert not (tmp_path / "tfds").exists() or not list((tmp_path / "tfds").rglob("*array_record*"))
    with pytest.raises(SampleError, match="no splits"):
        corpus.prepare_augmented_corpus({}, data_dir=tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        corpus.prepare_augmented_corpus({"train": tmp_path / "absent"}, data_dir=tmp_path / "tfds")
