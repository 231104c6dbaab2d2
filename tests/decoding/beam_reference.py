"""Scores of tool ids and beam searches by whole passes of a model, in float64 and plain Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from jaxtool.decoding import BeamSearch, RankedTools, ToolTrie, TrieHead, decode_model, padded, prefill, rank_tools
from tests.tiny_models import logits

Path = tuple[int, ...]


def random_ids(count: int, seed: int, end: bool, tokens: int = 6, longest: int = 5) -> list[Path]:
    """Different ids of 1 to `longest` tokens; without END none begins another."""
    rng = np.random.default_rng(seed)
    found: list[Path] = []
    while len(found) < count:
        new = tuple(rng.integers(tokens, size=rng.integers(1, longest + 1)).tolist())
        clash = new in found if end else any(new[: len(old)] == old or old[: len(new)] == new for old in found)
        if not clash:
            found.append(new)
    return found


@dataclass
class Reference:
    """A prompt and the ids of all tools, END included.

    Attributes:
        model: read in whole passes.
        prompt: tokens in front of the ids.
        paths: the ids.
        normalize: as in `BeamSearch`.
        end: END, where it isn't to be scored.
        allowed: the tools that may be named (None: all).
    """

    model: Any
    prompt: Sequence[int]
    paths: Sequence[Path]
    normalize: str
    end: int | None = None
    allowed: Sequence[int] | None = None
    rows: dict[Path, np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.allowed = range(len(self.paths)) if self.allowed is None else self.allowed
        tokens = [[*self.prompt, *path] for path in self.paths]
        batch = np.zeros((len(tokens), 8 * (max(map(len, tokens)) // 8 + 1)), np.int32)
        for row, some in enumerate(tokens):
            batch[row, : len(some)] = some
        found = logits(self.model, batch).astype(np.float64)
        start = len(self.prompt) - 1
        self.rows = {
            path[:place]: found[row, start + place] for row, path in enumerate(self.paths) for place in range(len(path))
        }

    def left(self, prefix: Path) -> list[int]:
        """Allowed tools that a prefix leads to."""
        return [tool for tool in self.allowed if self.paths[tool][: len(prefix)] == prefix]

    def children(self, prefix: Path) -> list[int]:
        """Tokens that may come next."""
        paths = [self.paths[tool] for tool in self.left(prefix)]
        return sorted({path[len(prefix)] for path in paths if len(path) > len(prefix)})

    def after(self, prefix: Path) -> dict[int, float]:
        """Log-probabilities of these tokens."""
        row, children = self.rows[prefix], self.children(prefix)
        level = sorted({path[len(prefix)] for path in self.paths if len(path) > len(prefix)})
        columns = {"full": slice(None), "slice": level, "allowed": children}[self.normalize]
        norm = np.log(np.sum(np.exp(row[columns] - row.max()))) + row.max()
        return {token: 0.0 if token == self.end else row[token] - norm for token in children}

    def score(self, tool: int) -> float:
        path = self.paths[tool]
        return sum(self.after(path[:place])[path[place]] for place in range(len(path)))

    def length(self, tool: int) -> int:
        return max(len(self.paths[tool]) - (self.paths[tool][-1] == self.end), 1)

    def ranking(self, exponent: float = 0.0) -> list[tuple[int, float]]:
        """All allowed tools with their scores, best first."""
        scores = {tool: self.score(tool) / self.length(tool) ** exponent for tool in self.allowed}
        return sorted(scores.items(), key=lambda item: (-item[1], item[0]))

    def tool_at(self, prefix: Path) -> int | None:
        """The tool with which a beam ends that has come to a prefix."""
        if prefix in self.paths:
            return self.paths.index(prefix)
        if self.normalize == "allowed" and len(self.left(prefix)) == 1:
            return self.left(prefix)[0]
        if self.end is not None and self.children(prefix) == [self.end]:
            return self.paths.index((*prefix, self.end))
        return None

    def forced(self, score: float, prefix: Path, chunk: int) -> tuple[float, Path]:
        """A beam that has read the forced tokens behind its newest one, up to a decision, a last token, the chunk."""
        for _ in range(chunk - 1):
            after = self.after(prefix)
            if len(after) != 1 or (*prefix, *after) in self.paths:
                break
            (token, more), *_ = after.items()
            score, prefix = score + more, (*prefix, token)
        return score, prefix

    def beams(self, width: int, chunk: int = 1) -> tuple[list[tuple[int, float]], int]:
        """A beam search in one pool: tools and scores, and the number of passes."""
        pool: list[tuple[float, Path]] = [(0.0, ())]
        passes = -1  # the first tokens come from the prefill
        while any(self.tool_at(path) is None for _, path in pool):
            grown = []
            for score, path in pool:
                if self.tool_at(path) is not None:
                    grown.append((score, path))
                    continue
                score, path = self.forced(score, path, 1 if passes < 0 else chunk)
                grown += [(score + more, (*path, token)) for token, more in self.after(path).items()]
            pool = sorted(grown, key=lambda item: -item[0])[:width]
            passes += 1
        return [(self.tool_at(path), score) for score, path in pool], passes


def ranked(
    model: Any,
    trie: ToolTrie,
    prompts: Sequence[Sequence[int]],
    search: BeamSearch,
    allowed_bt: np.ndarray | None = None,
    head: TrieHead | None = None,
) -> RankedTools:
    made = decode_model(model)
    hidden_bd, cache = prefill(made, *padded(prompts))
    return jax.tree.map(np.asarray, rank_tools(made, trie, cache, hidden_bd, search, allowed_bt, head=head))


def assert_ranking(found: RankedTools, row: int, expected: Sequence[tuple[int, float]]) -> None:
    """A row of a result is these tools and scores, and nothing behind them."""
    count, keep = min(len(expected), found.search.keep), found.search.keep
    assert found.count_b[row] == count
    assert found.tools_bk[row].tolist() == [tool for tool, _ in expected[:count]] + [-1] * (keep - count)
    np.testing.assert_allclose(found.scores_bk[row, :count], [score for _, score in expected[:count]], atol=1e-4)
    assert (found.scores_bk[row, count:] == -np.inf).all()
    assert found.valid_bk[row].tolist() == [True] * count + [False] * (keep - count)
