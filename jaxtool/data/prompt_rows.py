"""Prompts for offline inference from a JSON Lines file, a line at a time: a line that is wrong spoils no other.

A line is an object with one of `prompt` (text), `messages` (a conversation that the model goes on with, through the
tokenizer's chat template) and `tokens` (ids). It may have an `id`, and `sampling` with settings of its own. All other
fields go into the result as they are.
"""

from __future__ import annotations

import dataclasses
import gzip
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxtool.data.chat import ChatPrompts
from jaxtool.data.chat_files import conversation_of
from jaxtool.data.chat_samples import ChatEncoder
from jaxtool.data.chat_template import ChatTemplate
from jaxtool.data.text_encoder import TextEncoder
from jaxtool.tools.json_records import Problems, Record, json_kind, parse_value

_PROMPTS = ("prompt", "messages", "tokens")
_QUERIES = ("query", "text")
_OF_MESSAGES = ("tools", "system")


@dataclass(frozen=True, kw_only=True)
class PromptLine:
    """A line of the file that isn't blank.

    Attributes:
        row: its number among these, from 0.
        line: its number in the file, from 1.
        text: the line.
    """

    row: int
    line: int
    text: str


@dataclass(frozen=True, kw_only=True)
class PromptRow:
    """A line that can be used.

    Attributes:
        row: as of the line.
        tokens: the prompt.
        sampling: the settings that the line gives.
        fields: `id` and what else the line has, for the result.
        cut: tokens of a query's end that were left out.
    """

    row: int
    tokens: list[int]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    cut: int = 0


def read_prompt_lines(path: str | Path) -> list[PromptLine]:
    """The lines of a file, gzip or plain.

    Raises:
        FileNotFoundError: no such file.
        ValueError: a folder, a damaged file, no UTF-8 text, or no line at all.
    """
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path}: is a folder, expected a file with a JSON object a line")
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file of prompts")
    data = path.read_bytes()
    try:
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        text = data.decode("utf-8-sig")
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged or cut gzip file ({error})") from error
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}:{line}: expected UTF-8 text, found byte 0x{data[error.start]:02x}") from error
    # Not splitlines: JSON text may hold characters that it takes for the end of a line.
    lines = [(number, line.strip("\r \t")) for number, line in enumerate(text.split("\n"), start=1)]
    found = [(number, line) for number, line in lines if line]
    if not found:
        raise ValueError(f"{path}: no line in it, expected a JSON object a line")
    return [PromptLine(row=row, line=number, text=line) for row, (number, line) in enumerate(found)]


