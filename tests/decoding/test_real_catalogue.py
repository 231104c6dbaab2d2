"""10,000 searches over the 46,985 names of ToolBench in every kind of ids: no result that isn't a tool.

The names are no part of the repository: JAXTOOL_TOOLBENCH_NAMES is the file with one name a line. One layer with random
weights stands for the model, whose logits are as good as any.
"""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.data import smollm2
from jaxtool.decoding import BeamSearch, DecodeModel, ToolTrie, TrieHead, decode_model, prefill, rank_tools
from jaxtool.weights import load_tokenizer
from tests.tiny_models import CONFIG, log_probs, logits, random_model

ROOT = Path(__file__).parents[2]
NAMES = Path(os.environ.get("JAXTOOL_TOOLBENCH_NAMES", ROOT.parent / "shared/data/tool_catalogs/toolbench_tokens.txt"))
TOOLS = 46_985
# Searches of each kind of ids: 2,000, a quarter of them among a random half or among three tools of all.
SEARCHES = {"full": 500, "slice": 500, "allowed": 1000}
ROWS = 50

pytestmark = [
    pytest.mark.slow,
    pytest.mark.assets,
    pytest.mark.skipif(not NAMES.is_file(), reason=f"ToolBench's names are not at {NAMES}"),
]


@pytest.fixture(autouse=True)
def quick_compilation() -> None:
    """Not here: what is compiled runs long."""


def names() -> list[str]:
    found = NAMES.read_text(encoding="utf-8").splitlines()
    assert len(found) == len(set(found)) == TOOLS
    return found


def ids_of(kind: str) -> tuple[list[tuple[int, ...]], int | None, int]:
    """The id of each tool, END, and the size of the vocabulary."""
    rng = np.random.default_rng(0)
    if kind == "atomic":
        return [(8 + tool,) for tool in range(TOOLS)], None, 8 + TOOLS
    if kind == "names":
        tokenizer = load_tokenizer(smollm2())
        tokens = tokenizer(names(), add_special_tokens=False)["input_ids"]
        assert tokenizer.batch_decode(tokens[:100]) == names()[:100]
        return [tuple(some) for some in tokens], tokenizer.eos_token_id, len(tokenizer)
    if kind == "digits":
        return [tuple(map(int, f"{tool:05d}")) for tool in range(TOOLS)], None, 16
    if kind == "16^4 clusters":
        codes = rng.permutation(16**4)[:TOOLS]
        return [tuple(16 * level + int(code >> 12 - 4 * level) % 16 for level in range(4)) for code in codes], None, 64
    assert kind == "256 x 256 x index"
    shares = rng.permutation(1 / np.arange(20, 276))
    first, second = rng.choice(256, size=(2, TOOLS), p=shares / shares.sum())
    seen: dict[tuple[int, int], int] = {}
    ids = []
    for pair in zip(first.tolist(), second.tolist(), strict=True):
        seen[pair] = seen.get(pair, -1) + 1
        ids.append((pair[0], 256 + pair[1], 512 + seen[pair]))
    return ids, None, 512 + max(seen.values()) + 1


def true_score(
    model: Any, prompt: list[int], ids: list[tuple[int, ...]], path: tuple[int, ...], normalize: str
) -> float:
    """From one whole pass and, for each token, a look at all ids."""
    tokens = [[*prompt, *path] + [0] * (96 - len(prompt) - len(path))]
    if normalize == "full":
        rows = log_probs(model, tokens)[0, len(prompt) - 1 :]
        return sum(rows[place, token] for place, token in enumerate(path))
    rows = logits(model, tokens)[0, len(prompt) - 1 :].astype(np.float64)
    total = 0.0
    for place, token in enumerate(path):
        prefix = path[:place] if normalize == "allowed" else ()
        columns = sorted({other[place] for other in ids if len(other) > place and other[: len(prefix)] == prefix})
        row = rows[place, columns]
        total += rows[place, token] - row.max() - np.log(np.exp(row - row.max()).sum())
    return total


