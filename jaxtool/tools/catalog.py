"""The ordered, immutable set of tools a model is trained on, where a tool's position is its id.

Also the project's own file format for it (JSON Lines behind a header that tells a cut or re-ordered file).
Reading other formats is in readers.py.
"""

from __future__ import annotations

import difflib
import gzip
import hashlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from jaxtool.tools.json_records import Problems, Record, counted, json_kind, listing, read_records
from jaxtool.tools.tool import CatalogError, Tool, ToolDocument

FORMAT_VERSION = 1
HEADER_KEY = "jaxtool_catalog"

OnDuplicate = Literal["error", "merge"]


class ToolCatalog:
    """Tools in a fixed order; the id of a tool is its position, and its name is unique.

    Two catalogues are equal when their tools are. `tool in catalog` and `index` compare names exactly.

    Attributes:
        tools: The tools; `tools[i]` has id i.
        notes: What reading and merging counted (copies merged, fields not carried), for reports.
        fingerprint: SHA-256 (hex) over the names in order. A model's tool tokens fit a catalogue if and only
            if this is the same; documents may be edited without changing it.

    Raises:
        CatalogError: A name appears more than once, with the places of both.
    """

    def __init__(self, tools: Iterable[Tool], *, notes: Iterable[str] = ()) -> None:
        self.tools: tuple[Tool, ...] = tuple(tools)
        self.notes: tuple[str, ...] = tuple(notes)
        self._ids: dict[str, int] = {}
        duplicates: list[str] = []
        for i, tool in enumerate(self.tools):
            first = self._ids.setdefault(tool.name, i)
            if first != i:
                places = f"{_place(self.tools[first], first)} and {_place(tool, i)}"
                duplicates.append(f"{tool.name!r}: {places}")
        if duplicates:
            heading = f"{counted(len(duplicates), 'tool')} with a name that is already taken"
            advice = 'Rename them, or read with on_duplicate="merge" to keep all documents under the one name.'
            raise CatalogError(listing(heading, duplicates) + f"\n{advice}")
        self.fingerprint: str = names_fingerprint(tool.name for tool in self.tools)

    @classmethod
    def from_tools(
        cls, tools: Iterable[Tool], *, on_duplicate: OnDuplicate = "error", notes: Iterable[str] = ()
    ) -> ToolCatalog:
        """A catalogue in order of first appearance.

        Args:
            tools: The tools, possibly with repeated names.
            on_duplicate: "error" refuses repeated names. "merge" makes one tool of each name: the first
                document stays in place, further different ones go to `documents`, identical ones are counted
                in the notes.
            notes: Goes in front of the notes about merging.
        """
        if on_duplicate == "error":
            return cls(tools, notes=notes)
        if on_duplicate != "merge":
            raise CatalogError(f'on_duplicate: expected "error" or "merge", found {on_duplicate!r}')
        merged, merge_notes = _merge(tools)
        return cls(merged, notes=(*notes, *merge_notes))

    def index(self, name: str) -> int:
        """The id of the tool with exactly this name.

        Raises:
            CatalogError: There is none; the nearest names are listed.
        """
        try:
            return self._ids[name]
        except KeyError:
            nearest = self.nearest(name)
            hint = f"; did you mean {', '.join(map(repr, nearest))}?" if nearest else ""
            raise CatalogError(f"no tool named {name!r} among {len(self):,}{hint}") from None

    def nearest(self, name: str, most: int = 3) -> tuple[str, ...]:
        """Up to `most` names that a person may have meant by `name`, the likeliest first; letter case is no difference.

        Those that differ in case or outer blanks alone come first, then those spelled alike, then those that hold
        `name` as a part (a ToolBench name given without its tool). Takes two seconds with 50,000 tools.
        """
        wanted = name.strip().casefold()
        by_key: dict[str, list[str]] = {}
        for tool in self.tools:
            by_key.setdefault(tool.name.strip().casefold(), []).append(tool.name)
        keys = [wanted] if wanted in by_key else []
        if not keys:
            keys = difflib.get_close_matches(wanted, by_key, n=most)
            keys += sorted(key for key in by_key if len(wanted) > 2 and wanted in key and key not in keys)[:most]
        return tuple(found for key in keys for found in by_key[key])[:most]

    def __contains__(self, name: object) -> bool:
        return name in self._ids

    def __getitem__(self, tool_id: int) -> Tool:
        return self.tools[tool_id]

    def __iter__(self) -> Iterator[Tool]:
        return iter(self.tools)

    def __len__(self) -> int:
        return len(self.tools)

    def __eq__(self, other: object) -> bool:
        return self.tools == other.tools if isinstance(other, ToolCatalog) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __repr__(self) -> str:
        return f"ToolCatalog({len(self):,} tools, fingerprint {self.fingerprint[:12]})"

    def save(self, path: str | Path) -> None:
        """Write the catalogue as JSON Lines: a header line, then one tool a line.

        A path in .gz is compressed. The file appears whole or not at all.

        Raises:
            CatalogError: A tool's parameters can't be written as JSON and read back the same.
        """
        path = Path(path)
        header: dict[str, Any] = {
            HEADER_KEY: FORMAT_VERSION,
            "count": len(self),
            "fingerprint": self.fingerprint,
        }
        if self.notes:
            header["notes"] = list(self.notes)
        lines = [json.dumps(header, ensure_ascii=False), *(_tool_line(tool) for tool in self.tools)]
        data = ("\n".join(lines) + "\n").encode("utf-8")
        if path.suffix == ".gz":
            data = gzip.compress(data, mtime=0)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
            # mkstemp makes a private file; a catalogue gets the mode any new file would get.
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

    @classmethod
    def load(cls, path: str | Path) -> ToolCatalog:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: There is no such file.
            CatalogError: Not such a file, another format version, unreadable lines, or tools that are missing
                or in another order than the header says.
        """
        problems = Problems()
        records = read_records(Path(path), problems)
        return catalog_from_records(path, records, problems)


def catalog_from_records(path: str | Path, records: list[Record], problems: Problems) -> ToolCatalog:
    """The catalogue in the records of a file that `ToolCatalog.save` wrote (what `ToolCatalog.load` does)."""
    heading = f"{path} is not a usable tool catalogue"
    header = records[0].value if records else None
    if not isinstance(header, dict) or HEADER_KEY not in header:
        message = f'expected a header line {{"{HEADER_KEY}": {FORMAT_VERSION}, "count": ..., "fingerprint": ...}}'
        problems.add(f"{path}:1", message)
        problems.raise_if_any(CatalogError, heading)
    assert isinstance(header, dict)
    if header[HEADER_KEY] != FORMAT_VERSION:
        problems.add(
            f"{path}:1",
            f"field {HEADER_KEY}: expected version {FORMAT_VERSION}, found {header[HEADER_KEY]!r}",
        )
        problems.raise_if_any(CatalogError, heading)
    notes = header.get("notes", [])
    if not isinstance(notes, list) or not all(isinstance(note, str) for note in notes):
        problems.add(f"{path}:1", "field notes: expected a list of texts")
        notes = []
    tools = []
    for record in records[1:]:
        tool = _tool_from_json(record.value, f"{path}:{record.line}", problems)
        if tool is not None:
            tools.append(tool)
    if not problems:
        if header.get("count") != len(tools):
            message = f"{counted(len(tools), 'tool')} in the file, but the header counts {header.get('count')!r}"
            problems.add(f"{path}:1", f"field count: {message}: the file was cut or edited")
        elif header.get("fingerprint") != names_fingerprint(tool.name for tool in tools):
            message = "the names or their order are not those the file was saved with, so tool ids would shift"
            problems.add(f"{path}:1", f"field fingerprint: {message}")
    problems.raise_if_any(CatalogError, heading)
    return ToolCatalog(tools, notes=notes)


def names_fingerprint(names: Iterable[str]) -> str:
    """SHA-256 (hex) over the names in order, each behind its length so that no two lists share bytes."""
    digest = hashlib.sha256()
    for name in names:
        data = name.encode("utf-8")
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()


def _place(tool: Tool, position: int) -> str:
    return tool.source or f"tool {position}"


def _merge(tools: Iterable[Tool]) -> tuple[list[Tool], list[str]]:
    first: dict[str, Tool] = {}
    further: dict[str, dict[str, ToolDocument]] = {}
    counts: Counter[str] = Counter()
    for tool in tools:
        known = first.setdefault(tool.name, tool)
        documents = further.setdefault(tool.name, {})
        if known is not tool:
            counts["repeated"] += 1
            for field in ("collection", "collection_description"):
                mine, other = getattr(known, field), getattr(tool, field)
                if other and not mine:
                    known = first[tool.name] = replace(known, **{field: other})
                elif other and other != mine:
                    counts[field] += 1
        own = known.document().content()
        incoming = tool.documents if known is tool else (tool.document(), *tool.documents)
        for document in incoming:
            content = document.content()
            if content == own or content in documents:
                counts["identical"] += 1
            else:
                documents[content] = document
    merged = [replace(tool, documents=tuple(further[name].values())) for name, tool in first.items()]
    notes = []
    if counts["repeated"]:
        several = sum(bool(tool.documents) for tool in merged)
        total = sum(len(tool.documents) for tool in merged)
        read = counted(counts["repeated"] + len(merged), "tool document")
        notes.append(
            f"{read} of {counted(len(merged), 'name')} merged: "
            f"{counted(counts['identical'], 'identical copy', 'identical copies')} counted once, "
            f"{counted(total, 'further different document')} kept on {counted(several, 'name')}"
        )
    for field in ("collection", "collection_description"):
        if counts[field]:
            notes.append(f"{counted(counts[field], 'merged tool')} had another {field}: the first was kept")
    return merged, notes


_TEXT_FIELDS = ("description", "source", "collection", "collection_description")


def _tool_line(tool: Tool) -> str:
    entry: dict[str, Any] = {"name": tool.name}
    entry.update({field: getattr(tool, field) for field in _TEXT_FIELDS if getattr(tool, field)})
    if tool.parameters:
        entry["parameters"] = tool.parameters
    if tool.documents:
        entry["documents"] = [
            {"description": d.description, "parameters": d.parameters, "source": d.source} for d in tool.documents
        ]
    try:
        line = json.dumps(entry, ensure_ascii=False, allow_nan=False, default=_plain)
        line.encode("utf-8")
    except (TypeError, ValueError) as error:
        raise CatalogError(f"tool {tool.name!r} can't be written as JSON: {error}") from None
    if json.loads(line) != entry:
        raise CatalogError(
            f"tool {tool.name!r}: field parameters: would not read back the same (text keys and lists only)"
        )
    return line


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON value")


def _tool_from_json(value: Any, where: str, problems: Problems) -> Tool | None:
    before = len(problems)
    allowed = {"name": str, **dict.fromkeys(_TEXT_FIELDS, str), "parameters": dict, "documents": list}
    if not _has_fields(value, allowed, where, problems):
        return None
    documents = []
    for i, document in enumerate(value.get("documents", [])):
        fields = {"description": str, "parameters": dict, "source": str}
        if _has_fields(document, fields, f"{where}: documents[{i}]", problems):
            documents.append(ToolDocument(**document))
    if len(problems) > before:
        return None
    if "name" not in value:
        problems.add(where, "field name: missing")
        return None
    try:
        return Tool(**{**value, "documents": tuple(documents)})
    except CatalogError as error:
        problems.add(where, str(error))
        return None


def _has_fields(value: Any, allowed: Mapping[str, type], where: str, problems: Problems) -> bool:
    if not isinstance(value, dict):
        problems.add(where, f"expected an object, found {json_kind(value)}")
        return False
    before = len(problems)
    for key, content in value.items():
        if key not in allowed:
            problems.add(where, f"field {key}: unknown; expected some of {', '.join(allowed)}")
        elif not isinstance(content, allowed[key]):
            expected = json_kind(allowed[key]())
            problems.add(where, f"field {key}: expected {expected}, found {json_kind(content)}")
    return len(problems) == before