class PromptEncoder:
    """Lines to prompts.

    Args:
        tokenizer: of the model.
        vocabulary: text rows of the model.
        end_ids: tokens that end a turn of the model.
        defaults: what a line's `sampling` may set: an instance of a frozen dataclass.
        tools: the ids that `tokens` may hold besides those of text.
        tool_id: the id of a tool's token by its name, for messages that name tools.
        result: fields that results have besides `row` and `error`; a line's own would be lost.
        queries: renders queries, which lines then may have in the place of a prompt: a text alone, or in the field
            `query` or `text`. They go into the result.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocabulary: int,
        end_ids: Sequence[int],
        defaults: Any = None,
        tools: range = range(0),
        tool_id: Callable[[str], int] | None = None,
        result: Sequence[str] = (),
        queries: ChatPrompts | None = None,
    ) -> None:
        self.tokenizer, self.vocabulary, self.end_ids = tokenizer, vocabulary, end_ids
        self.defaults, self.tools, self.tool_id = defaults, tools, tool_id
        self.result = ("row", "error", *result)
        self.queries = queries
        self.kinds = _PROMPTS if queries is None else (*_QUERIES, *_PROMPTS)
        self.text = TextEncoder(tokenizer)
        self._chat: ChatEncoder | None = None

    def encode(self, line: PromptLine, file: str) -> PromptRow:
        """The prompt of a line.

        Raises:
            ValueError: says what is wrong with it; begins with file and line.
        """
        where = f"{file}:{line.line}"
        value = parse_value(line.text, where)
        if self.queries is not None and isinstance(value, str):
            value = {"query": value}
        if not isinstance(value, dict):
            raise ValueError(f"{where}: expected an object with a prompt, found {json_kind(value)}")
        given = [name for name in self.kinds if name in value]
        if len(given) != 1:
            found = " and ".join(given) or ", ".join(map(repr, value)) or "no field"
            raise ValueError(f"{where}: expected one of the fields {', '.join(self.kinds)}; found {found}")
        settings = () if self.defaults is None else ("sampling",)
        used = (*_PROMPTS, *settings, *(_OF_MESSAGES if given == ["messages"] else ()))
        kept = {name: x for name, x in value.items() if name not in used}
        for name in self.result:
            if name in kept:
                raise ValueError(f"{where}: field {name!r} is a field of the result, expected another name")
        sampling = self._sampling(value["sampling"], where) if settings and "sampling" in value else {}
        if self.queries is not None and given[0] in _QUERIES:
            tokens, cut = self._query(self.queries, value[given[0]], f"{where}, field {given[0]}")
            return PromptRow(row=line.row, tokens=tokens, sampling=sampling, fields=kept, cut=cut)
        if given == ["prompt"]:
            tokens = self._text_tokens(value["prompt"], where)
        elif given == ["tokens"]:
            tokens = self._ids(value["tokens"], where)
        else:
            tokens = self._messages(Record(line=line.line, value=value), file)
        return PromptRow(row=line.row, tokens=tokens, sampling=sampling, fields=kept)

    def _text_tokens(self, text: Any, where: str) -> list[int]:
        if not isinstance(text, str):
            raise ValueError(f"{where}, field prompt: expected text, found {json_kind(text)}")
        ids = self.text.texts([text])[0].tolist()
        ids = ids if self.text.bos_id is None else [self.text.bos_id, *ids]
        if not ids:
            raise ValueError(f"{where}, field prompt: the text has no tokens, expected at least one character")
        if max(ids) >= self.vocabulary:
            raise ValueError(
                f"{where}, field prompt: the tokenizer gives id {max(ids)}, the model has {self.vocabulary}"
            )
        return list(ids)

    def _query(self, queries: ChatPrompts, text: Any, where: str) -> tuple[list[int], int]:
        if not isinstance(text, str):
            raise ValueError(f"{where}: expected text, found {json_kind(text)}")
        try:
            prompt = queries.prompt(text)
            queries.check_within(self.vocabulary, prompt.ids)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        return prompt.ids, prompt.cut

    def _ids(self, ids: Any, where: str) -> list[int]:
        if not isinstance(ids, list) or not ids:
            raise ValueError(f"{where}, field tokens: expected a list of at least one id, found {json_kind(ids)}")
        for place, token in enumerate(ids):
            if type(token) is not int or not (0 <= token < self.vocabulary or token in self.tools):
                shown = token if type(token) is int else json_kind(token)
                raise ValueError(f"{where}, field tokens[{place}]: expected an id of the model, found {shown}")
        return ids

    def _messages(self, record: Record, file: str) -> list[int]:
        problems = Problems()
        conversation = conversation_of(file, record, problems)
        if conversation is None:
            raise ValueError("; ".join(problems.messages))
        if conversation.messages[-1].role == "assistant":
            where = f"{file}:{record.line}"
            raise ValueError(f"{where}, field messages: the last turn is the model's own, expected another one's")
        if self._chat is None:
            template = ChatTemplate(self.tokenizer, end_ids=self.end_ids)
            self._chat = ChatEncoder(template, tool_id=self.tool_id, vocabulary=self.vocabulary)
        rendered = self._chat.template.render(conversation, prompt=True)
        return [int(token) for token in self._chat.encode([(conversation, rendered)])[0].ids]

    def _sampling(self, value: Any, where: str) -> dict[str, Any]:
        """What a line sets, each of the type of its default."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError(f"{where}, field sampling: expected an object, found {json_kind(value)}")
        known = {each.name for each in dataclasses.fields(self.defaults)}
        found: dict[str, Any] = {}
        for name, given in value.items():
            if name not in known:
                raise ValueError(f"{where}, field sampling.{name}: unknown, expected one of {', '.join(sorted(known))}")
            default = getattr(self.defaults, name)
            if isinstance(default, tuple):
                given = [given] if isinstance(given, str) else given
                fits = isinstance(given, list) and all(isinstance(each, str) for each in given)
                found[name] = tuple(given) if fits else None
            elif isinstance(default, float):
                fits = type(given) is float or (type(given) is int and abs(given) < 2**64)  # others may have no float
                found[name] = float(given) if fits else None
            else:
                fits = type(given) is type(default)
                found[name] = given
            if not fits:
                wanted = {tuple: "a text or a list of texts", bool: "true or false", int: "a whole number"}
                expected = wanted.get(type(default), "a number")
                shown = repr(given)[:60] if type(given) in (int, float, str) else json_kind(given)
                raise ValueError(f"{where}, field sampling.{name}: expected {expected}, found {shown}")
        return found
