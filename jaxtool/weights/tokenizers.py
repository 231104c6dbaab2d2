"""The text tokenizer of a model: from a Hugging Face folder, or rebuilt from a GGUF file's metadata.

Here too: whether a tokenizer fits a model, and which ids end a text. Text only: tool tokens are ids outside this
vocabulary and never pass through here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

# Importing it warns that torch is missing, which nothing here uses.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxtool.models import LanguageModelConfig
from jaxtool.weights.gguf_reader import GgufFile
from jaxtool.weights.safetensors_reader import read_json_object
from jaxtool.weights.tool_ids import read_tool_ids
from jaxtool.weights.tool_tokens import TokenizerError, text_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """How a family of byte-level BPE tokenizers treats text.

    Attributes:
        words: pattern of the pieces that merges stay within; empty for GPT-2's, which the library has.
        split_digits: each digit is cut off before `words` applies.
        whole_words: a piece that is a token is taken whole, whether or not merges lead there.
        nfc: text is normalised to NFC; the files don't say so, the models were trained with it.
        adds_bos: text begins with the BOS token where the file doesn't say.
    """

    words: str = ""
    split_digits: bool = False
    whole_words: bool = False
    nfc: bool = False
    adds_bos: bool = False

    def pre_tokenizer(self) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.split_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.words:
            steps.append(pre_tokenizers.Split(Regex(self.words), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not self.words))
        return pre_tokenizers.Sequence(steps)


def _words(digits: str) -> str:
    """The pattern of Llama 3 and Qwen, which differ in how many digits stay together."""
    contractions = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    return (
        rf"{contractions}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


# By llama.cpp's names, as far as they were checked against what the models were trained with.
_KINDS: Mapping[str, _Kind] = {
    "gpt-2": _Kind(),
    "smollm": _Kind(split_digits=True),
    "llama-bpe": _Kind(words=_words(r"\p{N}{1,3}"), whole_words=True, adds_bos=True),
    "qwen2": _Kind(words=_words(r"\p{N}"), nfc=True),
}

# Model types (None: no config.json) whose text GPT2Tokenizer splits as they were trained.
_GPT2_MODEL_TYPES = ("gpt2", "gptj", None)
_GPT2_END = "<|endoftext|>"

# Fields of GGUF metadata that name a token at which generation ends.
_GGUF_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")

# Fields of tokenizer.ggml that text to ids doesn't depend on.
_HARMLESS_FIELDS = frozenset(
    {
        "scores",
        "token_type_count",
        "eot_token_id",
        "eom_token_id",
        "seperator_token_id",
        "cls_token_id",
        "mask_token_id",
        "prefix_token_id",
        "suffix_token_id",
        "middle_token_id",
        "fim_pre_token_id",
        "fim_suf_token_id",
        "fim_mid_token_id",
        "fim_pad_token_id",
        "fim_rep_token_id",
        "fim_sep_token_id",
    }
)
_USED_FIELDS = frozenset(
    {
        "model",
        "pre",
        "tokens",
        "token_type",
        "merges",
        "add_space_prefix",
        "add_bos_token",
        "add_eos_token",
        "bos_token_id",
        "eos_token_id",
        "unknown_token_id",
        "padding_token_id",
    }
)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a local Hugging Face folder or `.gguf` file.

    `tokenizer.json` is taken as it is wherever there is one: the model-specific classes of transformers
    rebuild the pre-tokenizer from their own idea of the model, e.g. `GPT2Tokenizer` loses SmolLM2's digit
    splitting.

    Tokens that an export added for tool rows are left out: inside jaxtool tools are ids.

    Text that spells a special token, such as `<|im_end|>`, encodes to that token's id; for untrusted text
    pass `split_special_tokens=True` when encoding.

    Raises:
        FileNotFoundError: no such folder or file.
        TokenizerError: the tokenizer is damaged or of a kind that can't be rebuilt faithfully.
        WeightsError: the folder's table of tools is damaged.
    """
    path = Path(path)
    if path.is_dir():
        with text_folder(path, read_tool_ids(path)) as folder:
            tokenizer = _from_folder(folder)
        tokenizer.name_or_path = str(path)
        return tokenizer
    return tokenizer_from_gguf(GgufFile(path))


def check_tokenizer_fits(tokenizer: PreTrainedTokenizerBase, config: LanguageModelConfig, source: str | Path) -> int:
    """Checks that the model has a row for each id of the tokenizer, and counts those of text.

    Args:
        tokenizer: the text tokenizer.
        config: the model's; `vocab_size` counts its text rows.
        source: the model's folder or file, for the message.

    Returns:
        The largest id of a text row + 1, added and special tokens included: what `text_tokens` of the config should be.

    Raises:
        TokenizerError: the tokenizer has ids that the model's text rows lack.
    """
    size = _size(tokenizer)
    if size > config.vocab_size:
        largest = tokenizer.convert_ids_to_tokens(size - 1)
        raise TokenizerError(
            f"{source}: the model has vocab_size {config.vocab_size}, but the tokenizer in "
            f"{tokenizer.name_or_path or 'memory'} has ids up to {size - 1} ({largest!r}), "
            f"expected at most {config.vocab_size - 1}"
        )
    return size


