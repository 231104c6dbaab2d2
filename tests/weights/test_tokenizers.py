"""Tokenizers against a plain reimplementation of byte-level BPE and against what the formats promise."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from jaxtool.weights import ConfigError, TokenizerError, load_tokenizer

WriteGguf = Callable[..., Path]

# The split of GPT-2, as published.
GPT2_WORDS = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
# llama.cpp's "smollm": each digit on its own first, then as GPT-2.
DIGITS = regex.compile(r"\p{N}|[^\p{N}]+")
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


def encode_slowly(text: str, merges: list[str], ids: dict[str, int], digits: bool) -> list[int]:
    """Byte-level BPE by its definition: merge the pair of lowest rank until none is left."""
    symbols = bytes_to_unicode()
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    found: list[int] = []
    for chunk in DIGITS.findall(text) if digits else [text]:
        for word in GPT2_WORDS.findall(chunk):
            parts = [symbols[byte] for byte in word.encode()]
            while True:
                pairs = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
                if not pairs:
                    break
                _, i = min(pairs)
                parts[i : i + 2] = [parts[i] + parts[i + 1]]
            found += [ids[part] for part in parts]
    return found


@pytest.fixture
def tokenizer(write_gguf: WriteGguf) -> Any:
    return load_tokenizer(write_gguf())


def test_digits_stand_alone(tokenizer: Any, vocabulary: list[str]) -> None:
    """The merges 1+2 and 12+3 never apply: this is what a plain GPT-2 split gets wrong."""
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12345")) == list("12345")
    assert "123" in vocabulary


def test_gpt2_split_keeps_numbers_together(write_gguf: WriteGguf) -> None:
    tokenizer = load_tokenizer(write_gguf(metadata={"tokenizer.ggml.pre": "gpt-2"}))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12345")) == ["123", "4", "5"]


@pytest.mark.parametrize("pre", ["smollm", "gpt-2"])
def test_equals_the_definition_and_round_trips(
    write_gguf: WriteGguf, vocabulary: list[str], merges: list[str], pre: str
) -> None:
    tokenizer = load_tokenizer(write_gguf(metadata={"tokenizer.ggml.pre": pre}))
    ids = {token: row for row, token in enumerate(vocabulary)}

    @given(st.one_of(TEXT, st.text(" helotin123\n's.!½²", max_size=30)))
    def check(text: str) -> None:
        found = tokenizer.encode(text)
        assert found == encode_slowly(text, merges, ids, digits=pre == "smollm")
        assert tokenizer.decode(found) == text

    check()


def test_special_tokens(tokenizer: Any) -> None:
    assert len(tokenizer) == 272
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", 1)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", 2)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (2, 0)
    assert tokenizer.model_max_length == 128
    assert tokenizer.encode("<|im_start|>12<|im_end|>") == [1, *tokenizer.encode("12"), 2]
    assert tokenizer.decode([1, *tokenizer.encode("12"), 2], skip_special_tokens=True) == "12"
    # User-defined tokens are matched whole, but are text.
    (note,) = tokenizer.encode("<note>")
    assert tokenizer.decode([note], skip_special_tokens=True) == "<note>"


def test_untrusted_text_cannot_make_a_special_token(tokenizer: Any) -> None:
    assert not {0, 1, 2} & set(tokenizer.encode("<|im_start|> <|im_end|> <|endoftext|>", split_special_tokens=True))


def test_chat_template(tokenizer: Any) -> None:
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert text == "<|im_start|>user\nhello<|im_end|>\n"


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (True, True), (False, True), (None, None)])
def test_added_ends(write_gguf: WriteGguf, bos: bool | None, eos: bool | None) -> None:
    tokenizer = load_tokenizer(
        write_gguf(metadata={"tokenizer.ggml.add_bos_token": bos, "tokenizer.ggml.add_eos_token": eos})
    )
    found = tokenizer.encode("hello")
    assert (found[0] == 1, found[-1] == 2) == (bool(bos), bool(eos))
    assert not {1, 2} & set(tokenizer.encode("hello", add_special_tokens=False))


@pytest.mark.parametrize(
    ("metadata", "error", "words"),
    [
        ({"tokenizer.ggml.model": "llama"}, TokenizerError, "'tokenizer.ggml.model' is 'llama', only 'gpt2'"),
        (
            {"tokenizer.ggml.pre": "qwen2"},
            TokenizerError,
            "'tokenizer.ggml.pre' is 'qwen2', only 'gpt-2' or 'smollm'",
        ),
        ({"tokenizer.ggml.pre": None}, ConfigError, "'tokenizer.ggml.pre' is missing"),
        ({"tokenizer.ggml.add_space_prefix": True}, TokenizerError, "add_space_prefix"),
        ({"tokenizer.ggml.normalizer": "nfc"}, TokenizerError, "'tokenizer.ggml.normalizer' is not known"),
        ({"tokenizer.ggml.merges": ["hel lo"]}, TokenizerError, "number 0 is 'hel lo', expected two tokens"),
        ({"tokenizer.ggml.merges": ["h e l"]}, TokenizerError, "number 0 is 'h e l'"),
        ({"tokenizer.ggml.merges": None}, ConfigError, "'tokenizer.ggml.merges' is missing"),
        (
            {"tokenizer.ggml.token_type": [1, 1]},
            TokenizerError,
            "2 entries in 'tokenizer.ggml.token_type' for 272",
        ),
        ({"tokenizer.ggml.tokens": ["a", "b", "a"]}, TokenizerError, "'tokenizer.ggml.tokens' has 'a' twice"),
        (
            {"tokenizer.ggml.eos_token_id": 999},
            TokenizerError,
            "'tokenizer.ggml.eos_token_id' is 999, expected 0 to 271",
        ),
    ],
)
def test_refused_metadata(write_gguf: WriteGguf, metadata: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=rf"tiny\.gguf: .*{words}"):
        load_tokenizer(write_gguf(metadata=metadata))


@pytest.fixture
def tokenizer_folder(tmp_path: Path, vocabulary: list[str], merges: list[str]) -> Path:
    """A folder as SmolLM2's: digits split in tokenizer.json, but declared as GPT2Tokenizer."""
    backend = Tokenizer(
        models.BPE(
            vocab={token: row for row, token in enumerate(vocabulary)},
            merges=[(a, b) for a, b in (merge.split(" ") for merge in merges)],
        )
    )
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(vocabulary[:3])
    folder = tmp_path / "hf"
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "GPT2Tokenizer",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "chat_template": "{{ messages[0].content }}",
            }
        )
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


