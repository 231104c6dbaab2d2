"""Packing of samples into rows of one or a few lengths: batch = f(samples, seed, step), nothing else.

First fit, samples kept apart by segment ids, none cut or dropped. A process may build some rows of a batch only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtool.data.samples import DRAWN, Batch, Sample, SampleArrays, fingerprint, ranges


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """Shape of the batches of one row length; each shape is compiled once.

    Attributes:
        rows: rows of a batch (B).
        row_length: tokens of a row (S).
        supervised: supervised positions of a row (P).
        targets: most targets of a position (A).
        batches: batches of this shape in all epochs.
    """

    rows: int
    row_length: int
    supervised: int
    targets: int
    batches: int


@dataclass(frozen=True, kw_only=True)
class _Epoch:
    """One epoch's plan: samples in rows, rows in batches.

    Attributes:
        members: sample indices, row after row.
        row_starts: where each row begins in `members`, and the end of the last.
        lengths: for each batch the index of its row length.
        first_rows: for each batch its first row; it ends at the next batch of that length or is filled up.
        last_rows: for each batch the row behind its last.
    """

    members: np.ndarray
    row_starts: np.ndarray
    lengths: np.ndarray
    first_rows: np.ndarray
    last_rows: np.ndarray


class PackedBatches:
    """Batches of packed rows; the order and every draw follow from `seed` and the step alone.

    Args:
        samples: what to train on; every one occurs exactly once an epoch.
        rows: rows of a batch (B).
        row_length: tokens of a row (S).
        epochs: passes over the samples.
        seed: decides order, packing and draws.
        shorter_rows: further row lengths, all shorter. A sample goes to the shortest rows that hold it, and a batch has
            rows of one length: `row_length // length` times as many as `rows`, so batches have about the same number
            of tokens, and their rows divide by whatever `rows` divides by.
        pack: put several samples into a row. Without it a row is one sample and padding.
        supervised_multiple: supervised positions of a row (P) are filled up to a multiple of this, for chunked losses.

    Attributes:
        shapes: the distinct shapes of batches, shortest rows first.
        max_supervised: supervised positions of the fullest row of all epochs (P), the same for every batch of one row
            length.
        max_targets: most targets of one position (A).

    Raises:
        ValueError: no samples, or one longer than a row, by its file and line where they are known.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        rows: int,
        row_length: int,
        epochs: int,
        seed: int,
        shorter_rows: Sequence[int] = (),
        pack: bool = True,
        supervised_multiple: int = 1,
    ) -> None:
        if not len(samples):
            raise ValueError("no samples to train on")
        if rows < 1 or epochs < 1 or supervised_multiple < 1:
            raise ValueError(
                f"rows is {rows}, epochs is {epochs} and supervised_multiple is {supervised_multiple}, "
                "expected at least 1 of each"
            )
        lengths = [*sorted(shorter_rows), row_length]
        if len(set(lengths)) < len(lengths) or not 1 <= lengths[0] <= max(lengths) == row_length:
            raise ValueError(
                f"shorter_rows is {list(shorter_rows)}, expected different lengths below row_length {row_length}"
            )
        self.samples = samples
        self.rows, self.row_length, self.seed = rows, row_length, seed
        self._arrays = arrays = SampleArrays.of(samples)
        self._sizes = np.diff(arrays.starts)
        self._counts = np.diff(arrays.position_starts)
        longest = int(self._sizes.argmax())
        if self._sizes[longest] > row_length:
            where = f"{arrays.place(longest)}: " if len(arrays.file_of) else ""
            raise ValueError(
                f"{where}a sample has {self._sizes[longest]} tokens, a row holds {row_length}: "
                "raise row_length or cut the text"
            )
        self._drawn = np.zeros(len(arrays), np.bool_)
        self._drawn[np.searchsorted(arrays.starts, np.flatnonzero(arrays.tokens == DRAWN), side="right") - 1] = True
        self._lengths = np.asarray(lengths)
        self._rows = np.asarray([rows * (row_length // length) for length in lengths])
        self._length_of = np.searchsorted(self._lengths, self._sizes)
        self._epochs = [self._plan(epoch, pack) for epoch in range(epochs)]
        self._starts = np.cumsum([0] + [len(plan.lengths) for plan in self._epochs])
        self.max_targets = arrays.most_targets
        self._supervised = [
            -(-most // supervised_multiple) * supervised_multiple for most in self._most_supervised().tolist()
        ]
        self.max_supervised = max(self._supervised)
        batches = np.bincount(np.concatenate([plan.lengths for plan in self._epochs]), minlength=len(lengths))
        self.shapes = tuple(
            BatchShape(
                rows=int(self._rows[i]),
                row_length=length,
                supervised=self._supervised[i],
                targets=self.max_targets,
                batches=int(batches[i]),
            )
            for i, length in enumerate(lengths)
            if batches[i]
        )

    @property
    def steps(self) -> int:
        """Batches in all epochs; the last one of an epoch (and of a row length) may have empty rows."""
        return int(self._starts[-1])

    @property
    def tokens(self) -> int:
        """Input tokens in all epochs, padding not counted."""
        return len(self._epochs) * len(self._arrays.tokens)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the samples in order; batches with the same arguments and fingerprint are the same."""
        return fingerprint(self.samples)

    @property
    def filled(self) -> float:
        """Share of the positions of all batches that hold a token."""
        return self.tokens / sum(shape.batches * shape.rows * shape.row_length for shape in self.shapes)

    def batch(self, step: int, rows: slice | Sequence[int] | None = None) -> Batch:
        """The batch of one step, as numpy arrays.

        Args:
            step: 0 .. steps - 1.
            rows: the rows to build, in this order: what a process feeds to its own devices. None: all.

        Raises:
            IndexError: `step` or a row is outside of them.
        """
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} is outside the {self.steps} steps")
        epoch = int(np.searchsorted(self._starts, step, side="right")) - 1
        plan, number = self._epochs[epoch], step - int(self._starts[epoch])
        length = int(plan.lengths[number])
        chosen = np.arange(self._rows[length])
        if isinstance(rows, slice):
            chosen = chosen[rows]
        elif rows is not None:
            chosen = chosen[np.asarray(rows, np.int64)]
        return self._fill(plan, epoch, length, plan.first_rows[number] + chosen, int(plan.last_rows[number]))

    def _plan(self, epoch: int, pack: bool) -> _Epoch:
        generator = np.random.default_rng((self.seed, epoch))
        order = generator.permutation(len(self._arrays))
        members, starts, batches = [], [np.zeros(1, np.int64)], []
        first_row = placed = 0
        for number, length in enumerate(self._lengths.tolist()):
            rows = int(self._rows[number])
            part = order if len(self._lengths) == 1 else order[self._length_of[order] == number]
            row_of = first_fit(self._sizes[part], length, window=4 * rows) if pack else np.arange(len(part))
            members.append(part[np.argsort(row_of, kind="stable")].astype(np.int32))
            ends = np.cumsum(np.bincount(row_of)) if len(part) else np.zeros(0, np.int64)
            starts.append(placed + ends)
            first = np.arange(first_row, first_row + len(ends), rows)
            last = np.minimum(first + rows, first_row + len(ends))
            batches.append(np.stack([np.full(len(first), number), first, last]))
            first_row, placed = first_row + len(ends), placed + len(part)
        of_all = np.concatenate(batches, axis=1)
        if len(self._lengths) > 1:
            of_all = of_all[:, generator.permutation(of_all.shape[1])]
        return _Epoch(
            members=np.concatenate(members),
            row_starts=np.concatenate(starts),
            lengths=of_all[0],
            first_rows=of_all[1],
            last_rows=of_all[2],
        )

    def _most_supervised(self) -> np.ndarray:
        """For each row length the supervised positions of its fullest row."""
        most = np.zeros(len(self._lengths), np.int64)
        for plan in self._epochs:
            of_row = np.add.reduceat(self._counts[plan.members], plan.row_starts[:-1])
            np.maximum.at(most, self._length_of[plan.members[plan.row_starts[:-1]]], of_row)
        return most

    def _fill(self, plan: _Epoch, epoch: int, length: int, rows: np.ndarray, last_row: int) -> Batch:
        """The rows with these numbers; those from `last_row` on are empty."""
        samples = self._arrays
        b, s, p, a = len(rows), int(self._lengths[length]), self._supervised[length], self.max_targets
        tokens_bs, positions_bs, segments_bs = (np.zeros((b, s), np.int32) for _ in range(3))
        supervised_bp = np.zeros((b, p), np.int32)
        targets_bpa, weights_bpa = np.zeros((b, p, a), np.int32), np.zeros((b, p, a), np.float32)

        kept = np.flatnonzero(rows < last_row)
        first = plan.row_starts[rows[kept]]
        in_row = plan.row_starts[rows[kept] + 1] - first
        members = plan.members[ranges(first, in_row)]
        sizes = self._sizes[members]
        # Where each sample begins in its row: running sums of the sizes, less what they were when the row began.
        flat = np.cumsum(sizes) - sizes
        begins = flat - np.repeat(flat[np.cumsum(in_row) - in_row], in_row)
        row = np.repeat(np.repeat(kept, in_row), sizes)
        position = ranges(np.zeros(len(members), np.int64), sizes)
        column = np.repeat(begins, sizes) + position
        source = ranges(samples.starts[members], sizes)
        tokens_bs[row, column] = samples.tokens[source]
        positions_bs[row, column] = position
        segments_bs[row, column] = np.repeat(ranges(np.ones(len(kept), np.int64), in_row), sizes)

        at = np.flatnonzero(samples.supervised[source])
        row_at = row[at]
        per_row = np.bincount(row_at, minlength=b)
        slot = np.arange(len(at)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
        supervised_bp[row_at, slot] = column[at]
        index = ranges(samples.position_starts[members], self._counts[members])
        if samples.target_starts is None:
            targets_bpa[row_at, slot, 0] = samples.targets[index]
            weights_bpa[row_at, slot, 0] = 1
        else:
            each = samples.target_starts[index + 1] - samples.target_starts[index]
            place = np.repeat(row_at, each), np.repeat(slot, each), ranges(np.zeros(len(each), np.int64), each)
            targets_bpa[place] = samples.targets[ranges(samples.target_starts[index], each)]
            weights_bpa[place] = np.repeat(1 / each, each)
        for where in np.flatnonzero(self._drawn[members]).tolist():
            columns = slice(begins[where], begins[where] + sizes[where])
            tokens_bs[row[flat[where]], columns] = self._with_draws(int(members[where]), epoch)
        arrays: dict[str, Any] = {
            "tokens_bs": tokens_bs,
            "positions_bs": positions_bs,
            "segment_ids_bs": segments_bs,
            "supervised_bp": supervised_bp,
            "targets_bpa": targets_bpa,
            "weights_bpa": weights_bpa,
        }
        return Batch(**arrays)

    def _with_draws(self, index: int, epoch: int) -> list[int]:
        sample = self._arrays[index]
        draw = np.random.default_rng((self.seed, epoch, index))
        targets = dict(zip(sample.positions, sample.targets, strict=True))
        return [
            targets[place - 1][draw.integers(len(targets[place - 1]))] if token == DRAWN else token
            for place, token in enumerate(sample.tokens)
        ]


def first_fit(sizes: np.ndarray, row_length: int, *, window: int) -> np.ndarray:
    """For each sample the number of its row: the first of the open rows that has room for it, else a new one.

    Only the last `window` rows are open, which keeps the order of rows close to that of the samples. O(n log n).
    """
    if len(sizes) == 0 or 2 * int(sizes.min()) > row_length:
        return np.arange(len(sizes))
    # A row opens with a sample that the one before had no room for, so two neighbours hold more than one row.
    most_rows = min(len(sizes), 2 * int(sizes.sum()) // row_length + 1)
    leaves = 1 << (most_rows - 1).bit_length()
    room = [0] * (2 * leaves)  # a binary tree: the room of each row, and above it the largest room of two

    def set_room(row: int, value: int) -> None:
        node = row + leaves
        room[node] = value
        while node > 1:
            node >>= 1
            largest = max(room[2 * node], room[2 * node + 1])
            if room[node] == largest:
                break
            room[node] = largest

    rows = 0
    row_of = np.empty(len(sizes), np.int64)
    for number, size in enumerate(sizes.tolist()):
        if room[1] >= size:
            node = 1
            while node < leaves:
                node *= 2
                if room[node] < size:
                    node += 1
            row = node - leaves
            set_room(row, room[node] - size)
        else:
            row = rows
            if rows >= window:
                set_room(rows - window, 0)
            set_room(row, row_length - size)
            rows += 1
        row_of[number] = row
    return row_of
