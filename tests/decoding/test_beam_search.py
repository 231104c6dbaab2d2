"""Beam search over random tries against scores of every tool by whole passes, and against a plain beam search."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtool.config import MeshConfig
from jaxtool.decoding import BeamSearch, ToolTrie, TrieHead, decode_model, padded, prefill, rank_tools
from jaxtool.models import parameters, with_parameters
from jaxtool.parallel import make_mesh
from tests.decoding.beam_reference import Path, Reference, assert_ranking, random_ids, ranked
from tests.tiny_models import CONFIG, CONFIGS, logits, random_model

END = 95
VOCAB = 100
NORMALIZE = ("full", "slice", "allowed")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [5, 3], [58, 97, 93]]
# Beginnings of one another, the empty id, a long id of its own, a run in front of END and a child.
PREFIX_IDS: list[Path] = [(), (1,), (1, 2), (1, 2, 3, 4, 5), (2, 2, 2, 2, 2, 2, 2), (3, 1, 1, 1), (3, 1, 1, 1, 4), (4,)]


@pytest.fixture(scope="module")
def model() -> Any:
    return random_model(dataclasses.replace(CONFIGS["llama"], num_tools=9))


@pytest.fixture(scope="module")
def biased_model() -> Any:
    return random_model(dataclasses.replace(CONFIGS["gptj"], num_tools=9))


def with_end(ids: list[Path]) -> list[Path]:
    return [(*tokens, END) for tokens in ids]


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize(("end", "chunk"), [(False, 1), (True, 4)])
def test_enough_beams_are_exact(normalize: str, end: bool, chunk: int, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue("model" if end else "biased_model")
    ids = random_ids(23, seed=1, end=end)
    trie = ToolTrie.build(ids, end_token=END if end else None, vocab_rows=VOCAB)
    search = BeamSearch(beams=30, keep=30, normalize=normalize, chunk=chunk)
    found = ranked(model, trie, PROMPTS, search)
    assert found.search == search
    for row, prompt in enumerate(PROMPTS):
        reference = Reference(model, prompt, with_end(ids) if end else ids, normalize)
        assert_ranking(found, row, reference.ranking())
        if normalize == "allowed":
            assert np.exp(found.scores_bk[row]).sum() == pytest.approx(1)


@pytest.mark.parametrize("normalize", NORMALIZE)
@pytest.mark.parametrize(("beams", "chunk"), [(1, 3), (2, 1), (5, 3)])
def test_few_beams_are_a_plain_beam_search(model: Any, normalize: str, beams: int, chunk: int) -> None:
    ids = random_ids(60, seed=2, end=True)
    trie = ToolTrie.build(ids, end_token=END, vocab_rows=VOCAB)
    search = BeamSearch(beams=beams, keep=beams, normalize=normalize, chunk=chunk)
    found = ranked(model, trie, PROMPTS, search)
    passes = []
    for row, prompt in enumerate(PROMPTS):
        expected, count = Reference(model, prompt, with_end(ids), normalize).beams(beams, chunk)
        assert_ranking(found, row, expected)
        passes.append(count)
    assert found.passes == max(passes)


@pytest.mark.parametrize("score_end", [False, True])
@pytest.mark.parametrize("normalize", NORMALIZE)
def test_ids_that_begin_others(model: Any, normalize: str, score_end: bool) -> None:
    """With the end scored and not; lengths count the tokens that are scored, of the id alone and not of the prompt."""
    trie = ToolTrie.build(PREFIX_IDS, end_token=END, vocab_rows=VOCAB)
    search = BeamSearch(beams=8, keep=8, normalize=normalize, score_end=score_end, length_exponent=0.7)
    found = ranked(model, trie, PROMPTS, search)
    for row, prompt in enumerate(PROMPTS):
        reference = Reference(model, prompt, with_end(PREFIX_IDS), normalize, end=None if score_end else END)
        assert_ranking(found, row, reference.ranking(exponent=0.7))


@pytest.mark.parametrize(("normalize", "chunk"), [("full", 4), ("slice", 3), ("allowed", 1), ("allowed", 4)])
def test_subsets(model: Any, normalize: str, chunk: int) -> None:
    """Each row its own: some tools, one, none. Their order among all others must not matter."""
    ids = random_ids(40, seed=3, end=True)
    trie = ToolTrie.build(ids, end_token=END, vocab_rows=VOCAB)
    last = [tool for tool, _ in Reference(model, PROMPTS[0], with_end(ids), normalize).ranking()[-4:]]
    allowed = np.zeros((3, 40), bool)
    allowed[0, last] = True
    allowed[1, 5] = True
    found = ranked(model, trie, PROMPTS, BeamSearch(beams=8, keep=6, normalize=normalize, chunk=chunk), allowed)
    for row, prompt in enumerate(PROMPTS):
        few = np.flatnonzero(allowed[row]).tolist()
        assert_ranking(found, row, Reference(model, prompt, with_end(ids), normalize, allowed=few).ranking())


@settings(max_examples=6)  # each compiles anew
@given(
    ids=st.lists(st.lists(st.integers(0, 3), max_size=6).map(tuple), min_size=1, max_size=16, unique=True),
    search=st.builds(
        BeamSearch,
        beams=st.integers(2, 20),
        keep=st.integers(1, 2),
        normalize=st.sampled_from(NORMALIZE),
        score_end=st.booleans(),
        chunk=st.integers(1, 5),
    ),
    data=st.data(),
)
def test_any_catalogue(ids: list[Path], search: BeamSearch, data: st.DataObject) -> None:
    model = random_model(dataclasses.replace(CONFIG, num_hidden_layers=1))
    some = data.draw(st.none() | st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
    trie = ToolTrie.build(ids, end_token=END, vocab_rows=VOCAB)
    found = ranked(model, trie, PROMPTS[:1], search, None if some is None else np.array([some]))
    few = [tool for tool in range(len(ids)) if some is None or some[tool]]
    end = None if search.score_end else END
    reference = Reference(model, PROMPTS[0], with_end(ids), search.normalize, end=end, allowed=few)
    expected = reference.beams(search.beams, search.chunk)[0] if few else []
    assert_ranking(found, 0, sorted(expected, key=lambda item: (-item[1], item[0])))


def test_probabilities_of_all_ids_sum_to_one() -> None:
    """Every sequence of three of the model's tokens is a tool."""
    ids = [(a, b, c) for a in range(6) for b in range(6) for c in range(6)]
    trie = ToolTrie.build(ids, end_token=None, vocab_rows=6)
    model = random_model(dataclasses.replace(CONFIG, vocab_size=6))
    prompts = [[1, 2, 3], [5]]
    found = ranked(model, trie, prompts, BeamSearch(beams=216, keep=216))
    np.testing.assert_allclose(np.exp(found.scores_bk.astype(np.float64)).sum(axis=1), 1, atol=1e-5)
    for row in found.tools_bk:
        assert sorted(row.tolist()) == list(range(216))