def subset(rng: np.random.Generator, number: int) -> np.ndarray | None:
    """Every eighth batch a random half for each row, every eighth three tools."""
    if number % 8 == 3:
        return rng.random((ROWS, TOOLS)) < 0.5
    if number % 8 == 7:
        allowed = np.zeros((ROWS, TOOLS), bool)
        for row in allowed:
            row[rng.choice(TOOLS, size=3, replace=False)] = True
        return allowed
    return None


@pytest.mark.parametrize("kind", ["atomic", "names", "digits", "16^4 clusters", "256 x 256 x index"])
def test_no_search_names_what_is_no_tool(kind: str) -> None:
    ids, end, vocab = ids_of(kind)
    start = time.perf_counter()
    trie = jax.device_put(ToolTrie.build(ids, end_token=end, vocab_rows=vocab))
    print(f"\n{kind}: trie of {trie.num_nodes:,} nodes in {time.perf_counter() - start:.1f} s")
    config = dataclasses.replace(CONFIG, vocab_size=vocab, num_hidden_layers=1)
    model = random_model(config)
    made, rng = decode_model(model), np.random.default_rng(1)
    paths = ids if end is None else [(*tokens, end) for tokens in ids]
    for normalize, searches in SEARCHES.items():
        search = BeamSearch(beams=5, keep=5, normalize=normalize)
        head = TrieHead.build(made, trie, normalize)
        seconds, passes = [], 0
        for number in range(searches // ROWS):
            prompts = rng.integers(vocab, size=(ROWS, 8)).astype(np.int32)
            allowed = subset(rng, number)
            begin = time.perf_counter()
            passes += check(made, trie, prompts, search, allowed, head)
            seconds.append(time.perf_counter() - begin)
        # Against whole passes: the best tools of one row of the last batch.
        tools, scores = searched(made, trie, prompts[:1], search, None, head)
        for tool, score in zip(tools[0].tolist(), scores[0], strict=True):
            truth = true_score(model, prompts[0].tolist(), paths, paths[tool], normalize)
            assert score == pytest.approx(truth, rel=1e-4, abs=1e-3)
        print(
            f"{kind}, {normalize}: {searches:,} searches, {np.median(seconds) / ROWS * 1e3:.2f} ms each (median batch "
            f"of {ROWS}), {sum(seconds):.0f} s with compilation, {passes / len(seconds):.1f} passes"
        )


def searched(
    made: DecodeModel,
    trie: ToolTrie,
    prompts: np.ndarray,
    search: BeamSearch,
    allowed: np.ndarray | None,
    head: TrieHead,
) -> tuple[np.ndarray, np.ndarray]:
    hidden_bd, cache = prefill(made, prompts, np.full(len(prompts), prompts.shape[1], np.int32))
    found = rank_tools(made, trie, cache, hidden_bd, search, allowed, head=head)
    return np.asarray(found.tools_bk), np.asarray(found.scores_bk)


def check(
    made: DecodeModel,
    trie: ToolTrie,
    prompts: np.ndarray,
    search: BeamSearch,
    allowed: np.ndarray | None,
    head: TrieHead,
) -> int:
    """Searches for each prompt; returns the number of passes."""
    hidden_bd, cache = prefill(made, prompts, np.full(len(prompts), prompts.shape[1], np.int32))
    found = rank_tools(made, trie, cache, hidden_bd, search, allowed, head=head)
    tools, scores, count = map(np.asarray, (found.tools_bk, found.scores_bk, found.count_b))
    expected = np.full(ROWS, search.keep) if allowed is None else np.minimum(allowed.sum(axis=1), search.keep)
    np.testing.assert_array_equal(count, expected)
    for row in range(ROWS):
        some = tools[row, : count[row]]
        assert len(set(some.tolist())) == count[row] and some.min() >= 0 and some.max() < TOOLS
        assert allowed is None or allowed[row, some].all()
        assert np.isfinite(scores[row, : count[row]]).all() and (np.diff(scores[row, : count[row]]) <= 0).all()
        assert (tools[row, count[row] :] == -1).all()
    return int(found.passes)