def eos_token_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Every id at which a text ends, ascending: the tokenizer's EOS token and those that the model's files name.

    In a folder these are `eos_token_id` (a number or a list) of `generation_config.json` and `config.json`, in a GGUF
    file the end of sequence, of turn and of message in the tokenizer's metadata.

    Args:
        path: local folder or `.gguf` file.
        tokenizer: the model's.

    Raises:
        TokenizerError: an id that isn't a whole number or that the tokenizer doesn't have.
        FileNotFoundError: no such folder or file.
    """
    path = Path(path)
    named: dict[str, Any] = {}
    if path.is_dir():
        for file in (path / "generation_config.json", path / "config.json"):
            if file.is_file():
                named[f"{file}: field 'eos_token_id'"] = read_json_object(file).get("eos_token_id")
    else:
        gguf_file = GgufFile(path)
        for name in _GGUF_ENDS:
            if gguf_file.field_names(field := f"tokenizer.ggml.{name}"):
                named[f"{path}: metadata field {field!r}"] = gguf_file.field(field, object)
    found = set() if tokenizer.eos_token_id is None else {tokenizer.eos_token_id}
    last = _size(tokenizer) - 1
    for where, value in named.items():
        for row in value if isinstance(value, list) else [] if value is None else [value]:
            if isinstance(row, bool) or not isinstance(row, int) or not 0 <= row <= last:
                raise TokenizerError(f"{where} is {value!r}, expected ids of the tokenizer, 0 to {last}")
            found.add(row)
    return tuple(sorted(found))


def _size(tokenizer: PreTrainedTokenizerBase) -> int:
    """The largest id + 1; ids may have holes, so that counting tokens is not enough."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    whole = (folder / "tokenizer.json").is_file()
    config_file = folder / "tokenizer_config.json"
    settings = read_json_object(config_file) if config_file.is_file() else {}
    declared, model_type = settings.get("tokenizer_class"), _model_type(folder)
    gpt2 = str(declared).removesuffix("Fast") == "GPT2Tokenizer"
    if gpt2 and not whole and model_type not in _GPT2_MODEL_TYPES:
        raise TokenizerError(
            f"{folder}: a model of type {model_type!r} with tokenizer_class {declared!r} needs a tokenizer.json: "
            "vocab.json and merges.txt don't say how digits are split"
        )
    loader: Any = PreTrainedTokenizerFast if whole else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, local_files_only=True)
    # The tokenizers library raises bare Exception on a damaged tokenizer.json.
    except Exception as error:
        raise TokenizerError(f"{folder}: can't load the tokenizer: {error}") from error
    _check_declared_ids(folder, settings, tokenizer)
    # GPT2Tokenizer has these without being told; published folders rely on it.
    if (gpt2 or (declared is None and model_type in ("gpt2", "gptj"))) and _GPT2_END in tokenizer.get_vocab():
        for role in ("bos_token", "eos_token", "unk_token"):
            if getattr(tokenizer, role) is None:
                setattr(tokenizer, role, _GPT2_END)
    return tokenizer


