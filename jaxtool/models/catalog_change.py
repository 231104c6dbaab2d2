"""From one list of tools to another: which of the new tools has learned rows already, and where they are.

Pure arithmetic on names in order. The rows themselves are moved in `vocabulary`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class CatalogChange:
    """What becomes of each tool when one list of tools takes the place of another.

    `str(change)` is one line for the log of a run.

    Attributes:
        old_count: tools before.
        sources: for each new tool the id it had before, None for a tool that is added.

    Raises:
        ValueError: a source is no old id, or two new tools have the same.
    """

    old_count: int
    sources: tuple[int | None, ...]

    def __post_init__(self) -> None:
        first: dict[int, int] = {}
        for tool, source in enumerate(self.sources):
            if source is None:
                continue
            if not 0 <= source < self.old_count:
                raise ValueError(f"new tool {tool} comes from old tool {source}, expected 0 to {self.old_count - 1}")
            if (other := first.setdefault(source, tool)) != tool:
                raise ValueError(f"new tools {other} and {tool} both come from old tool {source}")

    @classmethod
    def of_counts(cls, old_count: int, new_count: int) -> CatalogChange:
        """The change of tools that are known by their ids alone: the first ones stay, all else is at the end."""
        kept = min(old_count, new_count)
        return cls(old_count=old_count, sources=(*range(kept), *[None] * (new_count - kept)))

    @classmethod
    def all_new(cls, old_count: int, new_count: int) -> CatalogChange:
        """The change that keeps no tool."""
        return cls(old_count=old_count, sources=(None,) * new_count)

    @property
    def new_count(self) -> int:
        """Tools after the change."""
        return len(self.sources)

    @property
    def added_ids(self) -> np.ndarray:
        """Ids of the added tools, int32 ascending."""
        return np.asarray([tool for tool, source in enumerate(self.sources) if source is None], np.int32)

    @property
    def added(self) -> int:
        """Number of new tools that were no tools before."""
        return self.sources.count(None)

    @property
    def kept(self) -> int:
        """Number of tools that stay, moved ones included."""
        return self.new_count - self.added

    @property
    def removed(self) -> int:
        """Number of old tools that are no longer there."""
        return self.old_count - self.kept

    @property
    def moved(self) -> int:
        """Number of tools that stay and get another id."""
        return sum(source is not None and source != tool for tool, source in enumerate(self.sources))

    def __str__(self) -> str:
        return (
            f"{self.old_count:,} tools before, {self.new_count:,} now: {self.kept:,} kept ({self.moved:,} with another "
            f"id), {self.added:,} added, {self.removed:,} removed"
        )


def catalog_change(old_names: Sequence[str], new_names: Sequence[str]) -> CatalogChange:
    """The change from the tools `old_names` to the tools `new_names`, both in the order of their ids.

    A tool stays when its name does, exactly as it is written; a renamed tool is one removed and one added.

    Raises:
        ValueError: a name occurs twice in one of the lists.
    """
    ids = _ids(old_names, "old")
    return CatalogChange(old_count=len(ids), sources=tuple(ids.get(name) for name in _ids(new_names, "new")))


def _ids(names: Sequence[str], which: str) -> dict[str, int]:
    if isinstance(names, str):
        raise ValueError(f"{which} tools: expected a sequence of names, found the text {names[:40]!r}")
    ids: dict[str, int] = {}
    for tool, name in enumerate(names):
        if (first := ids.setdefault(name, tool)) != tool:
            raise ValueError(f"{which} tools {first} and {tool} are both named {name!r}, names must be unique")
    return ids
