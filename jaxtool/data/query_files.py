"""Unlabelled queries from a user's file, for offline inference. Labelled ones are read in labelled_files.py."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from jaxtool.data.chat import ChatPrompts
from jaxtool.data.prompt_rows import PromptLine, read_prompt_lines
from jaxtool.data.query_sets import LabelledQuery, QuerySetError
from jaxtool.tools.json_records import Problems, counted, listing, read_records

QUERY_FORMATS = (
    "a text file with a query a line, a file in .jsonl with a text or an object with a field query or text in each, or "
    "one in .json with an array of them"
)
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


def read_query_lines(path: str | Path) -> list[PromptLine]:
    """The lines of a file of queries, a JSON value each; for what they may be see `PromptEncoder`.

    A file that ends in .jsonl holds one a line, one in .json may be an array too; any other file is text, a query a
    line. All may be compressed with gzip. Blank lines are left out.

    Raises:
        FileNotFoundError: no such file.
        ValueError: as `read_prompt_lines`, or no array or lines of JSON; lists file and line of each.
    """
    path = Path(path)
    if path.is_dir() or not path.exists() or path.name.endswith((".jsonl", ".jsonl.gz")):
        return read_prompt_lines(path)
    if not path.name.endswith((".json", ".json.gz")):
        lines = read_prompt_lines(path)
        if _JSON_START.match(lines[0].text):
            raise ValueError(
                f"{path}:{lines[0].line}: begins like JSON, but a file without the ending .json or .jsonl holds a "
                "query a line"
            )
        return [replace(line, text=json.dumps(line.text, ensure_ascii=False)) for line in lines]
    problems = Problems()
    records = read_records(path, problems)
    problems.raise_if_any(QuerySetError, f"{path} can't be used as queries")
    if not records:
        raise ValueError(f"{path}: no query in it; expected {QUERY_FORMATS}")
    return [
        PromptLine(row=row, line=record.line, text=json.dumps(record.value, ensure_ascii=False))
        for row, record in enumerate(records)
    ]


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
