"""Tools by their names against every name scored by whole passes in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.config import MeshConfig
from jaxtool.decoding import BeamSearch
from jaxtool.parallel import make_mesh
from jaxtool.toolgen import NameRetriever, name_ids
from jaxtool.weights import load_tokenizer
from tests.decoding.beam_reference import Reference
from tests.tiny_models import CONFIG, TINY_LLAMA, random_model

NAMES = ["get_weather", "get_news", "get", "rent_boat", "convert <|end|>", "größe"]
PROMPTS = [[7, 5, 3], [100], list(range(40, 60)), [9, 9]]
WITH_TEXT = dataclasses.replace(CONFIG, vocab_size=264)
EXACT = BeamSearch(beams=8, keep=7)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY_LLAMA)


def retriever(tokenizer: Any, sizes: tuple[int, int, int] = (1, 1, 1), **options: Any) -> NameRetriever:
    count = sizes[0] * sizes[1] * sizes[2]
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], model=sizes[2]), jax.devices()[:count])
    model = random_model(WITH_TEXT, mesh=mesh)
    given = {"end_token": tokenizer.eos_token_id, "search": EXACT, "batch_size": 4}
    return NameRetriever(model, tokenizer, NAMES, mesh, **given | options)


def brute_force(tokenizer: Any, prompt: list[int], names: list[str], allowed: list[int]) -> dict[int, float]:
    paths = [(*ids, tokenizer.eos_token_id) for ids in name_ids(tokenizer, names)]
    reference = Reference(random_model(WITH_TEXT), prompt, paths, "full", allowed=allowed)
    return {tool: reference.score(tool) for tool in allowed}


@pytest.mark.parametrize("no_tool", [None, "none of them"])
def test_equals_brute_force(tokenizer: Any, no_tool: str | None) -> None:
    names = [*NAMES, no_tool] if no_tool else NAMES
    allowed = np.ones((4, len(NAMES)), bool)
    allowed[1, [0, 2, 3]], allowed[2, :-1] = False, False
    counts: list[int] = []
    found = retriever(tokenizer, no_tool=no_tool, read_tokens=64).rank(
        PROMPTS, 7, allowed_qt=allowed, progress=counts.append
    )
    assert counts == [2, 2]  # of the longest one 32 tokens are read
    for row, prompt in enumerate(PROMPTS):
        some = [*np.flatnonzero(allowed[row]).tolist(), *range(len(NAMES), len(names))]
        expected = brute_force(tokenizer, prompt, names, some)
        valid = found.valid_qk[row]
        assert valid.sum() == len(some)
        assert found.tools_qk[row, valid].tolist() == sorted(some, key=lambda tool: -expected[tool])
        np.testing.assert_allclose(
            found.log_probs_qk[row, valid], sorted(expected.values(), reverse=True), atol=1e-4, rtol=1e-5
        )


def test_eight_devices(tokenizer: Any) -> None:
    expected = retriever(tokenizer).rank(PROMPTS, 5)
    found = retriever(tokenizer, (2, 2, 2)).rank(PROMPTS, 5)
    np.testing.assert_array_equal(found.tools_qk, expected.tools_qk)
    np.testing.assert_allclose(found.log_probs_qk, expected.log_probs_qk, atol=1e-4)


def test_names_that_the_tokenizer_does_not_give_back(tokenizer: Any) -> None:
    class Lossy:
        def __call__(self, texts: list[str], **options: Any) -> Any:
            return tokenizer([text.lower() for text in texts], **options)

        def decode(self, *given: Any, **options: Any) -> Any:
            return tokenizer.decode(*given, **options)

    assert len(name_ids(Lossy(), ["a", "b"])) == 2
    with pytest.raises(ValueError, match="tool 1, 'B': the tokenizer gives 'b' back, expected the name"):
        name_ids(Lossy(), ["a", "B"])
    with pytest.raises(ValueError, match="tools 0 and 2 have the same name 'a'"):
        name_ids(tokenizer, ["a", "b", "a"])
    with pytest.raises(ValueError, match="tool 1: its name is empty"):
        name_ids(tokenizer, ["a", ""])


def test_what_cannot_be_ranked(tokenizer: Any) -> None:
    made = retriever(tokenizer)
    for k in (0, 8):
        with pytest.raises(ValueError, match=f"k is {k}, expected 1 to 7"):
            made.rank(PROMPTS, k)
    with pytest.raises(ValueError, match=r"allowed_qt is bool \(1, 6\), expected bool \(4, 6\)"):
        made.rank(PROMPTS, 1, allowed_qt=np.ones((1, 6), bool))
    with pytest.raises(ValueError, match="no_tool is 'get', the name of tool 2; expected a text that names none"):
        retriever(tokenizer, no_tool="get")
    with pytest.raises(ValueError, match="batch_size 0 is not a positive multiple"):
        retriever(tokenizer, batch_size=0)
    assert made.rank([], 3).tools_qk.shape == (0, 3)