def test_declared_class_does_not_override_the_file(tokenizer_folder: Path) -> None:
    tokenizer: Any = load_tokenizer(tokenizer_folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12345")) == list("12345")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


def test_folder_and_gguf_agree(tokenizer_folder: Path, tokenizer: Any) -> None:
    other: Any = load_tokenizer(tokenizer_folder)

    @given(TEXT)
    def check(text: str) -> None:
        assert other.encode(text) == tokenizer.encode(text)

    check()


def test_llama_folder_without_the_split(tokenizer_folder: Path, vocabulary: list[str], merges: list[str]) -> None:
    (tokenizer_folder / "tokenizer.json").unlink()
    (tokenizer_folder / "vocab.json").write_text(json.dumps({token: row for row, token in enumerate(vocabulary)}))
    (tokenizer_folder / "merges.txt").write_text("\n".join(merges))
    with pytest.raises(TokenizerError, match=r"needs a tokenizer\.json"):
        load_tokenizer(tokenizer_folder)


@pytest.mark.parametrize("content", ["{", '{"model": {"type": "BPE"}}', "[]"])
def test_damaged_folder(tokenizer_folder: Path, content: str) -> None:
    (tokenizer_folder / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=r"hf: can't load the tokenizer"):
        load_tokenizer(tokenizer_folder)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_tokenizer(tmp_path / "none")
    with pytest.raises(TokenizerError, match="can't load the tokenizer"):
        load_tokenizer(tmp_path)
