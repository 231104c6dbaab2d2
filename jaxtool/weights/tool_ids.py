"""Which row of an exported model is which tool: the table `tool_ids.jsonl`.

Tool rows lie behind the text rows. Tokenizers that know tools as text are made in `tool_tokens`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from jaxtool.weights.safetensors_header import parse_json_object
from jaxtool.weights.tensor_map import WeightsError

TOOL_IDS_FILE = "tool_ids.jsonl"

_FIELDS = {"id", "name"}


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
    folder = Path(os.path.expanduser(folder))
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
    """Raises ValueError where a name is no text, is empty, appears twice or can't be written as UTF-8."""
    if isinstance(names, str):
        raise ValueError(f"tools: expected a sequence of names, found the text {names[:40]!r}")
    seen: dict[str, int] = {}
    for tool, name in enumerate(names):
        if not isinstance(name, str):
            raise ValueError(f"tool {tool}: its name is {name!r:.80}, expected a text")
        if not name:
            raise ValueError(f"tool {tool}: its name is empty")
        if (first := seen.setdefault(name, tool)) != tool:
            raise ValueError(f"tool {tool}: its name {name!r} is that of tool {first} already")
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"tool {tool}: its name {name!r} is not valid Unicode") from error
