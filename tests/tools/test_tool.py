"""Tools: identity, validation, and the words of a name."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.tools import CatalogError, Tool, ToolDocument


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Movies_3_FindMovies", "Movies 3 Find Movies"),
        ("math.hypot", "math hypot"),
        ("version_api.VersionApi.get_version", "version api Version Api get version"),
        ("getHTTPResponse", "get HTTP Response"),
        ("base64Encode", "base64 Encode"),
        ("MP3Player", "MP3 Player"),
        ("3D", "3D"),
        ("v2::Api/Users-list", "v2 Api Users list"),
        ("YouTube Hub&&Get  Video\tDetails", "You Tube Hub Get Video Details"),
        ("AT&T quotes", "AT&T quotes"),
        ("a&&b&&c", "a b c"),
        ("<script>alert(1)</script>", "<script>alert(1)< script>"),
        ("天气_查询", "天气 查询"),
    ],
)
def test_name_text_splits_names_into_words(name: str, words: str) -> None:
    assert Tool(name=name).name_text() == words


@pytest.mark.parametrize("name", ["___", "&&", "-", "./:"])
def test_a_name_without_words_is_its_own_text(name: str) -> None:
    assert Tool(name=name).name_text() == name


def test_the_collection_comes_first_and_only_once() -> None:
    assert Tool(name="get_user", collection="gitHub").name_text() == "git Hub get user"
    assert Tool(name="Gas Price&&usa", collection="Gas Price").name_text() == "Gas Price usa"


@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])).filter(str.strip), st.text())
def test_name_text_is_never_empty_and_keeps_every_other_character(name: str, collection: str) -> None:
    tool = Tool(name=name, collection=collection)
    assert tool.name == name
    assert tool.name_text()
    kept = [c for c in Tool(name=name).name_text() if not c.isspace() and c not in "_.-/:&"]
    assert kept == [c for c in name if not c.isspace() and c not in "_.-/:&"]


@pytest.mark.parametrize("name", ["", "  ", "\n\t", None, 3])
def test_a_tool_needs_a_name(name: object) -> None:
    with pytest.raises(CatalogError, match=r"f\.json:3: field name"):
        Tool(name=name, source="f.json:3")  # type: ignore[arg-type]


def test_a_lone_surrogate_is_refused() -> None:
    with pytest.raises(CatalogError, match="not valid Unicode"):
        Tool(name="a\ud800")


def test_tools_can_be_compared_and_hashed() -> None:
    a = Tool(name="a", parameters={"type": "object"})
    assert a == Tool(name="a", parameters={"type": "object"})
    assert a != Tool(name="a", parameters={})
    assert len({a, Tool(name="a", parameters={"type": "object"}), Tool(name="A")}) == 2


def test_document_content_ignores_key_order_and_source() -> None:
    one = ToolDocument(description="d", parameters={"a": 1, "b": {"c": 2, "d": 3}}, source="x")
    other = ToolDocument(description="d", parameters={"b": {"d": 3, "c": 2}, "a": 1}, source="y")
    assert one.content() == other.content()
    assert one.content() != ToolDocument(description="e", parameters=one.parameters).content()
