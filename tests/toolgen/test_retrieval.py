"""Retrieval against brute force: each prompt alone, a float64 softmax over tool columns, a stable sort."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh

from jaxtool.config import MeshConfig
from jaxtool.data import ChatPrompts
from jaxtool.models import Llama
from jaxtool.parallel import make_mesh
from jaxtool.toolgen import Retrieved, ToolRetriever
from jaxtool.toolgen import retrieval as retrieval_module
from jaxtool.weights import load_tokenizer
from tests.tiny_models import CONFIG, GPTJ_CONFIG, TINY_LLAMA, logits, random_model

V, TOOLS = 264, 11
WITH_TOOLS = dataclasses.replace(CONFIG, vocab_size=V, num_tools=TOOLS)

# Three lengths, so that brute force compiles three programs; a row of 64 tokens holds one to four of the prompts.
TEXTS = [letter * length for length in (30, 3, 12) for letter in "abcdefg"]


def prompts(max_length: int = 200) -> ChatPrompts:
    return ChatPrompts(load_tokenizer(TINY_LLAMA), system_prompt="", max_length=max_length)


def mesh_of(data: int, fsdp: int, model: int) -> Mesh:
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, model=model), jax.devices()[: data * fsdp * model])


def brute_force(model: Llama, texts: list[str], k: int, allowed: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Ids [Q, k] and log-probabilities [Q, k] among `allowed`; -1 and -inf behind the last."""
    tools = np.full((len(texts), k), -1)
    log_probs = np.full((len(texts), k), -np.inf)
    for row, text in enumerate(texts):
        columns = logits(model, [prompts().prompt(text).ids])[0, -1, V : V + TOOLS].astype(np.float64)
        scores = {tool: columns[tool] for tool in sorted(allowed)}
        norm = np.log(sum(np.exp(score) for score in scores.values()))
        ranked = sorted(scores, key=lambda tool: -scores[tool])[:k]  # stable: ties stay in order of id
        tools[row, : len(ranked)] = ranked
        log_probs[row, : len(ranked)] = [scores[tool] - norm for tool in ranked]
    return tools, log_probs


def assert_equals(found: Retrieved, tools: np.ndarray, log_probs: np.ndarray) -> None:
    np.testing.assert_array_equal(found.tools_qk, tools)
    np.testing.assert_array_equal(found.valid_qk, tools >= 0)
    np.testing.assert_allclose(found.log_probs_qk, log_probs, atol=4e-5)
    assert (found.tools_qk.dtype, found.log_probs_qk.dtype, found.valid_qk.dtype) == (np.int32, np.float32, bool)


@pytest.fixture(scope="module")
def model() -> Llama:
    return random_model(WITH_TOOLS)


@pytest.fixture(scope="module")
def on_mesh() -> Llama:
    """The same on a mesh of one device."""
    return random_model(WITH_TOOLS, mesh=mesh_of(1, 1, 1))


@pytest.fixture(scope="module")
def retriever(on_mesh: Llama) -> ToolRetriever:
    return ToolRetriever(on_mesh, prompts(), mesh_of(1, 1, 1), batch_size=4)


