"""Supervised samples, one by one or as flat arrays for corpora, and the packed rows that a step takes.

A sample may supervise a position with several equally right ids (soft target). How samples are made lives elsewhere
(sample_writer.py, corpus.py, chat_samples.py, the methods); how they are packed, in packing.py.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, overload

import jax
import numpy as np

DRAWN = -1


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One training sequence.

    Attributes:
        tokens: input ids. The id `DRAWN` stands for one id drawn from the targets of the position before it, anew in
            every epoch.
        positions: supervised input positions, ascending: position p predicts `targets[i]` as its next token.
        targets: for each supervised position the right next ids; the target distribution is uniform over them.
    """

    tokens: tuple[int, ...]
    positions: tuple[int, ...]
    targets: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.positions) != len(self.targets) or not self.positions:
            raise ValueError(
                f"{len(self.positions)} supervised positions with {len(self.targets)} targets, "
                "expected as many, and one at least"
            )
        if list(self.positions) != sorted(set(self.positions)) or not 0 <= self.positions[0] <= self.positions[
            -1
        ] < len(self.tokens):
            raise ValueError(
                f"supervised positions {self.positions} are not ascending positions of {len(self.tokens)} tokens"
            )
        if not all(self.targets):
            raise ValueError("a supervised position has no target id")
        if any(len(set(ids)) != len(ids) for ids in self.targets):
            raise ValueError("a target id is repeated: the target is uniform over different ids")
        supervised = set(self.positions)
        for place, token in enumerate(self.tokens):
            if token == DRAWN and place - 1 not in supervised:
                raise ValueError(f"token {place} is to be drawn from targets, but position {place - 1} has none")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """Packed rows of int32 (weights float32): numpy arrays from `PackedBatches`, device arrays in a step.

    Attributes:
        tokens_bs: input ids, 0 in padding.
        positions_bs: position in its sample.
        segment_ids_bs: 1, 2, ... for the samples of a row, 0 for padding.
        supervised_bp: row position of each supervised token, 0 in padding.
        targets_bpa: right next ids.
        weights_bpa: their target probabilities; they sum to 1 at a supervised position and are 0 in padding.
    """

    tokens_bs: jax.Array
    positions_bs: jax.Array
    segment_ids_bs: jax.Array
    supervised_bp: jax.Array
    targets_bpa: jax.Array
    weights_bpa: jax.Array


