"""What a trie is, from all prefixes of all ids; catalogues to try it on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from jaxtool.decoding import ROOT_NODE, ToolTrie

VOCAB = 64
END = 21  # between the other tokens
TOKENS = (0, 5, 20, 22, 40, 63)
Ids = Sequence[tuple[int, ...]]


@dataclass
class BruteForce:
    """What a trie is, from all prefixes of all ids."""

    ids: Ids

    def __post_init__(self) -> None:
        distinct = {full[:length] for full in self.ids for length in range(len(full) + 1)}
        self.prefixes = sorted(distinct, key=lambda prefix: (len(prefix), prefix))
        self.node = {prefix: ROOT_NODE + place for place, prefix in enumerate(self.prefixes)}
        self.tool = {full: tool for tool, full in enumerate(self.ids)}
        self.tokens: dict[tuple[int, ...], list[int]] = {prefix: [] for prefix in self.prefixes}
        for prefix in self.prefixes[1:]:
            self.tokens[prefix[:-1]].append(prefix[-1])

    def run(self, prefix: tuple[int, ...]) -> tuple[int, ...]:
        end = prefix
        while len(self.tokens[end]) == 1:
            end += (self.tokens[end][0],)
        return end[len(prefix) :]

    def below(self, prefix: tuple[int, ...]) -> set[int]:
        return {tool for tool, full in enumerate(self.ids) if full[: len(prefix)] == prefix}


def built(ids: Ids, end_token: int | None) -> tuple[ToolTrie, BruteForce]:
    trie = ToolTrie.build(ids, end_token=end_token, vocab_rows=VOCAB)
    return trie, BruteForce(ids if end_token is None else [(*tokens, end_token) for tokens in ids])


@st.composite
def catalogues(draw: st.DrawFn) -> tuple[Ids, int | None]:
    """Distinct ids and an end token: with one, ids that begin others and the empty one too; without, none of them."""
    end_token = draw(st.sampled_from([END, None]))
    one_id = st.lists(st.sampled_from(TOKENS), min_size=end_token is None, max_size=6).map(tuple)
    ids = draw(st.lists(one_id, min_size=1, max_size=25, unique=True))
    if end_token is None:
        ids = [a for a in ids if not any(a != b and b[: len(a)] == a for b in ids)]
    return ids, end_token


MIXED = [(5, 20, 40), (22, 20, 63), (5, 20, 22, 5), (63,), (22, 0), (5, 0, 0, 0, 0), (40, 40), (5, 20, 5)]
CATALOGUES: dict[str, tuple[Ids, int | None]] = {
    "mixed lengths": (MIXED, None),
    "mixed lengths, END": (MIXED, END),
    "ids that begin others": ([(5,), (5, 20), (), (5, 20, 40, 0), (20, 5), (5, 40)], END),
    "one tool": ([(40, 5, 20)], None),
    "one empty id": ([()], END),
    "atomic": ([(63,), (5,), (40,)], None),
    "digits": ([tuple(int(digit) for digit in f"{tool:02d}") for tool in range(37)], None),
}
