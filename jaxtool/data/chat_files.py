"""Conversations from files in the OpenAI format (`messages`) or the ShareGPT format (`conversations`).

Only reading and checking happen here; chat_template.py renders, chat_samples.py makes tokens.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtool.data.data_files import json_records, source_files, strict_json
from jaxtool.data.sample_writer import SampleError
from jaxtool.tools.json_records import Problems, Record, counted, json_kind

CHAT_ENDINGS = (".jsonl", ".json", ".ndjson")
_ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
_CALL_ROLES = ("function_call", "tool_call")
_MARKS = ("train", "loss", "weight")
_OWN_FIELDS = ("role", "content", "from", "value", "tool_calls", "function_call", *_MARKS)


@dataclass(frozen=True, kw_only=True)
class ToolName:
    """A tool in a message that stands for its token, `{"type": "tool", "name": ...}` in a file."""

    name: str


@dataclass(frozen=True, kw_only=True)
class Message:
    """One turn.

    Attributes:
        role: "system", "developer", "user", "assistant" or "tool".
        content: text and tools in their order; empty where there are only calls.
        fields: what else the chat template may use, `tool_calls` in the OpenAI format with parsed arguments.
        train: whether the file says that the turn is to be learned; None where it says nothing.
    """

    role: str
    content: tuple[str | ToolName, ...]
    fields: Mapping[str, Any]
    train: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Turns in order, and the descriptions of the tools that the template may show."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    file: str
    line: int


class ChatFiles:
    """The conversations of a source, in an order that is the same on every machine.

    A record is an object with `messages` or `conversations`: objects with `role` and `content`, or `from` and `value`.
    Content is text, or a list of parts `{"type": "text", "text": ...}` and `{"type": "tool", "name": ...}`. Turns of
    the model may have `tool_calls` (or ShareGPT's role function_call), and say by `train` or `loss` (true or false) or
    `weight` (0 or 1) whether they are learned. A record may have `tools` (a list, or one as JSON text) and `system`.

    Args:
        source: a file, a folder with its subfolders, or a pattern, of .jsonl and .json files (each also with .gz).

    Attributes:
        notes: after iteration, what was left out.

    Raises:
        FileNotFoundError: no such file, folder or match.
        SampleError: files of another kind; in iteration, all records that can't be used, by file, line and field.
    """

    def __init__(self, source: str | Path) -> None:
        self.source = str(source)
        self._files = source_files(source, CHAT_ENDINGS)
        self.notes: list[str] = []

    def __iter__(self) -> Iterator[Conversation]:
        problems, counts, unused = Problems(), Counter[str](), Counter[str]()
        for path in self._files.files:
            for record in json_records(path, problems, counts):
                conversation = conversation_of(str(path), record, problems, unused)
                if conversation is not None and not problems:
                    yield conversation
        problems.raise_if_any(SampleError, f"{self.source} can't be used as conversations")
        self.notes = list(self._files.notes)
        if counts["empty line"]:
            self.notes.append(f"{counted(counts['empty line'], 'empty line')} skipped")
        if unused:
            names = ", ".join(f"{name} ({count:,})" for name, count in unused.most_common(10))
            self.notes.append(f"fields of records that are not used: {names}{', ...' if len(unused) > 10 else ''}")


def conversation_of(
    file: str, record: Record, problems: Problems, unused: Counter[str] | None = None
) -> Conversation | None:
    """The conversation of a record, or None and problems; counts the fields that it doesn't use."""
    where, value = f"{file}:{record.line}", record.value
    if not isinstance(value, dict):
        problems.add(where, f"expected an object with messages or conversations, found {json_kind(value)}")
        return None
    named = [name for name in ("messages", "conversations") if name in value]
    if len(named) != 1:
        found = "both" if named else ", ".join(map(repr, value)) or "no field"
        problems.add(where, f"expected a field messages or conversations, found {found}")
        return None
    turns = value[named[0]]
    if not isinstance(turns, list) or not turns:
        found = "an empty one" if turns == [] else json_kind(turns)
        problems.add(where, f"field {named[0]}: expected a list of messages, found {found}")
        return None
    before = len(problems)
    messages = [_message(turn, where, f"{named[0]}[{i}]", problems) for i, turn in enumerate(turns)]
    tools = _tools(value.get("tools"), where, problems)
    system = value.get("system")
    if system is not None and not isinstance(system, str):
        problems.add(where, f"field system: expected text, found {json_kind(system)}")
    elif system and any(message is not None and message.role == "system" for message in messages):
        problems.add(where, "field system: there is a system message as well, expected one of them")
    if len(problems) > before:
        return None
    if isinstance(system, str) and system:
        messages.insert(0, Message(role="system", content=(system,), fields={}))
    if unused is not None:
        unused.update(name for name in value if name not in (*named, "tools", "system"))
    return Conversation(
        messages=tuple(message for message in messages if message is not None),
        tools=tools,
        file=file,
        line=record.line,
    )


def _message(turn: Any, where: str, field: str, problems: Problems) -> Message | None:
    def wrong(name: str, expected: str, found: Any) -> None:
        shown = repr(found[:60]) if isinstance(found, str) else json_kind(found)
        problems.add(where, f"field {field}{name}: expected {expected}, found {shown}")

    if not isinstance(turn, dict):
        wrong("", "an object", turn)
        return None
    keys = [(a, b) for a, b in (("role", "content"), ("from", "value")) if a in turn]
    if len(keys) != 1:
        wrong("", "either role and content, or from and value", ", ".join(turn))
        return None
    role_key, content_key = keys[0]
    given = turn[role_key]
    if not isinstance(given, str) or given not in _ROLES:
        wrong(f".{role_key}", f"one of {', '.join(_ROLES)}", given)
        return None
    role = _ROLES[given]
    before = len(problems)
    fields = {
        name: value
        for name, value in turn.items()
        if name not in ("role", "content", "from", "value", "tool_calls", "function_call", *_MARKS)
        and value is not None
    }
    content = _content(turn.get(content_key), where, f"{field}.{content_key}", problems)
    calls = turn.get("tool_calls")
    calls_field = f"{field}.tool_calls"
    if turn.get("function_call") is not None:
        calls, calls_field = [turn["function_call"]], f"{field}.function_call"
    if given in _CALL_ROLES:
        calls_field = f"{field}.{content_key}"
        calls, content = _call_text(turn.get(content_key), where, calls_field, problems), ()
    if calls and role != "assistant":
        wrong("", "no tool_calls in a turn that isn't the assistant's", turn)
    elif calls:
        fields["tool_calls"] = _calls(calls, where, calls_field, problems)
    elif role == "assistant" and not any(content) and len(problems) == before:
        wrong(f".{content_key}", "text or tool_calls in a turn of the assistant", turn.get(content_key))
    train = _train(turn, where, field, problems)
    if train and role != "assistant":
        wrong("", "only turns of the assistant to be learned", given)
    return None if len(problems) > before else Message(role=role, content=content, fields=fields, train=train)


def _content(value: Any, where: str, field: str, problems: Problems) -> tuple[str | ToolName, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list):
        problems.add(where, f"field {field}: expected text or a list of parts, found {json_kind(value)}")
        return ()
    parts: list[str | ToolName] = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        key = {"text": "text", "tool": "name"}.get(kind) if isinstance(kind, str) else None
        if key is None or not isinstance(part.get(key), str):
            problems.add(
                where,
                f'field {field}[{i}]: expected {{"type": "text", "text": ...}} or {{"type": "tool", "name": ...}}, '
                f"found {json.dumps(part, ensure_ascii=False)[:80]}",
            )
        else:
            parts.append(ToolName(name=part[key]) if kind == "tool" else part[key])
    return tuple(parts)


def _call_text(value: Any, where: str, field: str, problems: Problems) -> Any:
    try:
        found = strict_json(value) if isinstance(value, str) else value
    except ValueError as error:
        problems.add(where, f"field {field}: expected calls as JSON ({error}), found {value[:60]!r}")
        return None
    return found if isinstance(found, list) else [found]


def _calls(value: Any, where: str, field: str, problems: Problems) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    if not isinstance(value, list):
        problems.add(where, f"field {field}: expected a list of calls, found {json_kind(value)}")
        return calls
    for i, call in enumerate(value):
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            shown = json.dumps(call, ensure_ascii=False)[:80]
            problems.add(where, f"field {field}[{i}]: expected a function with name and arguments, found {shown}")
            continue
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = strict_json(arguments) if arguments.strip() else {}
            except ValueError as error:
                problems.add(where, f"field {field}[{i}].arguments: not valid JSON ({error}): {arguments[:60]!r}")
                continue
        if not isinstance(arguments, dict):
            problems.add(where, f"field {field}[{i}].arguments: expected an object, found {json_kind(arguments)}")
            continue
        known = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
        calls.append(known | {"type": "function", "function": {"name": function["name"], "arguments": arguments}})
    return calls


def _train(turn: Mapping[str, Any], where: str, field: str, problems: Problems) -> bool | None:
    found: dict[str, bool] = {}
    for name in _MARKS:
        value = turn.get(name)
        if value is None:
            continue
        if not (isinstance(value, bool) if name != "weight" else value in (0, 1)):
            expected = "0 or 1" if name == "weight" else "true or false"
            problems.add(where, f"field {field}.{name}: expected {expected}, found {value!r}")
        else:
            found[name] = bool(value)
    if len(set(found.values())) > 1:
        problems.add(where, f"field {field}: {' and '.join(found)} contradict one another")
    return next(iter(found.values()), None)


def _tools(value: Any, where: str, problems: Problems) -> tuple[Mapping[str, Any], ...]:
    if value is None or value == "":
        return ()
    try:
        found = strict_json(value) if isinstance(value, str) else value
    except ValueError as error:
        problems.add(where, f"field tools: not valid JSON ({error})")
        return ()
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        problems.add(where, f"field tools: expected a list of objects, found {json_kind(found)}")
        return ()
    return tuple(found)
