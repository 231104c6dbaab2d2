"""What a tool is: a name that identifies it, its documents, and the words of its name.

Nothing here reads files (readers.py), orders tools (catalog.py) or interprets parameters (schema.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class CatalogError(ValueError):
    """A tool, or a file of tools, that cannot be used as it is."""


@dataclass(frozen=True, kw_only=True)
class ToolDocument:
    """One description of a tool, as some source gave it.

    Attributes:
        description: What the tool does; "" when the source said nothing.
        parameters: JSON schema of the arguments (an object), as the source wrote it; {} when unknown.
        source: Where it was read, as "file:line" or the name of a data set.
    """

    description: str = ""
    # Left out of the hash because a dict has none; equality still compares it.
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    source: str = ""

    def content(self) -> str:
        """What makes two documents the same: description and parameters (in any key order), not source."""
        return json.dumps([self.description, self.parameters], sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool that a model can retrieve and call.

    Attributes:
        name: The key of the tool in its catalogue. Opaque text: compared exactly (letter case included),
            never split or parsed, whatever characters it holds.
        description: What the tool does; "" when unknown.
        parameters: JSON schema of the arguments (an object), as the source wrote it; {} when unknown. Treat
            as read-only.
        source: Where it was read, as "file:line" or the name of a data set.
        collection: The provider or API family the tool belongs to (ToolBench: `tool_name`); "" for none.
        collection_description: What the collection offers; "" when unknown.
        documents: Further documents of the same name that differ from the one above, in order of appearance.

    Raises:
        CatalogError: The name is not text, is blank, or is not valid Unicode (a lone surrogate).
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict, hash=False)
    source: str = ""
    collection: str = ""
    collection_description: str = ""
    documents: tuple[ToolDocument, ...] = ()

    def __post_init__(self) -> None:
        where = f"{self.source}: " if self.source else ""
        if not isinstance(self.name, str):
            raise CatalogError(f"{where}field name: expected text, found {type(self.name).__name__}")
        if not self.name.strip():
            raise CatalogError(f"{where}field name: a tool needs a name, found {self.name!r}")
        try:
            self.name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise CatalogError(f"{where}field name: {self.name!r} is not valid Unicode text ({error.reason})") from None

    def document(self) -> ToolDocument:
        """The tool's own (first) document."""
        return ToolDocument(description=self.description, parameters=self.parameters, source=self.source)

    def name_text(self) -> str:
        """The collection and the name as readable words, for initialising embeddings and for search.

        "Movies_3_FindMovies" gives "Movies 3 Find Movies", "math.hypot" gives "math hypot". The collection is
        left out where the name already starts with it, as ToolBench names do. Never empty: a name without any
        word is given back as it is.
        """
        text = self.name if self.name.startswith(self.collection) else f"{self.collection} {self.name}"
        return _words(text) or self.name


_SEPARATORS = re.compile(r"(?:[\s_.\-/:]|&&)+")


def _words(text: str) -> str:
    return " ".join(part for piece in _SEPARATORS.split(text) for part in _camel_case_parts(piece) if part)


def _camel_case_parts(piece: str) -> list[str]:
    """ "getHTTPResponse" -> get, HTTP, Response; "base64Encode" -> base64, Encode; "3D" stays whole."""
    parts, start = [], 0
    for i in range(1, len(piece)):
        before, here, after = piece[i - 1], piece[i], piece[i + 1 : i + 2]
        starts_word = here.isupper() and (
            before.islower() or (after.islower() and (before.isupper() or before.isdigit()))
        )
        if starts_word:
            parts.append(piece[start:i])
            start = i
    parts.append(piece[start:])
    return parts