@dataclass(frozen=True, kw_only=True, eq=False)
class SampleArrays(Sequence[Sample]):
    """Samples end to end in flat arrays: about 9 bytes a token where every position has one target.

    The arrays may be memory maps; nothing writes to them.

    Attributes:
        tokens: int32, the input ids of all samples; `DRAWN` as in `Sample`.
        starts: int64, where each sample begins in `tokens`, and the end of the last.
        supervised: bool, for each token whether its position is supervised.
        targets: int32, the right next ids of the supervised positions, in their order.
        target_starts: int64, where the targets of each supervised position begin, and the end of the last; None where
            each has one.
        files: names of the files that samples come from.
        file_of: int32, for each sample the index of its file; empty where nothing is known.
        line_of: int64, for each sample its line, from 1.

    Raises:
        ValueError: arrays that contradict one another, or what makes a `Sample` invalid; names the sample.
    """

    tokens: np.ndarray
    starts: np.ndarray
    supervised: np.ndarray
    targets: np.ndarray
    target_starts: np.ndarray | None = None
    files: tuple[str, ...] = ()
    file_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    line_of: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    # int64: where the supervised positions of each sample begin among all of them, and the end of the last.
    position_starts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.starts) - 1
        if count < 0 or self.starts[0] != 0 or self.starts[-1] != len(self.tokens) or np.any(np.diff(self.starts) < 1):
            raise ValueError(f"starts are not ascending from 0 to the {len(self.tokens)} tokens")
        if len(self.supervised) != len(self.tokens):
            raise ValueError(f"{len(self.supervised)} marks of supervised positions for {len(self.tokens)} tokens")
        for name, values in (("file_of", self.file_of), ("line_of", self.line_of)):
            if len(values) not in (0, count):
                raise ValueError(f"{name} has {len(values)} entries for {count} samples")
        positions = np.zeros(count + 1, np.int64)
        if count:
            np.cumsum(np.add.reduceat(self.supervised, self.starts[:-1], dtype=np.int64), out=positions[1:])
        object.__setattr__(self, "position_starts", positions)
        total = int(positions[-1])
        ends = total if self.target_starts is None else int(self.target_starts[-1])
        if ends != len(self.targets) or (self.target_starts is not None and len(self.target_starts) != total + 1):
            raise ValueError(f"{len(self.targets)} targets don't fit {total} supervised positions")
        empty = np.flatnonzero(np.diff(positions) == 0)
        if empty.size:
            raise ValueError(f"{self.place(int(empty[0]))}: no supervised position, expected one at least")
        drawn = np.flatnonzero(self.tokens == DRAWN)
        if drawn.size:
            sample = np.searchsorted(self.starts, drawn, side="right") - 1
            wrong = np.flatnonzero((drawn == self.starts[sample]) | ~self.supervised[drawn - 1])
            if wrong.size:
                first = int(sample[wrong[0]])
                token = int(drawn[wrong[0]] - self.starts[first])
                raise ValueError(f"{self.place(first)}: token {token} is to be drawn, but the position before has none")

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> SampleArrays:
        """The same samples as arrays; `samples` itself where it is already one."""
        if isinstance(samples, SampleArrays):
            return samples
        starts = _ends(len(sample.tokens) for sample in samples)
        positions = _ends(len(sample.positions) for sample in samples)
        alternatives = _ends(len(ids) for sample in samples for ids in sample.targets)
        supervised = np.zeros(starts[-1], np.bool_)
        places = np.fromiter(chain.from_iterable(sample.positions for sample in samples), np.int64, positions[-1])
        supervised[places + np.repeat(starts[:-1], np.diff(positions))] = True
        targets = chain.from_iterable(ids for sample in samples for ids in sample.targets)
        return cls(
            tokens=np.fromiter(chain.from_iterable(sample.tokens for sample in samples), np.int32, starts[-1]),
            starts=starts,
            supervised=supervised,
            targets=np.fromiter(targets, np.int32, alternatives[-1]),
            target_starts=None if alternatives[-1] == positions[-1] else alternatives,
        )

    def __len__(self) -> int:
        return len(self.starts) - 1

    @overload
    def __getitem__(self, index: int) -> Sample: ...
    @overload
    def __getitem__(self, index: slice) -> SampleArrays: ...
    def __getitem__(self, index: int | slice) -> Sample | SampleArrays:
        if isinstance(index, slice):
            return self.subset(range(len(self))[index])
        index = range(len(self))[index]
        tokens = slice(int(self.starts[index]), int(self.starts[index + 1]))
        first, last = self.position_starts[index : index + 2].tolist()
        ends = range(first, last + 1) if self.target_starts is None else self.target_starts[first : last + 1].tolist()
        return Sample(
            tokens=tuple(self.tokens[tokens].tolist()),
            positions=tuple(np.flatnonzero(self.supervised[tokens]).tolist()),
            targets=tuple(tuple(self.targets[a:b].tolist()) for a, b in pairwise(ends)),
        )

    def subset(self, indices: Sequence[int]) -> SampleArrays:
        """The samples at these places, in this order."""
        chosen = np.asarray(indices, np.int64)
        sizes, counts = np.diff(self.starts)[chosen], np.diff(self.position_starts)[chosen]
        tokens = ranges(self.starts[chosen], sizes)
        positions = ranges(self.position_starts[chosen], counts)
        alternatives = None
        if self.target_starts is not None:
            each = np.diff(self.target_starts)[positions]
            positions, alternatives = ranges(self.target_starts[positions], each), _ends(each)
        return SampleArrays(
            tokens=self.tokens[tokens],
            starts=_ends(sizes),
            supervised=self.supervised[tokens],
            targets=self.targets[positions],
            target_starts=alternatives,
            files=self.files,
            file_of=self.file_of[chosen] if len(self.file_of) else self.file_of,
            line_of=self.line_of[chosen] if len(self.line_of) else self.line_of,
        )

    def place(self, index: int) -> str:
        """Where a sample comes from: "file:line", or its number where that isn't known."""
        if not len(self.file_of):
            return f"sample {index}"
        return f"{self.files[self.file_of[index]]}:{self.line_of[index]}"

    @property
    def most_targets(self) -> int:
        """Targets of the position that has the most."""
        return 1 if self.target_starts is None else int(np.diff(self.target_starts).max(initial=1))


def fingerprint(samples: Sequence[Sample]) -> str:
    """SHA-256 (hex) over the samples in order, places left out.

    Arrays are hashed as bytes, which takes a second for 10^8 tokens where the text form of samples takes minutes; so
    the same samples have one fingerprint as arrays and another one by one.
    """
    digest = hashlib.sha256()
    if isinstance(samples, SampleArrays):
        digest.update(b"arrays 1\n")
        ends = np.zeros(0, np.int64) if samples.target_starts is None else samples.target_starts
        types: tuple[Any, ...] = ("<i4", "<i8", "?", "<i4", "<i8")
        for array, kind in zip(
            (samples.tokens, samples.starts, samples.supervised, samples.targets, ends), types, strict=True
        ):
            digest.update(f"{len(array)}\n".encode())
            digest.update(np.ascontiguousarray(array, kind).data)
    else:
        for sample in samples:
            digest.update(f"{sample.tokens}{sample.positions}{sample.targets}\n".encode())
    return digest.hexdigest()


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """starts[0], starts[0] + 1, ... (counts[0] numbers), then the same from starts[1], and so on."""
    ends = np.cumsum(counts, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - counts), counts) + np.arange(total)


def _ends(counts: Iterable[int] | np.ndarray) -> np.ndarray:
    """0 and the running sums of `counts`."""
    each = counts if isinstance(counts, np.ndarray) else np.fromiter(counts, np.int64)
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(each, dtype=np.int64)])
