"""Beam search over random tries against scores of every tool by whole passes, and against a plain beam search."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.config import MeshConfig
from jaxtool.decoding import ToolTrie, decode_model, padded, prefill, rank_tools
from jaxtool.parallel import make_mesh
from tests.tiny_models import CONFIGS, logits, random_model

END = 95
VOCAB = 100
NORMALIZE = ("full", "slice", "allowed")


def random_ids(count: int, seed: int, end: bool) -> list[tuple[int, ...]]:
    """Different ids of 1 to 5 tokens; without END none begins another."""
    rng = np.random.default_rng(seed)
    found: list[tuple[int, ...]] = []
    while len(found) < count:
        new = tuple(rng.integers(6, size=rng.integers(1, 6)).tolist())
        clash = new in found if end else any(new[: len(old)] == old or old[: len(new)] == new for old in found)
        if not clash:
            found.append(new)
    return found


class Reference:
    """Log-probabilities of the tokens behind a prefix, from whole passes, in float64."""

    def __init__(self, model: Any, prompt: Sequence[int], paths: Sequence[tuple[int, ...]], normalize: str) -> None:
        self.model, self.prompt, self.paths, self.normalize = model, list(prompt), list(paths), normalize
        self.alphabet = sorted({token for path in paths for token in path})
        self.seen: dict[tuple[int, ...], dict[int, float]] = {}

    def after(self, prefix: tuple[int, ...]) -> dict[int, float]:
        if prefix not in self.seen:
            children = sorted(
                {p[len(prefix)] for p in self.paths if p[: len(prefix)] == prefix and len(p) > len(prefix)}
            )
            tokens = [*self.prompt, *prefix]
            row = logits(self.model, np.pad([tokens], [(0, 0), (0, 32 - len(tokens))]))[0, len(tokens) - 1]
            row = row.astype(np.float64)
            columns = {"full": slice(None), "slice": self.alphabet, "allowed": children}[self.normalize]
            norm = np.log(np.sum(np.exp(row[columns] - row.max()))) + row.max()
            self.seen[prefix] = {token: row[token] - norm for token in children}
        return self.seen[prefix]

    def score(self, path: tuple[int, ...]) -> float:
        return sum(self.after(path[:place])[path[place]] for place in range(len(path)))

    def beams(self, width: int) -> list[tuple[float, int]]:
        """A plain beam search in one pool."""
        pool: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        while any(path not in self.paths for _, path in pool):
            grown = []
            for score, path in pool:
                if path in self.paths:
                    grown.append((score, path))
                else:
                    grown += [(score + more, (*path, token)) for token, more in self.after(path).items()]
            pool = sorted(grown, key=lambda item: -item[0])[:width]
        return [(score, self.paths.index(path)) for score, path in pool]


def ranked(model: Any, trie: ToolTrie, prompts: Sequence[Sequence[int]], **options: Any) -> Any:
    made = decode_model(model)
    hidden_bd, cache = prefill(made, *padded(prompts))
    return jax.tree.map(np.asarray, rank_tools(made, trie, cache, hidden_bd, **options))


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(dataclasses.replace(CONFIGS["llama"], num_tools=9))


@pytest.fixture(scope="module")
def biased_model() -> Any:
    return random_model(dataclasses.replace(CONFIGS["gptj"], num_tools=9))


PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [58, 97, 93]]


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("end", [False, True])
def test_enough_beams_are_exact(normalize: str, end: bool, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue("model" if end else "biased_model")
    ids = random_ids(23, seed=1, end=end)
    trie = ToolTrie.build(ids, end_token=END if end else None, vocab_rows=VOCAB)
    paths = [(*tokens, END) if end else tokens for tokens in ids]
    found = ranked(model, trie, PROMPTS, beams=30, keep=30, normalize=normalize)
    assert found.count_b.tolist() == [23] * 3 and found.normalize == normalize
    for row, prompt in enumerate(PROMPTS):
        reference = Reference(model, prompt, paths, normalize)
        scores = np.array([reference.score(path) for path in paths])
        order = np.argsort(-scores, kind="stable")
        assert found.tools_bk[row, :23].tolist() == order.tolist()
        np.testing.assert_allclose(found.scores_bk[row, :23], scores[order], atol=1e-4)
        assert not found.valid_bk[row, 23:].any() and (found.tools_bk[row, 23:] == -1).all()
        assert (found.scores_bk[row, 23:] == -np.inf).all()
        if normalize == "allowed":
            assert np.exp(scores).sum() == pytest.approx(1)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize("beams", [1, 2, 5])
def test_few_beams_are_a_plain_beam_search(model: Any, normalize: str, beams: int) -> None:
    ids = random_ids(60, seed=2, end=True)
    trie = ToolTrie.build(ids, end_token=END, vocab_rows=VOCAB)
    found = ranked(model, trie, PROMPTS, beams=beams, keep=beams, normalize=normalize)
    for row, prompt in enumerate(PROMPTS):
        expected = Reference(model, prompt, [(*tokens, END) for tokens in ids], normalize).beams(beams)
        assert found.tools_bk[row].tolist() == [tool for _, tool in expected]
        np.testing.assert_allclose(found.scores_bk[row], [score for score, _ in expected], atol=1e-4)


@pytest.mark.parametrize("normalize", NORMALIZE)
def test_subsets(model: Any, normalize: str) -> None:
    """Each row its own: some tools, one, none."""
    ids = random_ids(23, seed=3, end=True)
    trie = ToolTrie.build(ids, end_token=END, vocab_rows=VOCAB)
    allowed = np.zeros((3, 23), bool)
    allowed[0, [2, 3, 11, 17]] = True
    allowed[1, 5] = True
    found = ranked(model, trie, PROMPTS, allowed_bt=allowed, beams=8, keep=6, normalize=normalize)
    assert found.count_b.tolist() == [4, 1, 0]
    for row in (0, 1):
        few = np.flatnonzero(allowed[row])
        every = [(*ids[tool], END) for tool in (few if normalize == "allowed" else range(23))]
        reference = Reference(model, PROMPTS[row], every, normalize)
        scores = {int(tool): reference.score((*ids[tool], END)) for tool in few}
        order = sorted(scores, key=lambda tool: -scores[tool])
        assert found.tools_bk[row, : len(few)].tolist() == order
        np.testing.assert_allclose(found.scores_bk[row, : len(few)], [scores[tool] for tool in order], atol=1e-4)
    assert (found.tools_bk[2] == -1).all() and (found.scores_bk[2] == -np.inf).all()


def test_atomic_ids(model: Any) -> None:
    """One token each: the softmax of the tool rows."""
    trie = ToolTrie.build([(100 + tool,) for tool in range(9)], end_token=None, vocab_rows=128)
    found = ranked(model, trie, PROMPTS, beams=9, keep=4, normalize="allowed")
    for row, prompt in enumerate(PROMPTS):
        last = logits(model, [prompt])[0, -1, 100:109].astype(np.float64)
        expected = last - np.log(np.exp(last).sum())
        order = np.argsort(-expected)[:4]
        assert found.tools_bk[row].tolist() == order.tolist()
        np.testing.assert_allclose(found.scores_bk[row], expected[order], atol=1e-4)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 1, 2)])
@pytest.mark.parametrize("normalize", ["full", "allowed"])
def test_eight_devices(sizes: tuple[int, int, int], normalize: str) -> None:
    config = dataclasses.replace(CONFIGS["llama"], num_tools=9)
    trie = ToolTrie.build(random_ids(40, seed=4, end=True), end_token=END, vocab_rows=VOCAB)
    prompts = [*PROMPTS, [7], [1, 2], [3] * 9, [90, 80], [60]]
    allowed = np.random.default_rng(0).random((8, 40)) < 0.5
    options = {"allowed_bt": allowed, "beams": 5, "keep": 5, "normalize": normalize}
    expected = ranked(random_model(config), trie, prompts, **options)
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], model=sizes[2]))
    with jax.set_mesh(mesh):
        found = ranked(random_model(config, mesh=mesh), trie, prompts, **options)
    np.testing.assert_array_equal(found.tools_bk, expected.tools_bk)
    np.testing.assert_allclose(found.scores_bk, expected.scores_bk, atol=1e-4)


def test_wrong_options(model: Any) -> None:
    trie = ToolTrie.build([(1,)], end_token=None, vocab_rows=VOCAB)
    with pytest.raises(ValueError, match="normalize is 'all', expected one of full, slice, allowed"):
        ranked(model, trie, PROMPTS, beams=2, keep=2, normalize="all")
    with pytest.raises(ValueError, match="keep is 3 and beams 2"):
        ranked(model, trie, PROMPTS, beams=2, keep=3)
