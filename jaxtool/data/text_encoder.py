"""Plain text to token ids: a text as a whole, or a piece from the middle of one. Special tokens never arise here.

Special tokens that a text spells out stay text, so no text can forge the end of a document or a turn of a chat.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

# A text is cut behind a line break with no other white space around it: there tokens end, whatever follows.
_BREAK = re.compile(r"(?<=\S)\n(?=\S)")
_SENTINEL = "\n"


class TextEncoder:
    """Encodes text with one tokenizer.

    Args:
        tokenizer: a fast tokenizer of transformers.
        block: characters from which on a text is encoded in blocks that end with a line, which bounds memory.

    Attributes:
        bos_id: the token that the tokenizer itself begins every text with; None for tokenizers that put none.
    """

    def __init__(self, tokenizer: Any, *, block: int = 2**20) -> None:
        self.tokenizer, self.block = tokenizer, block
        bos = tokenizer.bos_token_id
        plain, whole = self._encode(["x"])[0], tokenizer("x")["input_ids"]
        self.bos_id: int | None = (
            bos if bos is not None and whole[:1] == [bos] and plain[:1].tolist() != [bos] else None
        )
        # Tokenizers of the SentencePiece kind put a blank before a text, and so before any piece encoded alone: those
        # pieces are encoded behind a line break, whose tokens are then taken off.
        sentinel, behind = self._encode([_SENTINEL, f"{_SENTINEL}x"])
        self._skip = 0 if behind.tolist() == [*sentinel.tolist(), *plain.tolist()] else len(sentinel)
        self._sentinel = sentinel
        special = next(iter(tokenizer.all_special_tokens), None)
        self._blank_behind_special = False
        if self._skip and special is not None:
            ids = tokenizer(f"{special}x", add_special_tokens=False)["input_ids"]
            self._blank_behind_special = ids[1:] == plain.tolist()

    def texts(self, texts: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of whole texts, long ones in blocks."""
        blocks, counts = [], []
        for text in texts:
            pieces = list(_blocks(text, self.block))
            counts.append(len(pieces))
            blocks += pieces
        if len(blocks) == len(texts):
            return self._encode(texts)
        encoded = iter(self._encode_mixed(blocks, [i > 0 for count in counts for i in range(count)]))
        return [np.concatenate([next(encoded) for _ in range(count)]) for count in counts]

    def pieces(self, pieces: Sequence[str], behind: Sequence[str]) -> list[np.ndarray]:
        """int32 ids of pieces of texts.

        Args:
            pieces: the pieces, each without special tokens.
            behind: for each piece what comes before it: "nothing", a "special" token, or "text".
        """
        alone = {"nothing": True, "special": self._blank_behind_special, "text": False}
        return self._encode_mixed(pieces, [not alone[before] for before in behind])

    def text_with_spans(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """int32 ids of a whole text, and for each token where in the text it begins and ends: [tokens, 2]."""
        parts, spans, begin = [], [], 0
        for number, block in enumerate(_blocks(text, self.block)):
            skip = self._skip if number else 0
            encoded = self.tokenizer(
                (_SENTINEL if skip else "") + block,
                add_special_tokens=False,
                split_special_tokens=True,
                return_offsets_mapping=True,
                verbose=False,
            )
            parts.append(np.asarray(encoded["input_ids"][skip:], np.int32))
            offsets = np.asarray(encoded["offset_mapping"][skip:], np.int64).reshape(-1, 2)
            spans.append(offsets + begin - (len(_SENTINEL) if skip else 0))
            begin += len(block)
        return np.concatenate(parts), np.concatenate(spans)

    def _encode_mixed(self, pieces: Sequence[str], inner: Sequence[bool]) -> list[np.ndarray]:
        if not self._skip:
            return self._encode(pieces)
        found = self._encode([(_SENTINEL if x else "") + piece for piece, x in zip(pieces, inner, strict=True)])
        for i, x in enumerate(inner):
            if x:
                if not np.array_equal(found[i][: self._skip], self._sentinel):
                    raise ValueError(f"the tokenizer can't encode {pieces[i][:40]!r} apart from what comes before it")
                found[i] = found[i][self._skip :]
        return found

    def _encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        if not texts:
            return []
        # Not verbose: it would warn of every text longer than the model's context.
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return [np.asarray(ids, np.int32) for ids in encoded]


def _blocks(text: str, size: int) -> Iterator[str]:
    """The text in pieces of about `size` characters, each ending with a line; without line breaks it stays whole."""
    begin = 0
    while len(text) - begin > size:
        found = _BREAK.search(text, begin + size)
        if found is None:
            break
        yield text[begin : found.end()]
        begin = found.end()
    yield text[begin:]
