"""ToolGen's samples: wording, golden ids, and the gradient that the soft target stands for.

Ids are worked out by hand from the tiny tokenizer: byte b is token 3 + b, 0 is BOS, 1 and 2 begin and end a turn.
Its merges (he, " t", " the", in, two line breaks) are avoided in the texts here, except where they are spelled out.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.data import DRAWN, Batch, ChatPrompts, LabelledQuery, PackedBatches, Sample
from jaxtool.models import parameters
from jaxtool.toolgen import document_text, memorization_samples, retrieval_samples
from jaxtool.tools import Tool, ToolCatalog, ToolDocument
from jaxtool.training import supervised_loss
from jaxtool.weights import load_tokenizer
from tests.tiny_models import TINY_LLAMA, random_model

BASE = 264  # text rows of the tiny model
BOS, START, END = 0, 1, 2


def in_bytes(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


# An empty system turn, a user turn around the text, and the head of the assistant's turn.
BEFORE = [BOS, START, *in_bytes("system\n"), END, *in_bytes("\n"), START, *in_bytes("user\n")]
BEHIND = [END, *in_bytes("\n"), START, *in_bytes("assistant\n")]


def prompts(max_length: int = 200) -> ChatPrompts:
    return ChatPrompts(load_tokenizer(TINY_LLAMA), system_prompt="", max_length=max_length)


HARBOR = Tool(
    name="Harbor Tides&&Next High Tide",
    collection="Harbor Tides",
    collection_description="Tide tables for small ports.",
    description="Gives time and height.",
)


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        (
            HARBOR,
            "Tool Name: Harbor Tides. Tool Description: Tide tables for small ports. "
            "Api Name: Next High Tide Api Description: Gives time and height.",
        ),
        (
            dataclasses.replace(HARBOR, description=" ", collection_description=""),
            "Tool Name: Harbor Tides. Tool Description: None. Api Name: Next High Tide Api Description: None.",
        ),
        # Names are opaque: only the collection in front and its separator are left out.
        (
            dataclasses.replace(HARBOR, name="Harbor Tides&&get&&Tide_v2>>"),
            "Tool Name: Harbor Tides. Tool Description: Tide tables for small ports. "
            "Api Name: get&&Tide_v2>> Api Description: Gives time and height.",
        ),
        (
            Tool(name="math.nextPrime", description="The next prime.\n"),
            "Api Name: math next Prime Api Description: The next prime.",
        ),
        (Tool(name="sort"), "Api Name: sort Api Description: None."),
    ],
)
def test_wording_of_documents(tool: Tool, expected: str) -> None:
    assert document_text(tool, tool.document()) == expected


def test_each_document_is_worded_for_itself() -> None:
    other = ToolDocument(description="Height only.", parameters={"type": "object"})
    text = document_text(HARBOR, other)
    assert text.endswith("Api Name: Next High Tide Api Description: Height only.")


def test_golden_memorization_samples() -> None:
    catalog = ToolCatalog(
        [
            Tool(name="a", description="X."),
            Tool(
                name="b",
                description="Y.",
                documents=(
                    ToolDocument(description="Z."),
                    ToolDocument(description="Y.", parameters={"type": "object"}),  # reads as the first
                ),
            ),
        ]
    )
    found = memorization_samples(catalog, prompts(), BASE)
    assert (found.cut_samples, found.cut_tokens) == (0, 0)
    expected = []
    for name, description, tool in (("a", "X.", 0), ("b", "Y.", 1), ("b", "Z.", 1)):
        prompt = [*BEFORE, *in_bytes(f"Api Name: {name} Api Description: {description}"), *BEHIND]
        last = len(prompt) - 1
        expected.append(
            Sample(tokens=(*prompt, BASE + tool), positions=(last, last + 1), targets=((BASE + tool,), (END,)))
        )
    assert found.samples == tuple(expected)


def test_golden_retrieval_samples() -> None:
    queries = [
        LabelledQuery(query_id="1", text="sum of 2 and 3?", tools=(4,)),
        LabelledQuery(query_id="2", text="the high water", tools=(0, 2, 7)),
    ]
    found = retrieval_samples(queries, prompts(), BASE)
    first = [*BEFORE, *in_bytes("sum of 2 and 3?"), *BEHIND]
    # "the" at the start is t + he: the merge of " the" needs its blank.
    second = [*BEFORE, *in_bytes("t"), 3 + 256, *in_bytes(" high water"), *BEHIND]
    assert found.samples == (
        Sample(
            tokens=(*first, BASE + 4),
            positions=(len(first) - 1, len(first)),
            targets=((BASE + 4,), (END,)),
        ),
        Sample(
            tokens=(*second, DRAWN),
            positions=(len(second) - 1, len(second)),
            targets=((BASE, BASE + 2, BASE + 7), (END,)),
        ),
    )
    # The sample predicts the tool where the assistant's turn begins, and the end of the turn from the tool.
    assert found.samples[0].tokens[found.samples[0].positions[0]] == in_bytes("\n")[0]


def test_cuts_are_counted() -> None:
    room = 10
    short = prompts(len(BEFORE) + len(BEHIND) + room)
    texts = ["x" * 10, "x" * 13, "x" * 40]
    queries = [LabelledQuery(query_id=text, text=text, tools=(1,)) for text in texts]
    found = retrieval_samples(queries, short, BASE)
    assert (found.cut_samples, found.cut_tokens) == (2, 3 + 30)
    part = found.subset([0, 2])  # counts are those of the part
    assert (part.samples, part.cut_samples, part.cut_tokens) == ((found.samples[0], found.samples[2]), 1, 30)
    whole = (*BEFORE, *in_bytes("x" * room), *BEHIND, BASE + 1)
    assert [sample.tokens for sample in found.samples] == [whole] * 3
    found = memorization_samples(ToolCatalog([Tool(name="sort", description="y" * 50)]), short, BASE)
    assert found.cut_samples == 1
    assert found.cut_tokens == len("Api Name: sort Api Description: " + "y" * 50) - room
    assert found.samples[0].tokens[-1] == BASE


def test_ids_beyond_the_text_rows_are_refused() -> None:
    """A tokenizer of another model: its ids would be read as tools."""
    query = LabelledQuery(query_id="q", text="sum", tools=(0,))
    largest = max(*in_bytes("sum"), *BEFORE, *BEHIND)
    assert retrieval_samples([query], prompts(), largest + 1).samples
    with pytest.raises(ValueError, match=f"gives id {largest}, but the model's vocab_size is {largest}"):
        retrieval_samples([query], prompts(), largest)
    with pytest.raises(ValueError, match="not the model's"):
        memorization_samples(ToolCatalog([Tool(name="sum")]), prompts(), largest)


def test_soft_target_has_the_mean_gradient_of_all_pairs() -> None:
    """Over all draws the mean gradient of one query is the mean of the gradients of its pairs (query, tool).

    The official form trains on each pair; both sides here are exact sums over the three tools, so they agree to
    rounding.
    """
    tools = (1, 4, 6)
    text = "sum"
    (soft,) = retrieval_samples([LabelledQuery(query_id="q", text=text, tools=tools)], prompts(), BASE).samples
    length = len(soft.tokens)

    # The draws come from the packing itself: one epoch after another until each tool was drawn.
    epochs = PackedBatches([soft], rows=1, row_length=length, epochs=40, seed=0)
    drawn: dict[int, Batch] = {}
    for step in range(epochs.steps):
        batch = epochs.batch(step)
        drawn.setdefault(int(batch.tokens_bs[0, -1]) - BASE, batch)
    assert drawn.keys() == set(tools)

    pairs = {}
    for tool in tools:
        (sample,) = retrieval_samples([LabelledQuery(query_id="q", text=text, tools=(tool,))], prompts(), BASE).samples
        pairs[tool] = PackedBatches([sample], rows=1, row_length=length, epochs=1, seed=0).batch(0)
        np.testing.assert_array_equal(pairs[tool].tokens_bs, drawn[tool].tokens_bs)

    config = random_model().config
    model = random_model(dataclasses.replace(config, vocab_size=BASE, num_tools=8))
    gradient = jax.jit(jax.grad(supervised_loss, has_aux=True))

    def mean_gradient(batches: dict[int, Batch]) -> dict[str, Any]:
        leaves = [parameters(gradient(model, batch)[0]) for batch in batches.values()]
        return {path: np.mean([np.asarray(leaf[path], np.float64) for leaf in leaves], axis=0) for path in leaves[0]}

    found, expected = mean_gradient(drawn), mean_gradient(pairs)
    for path, value in expected.items():
        error = np.linalg.norm(found[path] - value) / np.linalg.norm(value)
        assert error <= 1e-5, f"{path}: {error:.1e}"
    # No single draw has it: the draw matters for the end of the turn.
    one = np.asarray(parameters(gradient(model, drawn[1])[0])["embedding_vd"], np.float64)
    assert np.linalg.norm(one - expected["embedding_vd"]) > 0.1 * np.linalg.norm(one)
