"""Tokenizers against a plain reimplementation of byte-level BPE and against what the formats promise."""

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from jaxtool.models import GPTJConfig
from jaxtool.weights import ConfigError, TokenizerError, check_tokenizer_fits, eos_token_ids, load_tokenizer
from tests.weights.byte_level_bpe import TEXT, WORDS, encode_slowly, split_slowly

WriteGguf = Callable[..., Path]


@pytest.fixture
def vocabulary(vocabulary: list[str]) -> list[str]:
    """With a token that no merge leads to."""
    return [*vocabulary[:-1], "Ġhello"]


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


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2"])
def test_equals_the_definition_and_round_trips(
    write_gguf: WriteGguf, vocabulary: list[str], merges: list[str], pre: str
) -> None:
    tokenizer: Any = load_tokenizer(write_gguf(metadata={"tokenizer.ggml.pre": pre}))

    @given(TEXT)
    @example(" hello Hello'Stin 1112\r\n\n  x'llhe.the e\u0301")
    def check(text: str) -> None:
        pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)
        assert [piece for piece, _ in pieces] == split_slowly(text, pre)
        found = tokenizer.encode(text, add_special_tokens=False)
        assert found == encode_slowly(text, merges, vocabulary, pre)
        assert tokenizer.decode(found) == (unicodedata.normalize("NFC", text) if pre == "qwen2" else text)

    check()


def test_llama_3_takes_known_words_whole_and_begins_with_bos(write_gguf: WriteGguf, vocabulary: list[str]) -> None:
    tokenizer: Any = load_tokenizer(write_gguf(metadata={"tokenizer.ggml.pre": "llama-bpe"}))
    assert tokenizer.encode(" hello", add_special_tokens=False) == [vocabulary.index("Ġhello")]
    without: dict[str, Any] = {"tokenizer.ggml.add_bos_token": None, "tokenizer.ggml.pre": "llama-bpe"}
    assert load_tokenizer(write_gguf(metadata=without)).encode("x")[0] == 1
    without["tokenizer.ggml.bos_token_id"] = None
    with pytest.raises(TokenizerError, match=r"'tokenizer\.ggml\.bos_token_id' is missing, but text gets"):
        load_tokenizer(write_gguf(metadata=without))


def test_rows_that_only_fill_up_are_no_tokens(write_gguf: WriteGguf, vocabulary: list[str]) -> None:
    """llama.cpp's converter names each row of the embedding, e.g. 267 of Qwen3's."""
    tokens = [*vocabulary, "[PAD272]", "[PAD273]"]
    types = [3, 3, 3, *[1] * 269, 5, 5]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    tokenizer: Any = load_tokenizer(write_gguf(metadata=fields))
    assert len(tokenizer) == 272
    assert check_tokenizer_fits(tokenizer, gptj(274), "x") == 272
    with pytest.raises(TokenizerError, match=r"'tokenizer\.ggml\.eos_token_id' is 273, expected the id of a token"):
        load_tokenizer(write_gguf(metadata=fields | {"tokenizer.ggml.eos_token_id": 273}))


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
            {"tokenizer.ggml.pre": "tekken"},
            TokenizerError,
            "'tokenizer.ggml.pre' is 'tekken', only 'gpt-2' or 'smollm' or 'llama-bpe' or 'qwen2'",
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
        (
            {"tokenizer.ggml.tokens": ["a", "b", "a"], "tokenizer.ggml.token_type": [1, 1, 1]},
            TokenizerError,
            "'tokenizer.ggml.tokens' has 'a' twice",
        ),
        (
            {"tokenizer.ggml.eos_token_id": 999},
            TokenizerError,
            "'tokenizer.ggml.eos_token_id' is 999, expected the id of a token, 0 to 271",
        ),
    ],
)
def test_refused_metadata(write_gguf: WriteGguf, metadata: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=rf"tiny\.gguf: .*{words}"):
        load_tokenizer(write_gguf(metadata=metadata))