def test_a_row_does_not_depend_on_its_neighbours(model: Any) -> None:
    ids = random_ids(60, seed=2, end=True)
    trie = ToolTrie.build(ids, end_token=END, vocab_rows=VOCAB)
    search = BeamSearch(beams=4, keep=4)
    allowed = np.random.default_rng(5).random((3, 60)) < 0.4
    together = ranked(model, trie, PROMPTS, search, allowed)
    alone = ranked(model, trie, PROMPTS[1:2], search, allowed[1:2])
    assert together.tools_bk[1].tolist() == alone.tools_bk[0].tolist()
    np.testing.assert_allclose(together.scores_bk[1], alone.scores_bk[0], atol=1e-5)


def test_atomic_ids(model: Any) -> None:
    """One token each: the softmax of the tool rows, without a pass."""
    trie = ToolTrie.build([(100 + tool,) for tool in range(9)], end_token=None, vocab_rows=128)
    found = ranked(model, trie, PROMPTS, BeamSearch(beams=9, keep=4, normalize="allowed"))
    for row, prompt in enumerate(PROMPTS):
        last = logits(model, [prompt])[0, -1, 100:109].astype(np.float64)
        expected = last - np.log(np.exp(last).sum())
        assert_ranking(found, row, [(int(tool), expected[tool]) for tool in np.argsort(-expected)])
    assert found.passes == 0