@pytest.mark.parametrize("k", [1, 5, TOOLS, TOOLS + 4])
def test_equals_brute_force(model: Llama, retriever: ToolRetriever, k: int) -> None:
    found = retriever.retrieve(TEXTS, k)
    assert_equals(found, *brute_force(model, TEXTS, k, list(range(TOOLS))))
    assert found.cut == 0
    if k > TOOLS:
        assert not found.valid_qk[:, TOOLS:].any() and (found.tools_qk[:, TOOLS:] == -1).all()
        np.testing.assert_allclose(np.exp(found.log_probs_qk.astype(np.float64)).sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("allowed", [[6], [2, 9], [10, 0, 3, 8, 1, 3]])
@pytest.mark.parametrize("kind", [list, set, tuple])
def test_allowed_subsets(
    model: Llama, retriever: ToolRetriever, allowed: list[int], kind: Callable[[list[int]], Any]
) -> None:
    found = retriever.retrieve(TEXTS[:9], 5, allowed=kind(allowed))
    assert_equals(found, *brute_force(model, TEXTS[:9], 5, sorted(set(allowed))))


def test_each_prompt_has_its_own_subset(model: Llama, retriever: ToolRetriever) -> None:
    """Of prompts that share a prefill, in another order than that of the call; the last may have all tools."""
    texts = TEXTS[:10]
    ids = [prompts().prompt(text).ids for text in texts]
    rng = np.random.default_rng(3)
    allowed = rng.random((len(texts), TOOLS)) < 0.4
    allowed[np.arange(len(texts)), rng.integers(TOOLS, size=len(texts))] = True
    allowed[-1] = True
    found = retriever.rank(ids, 5, allowed_qt=allowed)
    each = [
        brute_force(model, [text], 5, np.flatnonzero(some).tolist()) for text, some in zip(texts, allowed, strict=True)
    ]
    assert_equals(found, *(np.concatenate(parts) for parts in zip(*each, strict=True)))
    allowed[4] = False
    with pytest.raises(ValueError, match="prompt 4: no tool is allowed"):
        retriever.rank(ids, 5, allowed_qt=allowed)
    for wrong in (allowed[:3], allowed[:, :4], allowed.astype(int)):
        with pytest.raises(ValueError, match=r"allowed_qt is .*, expected bool \(10, 11\)"):
            retriever.rank(ids, 5, allowed_qt=wrong)


def test_ties_break_by_id(on_mesh: Llama, retriever: ToolRetriever) -> None:
    """Tools with the same row in the head are equally probable, whatever the query."""
    head = np.array(on_mesh.head_vd[...])
    for tool in (8, 2, 5):
        head[V + tool] = head[V + 8]
    tied = random_model(WITH_TOOLS, mesh=retriever.mesh)
    tied.head_vd[...] = jax.device_put(head, tied.head_vd[...].sharding)
    found = ToolRetriever(tied, prompts(), retriever.mesh, batch_size=4).retrieve(TEXTS, TOOLS)
    for ranked, scores in zip(found.tools_qk.tolist(), found.log_probs_qk, strict=True):
        place = ranked.index(2)
        assert ranked[place : place + 3] == [2, 5, 8]
        assert scores[place] == scores[place + 1] == scores[place + 2]
    alike = random_model(WITH_TOOLS, mesh=retriever.mesh)
    alike.head_vd[...] = 0 * alike.head_vd[...]
    found = ToolRetriever(alike, prompts(), retriever.mesh, batch_size=4).retrieve(TEXTS[:2], 4, allowed={9, 3, 7, 4})
    assert found.tools_qk.tolist() == [[3, 4, 7, 9]] * 2
    np.testing.assert_allclose(found.log_probs_qk, np.log(1 / 4), rtol=1e-6)


@pytest.mark.parametrize("pair_cost", [0, 10**6])
def test_packed_prompts_do_not_see_one_another(
    model: Llama, retriever: ToolRetriever, pair_cost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where pairs of tokens cost nothing rows are long and full, where they cost much rows are short."""
    monkeypatch.setattr(retrieval_module, "_PAIR_COST", pair_cost)
    texts = ["z" * 30, *(letter * 15 for letter in "abcdefgh")]  # rows of 48 hold one each, rows of 96 three
    ids = [prompts().prompt(text).ids for text in texts]
    shared = len(prompts().beginning)
    assert shared > 5 and all(prompt[:shared] == prompts().beginning for prompt in ids)
    prefills = retriever._prefills([len(prompt) - shared for prompt in ids], shared)
    (row_length,) = {prefill.shape[1] for prefill in prefills}
    assert row_length == 48 if pair_cost else row_length > 48
    assert pair_cost or any(len(row) > 1 for prefill in prefills for row in prefill.rows)
    found = retriever.retrieve(texts, TOOLS)
    tools, log_probs = brute_force(model, texts, TOOLS, list(range(TOOLS)))
    np.testing.assert_array_equal(found.tools_qk, tools)
    np.testing.assert_allclose(found.log_probs_qk, log_probs, atol=1e-5)


@pytest.mark.parametrize("changes", [{"LONGEST_SHARING": 8}, {}])
def test_long_prompts_are_read_whole(
    model: Llama, on_mesh: Llama, changes: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same tools and probabilities as behind a beginning that was read before."""
    for name, value in changes.items():
        monkeypatch.setattr(retrieval_module, name, value)
    longest = prompts(800)
    texts = ["ab" * (4 if changes else 300), "c" * 12]
    found = ToolRetriever(on_mesh, longest, mesh_of(1, 1, 1), batch_size=2).retrieve(texts, 5)
    assert found.cut == 0
    for row, text in enumerate(texts):
        columns = logits(model, [longest.prompt(text).ids])[0, -1, V : V + TOOLS].astype(np.float64)
        np.testing.assert_array_equal(found.tools_qk[row], np.argsort(-columns, kind="stable")[:5])
        expected = np.sort(columns - np.log(np.exp(columns).sum()))[::-1][:5]
        np.testing.assert_allclose(found.log_probs_qk[row], expected, atol=2e-5)


def test_the_layers_can_be_given_up(retriever: ToolRetriever) -> None:
    given = random_model(WITH_TOOLS, mesh=retriever.mesh)
    found = ToolRetriever(given, prompts(), retriever.mesh, batch_size=4, donate=True).retrieve(TEXTS[:3], 3)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given.blocks))
    np.testing.assert_array_equal(found.tools_qk, retriever.retrieve(TEXTS[:3], 3).tools_qk)


