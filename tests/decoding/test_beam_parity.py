"""The search of `BeamSearch.hf_parity` against constrained beam search of transformers: tools, order and scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxtool.decoding import BeamSearch, ToolTrie
from tests.decoding.beam_reference import random_ids, ranked
from tests.models.torch_models import one_thread, reference_of, torch
from tests.tiny_models import load_model

pytestmark = pytest.mark.torch

EOS = 7
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [311, 40], [200, 100, 300, 250, 5]]


@dataclass(frozen=True)
class Pair:
    """A model in both libraries."""

    reference: Any
    model: Any


@pytest.fixture(scope="module", params=["llama-3", "gptj"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    with one_thread():
        reference = reference_of(request.param, folder)
        yield Pair(reference=reference, model=load_model(folder))


def catalogue(name: str) -> list[tuple[int, ...]]:
    """Ids over a few tokens, so that beams meet; some begin others."""
    if name == "atomic":
        return [(token,) for token in range(20, 60)]
    ids = random_ids(60, seed=2, end=True, tokens=5, longest=6)
    return [tuple(10 * token + 11 for token in tokens) for tokens in ids]


def of_transformers(
    reference: Any, prompt: list[int], ids: list[tuple[int, ...]], beams: int, exponent: float
) -> list[tuple[int, float]]:
    """Tools and scores, in the order in which transformers returns them."""
    after: dict[tuple[int, ...], set[int]] = {}
    for full in [(*tokens, EOS) for tokens in ids]:
        for place in range(len(full)):
            after.setdefault(full[:place], set()).add(full[place])

    def may_follow(_: int, sequence: Any) -> list[int]:
        # Where a beam has left the catalogue (with a score of minus infinity) transformers wants a token all the same.
        return sorted(after.get(tuple(sequence.tolist()[len(prompt) :]), {EOS}))

    tokens = torch.tensor([prompt])
    with torch.no_grad():
        found = reference.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            num_beams=beams,
            num_return_sequences=beams,
            prefix_allowed_tokens_fn=may_follow,
            early_stopping="never",
            length_penalty=exponent,
            max_new_tokens=16,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
    result = []
    for sequence, score in zip(found.sequences.tolist(), found.sequences_scores.tolist(), strict=True):
        answer = sequence[len(prompt) :]
        result.append((ids.index(tuple(answer[: answer.index(EOS)])), score))
    return result


@pytest.mark.parametrize(("name", "beams"), [("atomic", 5), ("mixed", 2), ("mixed", 5), ("mixed", 12)])
def test_equals_transformers(pair: Pair, name: str, beams: int) -> None:
    ids = catalogue(name)
    trie = ToolTrie.build(ids, end_token=EOS, vocab_rows=323)
    found = ranked(pair.model, trie, PROMPTS, BeamSearch.hf_parity(beams=beams, keep=beams))
    for row, prompt in enumerate(PROMPTS):
        expected = of_transformers(pair.reference, prompt, ids, beams, exponent=1.0)
        assert found.tools_bk[row].tolist() == [tool for tool, _ in expected]
        np.testing.assert_allclose(found.scores_bk[row], [score for _, score in expected], atol=1e-4)


def test_one_pool_is_another_search(pair: Pair) -> None:
    """What the comparison rests on: in one pool finished beams take the places of beams that would go on."""
    ids = catalogue("mixed")
    trie = ToolTrie.build(ids, end_token=EOS, vocab_rows=323)
    two = ranked(pair.model, trie, PROMPTS, BeamSearch.hf_parity(beams=5, keep=5))
    one = ranked(pair.model, trie, PROMPTS, dataclasses.replace(two.search, finished_pool="single"))
    assert two.tools_bk.tolist() != one.tools_bk.tolist()
