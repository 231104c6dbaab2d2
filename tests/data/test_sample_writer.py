"""Cutting and splitting: what is supervised afterwards against what was to be, token by token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.data.sample_writer import PreparedSamples, SampleError, SampleWriter


def written(documents: list[tuple[list[int], list[bool]]], **options: Any) -> PreparedSamples:
    writer = SampleWriter(**options)
    for number, (ids, marks) in enumerate(documents):
        writer.add(np.asarray(ids, np.int32), np.asarray(marks, np.bool_), file="a.jsonl", line=number + 1)
    return writer.finish(notes=["read"])


DOCUMENTS = st.lists(
    st.lists(st.booleans(), min_size=1, max_size=25).map(lambda marks: [True, *marks] if any(marks) else [False, True]),
    min_size=1,
    max_size=5,
)


def numbered(marks: list[list[bool]]) -> list[tuple[list[int], list[bool]]]:
    return [([100 * n + i for i in range(len(one))], one) for n, one in enumerate(marks)]


@given(marks=DOCUMENTS, max_tokens=st.integers(1, 12), overlap=st.integers(0, 11))
def test_split_supervises_each_token_once(marks: list[list[bool]], max_tokens: int, overlap: int) -> None:
    overlap = min(overlap, max_tokens - 1)
    documents = numbered(marks)
    found = written(documents, max_tokens=max_tokens, long="split", overlap=overlap)
    targets = []
    for number, sample in enumerate(found.samples):
        assert len(sample.tokens) <= max_tokens
        document = found.samples.line_of[number] - 1
        ids = documents[document][0]
        at = sample.tokens[0] - 100 * document
        assert list(sample.tokens) == ids[at : at + len(sample.tokens)]
        # A further window has at least `overlap` tokens before the first that it predicts.
        assert at == 0 or sample.positions[0] >= overlap
        for position, (target,) in zip(sample.positions, sample.targets, strict=True):
            assert target == sample.tokens[position] + 1
            targets.append(target)
    wanted = [i for ids, one in documents for i, mark in zip(ids[1:], one[1:], strict=True) if mark]
    assert sorted(targets) == wanted
    assert found.cut_documents == found.unsupervised == 0
    assert found.documents == len(documents) == len({int(line) for line in found.samples.line_of})


@given(marks=DOCUMENTS, max_tokens=st.integers(1, 12))
def test_cut_keeps_the_beginning_and_counts(marks: list[list[bool]], max_tokens: int) -> None:
    documents = numbered(marks)
    wanted = [
        [i for i, mark in zip(ids[1 : max_tokens + 1], one[1 : max_tokens + 1], strict=True) if mark]
        for ids, one in documents
    ]
    if not any(wanted):
        with pytest.raises(SampleError, match="the data has no token to train on"):
            written(documents, max_tokens=max_tokens, long="cut")
        return
    found = written(documents, max_tokens=max_tokens, long="cut")
    assert [[ids[0] for ids in sample.targets] for sample in found.samples] == [ids for ids in wanted if ids]
    assert found.unsupervised == sum(not ids for ids in wanted)
    lost = [
        max(i for i, mark in enumerate(one) if mark) - max_tokens
        for (_, one), ids in zip(documents, wanted, strict=True)
        if ids
    ]
    assert found.cut_documents == sum(n > 0 for n in lost)
    assert found.cut_tokens == sum(n for n in lost if n > 0)


def test_counts_are_told() -> None:
    long, short, nothing = ([1] * 8, [True] * 8), ([1, 2], [True, True]), ([3, 4], [True, False])
    found = written([long, short, nothing], max_tokens=4, long="split", overlap=1)
    assert found.notes == (
        "read",
        "2 documents in 3 samples: 9 tokens, 8 of them supervised",
        "1 document longer than 4 tokens split into windows that overlap by 1",
        "1 document left out: nothing in them is supervised",
    )
    found = written([long, short], max_tokens=4, long="cut", kind="conversation")
    assert found.notes[1:] == (
        "2 conversations in 2 samples: 5 tokens, 5 of them supervised",
        "1 conversation cut at 4 tokens, 3 tokens left out",
    )
    # 9 bytes a token, and 28 bytes a sample.
    samples = found.samples
    assert samples.tokens.nbytes + samples.supervised.nbytes + samples.targets.nbytes == 9 * 5


def test_what_lies_behind_the_last_supervised_token_is_no_input() -> None:
    found = written([([1, 2, 3, 4, 5], [True, False, True, False, False])], max_tokens=2)
    assert found.samples[0].tokens == (1, 2)
    assert found.samples[0].positions == (1,) and found.samples[0].targets == ((3,),)


def test_too_long_is_an_error_that_names_all() -> None:
    documents = [([1] * size, [True] * size) for size in (3, 9, 7)]
    with pytest.raises(SampleError) as caught:
        written(documents, max_tokens=4)
    heading, *places = str(caught.value).splitlines()
    assert heading.startswith(
        "2 samples longer than a row: raise the length of rows, or have long samples cut or split"
    )
    assert places == [
        "  a.jsonl:2: 8 tokens, expected at most 4",
        "  a.jsonl:3: 6 tokens, expected at most 4",
    ]


def test_nothing_to_learn_says_why() -> None:
    writer = SampleWriter(max_tokens=2, long="cut", kind="conversation")
    writer.add([1, 2, 3], np.asarray([True, False, False]), file="a.jsonl", line=1)
    for line in (2, 3):
        writer.add([1, 2, 3, 4], np.asarray([False, False, False, True]), file="a.jsonl", line=line)
    with pytest.raises(SampleError) as caught:
        writer.finish(notes=["1 empty line skipped"], source="a.jsonl")
    left_out = (
        "1 conversation left out: nothing in them is supervised",
        "2 conversations left out: what is supervised in them lies behind the cut at 2 tokens",
    )
    assert str(caught.value) == "; ".join(["a.jsonl has no token to train on", "1 empty line skipped", *left_out])
    writer.add([1, 2], None, file="a.jsonl", line=4)
    found = writer.finish()
    assert found.notes[-2:] == left_out and found.unsupervised == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_tokens": 4, "long": "drop"}, "long is 'drop', expected one of error, cut, split"),
        ({"max_tokens": 0}, "max_tokens is 0 and overlap is 0"),
        ({"max_tokens": 4, "long": "split", "overlap": 4}, "expected at least 1 token and a smaller overlap"),
        ({"max_tokens": 4, "long": "cut", "overlap": 1}, 'overlap is 1 with long "cut"'),
    ],
)
def test_policies_that_cannot_be(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SampleError, match=words):
        SampleWriter(**options)