def _check_declared_ids(folder: Path, settings: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Every added token must have the id that the folder gives it: transformers numbers some of them anew."""
    declared: dict[str, tuple[str, Any]] = {}
    added = folder / "added_tokens.json"
    if added.is_file():
        declared |= {token: (added.name, row) for token, row in read_json_object(added).items()}
    decoder = settings.get("added_tokens_decoder", {})
    if isinstance(decoder, dict):
        declared |= {
            entry["content"]: ("tokenizer_config.json", int(row))
            for row, entry in decoder.items()
            if isinstance(entry, dict) and "content" in entry and row.isdecimal()
        }
    vocabulary = tokenizer.get_vocab()
    for token, (file, row) in declared.items():
        if vocabulary.get(token) != row:
            raise TokenizerError(
                f"{folder / file}: token {token!r} has id {row!r}, but {vocabulary.get(token)} once the folder is "
                "loaded; a tokenizer.json would say"
            )


def _model_type(folder: Path) -> Any:
    config_file = folder / "config.json"
    return read_json_object(config_file).get("model_type") if config_file.is_file() else None


def tokenizer_from_gguf(file: GgufFile) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer that a GGUF file's metadata describe.

    Control tokens become special tokens, user-defined ones added tokens. Bytes without a token of their own,
    of which SmolLM2 has some, are lost in encoding, as in the original; their number is logged.

    Raises:
        ConfigError: a metadata field is missing or of the wrong type.
        TokenizerError: another kind of tokenizer, an unknown pre-tokenizer, or contradicting metadata.
    """
    source = file.source
    model = file.field("tokenizer.ggml.model", str)
    if model != "gpt2":
        raise TokenizerError(
            f"{source}: 'tokenizer.ggml.model' is {model!r}, only 'gpt2' (byte-level BPE) is implemented"
        )
    pre = file.field("tokenizer.ggml.pre", str)
    if pre not in _KINDS:
        raise TokenizerError(
            f"{source}: 'tokenizer.ggml.pre' is {pre!r}, only {' or '.join(map(repr, _KINDS))} is implemented"
        )
    kind = _KINDS[pre]
    for name in file.field_names("tokenizer.ggml."):
        if name.removeprefix("tokenizer.ggml.") not in _USED_FIELDS | _HARMLESS_FIELDS:
            raise TokenizerError(f"{source}: metadata field {name!r} is not known to this port")
    if file.field("tokenizer.ggml.add_space_prefix", bool, False):
        raise TokenizerError(f"{source}: 'tokenizer.ggml.add_space_prefix' is true, only false is implemented")

    tokens = _tokens(file)
    vocabulary = {token: row for row, (token, _) in tokens.items()}
    if len(vocabulary) != len(tokens):
        repeated = next(token for row, (token, _) in tokens.items() if vocabulary[token] != row)
        raise TokenizerError(f"{source}: 'tokenizer.ggml.tokens' has {repeated!r} twice")
    unreachable = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys())
    if unreachable:
        logger.info("%s: %d of 256 bytes have no token, text loses them", source, len(unreachable))

    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=_merges(file, vocabulary), fuse_unk=False, ignore_merges=kind.whole_words)
    )
    if kind.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = kind.pre_tokenizer()
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(_added_tokens(tokens, gguf.TokenType.CONTROL))
    backend.add_tokens(_added_tokens(tokens, gguf.TokenType.USER_DEFINED))
    settings: dict[str, Any] = {
        f"{role}_token": _token(file, f"tokenizer.ggml.{field}_token_id", tokens)
        for role, field in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    if file.field_names("tokenizer.chat_template"):
        settings["chat_template"] = file.field("tokenizer.chat_template", str)
    ends = {"bos": kind.adds_bos, "eos": False}
    ends = {role: file.field(f"tokenizer.ggml.add_{role}_token", bool, default) for role, default in ends.items()}
    for role, is_added in ends.items():
        if is_added and settings[f"{role}_token"] is None:
            raise TokenizerError(
                f"{source}: 'tokenizer.ggml.{role}_token_id' is missing, but text gets that token "
                f"('tokenizer.ggml.add_{role}_token' or the kind {pre!r})"
            )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{f"add_{role}_token": is_added for role, is_added in ends.items()},
        model_max_length=file.field(f"{file.architecture}.context_length", int),
        clean_up_tokenization_spaces=False,
        **settings,
    )
    # Not as an argument: transformers would ask the hub about a model of that name.
    tokenizer.name_or_path = str(source)
    return tokenizer


def _tokens(file: GgufFile) -> dict[int, tuple[str, int]]:
    """Text and type of each token by its id, without those that only fill up the embedding's rows."""
    texts: list[str] = file.field("tokenizer.ggml.tokens", list)
    types: list[int] = file.field("tokenizer.ggml.token_type", list)
    if len(types) != len(texts):
        raise TokenizerError(
            f"{file.source}: {len(types)} entries in 'tokenizer.ggml.token_type' for {len(texts)} tokens"
        )
    return {
        row: (text, kind)
        for row, (text, kind) in enumerate(zip(texts, types, strict=True))
        if not (kind == gguf.TokenType.UNUSED and text == f"[PAD{row}]")
    }


def _merges(file: GgufFile, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    merges: list[tuple[str, str]] = []
    for number, text in enumerate(file.field("tokenizer.ggml.merges", list)):
        parts = str(text).split(" ")
        if len(parts) != 2 or not {*parts, "".join(parts)} <= vocabulary.keys():
            raise TokenizerError(
                f"{file.source}: 'tokenizer.ggml.merges' number {number} is {text!r}, "
                "expected two tokens that make a third"
            )
        merges.append((parts[0], parts[1]))
    return merges


def _added_tokens(tokens: Mapping[int, tuple[str, int]], kind: gguf.TokenType) -> list[AddedToken]:
    special = kind == gguf.TokenType.CONTROL
    return [AddedToken(text, special=special, normalized=False) for text, of in tokens.values() if of == kind]


def _token(file: GgufFile, field: str, tokens: Mapping[int, tuple[str, int]]) -> str | None:
    if not file.field_names(field):
        return None
    row: int = file.field(field, int)
    if row not in tokens:
        raise TokenizerError(f"{file.source}: {field!r} is {row}, expected the id of a token, 0 to {max(tokens)}")
    return tokens[row][0]
