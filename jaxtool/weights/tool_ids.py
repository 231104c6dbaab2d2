"""Which row of an exported model is which tool: the table `tool_ids.jsonl`, and tool tokens for those who want text.

Tool rows lie behind the text rows. Inside jaxtool tools are ids and never text; `with_tool_tokens` is for programs
that know a model through its tokenizer alone.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from jaxtool.weights.safetensors_header import parse_json_object
from jaxtool.weights.tensor_map import WeightsError
from jaxtool.weights.tokenizers import TokenizerError

TOOL_IDS_FILE = "tool_ids.jsonl"

_FIELDS = {"id", "name"}
_LISTED = 5


def write_tool_ids(folder: Path, names: Sequence[str], first_id: int) -> None:
    """Writes the table: one JSON object a line, `id` (the row, ascending from `first_id`) and `name`.

    Raises:
        ValueError: a name is empty, appears twice or isn't Unicode text.
    """
    check_names(names)
    rows = enumerate(names, first_id)
    lines = [json.dumps({"id": row, "name": name}, ensure_ascii=False) + "\n" for row, name in rows]
    (folder / TOOL_IDS_FILE).write_bytes("".join(lines).encode())


def read_tool_ids(folder: str | Path) -> dict[str, int]:
    """The row of each tool of a model folder by its name, in the order of the rows; empty without `tool_ids.jsonl`.

    Raises:
        FileNotFoundError: no such folder.
        WeightsError: the file is damaged, or its ids aren't consecutive; names the line and the field.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder")
    path = folder / TOOL_IDS_FILE
    if not path.is_file():
        return {}
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        raise WeightsError(f"{path}: expected one object a line, the last line is empty or cut off")
    rows: dict[str, int] = {}
    for number, line in enumerate(content[:-1].split(b"\n"), 1):
        where = f"{path}:{number}"
        entry = parse_json_object(line, where)
        if entry.keys() != _FIELDS:
            raise WeightsError(f"{where}: has the fields {', '.join(sorted(entry)) or 'none'}, expected id and name")
        row, name = entry["id"], entry["name"]
        if type(row) is not int or row < 0:
            raise WeightsError(f"{where}: field 'id' is {row!r}, expected a whole number from 0 up")
        if rows and row != (expected := next(reversed(rows.values())) + 1):
            raise WeightsError(f"{where}: field 'id' is {row}, expected {expected}: one more than the line before")
        if not isinstance(name, str) or not name:
            raise WeightsError(f"{where}: field 'name' is {name!r}, expected a non-empty text")
        if name in rows:
            raise WeightsError(f"{where}: field 'name' is {name!r}, which is the tool of row {rows[name]} already")
        rows[name] = row
    return rows


def check_names(names: Sequence[str]) -> None:
    """Raises ValueError where a name is empty, appears twice or can't be written as UTF-8."""
    seen: dict[str, int] = {}
    for tool, name in enumerate(names):
        if not name:
            raise ValueError(f"tool {tool}: its name is empty")
        if (first := seen.setdefault(name, tool)) != tool:
            raise ValueError(f"tool {tool}: its name {name!r} is that of tool {first} already")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"tool {tool}: its name {name!r} is not valid Unicode") from error


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
    unused = [f"<|unused_{i}|>" for i in range(first_id - end)]
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