def test_wide_levels(model: Any) -> None:
    """A root of two children, one of them with more than 256 of its own: steps of their own with other widths."""
    rng = np.random.default_rng(0)
    wide = random_model(dataclasses.replace(CONFIG, num_hidden_layers=1, num_tools=400))
    middle = rng.permutation(np.arange(100, 400))
    ids = [(1, int(token), *rng.integers(4, size=rng.integers(0, 4)).tolist()) for token in middle] + [(2, 5), (2, 6)]
    trie = ToolTrie.build(ids, end_token=END, vocab_rows=500)
    assert trie.level_children[:2] == (2, 300)
    for normalize in NORMALIZE:
        search = BeamSearch(beams=6, keep=6, normalize=normalize)
        found = ranked(wide, trie, PROMPTS[1:2], search)
        # Runs begin behind the wide level; under two beams and with unequal depths that is a search of its own.
        expected, _ = Reference(wide, PROMPTS[1], with_end(ids), normalize).beams(302)
        scores = dict(expected)
        assert len(set(found.tools_bk[0].tolist())) == 6
        for tool, score in zip(found.tools_bk[0].tolist(), found.scores_bk[0], strict=True):
            assert score == pytest.approx(scores[tool], abs=1e-4)
        best = max(scores, key=lambda tool: scores[tool])
        assert best in found.tools_bk[0]


def test_scores_far_from_zero(model: Any) -> None:
    """Sums of large log-probabilities keep their order: nothing stands in for minus infinity."""
    ids = random_ids(23, seed=1, end=True)
    trie = ToolTrie.build(ids, end_token=END, vocab_rows=VOCAB)
    steep = with_parameters(model, {**parameters(model), "head_vd": 1e6 * parameters(model)["head_vd"]})
    found = ranked(steep, trie, PROMPTS, BeamSearch(beams=23, keep=23))
    for row, prompt in enumerate(PROMPTS):
        expected = Reference(steep, prompt, with_end(ids), "full").ranking()
        assert expected[0][1] < -1e6 and found.count_b[row] == 23
        by_tool = dict(expected)
        scores = np.array([by_tool[tool] for tool in found.tools_bk[row].tolist()])
        np.testing.assert_allclose(found.scores_bk[row], scores, rtol=1e-4)
        assert len(set(found.tools_bk[row].tolist())) == 23


def test_ties_go_to_the_lower_id(model: Any) -> None:
    """A head of zeros: every choice is a tie. The first in the order of ids are kept, and come in that of tools."""
    ids = [(3, 1), (0, 2), (0, 1), (3, 0), (2, 2), (2, 1), (0, 0), (2, 0), (3, 2)]
    trie = ToolTrie.build(ids, end_token=None, vocab_rows=VOCAB)
    flat = with_parameters(model, {**parameters(model), "head_vd": 0 * parameters(model)["head_vd"]})
    for normalize in NORMALIZE:
        search = BeamSearch(beams=5, keep=5, normalize=normalize)
        found = ranked(flat, trie, PROMPTS, search)
        first = sorted(range(9), key=lambda tool: ids[tool])[:5]
        assert found.tools_bk.tolist() == [sorted(first)] * 3


def test_scores_are_float32_where_the_model_is_not() -> None:
    """In bfloat16 most rows would have ties among their best tools."""
    config = dataclasses.replace(CONFIG, num_tools=300, compute_dtype="bfloat16")
    model = random_model(config)
    trie = ToolTrie.build([(100 + tool,) for tool in range(300)], end_token=None, vocab_rows=400)
    made = decode_model(model)
    hidden_bd, cache = prefill(made, *padded(PROMPTS))
    hidden, head = np.asarray(hidden_bd, np.float64), np.asarray(made.outside.head_vd[...], np.float64)
    for normalize in NORMALIZE:
        found = rank_tools(made, trie, cache, hidden_bd, BeamSearch(beams=10, keep=10, normalize=normalize))
        assert found.scores_bk.dtype == np.float32
        for row in range(3):
            every = head[: 400 if normalize == "full" else None] @ hidden[row]
            tools = every[100:400]
            expected = tools - np.log(np.exp(every[:400] if normalize == "full" else tools).sum())
            order = np.argsort(-expected, kind="stable")[:10]
            assert np.asarray(found.tools_bk[row]).tolist() == order.tolist()
            np.testing.assert_allclose(found.scores_bk[row], expected[order], atol=1e-5)


