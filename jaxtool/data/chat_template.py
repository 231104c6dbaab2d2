"""Conversations as text through the tokenizer's chat template, and where in that text the turns of the model lie.

The template writes special tokens; the same characters in a message, a name or an argument stay text. Tools in messages
are marks here and become ids in chat_samples.py, which makes the tokens.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from jaxtool.data.chat_files import Conversation, Message, ToolName
from jaxtool.data.sample_writer import SampleError

# What Llama 3's template shows where it isn't told the date.
SHOWN_DATE = datetime.date(2024, 7, 26)

_ADVICE = "a template with {% generation %} would say"
_PRIVATE = re.compile("[\ue000-\uf8ff]")
_GENERATION = re.compile(r"\{%([-+]?)\s*(end)?generation\s*([-+]?)%\}")
_DATE = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")


@dataclass(frozen=True, kw_only=True)
class RenderedChat:
    """A conversation as the template writes it.

    Attributes:
        text: what the template wrote. Special tokens that a message spells out and tools are marks in it.
        turns: for each turn of the model where it begins and ends in the text: from the end of the prompt that asks for
            it to behind the token that ends it.
        tokens: matches special tokens that the template wrote, and with the group `tool` marks of tools.
        spelled: matches marks of special tokens that messages spell out; its group is an index into `specials`.
        specials: special tokens that messages spell out, to be read as text.
        tools: names of tools, to be replaced by their ids; the group `tool` is an index into them.
        hidden_tools: descriptions of tools that the template doesn't show.
    """

    text: str
    turns: tuple[tuple[int, int], ...]
    tokens: re.Pattern[str]
    spelled: re.Pattern[str]
    specials: tuple[str, ...]
    tools: tuple[str, ...]
    hidden_tools: int

    def restored(self, text: str) -> str:
        """Part of the text without tools, with the special tokens in place that messages spell out."""
        return self.spelled.sub(lambda match: self.specials[int(match[1])], text)


@dataclass(frozen=True, kw_only=True)
class _Marks:
    """Characters that occur neither in the template nor in the conversation."""

    special: str
    tool: str
    probe: str
    begin: str
    end: str


class ChatTemplate:
    """Renders conversations for training with the chat template of a tokenizer.

    The turns of the model are found by rendering the conversation again with other words in them, or, where the
    template marks them with `{% generation %}`, as it says.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        end_ids: tokens that end a turn of the model; None: the tokenizer's EOS token.
        system_prompt: text of the system turn of conversations without one; None leaves it to the template.
        date: what templates show as the current date, so that a run doesn't depend on the day on which it is started.
        arguments: further variables of the template, such as `enable_thinking`.

    Attributes:
        special_pattern: matches any special token in a text.

    Raises:
        SampleError: no chat template, or one that doesn't end the model's turn with one of `end_ids`.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        end_ids: Sequence[int] | None = None,
        system_prompt: str | None = None,
        date: datetime.date = SHOWN_DATE,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        if not tokenizer.chat_template:
            raise SampleError("the tokenizer has no chat template: use a chat model, or set tokenizer.chat_template")
        self.tokenizer, self.system_prompt = tokenizer, system_prompt
        self.arguments = dict(arguments or {})
        self._date = date
        added = {token.content: (row, token) for row, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_ids = {content: row for content, (row, _) in added.items()}
        self.swallows_before = {content for content, (_, token) in added.items() if token.lstrip}
        self.swallows_behind = {content for content, (_, token) in added.items() if token.rstrip}
        longest_first = sorted(filter(None, added), key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        ends = [tokenizer.eos_token_id] if end_ids is None else list(end_ids)
        self.end_ids = {row for row in ends if row is not None}
        if not self.end_ids:
            raise SampleError("the tokenizer has no EOS token, which ends the turn of the model")
        if not self.end_ids & set(self.special_ids.values()):
            token = tokenizer.convert_ids_to_tokens(min(self.end_ids))
            raise SampleError(f"the token {token!r} ends turns but is not a special token: any text could end a turn")
        self._prompts: dict[bool, str] = {}
        self._sources: dict[tuple[bool, _Marks], str] = {}
        self._check()

    def render(self, conversation: Conversation, *, prompt: bool = False) -> RenderedChat:
        """The conversation as text; with `prompt` up to where the model's next turn begins, and without turns.

        Raises:
            SampleError: the template refuses it, leaves a message out, or hides where a turn of the model lies; begins
                with file and line.
        """
        where = f"{conversation.file}:{conversation.line}: "
        messages = list(conversation.messages)
        if self.system_prompt is not None and messages[0].role not in ("system", "developer"):
            messages.insert(0, Message(role="system", content=(self.system_prompt,), fields={}))
        marks = self._free_marks(messages, conversation.tools)
        specials, tools = list[str](), list[str]()

        def hidden(text: str) -> str:
            def hide(match: re.Match[str]) -> str:
                specials.append(match[0])
                return f"{marks.special}{len(specials) - 1}{marks.special}"

            return self.special_pattern.sub(hide, text)

        def part(content: str | ToolName) -> str:
            if isinstance(content, str):
                return hidden(content)
            tools.append(content.name)
            return f"{marks.tool}{len(tools) - 1}{marks.tool}"

        turns = [
            {"role": message.role, "content": "".join(map(part, message.content)), **_mapped(message.fields, hidden)}
            for message in messages
        ]
        schemas = [_mapped(tool, hidden) for tool in conversation.tools]
        try:
            if prompt:
                text, found = self._text(turns, schemas, marks, prompt=True), list[tuple[int, int]]()
                text = text.replace(marks.begin, "").replace(marks.end, "")
            else:
                text, found = self._with_turns(turns, schemas, marks)
        except SampleError as error:
            raise SampleError(f"{where}{error}") from error
        for i, turn in enumerate(turns):
            said = turn["content"].strip()
            if turn["role"] == "assistant":  # templates may leave out reasoning, which comes first
                said = said.rpartition("\n")[2]
            for shown in (said, *(call["function"]["name"] for call in turn.get("tool_calls", ()))):
                if not _shows(text, shown):
                    raise SampleError(
                        f"{where}the chat template leaves out or changes {shown[:60]!r} in message {i} ({turn['role']})"
                    )
        names = [schema.get("function", schema).get("name", "") for schema in schemas]
        return RenderedChat(
            text=text,
            turns=tuple(found),
            tokens=re.compile(f"{self.special_pattern.pattern}|{marks.tool}(?P<tool>[0-9]+){marks.tool}"),
            spelled=re.compile(f"{marks.special}([0-9]+){marks.special}"),
            specials=tuple(specials),
            tools=tuple(tools),
            hidden_tools=sum(not _shows(text, str(name)) for name in names),
        )

    def _with_turns(
        self, messages: list[dict[str, Any]], tools: list[Any], marks: _Marks
    ) -> tuple[str, list[tuple[int, int]]]:
        text = self._text(messages, tools, marks)
        if marks.begin in text or marks.end in text:
            return _marked_turns(text, marks)
        if _GENERATION.search(self._source(tools)):
            return text, []
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        contents = self._contents(text, messages, places, tools, marks)
        turns: list[tuple[int, int]] = []
        previous = 0
        for place, (begin, end, exact) in zip(places, contents, strict=True):
            first = self._begin(text, messages[:place], tools, marks, previous, begin)
            if first is None and not exact:
                raise SampleError(f"can't tell where message {place} begins in the chat template's text; {_ADVICE}")
            last = self._end(text, end, place)
            turns.append((begin if first is None else first, last))
            previous = last
        return text, turns

    def _contents(
        self, text: str, messages: list[dict[str, Any]], places: list[int], tools: list[Any], marks: _Marks
    ) -> list[tuple[int, int, bool]]:
        """Where what each turn of the model says begins and ends, and whether the beginning is certain."""

        def probed(which: Sequence[int]) -> list[str]:
            changed = list(messages)
            for place in which:
                changed[place] = {"role": "assistant", "content": f"{marks.probe}{place}{marks.probe}"}
            pieces = re.split(f"{marks.probe}([0-9]+){marks.probe}", self._text(changed, tools, marks))
            if pieces[1::2] != [str(place) for place in which]:
                raise SampleError(f"the chat template leaves out, repeats or moves turns of the model ({list(which)})")
            return pieces[::2]

        # All turns at once: right where the template treats each message by its role alone.
        frames = probed(places)
        found: list[tuple[int, int, bool]] = []
        at = len(frames[0])
        for place, frame in zip(places, frames[1:], strict=True):
            end = text.find(frame, at) if place != places[-1] else len(text) - len(frame)
            content = messages[place]["content"]
            whole = text[at:end] in (content, content.strip(), content.rstrip(), content.lstrip())
            if end < at or not (whole or self.special_pattern.search(frame)):
                break
            found.append((at, end, True))
            at = end + len(frame)
        if len(found) == len(places) and text.startswith(frames[0]) and text.endswith(frames[-1]):
            return found
        # One turn after the other, for templates that look at what a turn says.
        found = []
        for place in places:
            before, behind = probed([place])
            if not text.endswith(behind) or len(text) < len(behind):
                raise SampleError(f"can't tell where message {place} ends in the chat template's text; {_ADVICE}")
            begin = _shared(text, before)
            found.append((begin, len(text) - len(behind), begin == len(before)))
        return found

    def _begin(
        self,
        text: str,
        before: list[dict[str, Any]],
        tools: list[Any],
        marks: _Marks,
        previous: int,
        content: int,
    ) -> int | None:
        """Where the prompt for a turn ends, whose content begins at `content`; None where the template doesn't say."""
        prompt = self._prompt(tools)
        if prompt:
            at = text.rfind(prompt, previous, content)
            if at >= 0:
                return at + len(prompt)
        if not before:
            return None
        try:
            asked = self._text(before, tools, marks, prompt=True)
        except SampleError:
            return None
        return len(asked) if previous <= len(asked) <= content and text.startswith(asked) else None

    def _end(self, text: str, content_end: int, place: int) -> int:
        found = self.special_pattern.search(text, content_end)
        between = text[content_end : found.start() if found else None]
        if found is None or between.strip() or self.special_ids[found[0]] not in self.end_ids:
            shown = text[content_end : found.end() if found else None][:60]
            ends = ", ".join(repr(self.tokenizer.convert_ids_to_tokens(row)) for row in sorted(self.end_ids))
            raise SampleError(f"the chat template ends message {place} with {shown!r}, expected one of {ends}")
        end = found.end()
        if found[0] in self.swallows_behind:
            end += len(text[end:]) - len(text[end:].lstrip())
        return end

    def _prompt(self, tools: list[Any]) -> str:
        """What the template writes to ask for a turn of the model; "" where that is not one text behind the others."""
        key = bool(tools)
        if key not in self._prompts:
            marks = self._free_marks([], ())
            messages = [{"role": "user", "content": "x"}]
            try:
                without, asked = (self._text(messages, tools, marks, prompt=prompt) for prompt in (False, True))
            except SampleError:
                without, asked = "", ""
            self._prompts[key] = asked.removeprefix(without) if asked.startswith(without) else ""
        return self._prompts[key]

    def _check(self) -> None:
        messages = (
            Message(role="user", content=("x",), fields={}),
            Message(role="assistant", content=("y",), fields={}),
        )
        rendered = self.render(Conversation(messages=messages, tools=(), file="chat template", line=1))
        begins = self.tokenizer(rendered.text, add_special_tokens=False)["input_ids"]
        bos = self.tokenizer.bos_token_id
        if bos is not None and begins[:2] == [bos, bos]:
            raise SampleError(f"the chat template begins with two BOS tokens ({bos}), expected one")
        if len(rendered.turns) != 1:
            raise SampleError("the chat template's {% generation %} doesn't mark the turn of the model")
        self.ends_turns = any(
            self.special_ids[match[0]] in self.end_ids
            for match in self.special_pattern.finditer(rendered.text, *rendered.turns[0])
        )

    def _source(self, tools: list[Any]) -> str:
        source: str = self.tokenizer.get_chat_template(None, tools or None)
        return source

    def _marked_source(self, tools: list[Any], marks: _Marks) -> str:
        def tag(match: re.Match[str]) -> str:
            # A block, as the tag was, so that white space around it is trimmed in the same way.
            mark = marks.end if match[2] else marks.begin
            return f"{{%{match[1]} if true %}}{mark}{{% endif {match[3]}%}}"

        key = bool(tools), marks
        if key not in self._sources:
            source = _GENERATION.sub(tag, self._source(tools))
            self._sources[key] = _DATE.sub(lambda match: json.dumps(self._date.strftime(match[2])), source)
        return self._sources[key]

    def _text(self, messages: list[dict[str, Any]], tools: list[Any], marks: _Marks, *, prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages,
                tools=tools or None,
                chat_template=self._marked_source(tools, marks),
                tokenize=False,
                add_generation_prompt=prompt,
                **self.arguments,
            )
        # Templates add what they take for text, and a missing field is not.
        except (TemplateError, TypeError) as error:
            raise SampleError(f"the chat template refuses the conversation: {error}") from error
        return text

    def _free_marks(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]]) -> _Marks:
        used = set(_PRIVATE.findall(str(self.tokenizer.chat_template)))

        def note(text: str) -> str:
            used.update(_PRIVATE.findall(text))
            return text

        for value in (*(message.content for message in messages), *(message.fields for message in messages), *tools):
            _mapped(value, note)
        free = (chr(code) for code in range(0xE0F0, 0xF900) if chr(code) not in used)
        try:
            return _Marks(special=next(free), tool=next(free), probe=next(free), begin=next(free), end=next(free))
        except StopIteration:
            raise SampleError(
                "the conversation uses all of Unicode's private characters, expected 5 free ones"
            ) from None


def _marked_turns(text: str, marks: _Marks) -> tuple[str, list[tuple[int, int]]]:
    """The text without the marks of `{% generation %}`, and what lay between them."""
    pieces = re.split(f"([{marks.begin}{marks.end}])", text)
    kept, turns, length, begin = list[str](), list[tuple[int, int]](), 0, -1
    for piece in pieces:
        if piece == marks.begin:
            begin = length
        elif piece == marks.end:
            turns.append((begin, length))
        else:
            kept.append(piece)
            length += len(piece)
    return "".join(kept), turns


def _shared(first: str, second: str) -> int:
    """Characters that both texts begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


def _shows(text: str, part: str) -> bool:
    return part in text or json.dumps(part, ensure_ascii=False)[1:-1] in text


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """JSON with every text in it changed, keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, ToolName):
        return value
    if isinstance(value, Mapping):
        return {change(key): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value
