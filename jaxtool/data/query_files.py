"""Unlabelled queries from a user's file, for offline inference. Labelled ones are read in labelled_files.py."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtool.data.chat import ChatPrompts
from jaxtool.data.query_sets import LabelledQuery, QuerySetError
from jaxtool.tools.json_records import Problems, counted, json_kind, listing, read_records, read_text

QUERY_FORMATS = (
    "a text file with a query a line, or a file in .json or .jsonl (JSON Lines, or one array) of texts or of objects "
    "with a field query or text"
)
_JSON_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_FIELDS = ("query", "text")
# How an array or object of texts, arrays or objects begins, over several lines too: no query is written like that.
_JSON_START = re.compile(r"""\s*(\[\s*["\[{]|\{\s*")""")


@dataclass(frozen=True, kw_only=True)
class Query:
    """A user's request.

    Attributes:
        text: the request, with at least one character that isn't white space.
        where: where it comes from, "file:line" or file and id.
    """

    text: str
    where: str

    @classmethod
    def of(cls, query: LabelledQuery) -> Query:
        """A labelled query without its labels; it is found by its id."""
        return cls(text=query.text, where=f"{query.source}, query {query.query_id}")


def read_queries(path: str | Path) -> list[Query]:
    """The queries of a file, in its order.

    A file that ends in .json or .jsonl holds JSON values, a line each or in one array: texts, or objects whose text is
    in the field `query` or `text` (their other fields are not read, so a file of labelled queries will do). Any other
    file is text, a query a line. Both may be compressed with gzip.

    Raises:
        FileNotFoundError: no such file.
        QuerySetError: a folder, no query, or anything that is not as above; lists file and line of each.
    """
    path = Path(path)
    if path.is_dir():
        raise QuerySetError(f"{path}: is a folder; expected {QUERY_FORMATS}")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file of queries")
    problems = Problems()
    queries = _from_json(path, problems) if path.name.endswith(_JSON_SUFFIXES) else _from_text(path, problems)
    problems.raise_if_any(QuerySetError, f"{path} can't be used as queries")
    if not queries:
        raise QuerySetError(f"{path}: no query in it; expected {QUERY_FORMATS}")
    return queries


def check_readable(queries: Sequence[Query], prompts: ChatPrompts) -> list[str]:
    """Checks that the tokenizer has a token for some character of each query.

    Returns:
        A line for each character that it has none for.

    Raises:
        QuerySetError: queries of such characters alone; lists file and line of each.
    """
    counts = prompts.without_token(query.text for query in queries)
    lost = "".join(counts)
    wrong = [
        f"{query.where}: the tokenizer has no token for any character of {query.text[:40]!r}"
        for query in queries
        if counts and not query.text.translate(dict.fromkeys(map(ord, lost))).strip()
    ]
    if wrong:
        raise QuerySetError(listing(f"{counted(len(wrong), 'query', 'queries')} that the model can't read", wrong))
    return [
        f"the tokenizer has no token for {character!r}: the model reads {counted(count, 'text')} without it"
        for character, count in counts.items()
    ]


def _from_text(path: Path, problems: Problems) -> list[Query]:
    text = read_text(path, problems)
    if _JSON_START.match(text):
        problems.add(
            f"{path}:1", "begins like JSON, but a file without the ending .json or .jsonl holds a query a line"
        )
        return []
    # Not splitlines: a query may hold U+2028 and its like.
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    queries = []
    for number, line in enumerate(lines if text else [], start=1):
        if line.strip():
            queries.append(Query(text=line, where=f"{path}:{number}"))
        else:
            problems.add(f"{path}:{number}", "the line is empty, expected a query")
    return queries


def _from_json(path: Path, problems: Problems) -> list[Query]:
    queries = []
    for record in read_records(path, problems):
        where = f"{path}:{record.line}"
        text = record.value if isinstance(record.value, str) else _text_field(record.value, where, problems)
        if text is None:
            continue
        if text.strip():
            queries.append(Query(text=text, where=where))
        else:
            problems.add(where, "the query is empty, expected some text")
    return queries


def _text_field(value: Any, where: str, problems: Problems) -> str | None:
    if not isinstance(value, dict):
        problems.add(where, f"expected a text, or an object with a field query or text, found {json_kind(value)}")
        return None
    found = [field for field in _FIELDS if field in value]
    if len(found) != 1:
        has = "both" if found else ", ".join(value) or "no field"
        problems.add(where, f"expected an object with a field query or text, found {has}")
    elif not isinstance(value[found[0]], str):
        problems.add(where, f"field {found[0]}: expected text, found {json_kind(value[found[0]])}")
    else:
        return value[found[0]]
    return None
