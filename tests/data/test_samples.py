"""Packing checked by taking the rows apart again, and draws by counting."""

from __future__ import annotations

import hashlib
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.data import DRAWN, Batch, PackedBatches, Sample, SampleArrays

FIELDS = ("tokens_bs", "positions_bs", "segment_ids_bs", "supervised_bp", "targets_bpa", "weights_bpa")


def sample(length: int, number: int, alternatives: int = 1) -> Sample:
    """Tokens that occur in no other sample; the last two positions are supervised."""
    tokens = tuple(1000 * (number + 1) + place for place in range(length))
    targets = (tuple(5 * number + a for a in range(alternatives)), (9,))[-min(2, length) :]
    return Sample(tokens=tokens, positions=tuple(range(length))[-2:], targets=targets)


def taken_apart(batch: Batch) -> list[Sample]:
    """The samples of a batch, read off segments, positions and weights; checks what any batch must satisfy."""
    found = []
    for row in range(len(batch.tokens_bs)):
        tokens, segments, positions = (x[row] for x in (batch.tokens_bs, batch.segment_ids_bs, batch.positions_bs))
        assert not tokens[segments == 0].any() and not positions[segments == 0].any()
        last = int(segments.max())
        assert sorted(set(segments.tolist()) - {0}) == list(range(1, last + 1))
        total = batch.weights_bpa[row].sum(axis=-1)
        np.testing.assert_allclose(total, total > 0, atol=1e-6)
        assert (total[1:] <= total[:-1] + 1e-6).all()  # padding comes last
        assert not batch.supervised_bp[row][total == 0].any()
        for segment in range(1, last + 1):
            places = np.flatnonzero(segments == segment)
            assert (np.diff(places) == 1).all()
            assert positions[places].tolist() == list(range(len(places)))
            supervised, targets = [], []
            for p in np.flatnonzero(total):
                place = batch.supervised_bp[row, p]
                if segments[place] == segment:
                    weights = batch.weights_bpa[row, p]
                    ids = batch.targets_bpa[row, p][weights > 0]
                    np.testing.assert_allclose(weights[weights > 0], 1 / len(ids), rtol=1e-6)
                    supervised.append(int(positions[place]))
                    targets.append(tuple(ids.tolist()))
            found.append(
                Sample(tokens=tuple(tokens[places].tolist()), positions=tuple(supervised), targets=tuple(targets))
            )
        # No supervised position lies in padding.
        assert (segments[batch.supervised_bp[row][total > 0]] > 0).all()
    return found


@given(
    shapes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=40),
    rows=st.integers(1, 4),
    spare=st.integers(0, 20),
    seed=st.integers(0, 5),
)
def test_each_sample_is_once_in_each_epoch(shapes: list[tuple[int, int]], rows: int, spare: int, seed: int) -> None:
    samples = [sample(length, number, alternatives) for number, (length, alternatives) in enumerate(shapes)]
    row_length = max(length for length, _ in shapes) + spare
    batches = PackedBatches(samples, rows=rows, row_length=row_length, epochs=2, seed=seed)
    found, epochs = [], 0
    supervised = []
    for step in range(batches.steps):
        batch = batches.batch(step)
        p, a = batches.max_supervised, batches.max_targets
        shapes_of = [(rows, row_length)] * 3 + [(rows, p), (rows, p, a), (rows, p, a)]
        assert [getattr(batch, name).shape for name in FIELDS] == shapes_of
        assert [getattr(batch, name).dtype for name in FIELDS] == [np.int32] * 5 + [np.float32]
        supervised += (batch.weights_bpa.sum(axis=-1) > 0).sum(axis=-1).tolist()
        found += taken_apart(batch)
        if len(found) == len(samples):
            assert Counter(found) == Counter(samples)
            found, epochs = [], epochs + 1
    assert (epochs, found) == (2, [])
    assert max(supervised) == batches.max_supervised
    tokens = 2 * sum(length for length, _ in shapes)
    assert batches.tokens == tokens
    assert batches.filled == pytest.approx(tokens / (batches.steps * rows * row_length))