@given(st.lists(st.integers(1, 64), max_size=60), st.sampled_from([64, 128, 256]))
def test_every_prompt_lies_in_one_row(lengths: list[int], row_length: int) -> None:
    rows = retrieval_module._packed(lengths, row_length)
    assert sorted(number for row in rows for number in row) == list(range(len(lengths)))
    sizes = [[max(8, lengths[number]) for number in row] for row in rows]
    assert all(0 < sum(row) <= row_length for row in sizes)
    # Of two rows that are at most half full, one would have taken the other's prompts.
    assert sum(2 * sum(row) <= row_length for row in sizes) <= 1


@pytest.mark.parametrize("length", [*range(50, 72), *range(122, 135)])
def test_one_prompt_of_any_length_finds_its_place(model: Llama, retriever: ToolRetriever, length: int) -> None:
    """Among them those that fill a row to its last token."""
    empty = len(prompts().prompt("a").ids) - 1
    text = "a" * (length - empty)
    assert len(prompts().prompt(text).ids) == length
    assert_equals(retriever.retrieve([text], 5), *brute_force(model, [text], 5, list(range(TOOLS))))


@pytest.mark.parametrize("texts", [["a"], ["ab", "ab"], ["ab", "abc", "b"]])
def test_calls_whose_prompts_are_nearly_alike(model: Llama, retriever: ToolRetriever, texts: list[str]) -> None:
    assert_equals(retriever.retrieve(texts, 5), *brute_force(model, texts, 5, list(range(TOOLS))))


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60), st.sampled_from([4, 12, 15, 16]), st.integers(0, 40))
def test_prefills_keep_to_their_bounds(lengths: list[int], batch_size: int, shared: int) -> None:
    retriever = ToolRetriever(random_model(WITH_TOOLS), prompts(), mesh_of(1, 1, 1), batch_size=batch_size)
    prefills = retriever._prefills(lengths, shared)
    assert sorted(number for prefill in prefills for row in prefill.rows for number in row) == list(range(len(lengths)))
    power = next(power for power in (32, 48, 64, 96, 128, 192, 256) if power >= max(lengths))
    for prefill in prefills:
        rows, tokens = prefill.shape
        assert rows * tokens <= batch_size * power
        assert all(sum(max(8, lengths[number]) for number in row) <= tokens for row in prefill.rows)
        assert len(prefill.rows) <= rows and tokens in (power, 2 * power, 4 * power)
    assert len({prefill.shape for prefill in prefills[:-1]}) <= 1


@pytest.mark.parametrize("batch_size", [1, 16, 40])
def test_batch_size_does_not_matter(on_mesh: Llama, retriever: ToolRetriever, batch_size: int) -> None:
    expected = retriever.retrieve(TEXTS, 5)
    other = ToolRetriever(on_mesh, retriever.prompts, retriever.mesh, batch_size=batch_size)
    found = other.retrieve(TEXTS, 5)
    assert_equals(found, expected.tools_qk, expected.log_probs_qk)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1)])
def test_eight_devices_equal_one(retriever: ToolRetriever, sizes: tuple[int, int, int]) -> None:
    mesh = mesh_of(*sizes)
    sharded = ToolRetriever(random_model(WITH_TOOLS, mesh=mesh), prompts(), mesh, batch_size=8)
    for allowed in (None, [1, 4, 5]):
        expected = retriever.retrieve(TEXTS, 5, allowed=allowed)
        assert_equals(sharded.retrieve(TEXTS, 5, allowed=allowed), expected.tools_qk, expected.log_probs_qk)
    ids = [prompts().prompt(text).ids for text in TEXTS]
    mask_qt = np.arange(TOOLS) % (2 + np.arange(len(TEXTS))[:, None] % 3) == 0
    expected = retriever.rank(ids, 5, allowed_qt=mask_qt)
    assert_equals(sharded.rank(ids, 5, allowed_qt=mask_qt), expected.tools_qk, expected.log_probs_qk)


def test_tied_models(retriever: ToolRetriever) -> None:
    tied = random_model(dataclasses.replace(WITH_TOOLS, tie_word_embeddings=True))
    on_mesh = random_model(tied.config, mesh=retriever.mesh)
    found = ToolRetriever(on_mesh, prompts(), retriever.mesh, batch_size=4).retrieve(TEXTS[:7], 3)
    assert_equals(found, *brute_force(tied, TEXTS[:7], 3, list(range(TOOLS))))


def test_models_with_a_biased_head(retriever: ToolRetriever) -> None:
    config = dataclasses.replace(GPTJ_CONFIG, vocab_size=V, num_tools=TOOLS)
    on_mesh = random_model(config, mesh=retriever.mesh)
    found = ToolRetriever(on_mesh, prompts(), retriever.mesh, batch_size=4).retrieve(TEXTS[:7], 3)
    assert_equals(found, *brute_force(random_model(config), TEXTS[:7], 3, list(range(TOOLS))))