def test_padded_rows_never_win(model: Any) -> None:
    """Ids of rows that stand for no token: under "full" they can't be reached, without it they are refused."""
    assert model.config.rows == 128 and model.config.num_tools == 9
    ids = [(1, 2), (1, 109), (120,), (3,)]
    trie = ToolTrie.build(ids, end_token=None, vocab_rows=128)
    found = ranked(model, trie, PROMPTS, BeamSearch(beams=4, keep=4))
    assert [sorted(row) for row in found.tools_bk.tolist()] == [[-1, -1, 0, 3]] * 3
    assert found.count_b.tolist() == [2] * 3
    for normalize in ("slice", "allowed"):
        with pytest.raises(
            ValueError, match=r"^2 tokens of tool ids are none that the model predicts, the first is 109"
        ):
            TrieHead.build(decode_model(model), trie, normalize)


@pytest.mark.parametrize(
    ("architecture", "sizes", "search"),
    [
        ("llama", (2, 2, 2), BeamSearch(beams=5, keep=5)),
        ("gptj", (4, 1, 2), BeamSearch(beams=5, keep=5, normalize="slice", finished_pool="two", length_exponent=1.0)),
        ("llama", (4, 1, 2), BeamSearch(beams=5, keep=5, normalize="allowed")),
        ("gptj", (2, 2, 2), BeamSearch(beams=5, keep=5, normalize="allowed", chunk=1)),
    ],
    ids=["full", "slice", "allowed", "allowed, no chunks"],
)
def test_eight_devices(architecture: str, sizes: tuple[int, int, int], search: BeamSearch) -> None:
    config = dataclasses.replace(CONFIGS[architecture], num_tools=9)
    trie = ToolTrie.build(random_ids(40, seed=4, end=True), end_token=END, vocab_rows=VOCAB)
    prompts = [*PROMPTS, [7], [1, 2], [3] * 9, [90, 80], [60]]
    allowed = np.random.default_rng(0).random((8, 40)) < 0.5
    expected = ranked(random_model(config), trie, prompts, search, allowed)
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], model=sizes[2]))
    with jax.set_mesh(mesh):
        found = ranked(random_model(config, mesh=mesh), trie, prompts, search, allowed)
    np.testing.assert_array_equal(found.tools_bk, expected.tools_bk)
    np.testing.assert_allclose(found.scores_bk, expected.scores_bk, atol=1e-4)
    assert found.passes == expected.passes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"normalize": "all"}, "normalize is 'all', expected one of full, slice, allowed"),
        ({"finished_pool": "one"}, "finished_pool is 'one', expected one of single, two"),
        ({"keep": 3}, "keep is 3 and beams 2, expected 1 <= keep <= beams"),
        ({"keep": 0}, "keep is 0 and beams 2, expected 1 <= keep <= beams"),
        ({"chunk": 0}, "chunk is 0, expected at least 1"),
        ({"length_exponent": -1.0}, "length_exponent is -1.0, expected a number from 0"),
        ({"length_exponent": float("nan")}, "length_exponent is nan, expected a number from 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BeamSearch(**{"beams": 2, "keep": 2, **options})


def test_wrong_arguments(model: Any) -> None:
    trie = ToolTrie.build([(1,), (2,)], end_token=None, vocab_rows=VOCAB)
    head = TrieHead.build(decode_model(model), trie, "slice")
    with pytest.raises(ValueError, match="head is made for normalize 'slice', the search has 'allowed'"):
        ranked(model, trie, PROMPTS, BeamSearch(beams=2, keep=2, normalize="allowed"), head=head)
    other = ToolTrie.build([(1,), (2, 3)], end_token=None, vocab_rows=VOCAB)
    with pytest.raises(ValueError, match="head is made for another trie"):
        ranked(model, other, PROMPTS, BeamSearch(beams=2, keep=2, normalize="slice"), head=head)
    with pytest.raises(ValueError, match="allowed_bt has 1 rows, expected 3"):
        ranked(model, trie, PROMPTS, BeamSearch(beams=2, keep=2), np.ones((1, 2), bool))
    with pytest.raises(ValueError, match=r"allowed has shape \(3, 3\) and type bool; expected bool \[B, 2\]"):
        ranked(model, trie, PROMPTS, BeamSearch(beams=2, keep=2), np.ones((3, 3), bool))