def test_packing_fills_rows() -> None:
    """Lengths 1 to 16 in rows of 64: first fit leaves little."""
    lengths = np.random.default_rng(0).integers(1, 17, size=500)
    samples = [sample(int(length), number) for number, length in enumerate(lengths)]
    assert PackedBatches(samples, rows=4, row_length=64, epochs=1, seed=0).filled > 0.93


SAMPLES = [sample(3 + number % 5, number) for number in range(30)] + [
    Sample(tokens=(1, 2, DRAWN, 3), positions=(1, 2), targets=((7, 8, 9), (4,))) for _ in range(5)
]


def packed(samples: list[Sample] = SAMPLES, **changes: Any) -> PackedBatches:
    return PackedBatches(samples, **({"rows": 2, "row_length": 16, "epochs": 3, "seed": 0} | changes))


def same(first: Batch, second: Batch) -> bool:
    return all(np.array_equal(getattr(first, name), getattr(second, name)) for name in FIELDS)


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    batches, again = packed(), packed()
    forwards = [batches.batch(step) for step in range(batches.steps)]
    backwards = [again.batch(step) for step in reversed(range(again.steps))][::-1]
    assert all(same(*pair) for pair in zip(forwards, backwards, strict=True))
    assert same(batches.batch(4), forwards[4])
    # More epochs later don't change the earlier ones, except for the common number of supervised positions.
    longer = packed(epochs=5)
    assert all(np.array_equal(longer.batch(s).tokens_bs, forwards[s].tokens_bs) for s in range(len(forwards)))


@pytest.mark.parametrize("form", [list, SampleArrays.of])
def test_runs_of_earlier_versions_resume(form: Any) -> None:
    """Batches and fingerprint of these samples as version 0.1.0 made them."""
    batches = packed(form(SAMPLES))
    digest = hashlib.sha256()
    for step in range(batches.steps):
        batch = batches.batch(step)
        for name in FIELDS:
            digest.update(getattr(batch, name).tobytes())
    assert batches.steps == 18
    assert digest.hexdigest() == "084ae873de2afd48a77a630010c8acb27e410e62dbd1f7ebe3a647f89c53b7a2"
    if form is list:
        assert batches.fingerprint == "8b0adb159ce959922b35bb4f8a5cda9f522e7fb63f205c97fb5b3c9f8b1d1af9"


def test_order_differs_between_seeds_and_epochs() -> None:
    first, other = packed(), packed(seed=1)
    per_epoch = first.steps // 3
    assert not np.array_equal(first.batch(0).tokens_bs, other.batch(0).tokens_bs)
    assert not np.array_equal(first.batch(0).tokens_bs, first.batch(per_epoch).tokens_bs)


