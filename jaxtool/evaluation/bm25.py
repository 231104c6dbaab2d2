"""The lexical baseline: BM25 over the text of each tool.

Turns tools and queries into tokens and ranks with `bm25s`; how good a ranking is belongs to `ranking.py`.
The variant is Lucene's (k1 = 1.5, b = 0.75): Robertson's term frequency with the inverse document frequency
log(1 + odds), which is above 0 for every term. Robertson's own falls to 0 for terms in half of the tools or
more (`name`, `id`), so there a score of 0 wouldn't say that nothing matched.
"""

import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import bm25s
import numpy as np
from numpy.typing import NDArray

from jaxtool.tools import Tool, ToolCatalog

# It sets its logger to DEBUG by itself and reports every index it builds.
logging.getLogger("bm25s").setLevel(logging.WARNING)

# Two lower-case letters after the last capital: "HTTPServer" is two words, "URLs" is one.
_CAMEL_CASE = re.compile(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z]{2})")
_TOKEN = re.compile(r"[^\W\d_]+|\d+")


def tokenize(text: str) -> list[str]:
    """Runs of letters and runs of digits, camelCase split, lower-cased; everything else separates."""
    return _TOKEN.findall(_CAMEL_CASE.sub(" ", text).lower())


def tool_text(tool: Tool) -> str:
    """What BM25 reads of a tool.

    Name, collection, descriptions, and the names and descriptions of all parameters, nested ones too; then
    description and parameters of each further document.
    """
    parts = [tool.name, tool.collection, tool.collection_description, tool.description]
    parts.extend(_schema_texts(tool.parameters))
    for document in tool.documents:
        parts.append(document.description)
        parts.extend(_schema_texts(document.parameters))
    return "\n".join(part for part in parts if part)


class BM25Ranker:
    """A BM25 index over the tools of a catalogue."""

    def __init__(self, catalog: ToolCatalog, *, k1: float = 1.5, b: float = 0.75) -> None:
        """Indexes all tools. Raises ValueError for an empty catalogue."""
        if len(catalog) == 0:
            raise ValueError("BM25Ranker: the catalogue is empty; expected at least one tool")
        self._tool_count = len(catalog)
        self._term_ids: dict[str, int] = {}
        documents = [
            [self._term_ids.setdefault(token, len(self._term_ids)) for token in tokenize(tool_text(tool))]
            for tool in catalog
        ]
        self._index: Any = None
        if self._term_ids:  # a catalogue without a single word has nothing to index: no query matches
            self._index = bm25s.BM25(k1=k1, b=b, method="lucene", dtype="float64")
            self._index.index((documents, dict(self._term_ids)), create_empty_token=False, show_progress=False)

    def rank(self, texts: Sequence[str], k: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """The k best tools of each query, best first, equal scores in the order of tool ids.

        Args:
            texts: Q queries. A term that occurs twice in a query counts twice.
            k: how many tools, at least 1.

        Returns:
            ids_qk: tool ids [Q, k]; -1 past the end of the catalogue when k is larger.
            scores_qk: float64 [Q, k]. Exactly 0 where tool and query share no term, and at ids of -1: such
                entries were not retrieved, they only fill the row. `valid_qk = scores_qk > 0` is the mask for
                `evaluate_rankings`, and `(~valid_qk[:, 0]).sum()` counts the queries that matched nothing.
        """
        if k < 1:
            raise ValueError(f"rank: k is {k}; expected 1 or more")
        found = min(k, self._tool_count)
        ids_qk = np.full((len(texts), k), -1, dtype=np.int64)
        scores_qk = np.zeros((len(texts), k), dtype=np.float64)
        for row, text in enumerate(texts):
            scores_t = self._scores(text)
            # All tools at or above the k-th score, by id; a stable sort keeps that order among equals.
            threshold = np.partition(scores_t, self._tool_count - found)[self._tool_count - found]
            candidates = np.flatnonzero(scores_t >= threshold)
            best = candidates[np.argsort(-scores_t[candidates], kind="stable")[:found]]
            ids_qk[row, :found] = best
            scores_qk[row, :found] = scores_t[best]
        return ids_qk, scores_qk

    def _scores(self, text: str) -> NDArray[np.float64]:
        term_ids = [self._term_ids[token] for token in tokenize(text) if token in self._term_ids]
        if not term_ids:
            return np.zeros(self._tool_count, dtype=np.float64)
        return np.asarray(self._index.get_scores_from_ids(term_ids), dtype=np.float64)


# Keywords of JSON schema whose value is a schema, a list of schemas, or a mapping from names to schemas.
_NESTED = ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")


def _schema_texts(schema: Mapping[str, Any]) -> Iterator[str]:
    """Parameter names and descriptions of a JSON schema, in reading order."""
    pending: list[Any] = [schema]  # a stack, not recursion: schemas come from outside and may nest deeply
    while pending:
        node = pending.pop()
        if isinstance(node, str):
            yield node
        elif isinstance(node, (list, tuple)):
            pending.extend(entry for entry in reversed(node) if isinstance(entry, Mapping))
        elif isinstance(node, Mapping):
            inner: list[Any] = []
            if isinstance(node.get("description"), str):
                inner.append(node["description"])
            for keyword in _NAMED:
                named = node.get(keyword)
                if isinstance(named, Mapping):
                    inner.extend(part for name, value in named.items() for part in (str(name), value))
            inner.extend(node[keyword] for keyword in _NESTED if isinstance(node.get(keyword), (Mapping, list, tuple)))
            pending.extend(reversed(inner))
