"""Retrieval sets in BEIR format: corpus.jsonl, queries.jsonl and qrels/*.tsv in one folder.

ToolLens is one; where a document's text has its layout, the tool's fields are read from it.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxtool.data.query_sets import LabelledQuery, QuerySetError, RetrievalSet
from jaxtool.tools import CatalogError, Tool, ToolCatalog
from jaxtool.tools.json_records import Problems, counted, json_kind, read_records, read_text
from jaxtool.tools.readers import RecordReader

_SPLITS = ("train", "test")


def load_beir(directory: str | Path) -> RetrievalSet:
    """Read a BEIR folder; its corpus is the catalogue, in the order of the file.

    A document becomes a tool named by its `title`, or by its `_id` where it has none, with `text` as
    description. A text in ToolLens layout ("category_name:..., tool_name:..., api_name:...,
    api_description:..., required_params: [...], optional_params: [...], return_schema: ...") becomes a tool
    named "<tool_name>&&<api_name>" with collection, description and parameters. Documents are told apart by
    `_id`: where several would get one name, each gets " [<_id>]" behind it.

    Relevance above 0 makes a document one of the query's tools.

    Raises:
        FileNotFoundError: corpus.jsonl, queries.jsonl or qrels/test.tsv is missing. Without qrels/train.tsv
            the train part is empty.
        QuerySetError: Everything that is wrong in the files, with file and line; a folder in a file's place.
    """
    directory = Path(directory)
    for name in ("corpus.jsonl", "queries.jsonl", "qrels/test.tsv"):
        path = directory / name
        if path.is_dir():
            raise QuerySetError(f"{path}: is a folder; in BEIR format it is a file")
        if not path.exists():
            raise FileNotFoundError(f"{path}: missing; a folder in BEIR format needs it")
    problems = Problems()
    catalog, ids = _read_corpus(directory / "corpus.jsonl", problems)
    texts = _read_queries(directory / "queries.jsonl", problems)
    notes: list[str] = [*catalog.notes]
    parts: dict[str, tuple[LabelledQuery, ...]] = {"train": ()}
    asked: set[str] = set()
    for split in _SPLITS:
        path = directory / "qrels" / f"{split}.tsv"
        if not path.is_file():
            notes.append(f"no qrels/{split}.tsv: the {split} part is empty")
            continue
        labels = _read_qrels(path, texts, ids, problems, notes)
        asked |= labels.keys()
        parts[split] = tuple(
            LabelledQuery(query_id=q, text=texts[q], tools=tuple(sorted(tools)), source=path.name)
            for q, tools in labels.items()
            if tools
        )
    problems.raise_if_any(QuerySetError, f"{directory} can't be read as a BEIR folder")
    unread = sorted(p.name for p in (directory / "qrels").iterdir() if p.stem not in _SPLITS)
    if unread:
        notes.append(f"left unread in qrels/: {', '.join(unread)}")
    if len(texts) > len(asked):
        notes.append(f"{counted(len(texts) - len(asked), 'query', 'queries')} in no qrels that were read: left out")
    trained = {_plain_text(query.text) for query in parts["train"]}
    shared = sum(_plain_text(query.text) in trained for query in parts["test"])
    notes.append(f"{counted(shared, 'test query', 'test queries')} with a text that is also in train")
    return RetrievalSet(catalog=catalog, train=parts["train"], test=parts["test"], notes=tuple(notes))


def _plain_text(text: str) -> str:
    return " ".join(text.split()).casefold()


def _read_corpus(path: Path, problems: Problems) -> tuple[ToolCatalog, dict[str, int]]:
    """The catalogue, and the tool id of each document id."""
    reader = RecordReader(problems)
    tools: list[Tool] = []
    ids: dict[str, int] = {}
    counts: Counter[str] = Counter()
    lines: dict[str, int] = {}
    for record in read_records(path, problems):
        where = f"{path}:{record.line}"
        if not _is_row(record.value, where, problems, required=("_id", "text"), optional=("title",)):
            continue
        document_id, text, title = record.value["_id"], record.value["text"], record.value.get("title") or ""
        if document_id in lines:
            problems.add(where, f"field _id: {document_id!r} is also on line {lines[document_id]}")
            continue
        lines[document_id] = record.line
        fields = parse_toollens(text)
        if fields is not None:
            counts["ToolLens layout"] += 1
            counts["category"] += bool(fields.pop("category"))
            counts["return schema"] += bool(fields.pop("return_schema"))
            new = reader.toolbench(fields, where)
        else:
            new = _plain_tool(title if title.strip() else document_id, text, where, problems)
        if new:
            ids[document_id] = len(tools)
            tools += new
    notes = [*reader.notes()]
    laid_out = counts["ToolLens layout"]
    if laid_out:
        notes.append(
            f"{laid_out:,} of {counted(len(lines), 'document')} in ToolLens layout; a tool does not carry "
            f"their category ({counts['category']:,}) and return schema ({counts['return schema']:,})"
        )
    tools, renamed = _tell_apart(tools, list(ids))
    if renamed:
        notes.append(f"{counted(renamed, 'document')} sharing a name with another: renamed with their _id")
    if not tools and not problems:
        problems.add(f"{path}:1", "no documents")
    return ToolCatalog(tools, notes=notes), ids


def _plain_tool(name: str, description: str, where: str, problems: Problems) -> list[Tool]:
    try:
        return [Tool(name=name, description=description, source=where)]
    except CatalogError as error:
        problems.messages.append(str(error))
        return []


def _tell_apart(tools: list[Tool], document_ids: list[str]) -> tuple[list[Tool], int]:
    counts = Counter(tool.name for tool in tools)
    taken = {name for name, count in counts.items() if count == 1}
    result, renamed = [], 0
    for tool, document_id in zip(tools, document_ids, strict=True):
        if counts[tool.name] > 1:
            renamed += 1
            name = tool.name
            # Again while another document happens to have that name.
            while name == tool.name or name in taken:
                name = f"{name} [{document_id}]"
            taken.add(name)
            tool = replace(tool, name=name)
        result.append(tool)
    return result, renamed


def _read_queries(path: Path, problems: Problems) -> dict[str, str]:
    texts: dict[str, str] = {}
    for record in read_records(path, problems):
        where = f"{path}:{record.line}"
        if not _is_row(record.value, where, problems, required=("_id", "text")):
            continue
        query_id, text = record.value["_id"], record.value["text"]
        if query_id in texts:
            problems.add(where, f"field _id: {query_id!r} appeared before")
        elif not text.strip():
            problems.add(where, "field text: blank")
        else:
            texts[query_id] = text
    return texts


def _is_row(
    value: Any, where: str, problems: Problems, *, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> bool:
    if not isinstance(value, dict):
        problems.add(where, f"expected an object, found {json_kind(value)}")
        return False
    before = len(problems)
    for field in (*required, *optional):
        content = value.get(field)
        if not isinstance(content, str) and (field in required or content is not None):
            problems.add(where, f"field {field}: expected text, found {json_kind(content)}")
    if isinstance(value.get("_id"), str) and not value["_id"].strip():
        problems.add(where, "field _id: blank")
    return len(problems) == before


def _read_qrels(
    path: Path, texts: dict[str, str], ids: dict[str, int], problems: Problems, notes: list[str]
) -> dict[str, set[int]]:
    """The tool ids of each query in the file, in order of appearance; empty where no row is relevant."""
    labels: dict[str, set[int]] = {}
    pairs: dict[tuple[str, str], int] = {}
    counts: Counter[str] = Counter()
    lines = read_text(path, problems).split("\n")
    header = lines[0].rstrip("\r").split("\t")
    if header != ["query-id", "corpus-id", "score"]:
        message = f"expected the header query-id, corpus-id, score between tabs, found {lines[0][:80]!r}"
        problems.add(f"{path}:1", message)
        return labels
    for number, line in enumerate(lines[1:], start=2):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        cells = line.rstrip("\r").split("\t")
        if len(cells) != 3:
            problems.add(where, f"expected 3 fields between tabs, found {len(cells)}")
            continue
        query_id, document_id, score_text = cells
        try:
            score = int(score_text)
        except ValueError:
            problems.add(where, f"field score: expected a whole number, found {score_text!r}")
            continue
        if query_id not in texts:
            problems.add(where, f"field query-id: {query_id!r} is not in queries.jsonl")
        elif document_id not in ids:
            problems.add(where, f"field corpus-id: {document_id!r} is not in corpus.jsonl")
        elif pairs.setdefault((query_id, document_id), score) != score:
            problems.add(where, f"field score: {score}, but {pairs[query_id, document_id]} for this pair before")
        else:
            counts["rows"] += 1
            counts["not relevant"] += score <= 0
            tools = labels.setdefault(query_id, set())
            if score > 0:
                tools.add(ids[document_id])
    empty = sum(not tools for tools in labels.values())
    notes.append(
        f"qrels/{path.name}: {counted(counts['rows'], 'row')}, {len(pairs):,} different pairs of "
        f"{counted(len(labels), 'query', 'queries')}; {counts['not relevant']:,} rows with score 0 or less; "
        f"{counted(empty, 'query', 'queries')} without a relevant document left out"
    )
    return labels


_DECODER = json.JSONDecoder()


def parse_toollens(text: str) -> dict[str, Any] | None:
    """The fields of a document in ToolLens layout, or None when the text hasn't exactly that layout.

    The result has the ToolBench fields `tool_name`, `api_name`, `api_description`, `required_parameters` and
    `optional_parameters`, besides `category` and `return_schema` (texts). Names end at the first following
    key. The description ends where two JSON lists follow with their keys, so it may hold commas, colons and
    the keys themselves.
    """
    fields: dict[str, Any] = {}
    position = 0
    for field, key, following in (
        ("category", "category_name:", ", tool_name:"),
        ("tool_name", ", tool_name:", ", api_name:"),
        ("api_name", ", api_name:", ", api_description:"),
    ):
        end = text.find(following, position)
        if not text.startswith(key, position) or end < 0:
            return None
        fields[field] = text[position + len(key) : end]
        position = end
    position += len(", api_description:")
    if not fields["tool_name"].strip() or not fields["api_name"].strip():
        return None
    key = ", required_params: "
    start = text.find(key, position)
    while start >= 0:
        lists = _parameter_lists(text, start)
        if lists is not None:
            required, optional, end = lists
            fields["api_description"] = text[position:start]
            fields["required_parameters"], fields["optional_parameters"] = required, optional
            fields["return_schema"] = text[end:]
            return fields
        start = text.find(key, start + 1)
    return None


def _parameter_lists(text: str, position: int) -> tuple[list[Any], list[Any], int] | None:
    """Both lists from the position of the first's key on, and where the value of return_schema starts."""
    lists = []
    for key in (", required_params: ", ", optional_params: "):
        if not text.startswith(key, position):
            return None
        try:
            value, position = _DECODER.raw_decode(text, position + len(key))
        except (ValueError, RecursionError):
            return None
        if not isinstance(value, list) or not all(isinstance(v, dict) and "name" in v for v in value):
            return None
        lists.append(value)
    key = ", return_schema: "
    return (lists[0], lists[1], position + len(key)) if text.startswith(key, position) else None