def test_order_is_shuffled() -> None:
    """Samples of full row length: the first batch holds other ones than the first, and no two epochs agree."""
    batches = packed([sample(16, number) for number in range(20)], rows=1)
    orders = [[int(batches.batch(20 * e + s).tokens_bs[0, 0]) // 1000 - 1 for s in range(20)] for e in range(3)]
    assert all(sorted(order) == list(range(20)) for order in orders)
    assert len({tuple(order) for order in orders} | {tuple(range(20))}) == 4


def test_draws_are_uniform() -> None:
    """Chi-squared with 3 degrees of freedom is below 16.3 in 999 of 1000 cases."""
    soft = Sample(tokens=(1, DRAWN, 3), positions=(0, 1), targets=((40, 41, 42, 43), (2,)))
    batches = packed([soft, soft], rows=1, row_length=8, epochs=400)
    pairs = Counter()
    for step in range(batches.steps):
        tokens = batches.batch(step).tokens_bs[0].tolist()
        assert tokens[0] == 1 and tokens[2] == 3
        pairs[tokens[1], tokens[4]] += 1
    assert sum(pairs.values()) == 400

    def chi_squared(counts: list[int]) -> float:
        mean = sum(counts) / len(counts)
        return sum((count - mean) ** 2 for count in counts) / mean

    for which in (0, 1):
        counts = Counter(pair[which] for pair in pairs.elements())
        assert sorted(counts) == [40, 41, 42, 43]
        assert chi_squared(list(counts.values())) < 16.3
    # The two samples draw apart (15 degrees of freedom: 37.7).
    assert chi_squared([pairs[a, b] for a in range(40, 44) for b in range(40, 44)]) < 37.7


def test_several_draws_follow_their_own_targets() -> None:
    both = Sample(tokens=(4, DRAWN, DRAWN), positions=(0, 1), targets=((10, 11), (20, 21, 22)))
    batches = packed([both], rows=1, row_length=3, epochs=60)
    drawn = [tuple(batches.batch(step).tokens_bs[0, 1:].tolist()) for step in range(60)]
    assert set(drawn) == {(a, b) for a in (10, 11) for b in (20, 21, 22)}


def test_targets_stay_whole_where_one_is_drawn() -> None:
    batch = packed(SAMPLES[-1:], rows=1, epochs=1).batch(0)
    assert batch.targets_bpa[0].tolist() == [[7, 8, 9], [4, 0, 0]]
    np.testing.assert_allclose(batch.weights_bpa[0], [[1 / 3] * 3, [1, 0, 0]], rtol=1e-6)
    assert batch.supervised_bp[0].tolist() == [1, 2]


@pytest.mark.parametrize("step", [-1, 3, 100])
def test_steps_outside(step: int) -> None:
    batches = packed(SAMPLES[:1])
    assert batches.steps == 3
    with pytest.raises(IndexError, match=f"step {step} is outside the 3 steps"):
        batches.batch(step)


def test_unusable_samples() -> None:
    with pytest.raises(ValueError, match="no samples to train on"):
        packed([])
    with pytest.raises(ValueError, match="a sample has 17 tokens, a row holds 16: raise row_length"):
        packed([sample(3, 0), sample(17, 1)])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": (0,)}, "1 supervised positions with 2 targets"),
        ({"positions": (), "targets": ()}, "0 supervised positions with 0 targets"),
        ({"positions": (1, 0)}, r"supervised positions \(1, 0\) are not ascending positions of 3 tokens"),
        ({"positions": (1, 1)}, "not ascending"),
        ({"positions": (1, 3)}, r"\(1, 3\) are not ascending positions of 3 tokens"),
        ({"positions": (-1, 2)}, "not ascending positions"),
        ({"targets": ((5,), ())}, "a supervised position has no target id"),
        ({"targets": ((5,), (6, 7, 6))}, "a target id is repeated"),
        (
            {"tokens": (1, DRAWN, 3), "positions": (1, 2)},
            "token 1 is to be drawn from targets, but position 0 has none",
        ),
        ({"tokens": (DRAWN, 2, 3)}, "token 0 is to be drawn"),
    ],
)
def test_samples_that_contradict_themselves(changes: dict[str, Any], words: str) -> None:
    fields = {"tokens": (1, 2, 3), "positions": (0, 2), "targets": ((5,), (6, 7))} | changes
    with pytest.raises(ValueError, match=words):
        Sample(**fields)


@st.composite
def any_sample(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(1, 8))
    positions = sorted(draw(st.sets(st.integers(0, length - 1), min_size=1)))
    ids = st.sets(st.integers(0, 99), min_size=1, max_size=3).map(lambda chosen: tuple(sorted(chosen)))
    drawn = [place > 0 and place - 1 in positions and draw(st.booleans()) for place in range(length)]
    tokens = tuple(DRAWN if is_drawn else draw(st.integers(0, 99)) for is_drawn in drawn)
    return Sample(tokens=tokens, positions=tuple(positions), targets=tuple(draw(ids) for _ in positions))


@given(samples=st.lists(any_sample(), min_size=1, max_size=8), data=st.data())
def test_arrays_hold_the_same_samples(samples: list[Sample], data: st.DataObject) -> None:
    arrays = SampleArrays.of(samples)
    assert SampleArrays.of(arrays) is arrays
    assert list(arrays) == samples and len(arrays) == len(samples)
    assert arrays[-1] == samples[-1] and list(arrays[1:3]) == samples[1:3]
    chosen = data.draw(st.lists(st.integers(0, len(samples) - 1), min_size=1, max_size=5))
    assert list(arrays.subset(chosen)) == [samples[i] for i in chosen]
    with pytest.raises(IndexError):
        arrays[len(samples)]
    assert arrays.most_targets == max(len(ids) for sample in samples for ids in sample.targets)
    assert arrays.place(0) == "sample 0"
    one, two = (PackedBatches(x, rows=2, row_length=9, epochs=2, seed=3) for x in (samples, arrays))
    assert all(same(one.batch(step), two.batch(step)) for step in range(one.steps))


