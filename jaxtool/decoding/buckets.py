"""The sizes that shapes are rounded up to, so that few programs serve prompts of all lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

SHORTEST_READ = 16
LONGEST_READ = 512  # tokens of a row that are read at once; longer prompts are read in parts


def from_the_end(prompts: Sequence[Sequence[int]], length: int) -> Iterator[tuple[list[Sequence[int]], bool]]:
    """Prompts in pieces of `length` tokens, cut from their ends so that all end in the last piece; and which it is."""
    for back in reversed(range(-(-max(map(len, prompts)) // length))):
        pieces = [p[max(len(p) - length * (back + 1), 0) : max(len(p) - length * back, 0)] for p in prompts]
        yield pieces, back == 0


def bucket(length: int, smallest: int) -> int:
    """The smallest size for so many: a power of two, or half-way between two (128, 192, 256, 384, ...)."""
    size = smallest
    while size < length:
        size = size * 3 // 2 if size & (size - 1) == 0 else size // 3 * 4
    return size


def power(length: int, smallest: int) -> int:
    """The smallest power of two for so many."""
    return max(smallest, 1 << max(length - 1, 0).bit_length())
