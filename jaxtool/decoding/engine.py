"""Generation for many requests at once: rows that have ended are given the next request while the others go on.

What runs when depends on the requests alone, never on time, so that one list of requests gives the same bytes again.
Shapes come from a few buckets: a run compiles a bounded number of programs, whatever the lengths of its prompts.
Files, resuming and hosts are the matter of `offline_job`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jaxtool.decoding.buckets import LONGEST_READ, SHORTEST_READ, bucket, from_the_end, power
from jaxtool.decoding.capture import Capture
from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.generation import decode, padded, read
from jaxtool.decoding.prefix import common_prefix, read_prefix, with_prefix
from jaxtool.decoding.requests import Completion, Request, check_prompt
from jaxtool.decoding.rows import Rows, forget, keep_rows, resize, shares, stop
from jaxtool.decoding.sampling import RowSampling, Sampling

_FEWEST_SLOTS = 128
_LOOK = 32  # steps between two looks at the texts of rows with stop strings
_STEPS = 128  # and at the lengths of the others
_FEWEST_ROWS = 8  # of a share, that are decoded when others have ended: fewer take hardly less time
_FILLED = 8  # idle rows wait until they are this part of all: each costs its share of every step


class Engine:
    """Generates for lists of requests.

    Args:
        model: the model, on the active mesh.
        tokenizer: makes text of tokens; stop strings need one.
        rows: texts that are decoded at the same time, B; on a mesh a multiple of the devices that share a batch.
        read_tokens: tokens that are read at once when rows are filled, at most.
        log_probs: whether completions have log-probabilities.
        capture: what is captured of prompts and generated tokens.

    Raises:
        ValueError: `rows` can't be shared by the devices of the mesh, or `read_tokens` is below 1.
    """

    def __init__(
        self,
        model: DecodeModel,
        tokenizer: Any | None = None,
        *,
        rows: int = 64,
        read_tokens: int = 1024,
        log_probs: bool = False,
        capture: Capture | None = None,
    ) -> None:
        self.shares = shares(model.rules)
        if rows < 1 or rows % self.shares:
            raise ValueError(f"rows is {rows}, expected a multiple of the {self.shares} devices that share a batch")
        if read_tokens < 1:
            raise ValueError(f"read_tokens is {read_tokens}, expected at least 1")
        self.model, self.tokenizer = model, tokenizer
        self.rows, self.read_tokens = rows, read_tokens
        self.log_probs, self.capture = log_probs, capture

    def check(self, request: Request) -> None:
        """Whether the request can be answered.

        Raises:
            ValueError: says what is wrong with it.
        """
        if not isinstance(request.limit, int) or request.limit < 1:
            raise ValueError(f"the limit is {request.limit} tokens, expected at least 1")
        check_prompt(self.model.config, request.tokens, request.limit)
        if not 0 <= request.number < 2**31:
            raise ValueError(f"the number is {request.number}, expected 0 to 2^31 - 1")
        if isinstance(request.stop, str) or not all(isinstance(text, str) and text for text in request.stop):
            raise ValueError(f"stop is {request.stop!r}, expected several texts, none of them empty")
        if not all(-(2**31) <= token < 2**31 for token in request.stop_ids):
            raise ValueError(f"stop_ids are {request.stop_ids}, expected token ids")
        if request.stop and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer")

    def run(
        self, requests: Sequence[Request], *, progress: Callable[[int, int], object] = lambda read, made: None
    ) -> Iterator[Completion]:
        """The completions, in the order in which they end.

        Args:
            requests: what to continue.
            progress: is told the number of tokens that were read and generated since it was last called.

        Raises:
            ValueError: a request can't be answered; names it.
        """
        for number, request in enumerate(requests):
            try:
                self.check(request)
            except ValueError as error:
                raise ValueError(f"request {number}: {error}") from None
        if requests:
            yield from _Run(self, requests, progress).completions()


class _Run:
    """A list of requests on its way through the rows."""

    def __init__(self, engine: Engine, requests: Sequence[Request], progress: Callable[[int, int], object]) -> None:
        self.engine, self.model, self.requests, self.progress = engine, engine.model, requests, progress
        # A short list takes no more rows than it needs.
        most = -(-power(len(requests), 1) // engine.shares) * engine.shares
        rows = self.rows = min(engine.rows, most)
        self.draws = any(request.sampling.temperature > 0 for request in requests)
        penalty = any(request.sampling.repetition_penalty != 1 for request in requests)
        # Longest first: prompts that are read together are about as long, and no long text is left for the end. The
        # same prompt one behind the other: it is read once.
        first: dict[tuple[int, ...], int] = {}
        self.same = [first.setdefault(tuple(request.tokens), i) for i, request in enumerate(requests)]
        self.queue = deque(
            sorted(range(len(requests)), key=lambda i: (-len(requests[i].tokens), self.same[i], i)),
        )
        # What the whole list begins with is read once (not where sums over a prompt, or its tokens, are kept).
        alone = penalty or (engine.capture is not None and engine.capture.tokens != "last")
        self.prefix = () if alone else common_prefix([request.tokens for request in requests])
        self.most = power(max(request.limit for request in requests), 16)
        self.of_row = np.full(rows, -1)
        self.sampling, self.numbers = [Sampling()] * rows, [0] * rows
        self.limit_b = np.ones(rows, np.int32)
        self.stop_bk = np.full((rows, power(max(len(r.stop_ids) for r in requests), 4)), -1, np.int32)
        self.made_b = np.zeros(rows, np.int64)
        self.slots = 0
        self.state = Rows.empty(
            self.model,
            rows=rows,
            slots=_FEWEST_SLOTS,
            most=self.most,
            penalty=penalty,
            log_probs=engine.log_probs,
            capture=engine.capture,
        )
        self.prefix_cache = None
        if self.prefix:
            self.prefix_cache = read_prefix(self.model, self.prefix)
            progress(len(self.prefix), 0)

    def completions(self) -> Iterator[Completion]:
        while self.queue or (self.of_row >= 0).any():
            while self.queue and (self.of_row < 0).any() and self._idle() >= self._wanted():
                self._fill()
            yield from self._ended()  # texts of one token
            if not self.queue and self._halve():
                continue
            if (self.of_row >= 0).any():
                self._decode()
                yield from self._ended()

    def _idle(self) -> int:
        return int((self.of_row < 0).sum())

    def _wanted(self) -> int:
        """Rows that are filled together: as many as are read at once, or as many as there are requests."""
        return min(self._shape()[0], len(self.queue))

    def _shape(self) -> tuple[int, int]:
        """Rows and tokens of the next read."""
        longest = min(len(self.requests[self.queue[0]].tokens) - len(self.prefix), LONGEST_READ)
        length, parts = power(longest, SHORTEST_READ), self.engine.shares
        rows = min(max(self.engine.read_tokens // length, 1), max(self.rows // parts // _FILLED, 1) * parts)
        return max(2 ** (rows.bit_length() - 1), 1) if parts == 1 else max(rows // parts, 1) * parts, length

    def _fill(self) -> None:
        """Reads the prompts of the next requests into idle rows, the same ones once."""
        together, length = self._shape()
        groups = self._groups(together // self.engine.shares)
        given = [row for share in groups for group in share for row in group]
        self.state = forget(self.model, self.state, np.isin(np.arange(self.rows), given))
        self._make_room(max(len(self.requests[i].tokens) for i in self.of_row[given]) + 1)
        rows, prompts, copies = self._places(groups, together // self.engine.shares)
        if self.prefix_cache is not None:
            self.state = with_prefix(self.model, self.state, self.prefix_cache, rows)
        for pieces, last in from_the_end(prompts, length):
            self.state = read(
                self.model,
                self.state,
                *padded(pieces, length),
                *self._settings(),
                row_p=rows,
                copies=copies if last else None,
                draws=self.draws,
                last=last,
                capture=self.engine.capture,
            )
        self.progress(sum(map(len, prompts)), 0)

    def _groups(self, most: int) -> list[list[list[int]]]:
        """For each share up to so many prompts of the next requests, each with the idle rows that are given it."""
        parts, each = self.engine.shares, self.rows // self.engine.shares
        groups: list[list[list[int]]] = [[] for _ in range(parts)]
        for part, share in enumerate(groups):
            idle = [row for row in range(part * each, (part + 1) * each) if self.of_row[row] < 0]
            while idle and self.queue and len(share) < most:
                prompt = self.same[self.queue[0]]
                share.append([])
                while idle and self.queue and self.same[self.queue[0]] == prompt:
                    self._give(idle[0], self.queue.popleft())
                    share[-1].append(idle.pop(0))
        return groups

    def _places(
        self, groups: list[list[list[int]]], most: int
    ) -> tuple[np.ndarray, list[list[int]], tuple[np.ndarray, np.ndarray] | None]:
        """The rows that read, what they read, and the copies that are made of them; see `generation.read`."""
        copied = max(sum(len(group) - 1 for group in share) for share in groups)
        if copied:  # few prompts fill many rows
            most = min(most, power(max(map(len, groups)), 1))
        row_p: list[int] = []
        row_q: list[int] = []
        place_q: list[int] = []
        prompts: list[list[int]] = []
        for share in groups:
            others = [(row, len(row_p) + place) for place, group in enumerate(share) for row in group[1:]]
            others += [(self.rows, len(groups) * most)] * ((power(copied, 1) if copied else 0) - len(others))
            row_q += [row for row, _ in others]
            place_q += [place for _, place in others]
            row_p += [group[0] for group in share] + [self.rows] * (most - len(share))
            read = [list(self.requests[self.of_row[group[0]]].tokens)[len(self.prefix) :] for group in share]
            prompts += read + [[]] * (most - len(share))
        copies = (np.array(row_q, np.int32), np.array(place_q, np.int32)) if copied else None
        return np.array(row_p, np.int32), prompts, copies

    def _give(self, row: int, request: int) -> None:
        wanted = self.requests[request]
        self.of_row[row], self.made_b[row] = request, 0
        self.sampling[row], self.numbers[row], self.limit_b[row] = wanted.sampling, wanted.number, wanted.limit
        self.stop_bk[row] = -1
        self.stop_bk[row, : len(wanted.stop_ids)] = wanted.stop_ids

    def _settings(self) -> tuple[RowSampling, np.ndarray, np.ndarray]:
        return RowSampling.of(self.sampling, self.numbers), self.limit_b, self.stop_bk

    def _make_room(self, tokens: int) -> None:
        """Slots for so many tokens in every row, and for those that rows hold; fewer again if half would do."""
        held = max((len(self.requests[i].tokens) + int(made) for i, made in self._taken()), default=0)
        wanted = bucket(max(tokens, held), _FEWEST_SLOTS)
        if self.state.cache.slots < wanted or self.state.cache.slots >= 2 * wanted:
            self.state = resize(self.model, self.state, slots=wanted)

    def _taken(self) -> list[tuple[int, int]]:
        return [(int(i), int(made)) for i, made in zip(self.of_row, self.made_b, strict=True) if i >= 0]

    def _decode(self) -> None:
        """Decodes until enough rows are idle to be filled, or until it is time to look at the rows."""
        looks = any(self.requests[i].stop for i, _ in self._taken())
        steps = _LOOK if looks else _STEPS
        needed = [
            min(len(self.requests[i].tokens) + made + steps, len(self.requests[i].tokens) + self.requests[i].limit)
            for i, made in self._taken()
        ]
        self._make_room(max(needed))
        if self.queue:
            keep = self.rows - self._wanted()
        else:  # half as many take less time, once the texts that go on lie in as many rows of each share
            keep = self.rows // 2 if self._can_halve() else 0
            keep = min(keep, max(int((self.of_row >= 0).sum()) - 1, 0))
        self.state = decode(
            self.model,
            self.state,
            *self._settings(),
            np.int32(steps),
            np.int32(keep),
            draws=self.draws,
            capture=self.engine.capture,
        )

    def _can_halve(self) -> bool:
        each = self.rows // self.engine.shares
        return each % 2 == 0 and each // 2 >= _FEWEST_ROWS

    def _halve(self) -> bool:
        """Goes on with half the rows if that holds all that go on; whether it did."""
        parts, each = self.engine.shares, self.rows // self.engine.shares
        taken_pe = (self.of_row >= 0).reshape(parts, each)
        if not self._can_halve() or taken_pe.sum(axis=1).max() > each // 2:
            return False
        first_pe = np.argsort(~taken_pe, axis=1, kind="stable")[:, : each // 2]  # those that go on, then idle ones
        kept = (first_pe + each * np.arange(parts)[:, None]).ravel()
        self.state = keep_rows(self.model, self.state, kept.astype(np.int32))
        self.rows = len(kept)
        self.of_row, self.made_b = self.of_row[kept], self.made_b[kept]
        self.limit_b, self.stop_bk = self.limit_b[kept], self.stop_bk[kept]
        self.sampling, self.numbers = [self.sampling[row] for row in kept], [self.numbers[row] for row in kept]
        return True

    def _ended(self) -> Iterator[Completion]:
        """Takes the texts that have ended out of their rows."""
        state, taken = self.state, np.flatnonzero(self.of_row >= 0)
        if not len(taken):
            return
        count_b, active_b = np.asarray(state.count_b), np.asarray(state.active_b)
        tokens_bn = np.asarray(state.tokens_bn)
        self.progress(0, int((count_b - self.made_b)[taken].sum()))
        self.made_b[taken] = count_b[taken]
        stopped, found = [], []
        for row in taken.tolist():
            request, tokens = self.requests[self.of_row[row]], tokens_bn[row, : count_b[row]].tolist()
            at = self._stop_string(request, tokens) if request.stop else None
            if active_b[row] and at is None:
                continue
            if active_b[row]:
                stopped.append(row)
            found.append((row, request, tokens, at))
        if not found:
            return
        rest = {
            "log_probs": np.asarray(state.log_probs_bn) if self.engine.log_probs else None,
            "captured": (
                np.asarray(state.captured_bld.astype(self.engine.capture.dtype)) if self.engine.capture else None
            ),
            "captured_tokens": (
                np.asarray(state.captured_bnld) if self.engine.capture and self.engine.capture.generated else None
            ),
        }
        if stopped:  # takes the state over
            self.state = stop(self.model, state, np.isin(np.arange(self.rows), stopped))
        for row, request, tokens, at in found:
            yield self._completion(row, request, tokens, at, rest)
            self.of_row[row] = -1

    def _completion(
        self,
        row: int,
        request: Request,
        tokens: list[int],
        at: tuple[int, str, str] | None,
        rest: dict[str, np.ndarray | None],
    ) -> Completion:
        stopped: str | int | None = None
        if at is not None:
            count, text, stopped = at
            tokens = tokens[:count]
        else:
            text = self._text(tokens)
            if tokens[-1] in request.stop_ids:
                stopped = tokens[-1]
        log_probs, captured, of_tokens = rest["log_probs"], rest["captured"], rest["captured_tokens"]
        if of_tokens is not None:
            of_tokens = of_tokens[row, : len(tokens)].copy()
            of_tokens[len(tokens) - 1 :] = np.nan
        return Completion(
            request=int(self.of_row[row]),
            tokens=tokens,
            text=text,
            finish="length" if stopped is None else "stop",
            stop=stopped,
            log_probs=None if log_probs is None else log_probs[row, : len(tokens)].tolist(),
            captured=None if captured is None else captured[row].copy(),
            captured_tokens=of_tokens,
        )

    def _text(self, tokens: Sequence[int]) -> str:
        if self.engine.tokenizer is None:
            return ""
        known = [token for token in tokens if token < self.model.config.vocab_size]
        return str(self.engine.tokenizer.decode(known, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def _stop_string(self, request: Request, tokens: list[int]) -> tuple[int, str, str] | None:
        """The fewest tokens whose text holds a stop string, the text in front of it, and the string.

        Whichever is complete first, so that it doesn't matter when a text is looked at.
        """
        whole = self._text(tokens)
        complete = []
        for string in request.stop:
            if string not in whole:
                continue
            low, high = 1, len(tokens)
            while low < high:
                middle = (low + high) // 2
                low, high = (low, middle) if string in self._text(tokens[:middle]) else (middle + 1, high)
            text = self._text(tokens[:low])
            if string in text:  # not so where the text changed with a later token, as half a character does
                complete.append((low, text.find(string), text, string))
        if not complete:
            return None
        count, place, text, string = min(complete)
        return count, text[:place], string
