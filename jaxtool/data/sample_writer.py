"""From token ids with marks of what is supervised to `SampleArrays`; what is longer than a row is cut or split here.

Knows nothing of text: ids come from corpus.py and chat_samples.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxtool.data.samples import SampleArrays
from jaxtool.tools.json_records import counted, listing

LONG_POLICIES = ("error", "cut", "split")


class SampleError(ValueError):
    """Training data that can't be used as it is; names file, line and field."""


@dataclass(frozen=True, kw_only=True)
class PreparedSamples:
    """Samples and what became of the data that they were made from.

    Attributes:
        samples: the samples, in the order of the data.
        documents: documents or conversations that samples come from.
        cut_documents: those whose end was cut off.
        cut_tokens: tokens cut off there.
        split_documents: those that make several samples.
        unsupervised: documents left out because they have nothing to supervise.
        notes: these counts and those of reading, as lines for a person.
    """

    samples: SampleArrays
    documents: int
    cut_documents: int
    cut_tokens: int
    split_documents: int
    unsupervised: int
    notes: tuple[str, ...]


class SampleWriter:
    """Collects samples that supervise each next token or not.

    Args:
        max_tokens: longest sample in tokens; what rows of a batch can hold.
        long: what becomes of a longer one. "error": a problem that names its place. "cut": its end is left out and
            counted. "split": it becomes consecutive samples, and each of its supervised tokens is supervised in exactly
            one of them.
        overlap: tokens at the beginning of a further window of a split that repeat the end of the window before, as
            context.
        kind: what a document is called in notes.

    Raises:
        SampleError: an unknown policy, or an overlap that leaves no room.
    """

    def __init__(self, *, max_tokens: int, long: str = "error", overlap: int = 0, kind: str = "document") -> None:
        if long not in LONG_POLICIES:
            raise SampleError(f"long is {long!r}, expected one of {', '.join(LONG_POLICIES)}")
        if max_tokens < 1 or not 0 <= overlap < max_tokens:
            raise SampleError(
                f"max_tokens is {max_tokens} and overlap is {overlap}, expected at least 1 token and a smaller overlap"
            )
        if overlap and long != "split":
            raise SampleError(f'overlap is {overlap} with long "{long}", expected 0: only "split" has windows')
        self.max_tokens, self.long, self.overlap, self.kind = max_tokens, long, overlap, kind
        self._tokens: array[int] = array("i")
        self._targets: array[int] = array("i")
        self._supervised = bytearray()
        self._sizes: array[int] = array("q")
        self._lines: array[int] = array("q")
        self._file_of: array[int] = array("i")
        self._files: dict[str, int] = {}
        self._too_long: list[str] = []
        self._documents = self._cut_documents = self._cut_tokens = self._split_documents = self._unsupervised = 0
        self._cut_away = 0  # documents whose supervised tokens are all cut off

    def add(self, ids: np.ndarray | Sequence[int], supervised: np.ndarray | None, *, file: str, line: int) -> None:
        """Adds a document.

        Args:
            ids: all its tokens, in order.
            supervised: for each token whether to learn to predict it (None: all). The first never is: nothing comes
                before it.
            file: where it comes from.
            line: its line there, from 1.
        """
        tokens = np.asarray(ids, np.int32)
        marks = np.ones(len(tokens), np.bool_) if supervised is None else np.asarray(supervised, np.bool_)
        if len(marks) != len(tokens):
            raise ValueError(f"{file}:{line}: {len(marks)} marks for {len(tokens)} tokens")
        wanted = np.flatnonzero(marks[1:])  # positions: the token at p + 1 is predicted at p
        if not wanted.size:
            self._unsupervised += 1
            return
        size = int(wanted[-1]) + 1  # what comes behind the last prediction is of no use
        most = self.max_tokens
        if size > most and self.long == "error":
            self._too_long.append(f"{file}:{line}: {size:,} tokens, expected at most {most:,}")
            return
        if size > most and self.long == "cut":
            if wanted[0] >= most:
                self._cut_away += 1
                return
            self._cut_documents += 1
            self._cut_tokens += size - most
            size = most
        place = self._files.setdefault(file, len(self._files))
        self._documents += 1
        pieces = 0
        done = 0  # positions below it have had their turn
        while done < size:
            begin = max(0, done - self.overlap)
            end = min(size, begin + most)
            positions = marks[done + 1 : end + 1]
            if positions.any():
                pieces += 1
                self._tokens.frombytes(tokens[begin:end].tobytes())
                self._supervised += bytes(done - begin) + positions.tobytes()
                self._targets.frombytes(tokens[done + 1 : end + 1][positions].tobytes())
                self._sizes.append(end - begin)
                self._lines.append(line)
                self._file_of.append(place)
            done = end
        self._split_documents += pieces > 1

    def finish(self, *, notes: Sequence[str] = (), source: str = "the data") -> PreparedSamples:
        """The samples of all documents.

        Args:
            notes: lines about the reading of the data, to stand before those about the samples.
            source: where the data come from, for the error that they hold nothing.

        Raises:
            SampleError: documents that are too long where that is an error, or no sample at all.
        """
        if self._too_long:
            heading = (
                f"{counted(len(self._too_long), 'sample')} longer than a row: raise the length of rows, or have long "
                'samples cut or split (long "cut", "split")'
            )
            raise SampleError(listing(heading, self._too_long))
        left_out = []
        if self._unsupervised:
            left_out.append(f"{counted(self._unsupervised, self.kind)} left out: nothing in them is supervised")
        if self._cut_away:
            left_out.append(
                f"{counted(self._cut_away, self.kind)} left out: what is supervised in them lies behind the cut at "
                f"{self.max_tokens:,} tokens"
            )
        if not self._sizes:
            raise SampleError("; ".join([f"{source} has no token to train on", *notes, *left_out]))
        starts = np.zeros(len(self._sizes) + 1, np.int64)
        np.cumsum(np.frombuffer(self._sizes, np.int64), out=starts[1:])
        samples = SampleArrays(
            tokens=np.frombuffer(self._tokens, np.int32),
            starts=starts,
            supervised=np.frombuffer(self._supervised, np.bool_),
            targets=np.frombuffer(self._targets, np.int32),
            files=tuple(self._files),
            file_of=np.frombuffer(self._file_of, np.int32),
            line_of=np.frombuffer(self._lines, np.int64),
        )
        lines = [
            f"{counted(self._documents, self.kind)} in {counted(len(samples), 'sample')}: "
            f"{len(samples.tokens):,} tokens, {len(samples.targets):,} of them supervised"
        ]
        if self._cut_documents:
            lines.append(
                f"{counted(self._cut_documents, self.kind)} cut at {self.max_tokens:,} tokens, "
                f"{counted(self._cut_tokens, 'token')} left out"
            )
        if self._split_documents:
            lines.append(
                f"{counted(self._split_documents, self.kind)} longer than {self.max_tokens:,} tokens split into "
                f"windows that overlap by {self.overlap:,}"
            )
        return PreparedSamples(
            samples=samples,
            documents=self._documents,
            cut_documents=self._cut_documents,
            cut_tokens=self._cut_tokens,
            split_documents=self._split_documents,
            unsupervised=self._unsupervised + self._cut_away,
            notes=(*notes, *lines, *left_out),
        )
