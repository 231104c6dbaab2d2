"""Tool rows as tokens of a tokenizer, for programs that know a model through its tokenizer alone.

Inside jaxtool tools are ids and never text: `with_tool_tokens` serves the export, and what it adds is taken out again
when an exported folder is loaded.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jaxtool.weights.safetensors_reader import read_json_object

_LISTED = 5

# Where tokenizers of transformers 4 and 5 name added tokens.
_TOKEN_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


class TokenizerError(ValueError):
    """A tokenizer that can't be built faithfully; names the file and the field."""


def tool_token(name: str) -> str:
    """The text of a tool's token.

    The blank makes byte-level tokenizers give the text back as it is: they take a token that consists of their byte
    symbols alone for bytes, and `é` is such a symbol.
    """
    return f"<|tool {name}|>"


def with_tool_tokens(tokenizer: Any, names: Sequence[str], first_id: int) -> tuple[Any, int]:
    """A copy of the tokenizer in which tool i is the special token `<|tool NAME|>` with the id `first_id + i`.

    Ids between the tokenizer's last and `first_id` (padding rows of the checkpoint) become `<|unused_0|>` and so on:
    a tokenizer has no gaps. One that has the tool tokens already is copied as it is.

    Returns:
        The tokenizer and the number of unused tokens.

    Raises:
        TokenizerError: a token's text is taken, or the tokenizer gives a token another id than its row or doesn't
            encode and decode it as one; names the tool.
    """
    tokens = [tool_token(name) for name in names]
    known: Mapping[str, int] = tokenizer.get_vocab()
    wanted = dict(zip(tokens, range(first_id, first_id + len(tokens)), strict=True))
    result = copy.deepcopy(tokenizer)
    if all(known.get(token) == row for token, row in wanted.items()):
        return result, 0
    end = max(known.values(), default=-1) + 1
    if end > first_id:
        raise TokenizerError(
            f"the tokenizer has ids up to {end - 1:,}, expected none behind the model's {first_id:,} text rows"
        )
    unused = [_unused_token(i) for i in range(first_id - end)]
    wanted = dict(zip(unused, range(end, first_id), strict=True)) | wanted
    for token, row in wanted.items():
        if token in known:
            raise TokenizerError(
                f"the tokenizer has the token {token!r} already (id {known[token]:,}), expected it to be free for row "
                f"{row:,}: rename it, or export without tool tokens"
            )
    result.add_tokens([AddedToken(token, special=True, normalized=False) for token in wanted])
    _check_round_trip(result, wanted)
    return result, len(unused)


@contextmanager
def text_folder(folder: Path, tool_ids: Mapping[str, int]) -> Iterator[Path]:
    """The folder of a tokenizer, or for the time of the context a copy of it without the tokens of `with_tool_tokens`.

    Args:
        folder: of an exported model, with `tokenizer.json` where the tokenizer knows tools.
        tool_ids: the row of each tool by its name; see `read_tool_ids`.
    """
    if not tool_ids or not (folder / "tokenizer.json").is_file():
        yield folder
        return
    whole = read_json_object(folder / "tokenizer.json")
    listed = whole.get("added_tokens")
    entries = listed if isinstance(listed, list) else []
    known = {entry.get("content"): entry.get("id") for entry in entries if isinstance(entry, dict)}
    added = {token for name, row in tool_ids.items() if known.get(token := tool_token(name)) == row}
    if added:
        first = next(iter(tool_ids.values()))
        unused = next((n for n in range(first, 0, -1) if known.get(_unused_token(n - 1)) == first - 1), 0)
        added |= {_unused_token(i) for i in range(unused)}
    if not added:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="jaxtool-tokenizer-") as directory:
        copied = Path(directory)
        for path in folder.iterdir():
            if path.name in _TOKEN_FILES:
                fields = json.dumps(_without(read_json_object(path), added), ensure_ascii=False)
                (copied / path.name).write_text(fields, encoding="utf-8")
            elif path.suffix in (".json", ".jinja", ".txt", ".model"):
                shutil.copy(path, copied / path.name)
        yield copied


def _without(value: Any, tokens: set[str]) -> Any:
    """JSON without the entries of lists and objects that are, name or describe one of `tokens`."""

    def kept(entry: Any) -> bool:
        text = entry.get("content") if isinstance(entry, dict) else entry
        return not (isinstance(text, str) and text in tokens)

    if isinstance(value, dict):
        return {key: _without(item, tokens) for key, item in value.items() if key not in tokens and kept(item)}
    if isinstance(value, list):
        return [_without(item, tokens) for item in value if kept(item)]
    return value


def _unused_token(number: int) -> str:
    return f"<|unused_{number}|>"


def _check_round_trip(tokenizer: Any, wanted: Mapping[str, int]) -> None:
    texts, rows = list(wanted), list(wanted.values())
    for text, row, found in zip(texts, rows, tokenizer.convert_tokens_to_ids(texts), strict=True):
        if found != row:
            raise TokenizerError(f"the tokenizer gives the token {text!r} the id {found}, expected its row {row:,}")
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
    lost = [
        text
        for text, row, ids in zip(texts, rows, encoded, strict=True)
        if ids != [row] or tokenizer.decode([row], skip_special_tokens=False) != text
    ]
    if lost:
        more = f" and {len(lost) - _LISTED:,} more" if len(lost) > _LISTED else ""
        raise TokenizerError(
            f"the tokenizer doesn't encode and decode {', '.join(map(repr, lost[:_LISTED]))}{more} as one token: "
            "rename the tools, or export without tool tokens"
        )
