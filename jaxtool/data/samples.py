"""Supervised samples and their packing into fixed rows: batch = f(samples, seed, step), nothing else.

A sample may supervise a position with several equally right ids (soft target). Packing keeps samples apart by segment
ids; no sample is cut or dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


class PackedBatches:
    """Batches of packed rows; the order and every draw follow from `seed` and the step alone.

    Args:
        samples: what to train on; every one occurs exactly once an epoch.
        rows: rows of a batch (B).
        row_length: tokens of a row (S).
        epochs: passes over the samples.
        seed: decides order, packing and draws.

    Attributes:
        max_supervised: supervised positions of the fullest row of all epochs (P), the same for every batch.
        max_targets: most targets of one position (A).

    Raises:
        ValueError: no samples, or a sample longer than a row.
    """

    def __init__(self, samples: Sequence[Sample], *, rows: int, row_length: int, epochs: int, seed: int) -> None:
        if not samples:
            raise ValueError("no samples to train on")
        if rows < 1 or epochs < 1:
            raise ValueError(f"rows is {rows} and epochs is {epochs}, expected at least 1 of each")
        longest = max(len(sample.tokens) for sample in samples)
        if longest > row_length:
            raise ValueError(
                f"a sample has {longest} tokens, a row holds {row_length}: raise row_length or cut the text"
            )
        self.samples = samples
        self.rows, self.row_length, self.seed = rows, row_length, seed
        self.max_targets = max(len(ids) for sample in samples for ids in sample.targets)
        self._epochs = [self._plan(epoch) for epoch in range(epochs)]
        supervised = [len(sample.positions) for sample in samples]
        self.max_supervised = max(sum(supervised[i] for i in row) for plan in self._epochs for row in plan)
        self._starts = np.cumsum([0] + [-(-len(plan) // rows) for plan in self._epochs])

    @property
    def steps(self) -> int:
        """Batches in all epochs; the last one of an epoch may have empty rows."""
        return int(self._starts[-1])

    @property
    def tokens(self) -> int:
        """Input tokens in all epochs, padding not counted."""
        return len(self._epochs) * sum(len(sample.tokens) for sample in self.samples)

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over the samples in order; batches with the same arguments and fingerprint are the same."""
        digest = hashlib.sha256()
        for sample in self.samples:
            digest.update(f"{sample.tokens}{sample.positions}{sample.targets}\n".encode())
        return digest.hexdigest()

    @property
    def filled(self) -> float:
        """Share of the positions of all batches that hold a token."""
        return self.tokens / (self.steps * self.rows * self.row_length)

    def batch(self, step: int) -> Batch:
        """The batch of one step, as numpy arrays.

        Raises:
            IndexError: `step` is outside 0 .. steps - 1.
        """
        if not 0 <= step < self.steps:
            raise IndexError(f"step {step} is outside the {self.steps} steps")
        epoch = int(np.searchsorted(self._starts, step, side="right")) - 1
        first = (step - int(self._starts[epoch])) * self.rows
        return self._fill(self._epochs[epoch][first : first + self.rows], epoch)

    def _plan(self, epoch: int) -> list[list[int]]:
        """Rows as lists of sample indices: first fit in shuffled order, over a window of open rows."""
        order = np.random.default_rng((self.seed, epoch)).permutation(len(self.samples))
        done: list[list[int]] = []
        opened: list[tuple[list[int], int]] = []  # members, tokens left
        for index in order.tolist():
            tokens = len(self.samples[index].tokens)
            for slot, (members, room) in enumerate(opened):
                if tokens <= room:
                    opened[slot] = ([*members, index], room - tokens)
                    break
            else:
                # A window keeps the order close to the shuffled one: rows leave it in the order in which they opened.
                if len(opened) == 4 * self.rows:
                    done.append(opened.pop(0)[0])
                opened.append(([index], self.row_length - tokens))
        return done + [members for members, _ in opened]

    def _fill(self, plan: list[list[int]], epoch: int) -> Batch:
        b, s, p, a = self.rows, self.row_length, self.max_supervised, self.max_targets
        tokens_bs, positions_bs, segments_bs = (np.zeros((b, s), np.int32) for _ in range(3))
        supervised_bp = np.zeros((b, p), np.int32)
        targets_bpa, weights_bpa = np.zeros((b, p, a), np.int32), np.zeros((b, p, a), np.float32)
        for row, members in enumerate(plan):
            start = filled = 0
            for segment, index in enumerate(members, start=1):
                sample = self.samples[index]
                end = start + len(sample.tokens)
                tokens_bs[row, start:end] = self._drawn(sample, index, epoch)
                positions_bs[row, start:end] = np.arange(len(sample.tokens))
                segments_bs[row, start:end] = segment
                for position, ids in zip(sample.positions, sample.targets, strict=True):
                    supervised_bp[row, filled] = start + position
                    targets_bpa[row, filled, : len(ids)] = ids
                    weights_bpa[row, filled, : len(ids)] = 1 / len(ids)
                    filled += 1
                start = end
        arrays: dict[str, Any] = {
            "tokens_bs": tokens_bs,
            "positions_bs": positions_bs,
            "segment_ids_bs": segments_bs,
            "supervised_bp": supervised_bp,
            "targets_bpa": targets_bpa,
            "weights_bpa": weights_bpa,
        }
        return Batch(**arrays)

    def _drawn(self, sample: Sample, index: int, epoch: int) -> list[int]:
        if DRAWN not in sample.tokens:
            return list(sample.tokens)
        draw = np.random.default_rng((self.seed, epoch, index))
        targets = dict(zip(sample.positions, sample.targets, strict=True))
        return [
            targets[place - 1][draw.integers(len(targets[place - 1]))] if token == DRAWN else token
            for place, token in enumerate(sample.tokens)
        ]
