"""From a user's text to prompt ids through the tokenizer's own chat template.

The template and the text are tokenised apart: special tokens in a template are tokens, the same characters in a user's
text are text, so nobody can forge a turn. Tool ids never pass through the tokenizer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

# Private-use characters: no template contains them, and a text that does is still rendered right, because the template
# is rendered around the marker alone.
_MARKER = "\ue0f1\ue0f2\ue0f1"


@dataclass(frozen=True, kw_only=True)
class PromptIds:
    """Token ids of a prompt that ends where the assistant's turn begins.

    Attributes:
        ids: the prompt; starts with exactly one BOS if the template has one.
        cut: number of tokens of the text that did not fit `max_length` and were left out at its end.
    """

    ids: list[int]
    cut: int


class ChatPrompts:
    """Renders single-turn prompts of one tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        system_prompt: text of the system turn. None leaves it to the template (many insert a default one); "" gives an
            empty system turn to templates that would insert their default.
        max_length: longest prompt in tokens; longer texts are cut at their end, and the cut is reported.

    Raises:
        ValueError: no chat template, a template that can't be rendered, loses or repeats the text, begins with two BOS,
            or alone is longer than `max_length`.
    """

    def __init__(self, tokenizer: Any, *, system_prompt: str | None = None, max_length: int) -> None:
        if not tokenizer.chat_template:
            raise ValueError("the tokenizer has no chat template: use a chat model, or set tokenizer.chat_template")
        messages = [{"role": "user", "content": _MARKER}]
        if system_prompt is not None:
            messages.insert(0, {"role": "system", "content": system_prompt})
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            hint = "" if system_prompt is None else "; system_prompt null leaves the system turn out"
            raise ValueError(f"the chat template refuses the prompt: {error}{hint}") from error
        if rendered.count(_MARKER) != 1:
            raise ValueError(f"the chat template shows the user's text {rendered.count(_MARKER)} times, expected once")
        before, after = rendered.split(_MARKER)
        self.tokenizer = tokenizer
        self._before: list[int] = tokenizer(before, add_special_tokens=False)["input_ids"]
        self._after: list[int] = tokenizer(after, add_special_tokens=False)["input_ids"]
        self.max_length = max_length
        bos = tokenizer.bos_token_id
        if bos is not None and self._before[:2] == [bos, bos]:
            raise ValueError(f"the chat template begins with two BOS tokens ({bos}), expected one")
        own = len(self._before) + len(self._after)
        if own >= max_length:
            raise ValueError(
                f"max_length {max_length} leaves no room for text, the chat template alone has {own} tokens"
            )
        closing = tokenizer.eos_token_id
        if closing is None:
            raise ValueError("the tokenizer has no EOS token, which ends the assistant's turn")
        self.end_id: int = closing

    @property
    def beginning(self) -> list[int]:
        """The tokens that every prompt begins with: what the template has before the text."""
        return list(self._before)

    def text_ids(self, text: str) -> list[int]:
        """Ids of plain text; special tokens spelled out in it stay text."""
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]

    def without_token(self, texts: Iterable[str]) -> dict[str, int]:
        """The characters that the tokenizer has no token for, and in how many of the texts each occurs.

        They leave no trace in a prompt: the model reads the text without them.
        """
        found = Counter(character for text in texts for character in set(text))
        return {
            character: count
            for character, count in sorted(found.items())
            if not character.isspace() and not self.text_ids(character)
        }

    def check_within(self, vocabulary: int, ids: Sequence[int]) -> None:
        """Raises ValueError where an id, or the end of the turn, is outside of the model's text rows: rows behind them
        are tools, so the model would read a tool."""
        largest = max(*ids, self.end_id)
        if largest >= vocabulary:
            raise ValueError(
                f"the tokenizer gives id {largest}, but the model's vocab_size is {vocabulary}: "
                "this tokenizer is not the model's"
            )

    def prompt(self, text: str) -> PromptIds:
        """The prompt for one user turn.

        Raises:
            ValueError: the text is empty or white space only, or none of it has a token.
        """
        text = text.strip()
        if not text:
            raise ValueError("the query is empty, expected some text")
        ids = self.text_ids(text)
        if not ids:
            raise ValueError(f"the tokenizer has no token for any character of {text[:40]!r}")
        room = self.max_length - len(self._before) - len(self._after)
        return PromptIds(ids=[*self._before, *ids[:room], *self._after], cut=max(0, len(ids) - room))
