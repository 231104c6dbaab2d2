"""Unlabelled queries from a user's file, for offline inference."""

from __future__ import annotations

import json
from pathlib import Path

from jaxtool.data.query_sets import QuerySetError

_SHOWN = 20


def read_queries(path: str | Path) -> list[str]:
    """Queries of a text file (one a line) or, with the ending `.jsonl`, of JSON objects with a field `text`.

    Raises:
        FileNotFoundError: no such file.
        QuerySetError: no query, an empty line, or a line that is not such an object; lists file and line of each.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of queries")
    try:
        # Not splitlines: a query may hold U+2028 and its like.
        lines = path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise QuerySetError(f"{path}: not UTF-8 text (byte {error.start})") from error
    if lines == [""]:
        raise QuerySetError(f"{path}: no query in it")
    queries, problems = [], []
    for number, line in enumerate(lines, start=1):
        where = f"{path}:{number}"
        text = line
        if path.suffix == ".jsonl":
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                problems.append(f"{where}: expected a JSON object with a field text, found {line[:60]!r} ({error})")
                continue
            found = record.get("text") if isinstance(record, dict) else record
            if not isinstance(found, str):
                problems.append(f"{where}: field text: expected a string, found {str(found)[:60]!r}")
                continue
            text = found
        if any("\ud800" <= character <= "\udfff" for character in text):
            problems.append(f"{where}: field text: a lone surrogate escape is not valid Unicode text")
            continue
        if not text.strip():
            problems.append(f"{where}: the query is empty")
            continue
        queries.append(text)
    if problems:
        more = f"\n  ... and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise QuerySetError(
            f"{path}: {len(problems)} of {len(lines)} lines can't be used\n  " + "\n  ".join(problems[:_SHOWN]) + more
        )
    return queries
