"""The two kinds of ToolGen training samples: document -> tool (memorization) and query -> tools (retrieval).

Source: ToolGen, arXiv 2410.03439, section 3. The assistant's turn is the tool's id and the end of the turn, both
supervised. Ids are spliced in as integers; no tool name goes through the tokenizer as a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtool.data import DRAWN, ChatPrompts, LabelledQuery, Sample
from jaxtool.tools import Tool, ToolCatalog, ToolDocument


@dataclass(frozen=True, kw_only=True)
class SampleSet:
    """Samples and what was cut to make them.

    Attributes:
        samples: one per document or query.
        cuts: for each sample the text tokens that did not fit the maximal length and were left out.
    """

    samples: tuple[Sample, ...]
    cuts: tuple[int, ...]

    @property
    def cut_samples(self) -> int:
        """Samples whose text did not fit the maximal length."""
        return sum(cut > 0 for cut in self.cuts)

    @property
    def cut_tokens(self) -> int:
        """Text tokens left out in them."""
        return sum(self.cuts)

    def subset(self, indices: Sequence[int]) -> SampleSet:
        """The samples at these places, in this order."""
        return SampleSet(
            samples=tuple(self.samples[index] for index in indices), cuts=tuple(self.cuts[index] for index in indices)
        )


def document_text(tool: Tool, document: ToolDocument) -> str:
    """The user turn of a memorization sample: the labelled fields of the official code, in its order.

    ToolBench's API name is what stands behind the collection in the tool's name. Tools without a collection have no
    `Tool ...` fields, and the words of their name; an empty description reads `None.`, as there.
    """
    description = document.description.strip() or "None."
    if not tool.collection:
        return f"Api Name: {tool.name_text()} Api Description: {description}"
    api_name = tool.name.removeprefix(f"{tool.collection}&&")
    about = tool.collection_description.strip() or "None."
    collection = f"Tool Name: {tool.collection}. Tool Description: {about}"
    return f"{collection} Api Name: {api_name} Api Description: {description}"


def memorization_samples(catalog: ToolCatalog, prompts: ChatPrompts, base_vocabulary: int) -> SampleSet:
    """One sample for each document of each tool: L_tool = -log p(id(d) | document(d)).

    Documents of one tool that read the same (they differ in their parameters only) make one sample.

    Raises:
        ValueError: the tokenizer has ids beyond `base_vocabulary`.
    """
    pairs = [
        (text, (base_vocabulary + index,))
        for index, tool in enumerate(catalog)
        for text in dict.fromkeys(document_text(tool, document) for document in (tool.document(), *tool.documents))
    ]
    return _sample_set(pairs, prompts, base_vocabulary)


def retrieval_samples(queries: Sequence[LabelledQuery], prompts: ChatPrompts, base_vocabulary: int) -> SampleSet:
    """One sample for each query, with a uniform soft target over its tools D_q.

    The official form has one sample for each pair (q, d). Its gradient, averaged over the tools of q, is that of
    -1/|D_q| sum_d [log p(d | q) + log p(end | q, d)]. The first term is the cross-entropy against the uniform target,
    exactly; the second is the expectation over a uniformly drawn d, and d is drawn anew in every epoch. So one sample
    costs one forward pass instead of |D_q| and has the same expected gradient per query; queries weigh the same
    whatever their number of tools (in the official form a query weighs |D_q|).
    """
    pairs = [(query.text, tuple(base_vocabulary + tool for tool in query.tools)) for query in queries]
    return _sample_set(pairs, prompts, base_vocabulary)


def _sample_set(pairs: Sequence[tuple[str, tuple[int, ...]]], prompts: ChatPrompts, base_vocabulary: int) -> SampleSet:
    samples, cuts = [], []
    for text, targets in pairs:
        prompt = prompts.prompt(text)
        prompts.check_within(base_vocabulary, prompt.ids)
        cuts.append(prompt.cut)
        last = len(prompt.ids) - 1
        answer = targets[0] if len(targets) == 1 else DRAWN
        samples.append(
            Sample(tokens=(*prompt.ids, answer), positions=(last, last + 1), targets=(targets, (prompts.end_id,)))
        )
    return SampleSet(samples=tuple(samples), cuts=tuple(cuts))
