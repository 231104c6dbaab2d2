"""Ids of texts and their pieces against the tokenizer's own ids of the whole text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxtool.data.text_encoder import TextEncoder
from tests.data.tiny_tokenizers import byte_level, sentencepiece

TOKENIZERS = {
    "byte level": byte_level(),
    "byte level with BOS": byte_level(adds_bos=True),
    "sentencepiece": sentencepiece(legacy=False),
    "sentencepiece, legacy": sentencepiece(legacy=True),
}
BLOCKS = {name: TextEncoder(tokenizer, block=5) for name, tokenizer in TOKENIZERS.items()}
TEXTS = st.text("the a.\n<|im_end>s/é", max_size=40)


def whole(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(texts=st.lists(TEXTS, max_size=4))
def test_blocks_give_the_ids_of_the_whole_text(name: str, texts: list[str]) -> None:
    found = BLOCKS[name].texts(texts)
    assert [ids.tolist() for ids in found] == [whole(TOKENIZERS[name], text) for text in texts]
    assert all(ids.dtype == np.int32 for ids in found)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=TEXTS)
def test_spans(name: str, text: str) -> None:
    ids, spans = BLOCKS[name].text_with_spans(text)
    assert ids.tolist() == whole(TOKENIZERS[name], text)
    assert spans.shape == (len(ids), 2)
    expected = TOKENIZERS[name](text, add_special_tokens=False, split_special_tokens=True, return_offsets_mapping=True)[
        "offset_mapping"
    ]
    assert [tuple(span) for span in spans.tolist()] == expected


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["hi", "the a", " hi", "\nthe"])
def test_pieces_in_their_context(name: str, text: str) -> None:
    """What a piece gives is what it gives in the whole: alone, behind a special token, and behind text."""
    tokenizer, encoder = TOKENIZERS[name], TextEncoder(TOKENIZERS[name])
    end = tokenizer.eos_token
    alone, behind_special, behind_text = encoder.pieces([text] * 3, ["nothing", "special", "text"])
    assert alone.tolist() == whole(tokenizer, text)
    ids = tokenizer(f"{end}{text}", add_special_tokens=False)["input_ids"]
    assert [tokenizer.eos_token_id, *behind_special.tolist()] == ids
    assert [*whole(tokenizer, "s."), *behind_text.tolist()] == whole(tokenizer, f"s.{text}")


def test_special_tokens_that_a_text_spells_stay_text() -> None:
    for name, tokenizer in TOKENIZERS.items():
        ids = BLOCKS[name].texts([f"a{tokenizer.eos_token}a\na{tokenizer.bos_token}"])[0]
        assert not {tokenizer.eos_token_id, tokenizer.bos_token_id} & set(ids.tolist())


def test_bos_is_the_tokenizers_own_custom() -> None:
    assert {name: encoder.bos_id for name, encoder in BLOCKS.items()} == {
        "byte level": None,
        "byte level with BOS": 0,
        "sentencepiece": 1,
        "sentencepiece, legacy": 1,
    }
    assert BLOCKS["byte level"].texts([]) == []
