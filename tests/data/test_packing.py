"""Rows of several lengths, parts of batches, and first fit, each against a plain program or by counting tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtool.data import Batch, PackedBatches, SampleArrays
from jaxtool.data.packing import first_fit

FIELDS = ("tokens_bs", "positions_bs", "segment_ids_bs", "supervised_bp", "targets_bpa", "weights_bpa")


def corpus(sizes: list[int], *, seed: int = 0) -> SampleArrays:
    """Tokens that occur once each; some positions are supervised, by targets that occur once each."""
    generator = np.random.default_rng(seed)
    supervised = generator.random(sum(sizes)) < 0.6
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    supervised[starts[1:] - 1] = True
    return SampleArrays(
        tokens=np.arange(1, sum(sizes) + 1, dtype=np.int32),
        starts=starts,
        supervised=supervised,
        targets=10_000 + np.arange(supervised.sum(), dtype=np.int32),
    )


def predictions(batch: Batch) -> list[tuple[tuple[int, ...], int]]:
    """For each supervised position the tokens of its sample up to it, and the target."""
    found = []
    for row, slot in zip(*np.nonzero(batch.weights_bpa.sum(axis=-1)), strict=True):
        place = int(batch.supervised_bp[row, slot])
        segment = batch.segment_ids_bs[row, place]
        assert segment > 0 and batch.weights_bpa[row, slot].tolist() == [1]
        context = batch.tokens_bs[row, : place + 1][batch.segment_ids_bs[row, : place + 1] == segment]
        assert batch.positions_bs[row, place] == len(context) - 1
        found.append((tuple(context.tolist()), int(batch.targets_bpa[row, slot, 0])))
    return found


def expected_predictions(samples: SampleArrays) -> list[tuple[tuple[int, ...], int]]:
    return [
        (sample.tokens[: position + 1], ids[0])
        for sample in samples
        for position, ids in zip(sample.positions, sample.targets, strict=True)
    ]


PLANS = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "row_length": st.integers(12, 30),
        "shorter_rows": st.sets(st.integers(1, 11), max_size=3).map(list),
        "pack": st.booleans(),
        "supervised_multiple": st.integers(1, 5),
        "seed": st.integers(0, 3),
    }
)


@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=30), plan=PLANS)
def test_every_supervised_token_is_once_in_each_epoch(sizes: list[int], plan: dict[str, Any]) -> None:
    samples = corpus(sizes)
    batches = PackedBatches(samples, epochs=2, **plan)
    of_shape = {shape.row_length: shape for shape in batches.shapes}
    lengths = sorted([*plan["shorter_rows"], plan["row_length"]])
    seen: Counter[int] = Counter()
    found: list[Any] = []
    epochs, slots = 0, 0
    for step in range(batches.steps):
        batch = batches.batch(step)
        length = batch.tokens_bs.shape[1]
        shape = of_shape[length]
        assert shape.rows == plan["rows"] * (plan["row_length"] // length)
        p = shape.supervised
        shapes = [(shape.rows, length)] * 3 + [(shape.rows, p), (shape.rows, p, 1), (shape.rows, p, 1)]
        assert [getattr(batch, name).shape for name in FIELDS] == shapes
        assert p % plan["supervised_multiple"] == 0
        if not plan["pack"]:
            assert batch.segment_ids_bs.max() == 1
        for row in batch.segment_ids_bs:
            for segment in range(1, row.max() + 1):  # no shorter row would have held it
                size = int((row == segment).sum())
                assert length == min(length for length in lengths if length >= size)
        seen[length] += 1
        slots += batch.tokens_bs.size
        found += predictions(batch)
        if len(found) >= len(samples.targets):
            assert sorted(found) == sorted(expected_predictions(samples))
            found, epochs = [], epochs + 1
    assert (epochs, found) == (2, [])
    assert seen == {length: shape.batches for length, shape in of_shape.items()}
    assert batches.tokens == 2 * sum(sizes) and batches.filled == pytest.approx(batches.tokens / slots)


@settings(max_examples=20)
@given(sizes=st.lists(st.integers(1, 12), min_size=1, max_size=20), plan=PLANS, start=st.floats(0, 1))
def test_processes_build_their_rows_and_resume_anywhere(sizes: list[int], plan: dict[str, Any], start: float) -> None:
    """1, 2 and 4 processes, each with a plan of its own and starting at some step: the same batches."""
    samples = corpus(sizes)
    straight = [PackedBatches(samples, epochs=2, **plan | {"rows": 4}) for _ in range(4)]
    first = int(start * (straight[0].steps - 1))
    whole = [straight[0].batch(step) for step in range(straight[0].steps)]
    for processes in (1, 2, 4):
        for step in range(first, len(whole)):
            share = len(whole[step].tokens_bs) // processes
            parts = [straight[i].batch(step, slice(i * share, (i + 1) * share)) for i in range(processes)]
            for name in FIELDS:
                together = np.concatenate([getattr(part, name) for part in parts])
                assert np.array_equal(together, getattr(whole[step], name))


def test_rows_in_any_order() -> None:
    batches = PackedBatches(corpus([3, 4, 5, 6, 7, 8]), rows=4, row_length=8, epochs=1, seed=0)
    whole, some = batches.batch(1), batches.batch(1, [3, 0])
    assert all(np.array_equal(getattr(some, name), getattr(whole, name)[[3, 0]]) for name in FIELDS)
    assert batches.batch(0, []).tokens_bs.shape == (0, 8)
    with pytest.raises(IndexError):
        batches.batch(0, [4])


def plain_first_fit(sizes: list[int], row_length: int, window: int) -> list[int]:
    rows: list[int] = []
    found = []
    for size in sizes:
        for row in range(max(0, len(rows) - window), len(rows)):
            if sum(s for s, r in zip(sizes, found, strict=False) if r == row) + size <= row_length:
                found.append(row)
                break
        else:
            found.append(len(rows))
            rows.append(size)
    return found


@given(sizes=st.lists(st.integers(1, 20), max_size=60), spare=st.integers(0, 30), window=st.integers(1, 8))
def test_first_fit(sizes: list[int], spare: int, window: int) -> None:
    row_length = max(sizes, default=1) + spare
    found = first_fit(np.asarray(sizes, np.int64), row_length, window=window)
    assert found.tolist() == plain_first_fit(sizes, row_length, window)


def test_buckets_are_mixed_and_short_samples_waste_less() -> None:
    sizes = np.random.default_rng(0).integers(1, 65, size=600).tolist()
    one = PackedBatches(corpus(sizes), rows=4, row_length=64, epochs=1, seed=0, pack=False)
    few = PackedBatches(corpus(sizes), rows=4, row_length=64, epochs=1, seed=0, pack=False, shorter_rows=(16, 32))
    assert few.filled > 0.7 > 0.55 > one.filled
    assert [shape.row_length for shape in few.shapes] == [16, 32, 64]
    lengths = [few.batch(step).tokens_bs.shape[1] for step in range(few.steps)]
    assert lengths != sorted(lengths)
    assert {shape.rows * shape.row_length for shape in few.shapes} == {256}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"shorter_rows": (8,)}, r"shorter_rows is \[8\], expected different lengths below row_length 8"),
        ({"shorter_rows": (9, 4)}, r"shorter_rows is \[9, 4\]"),
        ({"shorter_rows": (4, 4)}, r"shorter_rows is \[4, 4\]"),
        ({"shorter_rows": (0,)}, r"shorter_rows is \[0\]"),
        ({"rows": 0}, "rows is 0, epochs is 1 and supervised_multiple is 1, expected at least 1 of each"),
        ({"row_length": 6}, "a sample has 7 tokens, a row holds 6: raise row_length"),
    ],
)
def test_plans_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PackedBatches(corpus([3, 7]), **({"rows": 1, "row_length": 8, "epochs": 1, "seed": 0} | changes))


def test_a_sample_that_is_too_long_is_named() -> None:
    given = corpus([3, 7])
    named = SampleArrays(
        tokens=given.tokens,
        starts=given.starts,
        supervised=given.supervised,
        targets=given.targets,
        files=("chats.jsonl",),
        file_of=np.zeros(2, np.int32),
        line_of=np.asarray([1, 12]),
    )
    with pytest.raises(ValueError, match=r"^chats.jsonl:12: a sample has 7 tokens, a row holds 6"):
        PackedBatches(named, rows=1, row_length=6, epochs=1, seed=0)
