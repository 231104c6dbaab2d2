"""Samples of a corpus against the tokenizer's ids, worked out by hand where the tokenizer allows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.data import PackedBatches
from jaxtool.data.corpus import corpus_samples
from jaxtool.data.documents import Document, Documents
from jaxtool.data.sample_writer import SampleError
from tests.data.test_packing import predictions
from tests.data.tiny_tokenizers import byte_level, sentencepiece

BOS, END = 0, 2
THE = 3 + 256 + 2
PLAIN, WITH_BOS = byte_level(), byte_level(adds_bos=True)


def documents(*texts: str, **changes: Any) -> list[Document]:
    return [Document(text=text, file="a.txt", line=line, **changes) for line, text in enumerate(texts, start=1)]


def in_bytes(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


def prepared(given: Any, tokenizer: Any = PLAIN, **options: Any) -> Any:
    return corpus_samples(given, tokenizer, **({"max_tokens": 50, "vocabulary": 264} | options))


def test_a_document_has_bos_once_and_eos_once_and_all_of_it_is_learned() -> None:
    (sample,) = prepared(documents("ask the"), WITH_BOS).samples
    assert sample.tokens == (BOS, *in_bytes("ask"), THE)
    assert sample.positions == (0, 1, 2, 3, 4)
    assert sample.targets == tuple((ids,) for ids in [*in_bytes("ask"), THE, END])
    # Without BOS there is nothing before the first token.
    (sample,) = prepared(documents("ask the")).samples
    assert sample.tokens == (*in_bytes("ask"), THE)
    assert sample.targets == tuple((ids,) for ids in [*in_bytes("sk"), THE, END])


def test_a_text_cannot_end_a_document() -> None:
    (sample,) = prepared(documents("a<|im_end|>b<|bos|>"), WITH_BOS).samples
    assert sample.tokens.count(BOS) == 1 and END not in sample.tokens
    assert sample.tokens[1:] == tuple(in_bytes("a<|im_end|>b<|bos|>"))


def test_blanks_before_a_text_as_the_tokenizer_puts_them() -> None:
    tokenizer = sentencepiece(legacy=True)
    (sample,) = prepared(documents("the a"), tokenizer, vocabulary=len(tokenizer)).samples
    assert list(sample.tokens) == tokenizer("the a")["input_ids"]


@given(
    texts=st.lists(st.text("the a.\n", min_size=1, max_size=60).filter(str.strip), min_size=1, max_size=5),
    max_tokens=st.integers(1, 20),
    overlap=st.integers(0, 10),
    bos=st.booleans(),
)
def test_windows_lose_and_repeat_nothing(texts: list[str], max_tokens: int, overlap: int, bos: bool) -> None:
    """Packed into rows, each token of each document is learned once, behind the tokens that come before it."""
    tokenizer = WITH_BOS if bos else PLAIN
    overlap = min(overlap, max_tokens - 1)
    wholes = [[*tokenizer(text)["input_ids"], END] for text in texts]
    if all(len(ids) == 1 for ids in wholes):
        return
    found = prepared(documents(*texts), tokenizer, max_tokens=max_tokens, overlap=overlap)
    batches = PackedBatches(found.samples, rows=2, row_length=max_tokens, epochs=1, seed=0)
    learned = [pair for step in range(batches.steps) for pair in predictions(batches.batch(step))]
    remaining = [(ids[:place], ids[place]) for ids in wholes for place in range(1, len(ids))]
    for context, target in sorted(learned, key=lambda pair: -len(pair[0])):
        match = next(
            i for i, (before, ids) in enumerate(remaining) if ids == target and before[-len(context) :] == list(context)
        )
        remaining.pop(match)
    assert not remaining


def test_parts_that_are_context_only() -> None:
    text = "é the [x] in"
    given = documents(text, unsupervised=((0, 1), (5, 9)))
    (sample,) = prepared(given, WITH_BOS).samples
    ids = [*in_bytes("é"), THE, *in_bytes(" [x] "), 3 + 256 + 3, END]
    assert sample.tokens == (BOS, *ids[:-1])
    # " [x]" are characters 5 to 9; the blank behind them is learned.
    learned = [THE, *in_bytes(" "), 3 + 256 + 3, END]
    assert [target for (target,) in sample.targets] == learned


def test_counts(tmp_path: Path) -> None:
    rows = [{"text": "abcdef"}, {"text": ""}, {"text": "xy"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    found = prepared(Documents(tmp_path / "a.jsonl"), max_tokens=4)
    assert found.notes == (
        "1 document without text skipped",
        "2 documents in 3 samples: 8 tokens, 8 of them supervised",
        "1 document longer than 4 tokens split into windows that overlap by 0",
    )
    assert [found.samples.place(i).removeprefix(str(tmp_path)) for i in range(3)] == ["/a.jsonl:1"] * 2 + ["/a.jsonl:3"]
    assert prepared(Documents(tmp_path / "a.jsonl"), max_tokens=4, long="cut").cut_tokens == 2
    with pytest.raises(SampleError, match=r"a.jsonl:1: 6 tokens, expected at most 4"):
        prepared(Documents(tmp_path / "a.jsonl"), max_tokens=4, long="error")


def test_what_cannot_be_a_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text(" ")
    with pytest.raises(SampleError, match=r"a.txt has no token to train on; 1 document without text skipped"):
        prepared(Documents(tmp_path / "a.txt"))
    with pytest.raises(SampleError, match=r"a.txt:1: the tokenizer gives id 124, but the model has 100 text rows"):
        prepared(documents("y"), vocabulary=100)
    tokenizer = byte_level()
    tokenizer.eos_token = None
    with pytest.raises(SampleError, match="no EOS token, which ends a document"):
        prepared(documents("y"), tokenizer)