def test_bfloat16_is_close(retriever: ToolRetriever) -> None:
    half = random_model(dataclasses.replace(WITH_TOOLS, compute_dtype="bfloat16"), mesh=retriever.mesh)
    found = ToolRetriever(half, prompts(), retriever.mesh, batch_size=4).retrieve(TEXTS[:5], TOOLS)
    expected = retriever.retrieve(TEXTS[:5], TOOLS)
    for row in range(5):  # 8 bits of mantissa
        places = np.argsort(found.tools_qk[row]), np.argsort(expected.tools_qk[row])
        np.testing.assert_allclose(
            found.log_probs_qk[row][places[0]], expected.log_probs_qk[row][places[1]], atol=0.1, rtol=0.05
        )


def test_cut_queries_are_counted(on_mesh: Llama, retriever: ToolRetriever) -> None:
    template = len(prompts().prompt("x").ids) - 1
    short = ToolRetriever(on_mesh, prompts(template + 12), retriever.mesh, batch_size=4)
    found = short.retrieve(["a" * 12, "a" * 13, "b" * 30, "c"], 5)
    assert found.cut == 2
    # What is left of a cut query is its beginning.
    np.testing.assert_array_equal(found.tools_qk[0], found.tools_qk[1])
    np.testing.assert_array_equal(found.tools_qk[0], retriever.retrieve(["a" * 12], 5).tools_qk[0])


def test_progress_counts_queries(retriever: ToolRetriever) -> None:
    counts: list[int] = []
    retriever.retrieve([letter * 40 for letter in "abcdefghi"], 5, progress=counts.append)
    assert len(counts) > 1 and sum(counts) == 9


def test_no_queries(retriever: ToolRetriever) -> None:
    found = retriever.retrieve([], 3)
    assert found.tools_qk.shape == found.log_probs_qk.shape == found.valid_qk.shape == (0, 3)
    assert found.cut == 0


def test_few_programs_serve_all_queries(retriever: ToolRetriever) -> None:
    """Queries of 60 lengths, in calls of 1 to 60 of them: rows of 64, 128 or 256 tokens; 4, 2 or 1 of them."""
    texts = ["z" * length for length in range(1, 61)]
    compiled = (retrieval_module._hidden_at, retrieval_module._top_tools)
    for function in compiled:
        function.clear_cache()
    shapes = set()
    for count in range(1, 61):
        ids = [prompts().prompt(text).ids for text in texts[-count:]]
        shared = len(prompts().beginning)
        shapes |= {prefill.shape for prefill in retriever._prefills([len(prompt) - shared for prompt in ids], shared)}
    assert len(shapes) <= 6, shapes  # the longest prompt is in all: 4, 2, 1 rows, half as many of twice the length ...
    for count in (60, 3, 2, 1):
        retriever.retrieve(texts[-count:], 5)
    before = [function._cache_size() for function in compiled]
    assert before[0] <= 6 and before[1] <= 3  # rankings of 4, 2 or 1 queries
    # Another subset or order compiles nothing.
    retriever.retrieve(texts[::-1], 5, allowed=[1, 2])
    assert [function._cache_size() for function in compiled] == before


def test_few_queries_take_a_small_prefill(model: Llama, on_mesh: Llama, retriever: ToolRetriever) -> None:
    many = ToolRetriever(on_mesh, retriever.prompts, retriever.mesh, batch_size=65_536)
    assert [prefill.shape for prefill in many._prefills([1], 39)] == [(1, 32)]
    assert_equals(many.retrieve(TEXTS[:2], 3), *brute_force(model, TEXTS[:2], 3, list(range(TOOLS))))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"k": 0}, "k is 0, expected at least 1"),
        ({"allowed": []}, "allowed tools must be a non-empty set of ids from 0 to 10"),
        ({"allowed": [3, 11]}, "ids from 0 to 10"),
        ({"allowed": [-1]}, "ids from 0 to 10"),
        ({"texts": ["a", "b", "  "]}, "query 2: the query is empty"),
    ],
)
def test_requests_that_cannot_be_served(retriever: ToolRetriever, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        retriever.retrieve(**({"texts": ["a"], "k": 5} | arguments))


def test_retrievers_that_cannot_be() -> None:
    mesh = mesh_of(2, 2, 2)
    with pytest.raises(ValueError, match="the model has no tool rows"):
        ToolRetriever(random_model(), prompts(), mesh)
    model = random_model(WITH_TOOLS)
    for batch_size in (0, -4, 6):
        with pytest.raises(ValueError, match=f"batch_size {batch_size} is not a positive multiple of the 4 devices"):
            ToolRetriever(model, prompts(), mesh, batch_size=batch_size)