def arrays(**changes: Any) -> SampleArrays:
    fields = {
        "tokens": np.asarray([1, 2, 3, 4, 5], np.int32),
        "starts": np.asarray([0, 3, 5]),
        "supervised": np.asarray([1, 0, 1, 0, 1], np.bool_),
        "targets": np.asarray([7, 8, 9], np.int32),
        "files": ("a.jsonl", "b.jsonl"),
        "file_of": np.asarray([0, 1], np.int32),
        "line_of": np.asarray([4, 6]),
    }
    return SampleArrays(**(fields | changes))


def test_places_and_fingerprints_of_arrays() -> None:
    given = arrays()
    assert [given.place(i) for i in (0, 1)] == ["a.jsonl:4", "b.jsonl:6"]
    assert given.subset([1]).place(0) == "b.jsonl:6"

    def fingerprint(**changes: Any) -> str:
        return PackedBatches(arrays(**changes), rows=1, row_length=4, epochs=1, seed=0).fingerprint

    assert fingerprint() == fingerprint(file_of=np.asarray([1, 1], np.int32))
    others = [
        fingerprint(tokens=np.asarray([1, 2, 3, 4, 6], np.int32)),
        fingerprint(starts=np.asarray([0, 4, 5])),
        fingerprint(supervised=np.asarray([0, 1, 1, 0, 1], np.bool_)),
        fingerprint(targets=np.asarray([7, 8, 0], np.int32)),
        fingerprint(targets=np.asarray([7, 8, 9, 10], np.int32), target_starts=np.asarray([0, 1, 2, 4])),
        fingerprint(targets=np.asarray([7, 8, 9, 10], np.int32), target_starts=np.asarray([0, 1, 3, 4])),
    ]
    assert len({fingerprint(), *others}) == 7


def test_arrays_may_be_memory_maps(tmp_path: Path) -> None:
    given = arrays()
    maps = {}
    for name in ("tokens", "starts", "supervised", "targets"):
        np.save(tmp_path / f"{name}.npy", getattr(given, name))
        maps[name] = np.load(tmp_path / f"{name}.npy", mmap_mode="r")
    assert list(arrays(**maps)) == list(given)
    batches = PackedBatches(arrays(**maps), rows=1, row_length=5, epochs=1, seed=0)
    assert same(batches.batch(0), PackedBatches(given, rows=1, row_length=5, epochs=1, seed=0).batch(0))
    assert batches.fingerprint == PackedBatches(given, rows=1, row_length=5, epochs=1, seed=0).fingerprint


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"starts": np.asarray([0, 3, 3, 5])}, "starts are not ascending from 0 to the 5 tokens"),
        ({"starts": np.asarray([0, 3])}, "starts are not ascending"),
        ({"supervised": np.ones(4, np.bool_)}, "4 marks of supervised positions for 5 tokens"),
        ({"targets": np.asarray([7, 8], np.int32)}, "2 targets don't fit 3 supervised positions"),
        ({"target_starts": np.asarray([0, 1, 3])}, "3 targets don't fit 3 supervised positions"),
        ({"line_of": np.asarray([4])}, "line_of has 1 entries for 2 samples"),
        (
            {"supervised": np.asarray([1, 1, 1, 0, 0], np.bool_)},
            "b.jsonl:6: no supervised position, expected one at least",
        ),
        (
            {"tokens": np.asarray([1, 2, 3, 4, DRAWN], np.int32)},
            "b.jsonl:6: token 1 is to be drawn, but the position before has none",
        ),
        ({"tokens": np.asarray([1, 2, 3, DRAWN, 4], np.int32)}, "b.jsonl:6: token 0 is to be drawn"),
    ],
)
def test_arrays_that_contradict_themselves(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        arrays(**changes)
