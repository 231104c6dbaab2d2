"""Samples of conversations: the model's turns are learned, each with the token that ends it, and nothing else.

The tokens before a turn are those that the model is prompted with, so templates and text are tokenised apart where a
turn begins. Tools in messages become their ids and never pass through the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from jaxtool.data.chat_files import ChatFiles, Conversation
from jaxtool.data.chat_template import ChatTemplate, RenderedChat
from jaxtool.data.sample_writer import PreparedSamples, SampleError, SampleWriter
from jaxtool.data.text_encoder import TextEncoder
from jaxtool.tools.json_records import Problems, counted

SUPERVISED = ("assistant", "last", "marked")
# Conversations tokenised in one call.
_CALL = 256
_SHORT, _REMEMBERED = 64, 2**16


@dataclass(frozen=True, kw_only=True)
class ChatTokens:
    """A conversation as tokens.

    Attributes:
        ids: int32, all tokens.
        turn: int32, for each token the number of the model's turn that it belongs to, or -1.
    """

    ids: np.ndarray
    turn: np.ndarray


class ChatEncoder:
    """Tokens of rendered conversations.

    Args:
        template: renders them.
        tool_id: the id of a tool's token by its name, e.g. `lambda name: base_vocabulary + catalog.index(name)`; its
            ValueError for an unknown name is handed on with file and line. None: there are no tool tokens.
        vocabulary: text rows of the model: no id of text may lie behind them.
    """

    def __init__(self, template: ChatTemplate, *, tool_id: Callable[[str], int] | None, vocabulary: int) -> None:
        self.template, self.tool_id, self.vocabulary = template, tool_id, vocabulary
        self.encoder = TextEncoder(template.tokenizer)
        self._known: dict[tuple[str, str], np.ndarray] = {}

    def encode(self, conversations: Sequence[tuple[Conversation, RenderedChat]]) -> list[ChatTokens]:
        """The tokens of each.

        Raises:
            SampleError: an unknown tool, or ids outside of the vocabulary; begins with file and line.
        """
        pieces = [self._pieces(*pair) for pair in conversations]
        ids_of = self._texts({piece for of_one in pieces for piece, _ in of_one if isinstance(piece, tuple)})
        found = []
        for (conversation, _), of_one in zip(conversations, pieces, strict=True):
            ids, largest = [], 0
            for piece, _ in of_one:
                if isinstance(piece, tuple):
                    ids.append(ids_of[piece])
                    largest = max(largest, int(ids[-1].max(initial=0)))
                else:
                    ids.append(np.full(1, piece, np.int32))
            if largest >= self.vocabulary:
                raise SampleError(
                    f"{conversation.file}:{conversation.line}: the tokenizer gives id {largest}, but the model has "
                    f"{self.vocabulary} text rows: this tokenizer is not the model's"
                )
            turns = np.repeat(np.asarray([turn for _, turn in of_one], np.int32), [len(x) for x in ids])
            found.append(ChatTokens(ids=np.concatenate(ids), turn=turns))
        return found

    def _pieces(self, conversation: Conversation, rendered: RenderedChat) -> list[tuple[tuple[str, str] | int, int]]:
        """Text with what comes before it, or an id, each with the number of its turn."""
        found: list[tuple[tuple[str, str] | int, int]] = []
        before = "nothing"
        for part, turn in _parts(rendered):
            for text, token in self._split(conversation, rendered, part):
                if text:
                    found.append(((text, before), turn))
                    before = "text"
                if token is not None:
                    found.append((token, turn))
                    before = "special"
        return found

    def _split(self, conversation: Conversation, rendered: RenderedChat, part: str) -> Iterator[tuple[str, int | None]]:
        """Plain text and the id of the special token or tool behind it."""
        template = self.template
        at, swallow = 0, False
        for match in rendered.tokens.finditer(part):
            plain = part[at : match.start()]
            plain = plain.lstrip() if swallow else plain
            plain = plain.rstrip() if match[0] in template.swallows_before else plain
            tool = match["tool"]
            yield (
                rendered.restored(plain),
                template.special_ids[match[0]] if tool is None else self.id_of(conversation, rendered.tools[int(tool)]),
            )
            at, swallow = match.end(), match[0] in template.swallows_behind
        yield rendered.restored(part[at:].lstrip() if swallow else part[at:]), None

    def id_of(self, conversation: Conversation, name: str) -> int:
        """The id of a tool's token.

        Raises:
            SampleError: there is no such tool; begins with file and line of the conversation.
        """
        where = f"{conversation.file}:{conversation.line}"
        if self.tool_id is None:
            raise SampleError(f"{where}: the tool {name!r} stands in a message, but there is no catalogue of tools")
        try:
            return self.tool_id(name)
        except ValueError as error:
            raise SampleError(f"{where}: {error}") from error

    def _texts(self, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], np.ndarray]:
        """The ids of texts; short ones, which the template repeats, are remembered."""
        if len(self._known) > _REMEMBERED:
            self._known.clear()
        found = {piece: self._known[piece] for piece in wanted if piece in self._known}
        new = [piece for piece in wanted if piece not in found]
        for piece, ids in zip(new, self.encoder.pieces([x for x, _ in new], [x for _, x in new]), strict=True):
            found[piece] = ids
            if len(piece[0]) <= _SHORT:
                self._known[piece] = ids
        return found


def chat_samples(
    conversations: ChatFiles | Iterable[Conversation],
    encoder: ChatEncoder,
    *,
    max_tokens: int,
    long: str = "error",
    supervised: str = "assistant",
) -> PreparedSamples:
    """One sample for each conversation, up to the last turn of the model that is learned.

    Args:
        conversations: what to read.
        encoder: makes their tokens.
        max_tokens: tokens of a row (S); no sample is longer.
        long: what becomes of conversations that are longer: "error", "cut" (at the end) or "split" (into windows, of
            which only the first has the beginning).
        supervised: which turns of the model are learned: "assistant", all but those marked otherwise; "last", the
            last one of a conversation; "marked", only those marked with train, loss or weight, as in ToolGen's data.

    Raises:
        SampleError: nothing to learn, or conversations that can't be used; names files, lines and fields.
        FileNotFoundError: as `ChatFiles`.
    """
    if supervised not in SUPERVISED:
        raise SampleError(f"supervised is {supervised!r}, expected one of {', '.join(SUPERVISED)}")
    writer = SampleWriter(max_tokens=max_tokens, long=long, kind="conversation")
    problems = Problems()
    hidden_tools = 0
    for group in _groups(conversations):
        rendered: list[tuple[Conversation, RenderedChat]] = []
        for conversation in group:
            try:
                chat = encoder.template.render(conversation)
                for name in chat.tools:
                    encoder.id_of(conversation, name)
                rendered.append((conversation, chat))
            except SampleError as error:
                problems.messages.append(str(error))
        for (conversation, chat), tokens in zip(rendered, encoder.encode(rendered), strict=True):
            hidden_tools += chat.hidden_tools > 0
            said = [message.train for message in conversation.messages if message.role == "assistant"]
            learned = [train is True if supervised == "marked" else train is not False for train in said]
            if supervised == "last":
                learned = [False] * (len(learned) - 1) + learned[-1:]
            if len(chat.turns) == len(said):
                marks = np.asarray([*learned, False])[tokens.turn]
            elif all(learned):
                marks = tokens.turn >= 0
            else:
                problems.add(
                    f"{conversation.file}:{conversation.line}",
                    f"{{% generation %}} of the chat template marks {len(chat.turns)} parts for {len(said)} turns of "
                    "the model, so single turns can't be left out",
                )
                continue
            writer.add(tokens.ids, marks, file=conversation.file, line=conversation.line)
    problems.raise_if_any(SampleError, "conversations that can't be made samples")
    notes = list(conversations.notes) if isinstance(conversations, ChatFiles) else []
    if hidden_tools:
        notes.append(f"{counted(hidden_tools, 'conversation')} with tools that the chat template doesn't show")
    if not encoder.template.ends_turns:
        notes.append("the chat template's {% generation %} leaves out the end of the turn: the model won't learn it")
    source = conversations.source if isinstance(conversations, ChatFiles) else "the data"
    return writer.finish(notes=notes, source=source)


def _parts(rendered: RenderedChat) -> Iterator[tuple[str, int]]:
    """The text cut where turns of the model begin and end, each part with the number of its turn or -1."""
    at = 0
    for turn, (begin, end) in enumerate(rendered.turns):
        yield rendered.text[at:begin], -1
        yield rendered.text[begin:end], turn
        at = end
    yield rendered.text[at:], -1


def _groups(conversations: Iterable[Conversation]) -> Iterator[list[Conversation]]:
    remaining = iter(conversations)
    while group := list(islice(remaining, _CALL)):
        yield group