def write_folder(
    folder: Path, kind: str, vocabulary: list[str], merges: list[str], settings: dict[str, Any], model_type: str
) -> Path:
    """A folder with a `tokenizer.json` as published for that kind of model."""
    backend = Tokenizer(
        models.BPE(
            vocab={token: row for row, token in enumerate(vocabulary)},
            merges=[(a, b) for a, b in (merge.split(" ") for merge in merges)],
            ignore_merges=kind == "llama-bpe",
        )
    )
    words = pre_tokenizers.Split(Regex(WORDS[kind]), behavior="isolated")
    own_words = kind in ("llama-bpe", "qwen2")
    first = {"smollm": pre_tokenizers.Digits(individual_digits=True)}.get(kind)
    steps = [first] if first else [words] if own_words else []
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not own_words))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if kind == "qwen2":
        backend.normalizer = normalizers.NFC()
    if kind == "llama-bpe":
        bos = vocabulary[1]
        backend.post_processor = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, 1)])
    backend.add_special_tokens(vocabulary[:3])
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.fixture
def tokenizer_folder(tmp_path: Path, vocabulary: list[str], merges: list[str]) -> Path:
    """A folder as SmolLM2's: digits split in tokenizer.json, but declared as GPT2Tokenizer."""
    settings = {
        "tokenizer_class": "GPT2Tokenizer",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": "{{ messages[0].content }}",
    }
    return write_folder(tmp_path / "hf", "smollm", vocabulary, merges, settings, "llama")


def test_declared_class_does_not_override_the_file(tokenizer_folder: Path) -> None:
    tokenizer: Any = load_tokenizer(tokenizer_folder)
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("12345")) == list("12345")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "x"


@pytest.mark.parametrize(
    ("kind", "declared", "model_type"),
    [
        ("smollm", "GPT2Tokenizer", "llama"),
        ("llama-bpe", "PreTrainedTokenizerFast", "llama"),
        ("qwen2", "Qwen2Tokenizer", "qwen3"),
    ],
)
def test_folder_and_gguf_agree(
    tmp_path: Path,
    write_gguf: WriteGguf,
    vocabulary: list[str],
    merges: list[str],
    kind: str,
    declared: str,
    model_type: str,
) -> None:
    settings = {"tokenizer_class": declared, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    folder: Any = load_tokenizer(write_folder(tmp_path / "hf", kind, vocabulary, merges, settings, model_type))
    metadata = {"tokenizer.ggml.pre": kind, "tokenizer.ggml.add_bos_token": kind == "llama-bpe"}
    file: Any = load_tokenizer(write_gguf(metadata=metadata))

    @given(TEXT)
    def check(text: str) -> None:
        assert folder.encode(text) == file.encode(text)

    check()
    assert [row for row in folder.encode("hello") if row < 3] == ([1] if kind == "llama-bpe" else [])


@pytest.fixture
def gptj_folder(tmp_path: Path, vocabulary: list[str], merges: list[str]) -> Path:
    """As GPT-J's: GPT-2's tokenizer in its own two files, and a model with more rows than tokens."""
    folder = tmp_path / "gptj"
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps({token: row for row, token in enumerate(vocabulary)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "gptj", "eos_token_id": 0}))
    return folder


@pytest.mark.parametrize("declared", [True, False])
def test_gptj_folder(gptj_folder: Path, vocabulary: list[str], merges: list[str], declared: bool) -> None:
    if not declared:
        (gptj_folder / "tokenizer_config.json").unlink()
    tokenizer: Any = load_tokenizer(gptj_folder)

    @given(TEXT)
    def check(text: str) -> None:
        assert tokenizer.encode(text) == encode_slowly(text, merges, vocabulary, "gpt-2")

    check()
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, None)
    assert check_tokenizer_fits(tokenizer, gptj(300), gptj_folder) == 272
    assert eos_token_ids(gptj_folder, tokenizer) == (0,)


