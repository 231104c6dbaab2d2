"""The Berkeley Function Calling Leaderboard as a retrieval set: which functions does a user's request need?

Only its single-turn sets. Fetching the files is in assets.py, the rule of the split in query_sets.py.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtool.data.query_sets import HeldOut, LabelledQuery, QuerySetError, RetrievalSet, split_queries
from jaxtool.tools import Tool, ToolCatalog
from jaxtool.tools.json_records import Problems, Record, counted, json_kind, read_records
from jaxtool.tools.readers import RecordReader

# Conversations of several turns, or with tools that are not in the question file.
_OTHER_KINDS = ("multi_turn", "memory", "web_search", "format_sensitivity")
# Requests that no offered function answers (irrelevance), or that only say that some function does.
UNANSWERED_SETS = ("irrelevance", "live_irrelevance", "live_relevance")
ANSWERED_SETS = (
    "live_multiple",
    "live_parallel",
    "live_parallel_multiple",
    "live_simple",
    "multiple",
    "parallel",
    "parallel_multiple",
    "simple_java",
    "simple_javascript",
    "simple_python",
)


def load_bfcl(directory: str | Path, *, seed: int = 0, held_out: HeldOut | None = None) -> RetrievalSet:
    """Read the single-turn sets of BFCL: its functions as one catalogue, its answered questions as queries.

    The catalogue holds the functions of all rows, also of those without an answer, merged by name. A query is
    the text of the last user message (system prompts and earlier messages are left out, and counted); its
    tools are the functions in the answer. Questions with the same text but for letter case and white space
    are one query, which needs the tools of all, so that no text is both trained on and tested.

    Args:
        directory: The folder with `BFCL_v*_*.json` and `possible_answer/`.
        seed: Chooses the held-out queries.
        held_out: How much to hold out (default: `HeldOut()`).

    Raises:
        FileNotFoundError: There are no such files, or an answer file is missing.
        QuerySetError: Everything that is wrong in the files, with file and line.
    """
    directory = Path(directory)
    files = [path for path in sorted(directory.glob("BFCL_v*_*.json")) if _is_single_turn(path)]
    if not files:
        raise FileNotFoundError(f"{directory}: no single-turn BFCL_v*_*.json file in this folder")
    problems = Problems()
    reader = RecordReader(problems)
    functions: list[Tool] = []
    questions: list[_Question] = []
    counts: Counter[str] = Counter()
    for path in files:
        answers = _read_answers(path, problems)
        for record in read_records(path, problems):
            counts["rows"] += 1
            row = _read_row(record, path, reader, problems)
            if row is None:
                continue
            functions += row.functions
            if row.question_id not in answers:
                counts[f"unanswered {path.name}"] += 1
                continue
            names = answers.pop(row.question_id)
            missing = sorted(names - {function.name for function in row.functions})
            if missing:
                problems.add(row.where, f"field function: the answer's {missing[0]!r} is not among its names")
            counts["with other messages"] += row.earlier_messages > 0
            questions.append(_Question(row=row, names=names))
        for question_id in answers:
            problems.add(str(_answer_path(path)), f"answer to {question_id!r}, which is not in {path.name}")
    problems.raise_if_any(QuerySetError, f"{directory} can't be read as BFCL")

    catalog = ToolCatalog.from_tools(functions, on_duplicate="merge", notes=reader.notes())
    queries, merge_notes = _merge_texts(questions, catalog)
    train, test, test_unseen = split_queries(queries, seed=seed, held_out=held_out or HeldOut())
    unanswered = {name.split()[1]: count for name, count in counts.items() if name.startswith("unanswered ")}
    notes = [
        *catalog.notes,
        f"{counted(counts['rows'], 'row')} of {counted(len(files), 'file')} read: {len(questions):,} "
        f"with an answer, {sum(unanswered.values()):,} without, which give functions but no "
        f"query ({', '.join(f'{name} {count:,}' for name, count in unanswered.items()) or 'none'})",
        f"{counted(counts['with other messages'], 'answered row')} with a system prompt or earlier messages: "
        "only the last user message is the text",
        *merge_notes,
        f"split with seed {seed}: {len(train):,} train, {len(test):,} test of tools with training queries, "
        f"{len(test_unseen):,} test of tools without",
    ]
    return RetrievalSet(catalog=catalog, train=train, test=test, test_unseen=test_unseen, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class _Row:
    question_id: str
    where: str
    source: str
    text: str
    earlier_messages: int
    functions: list[Tool] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Question:
    row: _Row
    names: set[str]


def _category(path: Path) -> str:
    return path.stem.split("_", maxsplit=2)[2]


def _is_single_turn(path: Path) -> bool:
    return not _category(path).startswith(_OTHER_KINDS)


def _answer_path(path: Path) -> Path:
    return path.parent / "possible_answer" / path.name


def _read_answers(path: Path, problems: Problems) -> dict[str, set[str]]:
    """The names of the functions in the answer to each question id; empty for sets that have no answers."""
    answer_path = _answer_path(path)
    if not answer_path.exists():
        if _category(path) in UNANSWERED_SETS:
            return {}
        raise FileNotFoundError(f"{answer_path}: missing; {path.name} can't be used without its answers")
    answers: dict[str, set[str]] = {}
    for record in read_records(answer_path, problems):
        where = f"{answer_path}:{record.line}"
        question_id = _field(record.value, "id", str, where, problems)
        calls = _field(record.value, "ground_truth", list, where, problems)
        if question_id is None or calls is None:
            continue
        if not calls or not all(isinstance(call, dict) and len(call) == 1 for call in calls):
            problems.add(where, "field ground_truth: expected objects with one function name each, at least one")
        elif question_id in answers:
            problems.add(where, f"field id: {question_id!r} was answered before")
        else:
            answers[question_id] = {name for call in calls for name in call}
    return answers


def _read_row(record: Record, path: Path, reader: RecordReader, problems: Problems) -> _Row | None:
    where = f"{path}:{record.line}"
    before = len(problems)
    question_id = _field(record.value, "id", str, where, problems)
    turns = _field(record.value, "question", list, where, problems)
    functions = _field(record.value, "function", list, where, problems)
    if question_id is None or turns is None or functions is None:
        return None
    tools = [tool for function in functions for tool in reader.openai(function, where)]
    messages = turns[0] if len(turns) == 1 and isinstance(turns[0], list) else None
    if not messages or not all(isinstance(message, dict) for message in messages):
        problems.add(where, "field question: expected one turn, a list of messages")
    elif messages[-1].get("role") != "user":
        role = messages[-1].get("role")
        problems.add(where, f"field question: expected a user message at the end, found {role!r}")
    elif not isinstance(messages[-1].get("content"), str) or not messages[-1]["content"].strip():
        problems.add(where, "field question: expected text in the last user message")
    if len(problems) > before or not messages:
        return None
    return _Row(
        question_id=question_id,
        where=where,
        source=path.name,
        text=messages[-1]["content"],
        earlier_messages=len(messages) - 1,
        functions=tools,
    )


def _field(value: Any, name: str, kind: type, where: str, problems: Problems) -> Any:
    content = value.get(name) if isinstance(value, dict) else None
    if isinstance(content, kind):
        return content
    problems.add(where, f"field {name}: expected {json_kind(kind())}, found {json_kind(content)}")
    return None


def _merge_texts(questions: list[_Question], catalog: ToolCatalog) -> tuple[list[LabelledQuery], list[str]]:
    """One query for each text, under the id and source of its first row, with the tools of all its rows."""
    first: dict[str, _Row] = {}
    tools: dict[str, set[int]] = {}
    rows: Counter[str] = Counter()
    joined: set[str] = set()
    for question in questions:
        key = " ".join(question.row.text.split()).casefold()
        ids = {catalog.index(name) for name in question.names}
        first.setdefault(key, question.row)
        if key in tools and tools[key] != ids:
            joined.add(key)
        tools.setdefault(key, set()).update(ids)
        rows[key] += 1
    queries = [
        LabelledQuery(query_id=row.question_id, text=row.text, tools=tuple(sorted(tools[key])), source=row.source)
        for key, row in first.items()
    ]
    repeats = [count for count in rows.values() if count > 1]
    note = (
        f"{len(questions):,} answered rows make {counted(len(queries), 'query', 'queries')} of different "
        f"text: {counted(len(repeats), 'text')} in {sum(repeats):,} rows merged, {len(joined):,} of them "
        "with different tools, which were united"
    )
    return queries, [note]
