"""What a search costs: passes of the model, programs compiled, what is part of them."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.decoding import BeamSearch, ToolTrie, TrieHead, beam_search, decode_model, padded, prefill, rank_tools
from tests.decoding.beam_reference import Path, Reference, assert_ranking, ranked
from tests.tiny_models import CONFIG, random_model

END = 95
NORMALIZE = ("full", "slice", "allowed")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3]]
# Two tools that part at once, forced up to their ends: 8 and 10 tokens and END.
TAILS: list[Path] = [(1, *range(20, 27)), (2, *range(30, 39))]
# Two that part at once, each again behind a run of five tokens.
RUNS: list[Path] = [(1, *[3] * 5, 4), (1, *[3] * 5, 5), (2, *[6] * 5, 4), (2, *[6] * 5, 5, 9)]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(dataclasses.replace(CONFIG, num_hidden_layers=1))


def found_of(model: Any, ids: list[Path], search: BeamSearch, allowed: np.ndarray | None = None) -> Any:
    """The result, of which every score is compared with the truth."""
    trie = ToolTrie.build(ids, end_token=END, vocab_rows=100)
    found = ranked(model, trie, PROMPTS, search, allowed)
    for row, prompt in enumerate(PROMPTS):
        few = None if allowed is None else np.flatnonzero(allowed[row]).tolist()
        paths = [(*tokens, END) for tokens in ids]
        assert_ranking(found, row, Reference(model, prompt, paths, search.normalize, allowed=few).ranking())
    return found


@pytest.mark.parametrize("normalize", ["full", "slice"])
@pytest.mark.parametrize(("chunk", "passes"), [(1, 10), (3, 4), (16, 1)])
def test_forced_tails_are_scored_in_chunks(model: Any, normalize: str, chunk: int, passes: int) -> None:
    """END is the eleventh token of the longer id: the first ten are read, the first of them after the prefill."""
    search = BeamSearch(beams=2, keep=2, normalize=normalize, chunk=chunk)
    assert found_of(model, TAILS, search).passes == passes


def test_forced_tails_cost_nothing_where_they_are_certain(model: Any) -> None:
    for chunk in (1, 4):
        search = BeamSearch(beams=2, keep=2, normalize="allowed", chunk=chunk)
        assert found_of(model, TAILS, search).passes == 0


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("chunk", [4, 8])
def test_runs_in_front_of_decisions(model: Any, normalize: str, chunk: int) -> None:
    """Six tokens up to the second decision; behind it nothing is certain but under "allowed" (one more: 9, END)."""
    rest = {"full": {1: 2, 4: 1, 8: 1}, "slice": {1: 2, 4: 1, 8: 1}, "allowed": {1: 0, 4: 0, 8: 0}}[normalize][chunk]
    search = BeamSearch(beams=4, keep=4, normalize=normalize, chunk=chunk)
    assert found_of(model, RUNS, search).passes == -(-6 // chunk) + rest


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_runs_of_a_subset(model: Any, normalize: str) -> None:
    """All but one tool behind each first token are forbidden: then the rest is forced."""
    ids = [(a, b, c, d) for a in (1, 2) for b in (3, 4) for c in (5, 6) for d in (7, 8)]
    allowed = np.zeros((2, 16), bool)
    allowed[0, [3, 12]] = True
    allowed[1, [3, 4]] = True  # (1, 3, 6, 8) and (1, 4, 5, 7): nothing to choose in front of the second token
    search = BeamSearch(beams=4, keep=4, normalize=normalize)
    alone = found_of(model, ids, search, np.repeat(allowed[:1], 2, axis=0))
    both = found_of(model, ids, search, allowed)
    assert (alone.passes, both.passes) == ((0, 1) if normalize == "allowed" else (1, 2))
    slow = found_of(model, ids, dataclasses.replace(search, chunk=1), allowed)
    assert slow.passes == (1 if normalize == "allowed" else 4)


def test_no_chunks_where_nothing_is_forced() -> None:
    digits = ToolTrie.build(
        [(a, b, c) for a in range(5) for b in range(5) for c in range(5)], end_token=None, vocab_rows=9
    )
    assert (digits.longest_run, digits.longest_tail) == (0, 0)
    tails = ToolTrie.build(TAILS, end_token=END, vocab_rows=100)
    assert (tails.longest_run, tails.longest_tail) == (0, 9)
    runs = ToolTrie.build(RUNS, end_token=END, vocab_rows=100)
    assert (runs.longest_run, runs.longest_tail) == (5, 1)


def parts(model: Any, normalize: str) -> tuple[Any, ...]:
    made = decode_model(model)
    trie = jax.device_put(ToolTrie.build(RUNS, end_token=END, vocab_rows=100))
    hidden_bd, cache = prefill(made, *padded(PROMPTS))
    return made, trie, cache, hidden_bd, None, TrieHead.build(made, trie, normalize)


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_compiled_once(model: Any, normalize: str) -> None:
    """Other prompts, weights, subsets of the same shapes; a new settings object that is equal."""
    made, trie, cache, hidden_bd, _, head = parts(model, normalize)
    other = decode_model(random_model(model.config, seed=1))
    allowed = np.ones((2, 4), bool)
    before = beam_search._rank_tools._cache_size()
    for seen in (allowed, allowed & [True, False, True, True]):
        for weights in (made, other):
            rank_tools(weights, trie, cache, 2 * hidden_bd, BeamSearch(beams=3, keep=3, normalize=normalize), seen)
    search = BeamSearch(beams=3, keep=3, normalize=normalize)
    rank_tools(made, trie, cache, hidden_bd, search, allowed, head=head)
    assert beam_search._rank_tools._cache_size() == before + 1


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_weights_and_trie_are_arguments(model: Any, normalize: str) -> None:
    """Closed over they would be constants of the program; and no step asks the host."""
    search = BeamSearch(beams=3, keep=3, normalize=normalize)
    text = beam_search._rank_tools.lower(*parts(model, normalize), search=search).as_text()
    assert "callback" not in text
    constants = re.findall(r"stablehlo\.constant dense<.*> : tensor<([0-9x]*)", text)
    sizes = [np.prod([int(size) for size in shape.rstrip("x").split("x") if size]) for shape in constants]
    filled = re.findall(r"stablehlo\.constant dense<(?:\"|\[).*> : tensor<([0-9x]*)", text)
    largest = max([np.prod([int(size) for size in shape.rstrip("x").split("x")]) for shape in filled], default=0)
    assert sizes and largest <= 16  # the frequencies of the rotary embedding


@pytest.mark.parametrize("normalize", ["slice", "allowed"])
def test_only_columns_of_the_trie(model: Any, normalize: str) -> None:
    """No array of the program is as long as the vocabulary, other than the matrices themselves."""
    wide = random_model(dataclasses.replace(model.config, vocab_size=1009, num_hidden_layers=1))
    search = BeamSearch(beams=3, keep=3, normalize=normalize)
    text = beam_search._rank_tools.lower(*parts(wide, normalize), search=search).as_text()
    shapes = set(re.findall(r"tensor<([0-9x]*1009[0-9x]*)x[a-z]", text))
    assert shapes <= {f"1009x{model.config.hidden_size}"}


def test_slices_of_the_head(model: Any) -> None:
    """Of each level the tokens that occur there; under "allowed" those that are a choice."""
    made, trie = decode_model(model), ToolTrie.build(RUNS, end_token=END, vocab_rows=100)
    rows = np.asarray(model.head_vd[...])
    tokens = {"slice": [[1, 2], [3, 4, 5, 6, 9, END]], "allowed": [[1, 2], [4, 5]], "full": []}
    for normalize, expected in tokens.items():
        head = TrieHead.build(made, trie, normalize)
        assert len(head.slices) == len(expected)
        for part, some in zip(head.slices, expected, strict=True):
            np.testing.assert_array_equal(part.rows_xd, rows[some])
