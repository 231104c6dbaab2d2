import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.evaluation.bm25 import BM25Ranker, tokenize, tool_text
from jaxtool.tools import Tool, ToolCatalog, ToolDocument


def catalog(*texts):
    return ToolCatalog([Tool(name=f"{number}", description=text, parameters={}) for number, text in enumerate(texts)])


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("getHTTPServer_status2", ["get", "http", "server", "status", "2"]),
        ("YouTube Hub&&Get Video-Details", ["you", "tube", "hub", "get", "video", "details"]),
        ("URLs, IDs: 42km", ["urls", "ids", "42", "km"]),
        ("Höhe über 日本語 x1y", ["höhe", "über", "日本語", "x", "1", "y"]),
        ("__ && -- ", []),
        ("", []),
    ],
)
def test_tokens(text, tokens):
    assert tokenize(text) == tokens


def test_text_of_a_tool_holds_every_described_part():
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string", "description": "Where to look"},
            "description": {"type": "string"},
            "legs": {
                "type": "array",
                "items": {"anyOf": [{"properties": {"airline": {"description": "Carrier code"}}}, {"type": "null"}]},
            },
        },
        "$defs": {"extra": {"description": "Shared shape"}},
    }
    tool = Tool(
        name="findFlight",
        description="Finds flights.",
        parameters=schema,
        collection="Skies",
        collection_description="All about air travel",
        documents=(ToolDocument(description="Second text", parameters={"properties": {"gate": {}}}),),
    )
    words = tokenize(tool_text(tool))
    expected = (
        "find flight skies all about air travel finds flights city where to look description legs airline "
        "carrier code extra shared shape second text gate"
    )
    assert " ".join(words) == expected


def test_deeply_nested_schema_is_no_stack_overflow():
    schema = {"description": "bottom"}
    for _ in range(5000):
        schema = {"items": schema}
    # The catalogue may refuse such a schema; the text alone must not break.
    from jaxtool.evaluation.bm25 import _schema_texts

    assert list(_schema_texts(schema)) == ["bottom"]


def slow_scores(documents, query, k1=1.5, b=0.75):
    """BM25 by its formula (Kamphuis et al. 2020, Lucene with exact document lengths)."""
    lengths = [len(document) for document in documents]
    average = sum(lengths) / len(lengths)
    scores = []
    for document, length in zip(documents, lengths, strict=True):
        counts, total = Counter(document), 0.0
        for term in query:
            frequency = counts[term]
            containing = sum(term in other for other in documents)
            idf = math.log(1 + (len(documents) - containing + 0.5) / (containing + 0.5))
            total += idf * frequency / (frequency + k1 * (1 - b + b * length / average)) if frequency else 0.0
        scores.append(total)
    return scores


WORDS = st.lists(st.sampled_from(["red", "green", "blue", "sun", "moon", "rain"]), max_size=7).map(" ".join)


@given(st.lists(WORDS, min_size=1, max_size=8), WORDS, st.integers(1, 10))
def test_ranking_equals_the_formula(texts, query, k):
    tools = catalog(*texts)
    ids, scores = BM25Ranker(tools).rank([query], k)
    expected = slow_scores([tokenize(tool_text(tool)) for tool in tools], tokenize(query))
    assert ids.shape == scores.shape == (1, k)
    found = min(k, len(texts))
    assert len(set(ids[0, :found].tolist())) == found
    for tool, value in zip(ids[0, :found], scores[0, :found], strict=True):
        assert value == pytest.approx(expected[tool], abs=1e-12)
    assert scores[0, :found].tolist() == pytest.approx(sorted(expected, reverse=True)[:found], abs=1e-12)
    assert np.all(ids[0, found:] == -1) and np.all(scores[0, found:] == 0)
    # Equal scores are in the order of ids.
    for left in range(found - 1):
        assert scores[0, left] > scores[0, left + 1] or ids[0, left] < ids[0, left + 1]


def test_ties_across_the_cut_go_to_the_lowest_ids():
    tools = catalog("same words", "other", "same words", "same words")
    ids, scores = BM25Ranker(tools).rank(["same"], 2)
    assert ids.tolist() == [[0, 2]]
    assert scores[0, 0] == scores[0, 1] > 0


def test_query_without_a_known_term_scores_zero_and_keeps_id_order():
    ranker = BM25Ranker(catalog("alpha", "beta", "gamma"))
    ids, scores = ranker.rank(["", "unknown words", "  !! ", "beta"], 3)
    assert ids.tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 0, 2]]
    assert np.all(scores[:3] == 0)
    assert (scores[3] > 0).tolist() == [True, False, False]


def test_term_of_every_tool_still_scores_above_zero():
    _, scores = BM25Ranker(catalog("common", "common", "common")).rank(["common"], 3)
    assert np.all(scores > 0)


def test_catalogue_without_words_matches_nothing():
    tools = ToolCatalog(
        [Tool(name="??", description="", parameters={}), Tool(name="!!", description="", parameters={})]
    )
    ids, scores = BM25Ranker(tools).rank(["anything"], 2)
    assert ids.tolist() == [[0, 1]] and not scores.any()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="k is 0"):
        BM25Ranker(catalog("x")).rank(["x"], 0)


def test_nothing_is_printed(capfd):
    BM25Ranker(catalog("alpha", "beta")).rank(["alpha"], 1)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
