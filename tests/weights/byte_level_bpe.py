"""Byte-level BPE by its definition, slowly: the truth that tokenizers are tested against."""

from __future__ import annotations

import itertools
import unicodedata

import regex
from hypothesis import strategies as st
from transformers.convert_slow_tokenizer import bytes_to_unicode

# The splits as published. GPT-2's stands for itself; SmolLM2 cuts off each digit before it.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORDS = {
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "llama-bpe": CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
WORDS["smollm"] = WORDS["gpt-2"]
PIECES = regex.compile(r"\p{N}|[^\p{N}]+")
TEXT = st.one_of(
    st.text(st.characters(exclude_categories=["Cs", "Cn"]), max_size=40),
    st.text(" helotin123\n\r's.!½²", max_size=30),
)


def split_slowly(text: str, kind: str) -> list[str]:
    """The pieces that merges stay within, each byte as its symbol."""
    symbols = bytes_to_unicode()
    chunks = PIECES.findall(text) if kind == "smollm" else [text]
    words = [word for chunk in chunks for word in regex.findall(WORDS[kind], chunk)]
    return ["".join(symbols[byte] for byte in word.encode()) for word in words]


def encode_slowly(text: str, merges: list[str], vocabulary: list[str], kind: str) -> list[int]:
    """Byte-level BPE by its definition: merge the pair of lowest rank until none is left."""
    ids = {token: row for row, token in enumerate(vocabulary)}
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    found: list[int] = []
    for word in split_slowly(unicodedata.normalize("NFC", text) if kind == "qwen2" else text, kind):
        parts = [word] if kind == "llama-bpe" and word in ids else list(word)
        while True:
            pairs = [(ranks[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in ranks]
            if not pairs:
                break
            _, i = min(pairs)
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        found += [ids[part] for part in parts]
    return found
