"""The text tokenizer of a model: from a Hugging Face folder, or rebuilt from a GGUF file's metadata.

Text only: tool tokens are ids outside this vocabulary and never pass through here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

# Importing it warns that torch is missing, which nothing here uses.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from jaxtool.weights.gguf_reader import GgufFile
from jaxtool.weights.safetensors_reader import read_json_object

logger = logging.getLogger(__name__)


class TokenizerError(ValueError):
    """A tokenizer that can't be built faithfully; names the file and the field."""


def _byte_level() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


# llama.cpp's names of pre-tokenizers, as far as they were checked against what the models were trained with.
_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": lambda: pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _byte_level()]),
}

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

    Text that spells a special token, such as `<|im_end|>`, encodes to that token's id; for untrusted text
    pass `split_special_tokens=True` when encoding.

    Raises:
        FileNotFoundError: no such folder or file.
        TokenizerError: the tokenizer is damaged or of a kind that can't be rebuilt faithfully.
    """
    path = Path(path)
    if path.is_dir():
        return _from_folder(path)
    return tokenizer_from_gguf(GgufFile(path))


def _from_folder(folder: Path) -> PreTrainedTokenizerBase:
    whole = (folder / "tokenizer.json").is_file()
    config_file = folder / "tokenizer_config.json"
    declared = read_json_object(config_file).get("tokenizer_class") if config_file.is_file() else None
    if not whole and str(declared).removesuffix("Fast") == "GPT2Tokenizer" and _model_type(folder) == "llama":
        raise TokenizerError(
            f"{folder}: a Llama model with tokenizer_class {declared!r} needs a tokenizer.json: "
            "vocab.json and merges.txt don't say how digits are split"
        )
    loader: Any = PreTrainedTokenizerFast if whole else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(folder, local_files_only=True)
    # The tokenizers library raises bare Exception on a damaged tokenizer.json.
    except Exception as error:
        raise TokenizerError(f"{folder}: can't load the tokenizer: {error}") from error
    return tokenizer


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
    kind = file.field("tokenizer.ggml.model", str)
    if kind != "gpt2":
        raise TokenizerError(
            f"{source}: 'tokenizer.ggml.model' is {kind!r}, only 'gpt2' (byte-level BPE) is implemented"
        )
    pre = file.field("tokenizer.ggml.pre", str)
    if pre not in _PRE_TOKENIZERS:
        raise TokenizerError(
            f"{source}: 'tokenizer.ggml.pre' is {pre!r}, only {' or '.join(map(repr, _PRE_TOKENIZERS))} is implemented"
        )
    for name in file.field_names("tokenizer.ggml."):
        if name.removeprefix("tokenizer.ggml.") not in _USED_FIELDS | _HARMLESS_FIELDS:
            raise TokenizerError(f"{source}: metadata field {name!r} is not known to this port")
    if file.field("tokenizer.ggml.add_space_prefix", bool, False):
        raise TokenizerError(f"{source}: 'tokenizer.ggml.add_space_prefix' is true, only false is implemented")

    tokens: list[str] = file.field("tokenizer.ggml.tokens", list)
    vocabulary = {token: row for row, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        repeated = next(token for row, token in enumerate(tokens) if vocabulary[token] != row)
        raise TokenizerError(f"{source}: 'tokenizer.ggml.tokens' has {repeated!r} twice")
    unreachable = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - vocabulary.keys())
    if unreachable:
        logger.info("%s: %d of 256 bytes have no token, text loses them", source, len(unreachable))

    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=_merges(file, vocabulary), fuse_unk=False))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    special, added = _added_tokens(file, tokens)
    backend.add_special_tokens(special)
    backend.add_tokens(added)
    settings: dict[str, Any] = {
        f"{role}_token": _token(file, f"tokenizer.ggml.{field}_token_id", tokens)
        for role, field in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
    }
    if file.field_names("tokenizer.chat_template"):
        settings["chat_template"] = file.field("tokenizer.chat_template", str)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        add_bos_token=file.field("tokenizer.ggml.add_bos_token", bool, False),
        add_eos_token=file.field("tokenizer.ggml.add_eos_token", bool, False),
        model_max_length=file.field("llama.context_length", int),
        clean_up_tokenization_spaces=False,
        **settings,
    )


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


def _added_tokens(file: GgufFile, tokens: list[str]) -> tuple[list[AddedToken], list[AddedToken]]:
    types: list[int] = file.field("tokenizer.ggml.token_type", list)
    if len(types) != len(tokens):
        raise TokenizerError(
            f"{file.source}: {len(types)} entries in 'tokenizer.ggml.token_type' for {len(tokens)} tokens"
        )

    def of(kind: gguf.TokenType, special: bool) -> list[AddedToken]:
        return [
            AddedToken(token, special=special, normalized=False)
            for token, of_type in zip(tokens, types, strict=True)
            if of_type == kind
        ]

    return of(gguf.TokenType.CONTROL, True), of(gguf.TokenType.USER_DEFINED, False)


def _token(file: GgufFile, field: str, tokens: list[str]) -> str | None:
    if not file.field_names(field):
        return None
    row: int = file.field(field, int)
    if not 0 <= row < len(tokens):
        raise TokenizerError(f"{file.source}: {field!r} is {row}, expected 0 to {len(tokens) - 1}")
    return tokens[row]