def test_gptj_folder_with_tokenizer_json(tmp_path: Path, vocabulary: list[str], merges: list[str]) -> None:
    """Some say nothing of special tokens, which GPT2Tokenizer knows by itself."""
    for settings in ({"tokenizer_class": "GPT2Tokenizer"}, {"model_max_length": 1024}):
        name = f"hf{len(settings)}{'tokenizer_class' in settings}"
        folder = write_folder(tmp_path / name, "gpt-2", vocabulary, merges, settings, "gptj")
        tokenizer: Any = load_tokenizer(folder)
        assert tokenizer.encode("123 hello") == encode_slowly("123 hello", merges, vocabulary, "gpt-2")
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 0)


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_folder_without_the_split(gptj_folder: Path, model_type: str) -> None:
    (gptj_folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(TokenizerError, match=rf"model of type '{model_type}' .* needs a tokenizer\.json"):
        load_tokenizer(gptj_folder)


def test_added_tokens_keep_their_ids(gptj_folder: Path) -> None:
    (gptj_folder / "added_tokens.json").write_text(json.dumps({"<|extra_2|>": 273, "<|extra_1|>": 272}))
    tokenizer: Any = load_tokenizer(gptj_folder)
    assert tokenizer.encode("<|extra_2|><|extra_1|>") == [273, 272]
    assert check_tokenizer_fits(tokenizer, gptj(274), gptj_folder) == 274
    for file, content in (
        ("added_tokens.json", {"<|extra_1|>": 272, "<|extra_9|>": 280}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"280": {"content": "<|extra_9|>", "special": True}}}),
    ):
        (gptj_folder / "added_tokens.json").unlink(missing_ok=True)
        (gptj_folder / file).write_text(json.dumps(content))
        with pytest.raises(TokenizerError, match=rf"{file}: token '<\|extra_9\|>' has id 280, but 27\d once"):
            load_tokenizer(gptj_folder)


def gptj(vocab_size: int) -> GPTJConfig:
    return GPTJConfig(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        head_dim=4,
        rotary_dim=2,
        max_position_embeddings=8,
    )


def test_tokenizer_that_is_larger_than_the_model(tokenizer_folder: Path, write_gguf: WriteGguf) -> None:
    words = r"m: the model has vocab_size 271, but the tokenizer in .*{} has ids up to 271 \('Ġhello'\)"
    with pytest.raises(TokenizerError, match=words.format("hf")):
        check_tokenizer_fits(load_tokenizer(tokenizer_folder), gptj(271), "m")
    with pytest.raises(TokenizerError, match=words.format(r"tiny\.gguf")):
        check_tokenizer_fits(load_tokenizer(write_gguf()), gptj(271), "m")


def test_ids_with_holes(tokenizer_folder: Path) -> None:
    file = tokenizer_folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["Ġhello"] = 290
    file.write_text(json.dumps(content))
    tokenizer: Any = load_tokenizer(tokenizer_folder)
    assert len(tokenizer) == 272
    assert check_tokenizer_fits(tokenizer, gptj(300), "m") == 291
    with pytest.raises(TokenizerError, match=r"vocab_size 280, .* ids up to 290"):
        check_tokenizer_fits(tokenizer, gptj(280), "m")


def test_all_ends_of_a_folder(tokenizer_folder: Path) -> None:
    tokenizer: Any = load_tokenizer(tokenizer_folder)
    assert eos_token_ids(tokenizer_folder, tokenizer) == (2,)
    generation = tokenizer_folder / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": [271, 0]}))
    assert eos_token_ids(tokenizer_folder, tokenizer) == (0, 2, 271)
    (tokenizer_folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert eos_token_ids(tokenizer_folder, tokenizer) == (0, 2, 5, 271)
    generation.write_text(json.dumps({"eos_token_id": None}))
    tokenizer.eos_token = None
    assert eos_token_ids(tokenizer_folder, tokenizer) == (5,)


@pytest.mark.parametrize("value", [272, -1, [1, 272], "2", True, [[1]], 1.0])
def test_ends_that_are_no_ids(tokenizer_folder: Path, value: Any) -> None:
    (tokenizer_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    words = r"generation_config\.json: field 'eos_token_id' is .*, expected ids of the tokenizer, 0 to 271"
    with pytest.raises(TokenizerError, match=words):
        eos_token_ids(tokenizer_folder, load_tokenizer(tokenizer_folder))


def test_all_ends_of_a_gguf_file(write_gguf: WriteGguf) -> None:
    path = write_gguf(metadata={"tokenizer.ggml.eot_token_id": 1, "tokenizer.ggml.eom_token_id": 0})
    tokenizer = load_tokenizer(path)
    assert eos_token_ids(path, tokenizer) == (0, 1, 2)
    path = write_gguf(metadata={"tokenizer.ggml.eot_token_id": 500})
    with pytest.raises(TokenizerError, match=r"tiny\.gguf: metadata field 'tokenizer.ggml.eot_token_id' is 500"):
        eos_token_ids(path, tokenizer)
    with pytest.raises(FileNotFoundError):
        eos_token_ids(path.parent / "none", tokenizer)


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
