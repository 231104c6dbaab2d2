"""Tool catalogues from the formats people have: OpenAI-style functions, ToolBench JSON, our own JSON Lines.

Names are carried unchanged, whatever characters they hold. All problems of an input are reported in one
error, and what a format says beyond a Tool's fields is counted in the catalogue's notes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from jaxtool.tools.catalog import HEADER_KEY, OnDuplicate, ToolCatalog, catalog_from_records
from jaxtool.tools.json_records import Problems, counted, json_kind, read_records, read_text
from jaxtool.tools.schema import toolbench_schema
from jaxtool.tools.tool import CatalogError, Tool

CatalogFormat = Literal["auto", "openai", "toolbench", "jaxtool"]

_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")


def read_tool_names(path: str | Path) -> tuple[str, ...]:
    """The names of the tools of a file: a catalogue in JSON, as `read_catalog`, or text with a name a line.

    Raises:
        FileNotFoundError: no such file.
        CatalogError: as `read_catalog`; of a text file no UTF-8, no name, or repeated names, with their lines.
    """
    path = Path(path)
    if path.is_dir() or path.name.endswith(_SUFFIXES):
        return tuple(tool.name for tool in read_catalog(path))
    problems = Problems()
    lines = read_text(path, problems).replace("\r\n", "\n").split("\n")
    first: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and first.setdefault(line, number) != number:
            problems.add(f"{path}:{number}", f"the name {line!r} stands in line {first[line]} already")
    problems.raise_if_any(CatalogError, f"{path} can't be used as names of tools")
    if not first:
        raise CatalogError(f"{path}: no name in it; expected a name a line, or a catalogue in a file ending in .json")
    return tuple(first)


def read_catalog(path: str | Path, format: CatalogFormat = "auto", on_duplicate: OnDuplicate = "error") -> ToolCatalog:
    """Read a catalogue from a file, or from all JSON files below a folder (in order of their paths).

    Files are JSON (one object or an array) or JSON Lines, plain or gzip, UTF-8.

    Args:
        path: The file or folder.
        format: "openai": `{"type": "function", "function": {"name", "description", "parameters"}}` or the
            inner object alone. "toolbench": a tool with its `api_list`, or one API a record with `tool_name`
            and `api_name`; the tool's name is then "<tool_name>&&<api_name>" and its collection `tool_name`.
            "jaxtool": a file that `ToolCatalog.save` wrote. "auto" decides by the first record.
        on_duplicate: What to do with a name that appears again (see `ToolCatalog.from_tools`).

    Raises:
        FileNotFoundError: There is no such file, or no JSON file in the folder.
        CatalogError: Everything that is wrong in the input, with file and line, up to 20 problems and their
            number; or the repeated names, with both places.
    """
    path = Path(path)
    if format not in ("auto", "openai", "toolbench", "jaxtool"):
        raise CatalogError(f'format: expected "auto", "openai", "toolbench" or "jaxtool", found {format!r}')
    files, notes = _files(path)
    problems = Problems()
    reader = RecordReader(problems)
    tools: list[Tool] = []
    for file in files:
        records = read_records(file, problems)
        if format == "auto" and records:
            format = _recognise(records[0].value, f"{file}:{records[0].line}")
        if format == "jaxtool":
            if len(files) > 1:
                raise CatalogError(f"{path}: a folder can't hold a jaxtool catalogue; name the file")
            catalog = catalog_from_records(file, records, problems)
            return ToolCatalog.from_tools(catalog.tools, on_duplicate=on_duplicate, notes=catalog.notes)
        for record in records:
            read = reader.toolbench if format == "toolbench" else reader.openai
            tools += read(record.value, f"{file}:{record.line}")
    problems.raise_if_any(CatalogError, f"{path} can't be read as a tool catalogue")
    if not tools:
        raise CatalogError(f"{path}: no tools found in {counted(len(files), 'file')}")
    return ToolCatalog.from_tools(tools, on_duplicate=on_duplicate, notes=(*notes, *reader.notes()))


def _files(path: Path) -> tuple[list[Path], list[str]]:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or folder")
    if not path.is_dir():
        return [path], []
    everything = sorted((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.relative_to(path).as_posix())
    files = [p for p in everything if p.name.endswith(_SUFFIXES)]
    if not files:
        raise FileNotFoundError(f"{path}: no file in this folder ends with {', '.join(_SUFFIXES)}")
    other = len(everything) - len(files)
    return files, [f"{counted(other, 'file')} of another kind left unread in {path}"] if other else []


def _recognise(value: Any, where: str) -> CatalogFormat:
    if isinstance(value, dict):
        if HEADER_KEY in value:
            return "jaxtool"
        if "api_list" in value or ("tool_name" in value and "api_name" in value):
            return "toolbench"
        if "function" in value or "name" in value:
            return "openai"
    raise CatalogError(
        f'{where}: not a known catalogue format: expected an object with "function" or "name" (OpenAI), '
        f'with "tool_name" and "api_list" or "api_name" (ToolBench), or with "{HEADER_KEY}" (our own)'
    )


class RecordReader:
    """Turns records into tools; adds what is wrong to `problems` and counts what a Tool has no field for."""

    def __init__(self, problems: Problems) -> None:
        self.problems = problems
        self._ignored: Counter[str] = Counter()
        self._without_apis = 0
        self._repeated_parameters: Counter[str] = Counter()

    def notes(self) -> tuple[str, ...]:
        """What was counted so far."""
        notes = []
        if self._ignored:
            fields = ", ".join(f"{field} ({count:,})" for field, count in sorted(self._ignored.items()))
            notes.append(f"fields that a tool does not carry, with the number of records: {fields}")
        if self._without_apis:
            notes.append(f"{counted(self._without_apis, 'ToolBench tool')} with an empty api_list")
        if self._repeated_parameters:
            names = [f"{where} ({count})" for where, count in list(self._repeated_parameters.items())[:5]]
            more = ", ..." if len(self._repeated_parameters) > 5 else ""
            apis = counted(len(self._repeated_parameters), "API")
            notes.append(
                f"{apis} with a repeated parameter name, of which the first definition was kept (required "
                f"before optional): {', '.join(names)}{more}"
            )
        return tuple(notes)

    def openai(self, value: Any, where: str) -> list[Tool]:
        """The tool of an OpenAI-style record: a list of one, or of none with the problem added."""
        if not self._is_object(value, where):
            return []
        function, prefix = value, ""
        kind = value.get("type", "function")
        # A bare function may be *named* "function" by key only: the wrapper always holds an object there.
        if "function" in value:
            function, prefix = value["function"], "function."
            if not self._is_object(function, where, "field function: "):
                return []
            self._count_ignored(value, ("type", "function"), "")
        if kind != "function":
            self.problems.add(where, f'field type: expected "function", found {kind!r}')
            return []
        self._count_ignored(function, ("type", "name", "description", "parameters"), prefix)
        before = len(self.problems)
        name = self._name(function, "name", where, prefix)
        description = self._text(function, "description", where, prefix)
        parameters = function.get("parameters")
        if parameters is None:
            parameters = {}
        elif not isinstance(parameters, dict):
            self._wrong_type(where, f"{prefix}parameters", "an object (JSON schema)", parameters)
        if len(self.problems) > before:
            return []
        return self._tools(name=name, description=description, parameters=parameters, source=where)

    def toolbench(self, value: Any, where: str) -> list[Tool]:
        """The tools of a ToolBench record: one for each entry of `api_list`, or one for a flat row."""
        if not self._is_object(value, where):
            return []
        before = len(self.problems)
        collection = self._name(value, "tool_name", where, "")
        collection_description = self._text(value, "tool_description", where, "")
        if len(self.problems) > before:
            return []
        if "api_list" not in value:
            return self._api(value, "api_name", "api_description", collection, collection_description, where, "")
        apis = value["api_list"]
        if not isinstance(apis, list):
            self._wrong_type(where, "api_list", "a list", apis)
            return []
        self._count_ignored(value, ("tool_name", "tool_description", "api_list"), "")
        if not apis:
            self._without_apis += 1
        tools = []
        for i, api in enumerate(apis):
            place = f"api_list[{i}]"
            if self._is_object(api, where, f"field {place}: "):
                tools += self._api(api, "name", "description", collection, collection_description, where, place)
        return tools

    def _api(
        self,
        api: Mapping[str, Any],
        name_field: str,
        description_field: str,
        collection: str,
        collection_description: str,
        where: str,
        place: str,
    ) -> list[Tool]:
        prefix = f"{place}." if place else ""
        before = len(self.problems)
        name = self._name(api, name_field, where, prefix)
        description = self._text(api, description_field, where, prefix)
        lists = [self._parameters(api, f"{kind}_parameters", where, prefix) for kind in ("required", "optional")]
        if len(self.problems) > before:
            return []
        carried = (name_field, description_field, "required_parameters", "optional_parameters")
        flat = () if place else ("tool_name", "tool_description")
        self._count_ignored(api, (*carried, *flat), "api_list[]." if place else "")
        source = f"{where} {place}" if place else where
        # Without either list nothing is known about the arguments; empty lists say that there are none.
        known = any(api.get(f"{kind}_parameters") is not None for kind in ("required", "optional"))
        parameters, repeated = toolbench_schema(lists[0], lists[1]) if known else ({}, [])
        if repeated:
            self._repeated_parameters[source] += len(repeated)
        return self._tools(
            name=f"{collection}&&{name}",
            description=description,
            parameters=parameters,
            source=source,
            collection=collection,
            collection_description=collection_description,
        )

    def _parameters(self, api: Mapping[str, Any], field: str, where: str, prefix: str) -> list[dict[str, Any]]:
        entries = api.get(field)
        if entries is None:
            return []
        if not isinstance(entries, list):
            self._wrong_type(where, f"{prefix}{field}", "a list", entries)
            return []
        parameters = []
        for i, entry in enumerate(entries):
            inner = f"{prefix}{field}[{i}]"
            if self._is_object(entry, where, f"field {inner}: "):
                self._name(entry, "name", where, f"{inner}.")
                self._text(entry, "type", where, f"{inner}.")
                self._text(entry, "description", where, f"{inner}.")
                self._count_ignored(entry, ("name", "type", "description", "default"), f"{field}[].")
                parameters.append(entry)
        return parameters

    def _tools(self, *, source: str, **fields: Any) -> list[Tool]:
        try:
            return [Tool(source=source, **fields)]
        except CatalogError as error:
            self.problems.messages.append(str(error))
            return []

    def _is_object(self, value: Any, where: str, field: str = "") -> bool:
        if isinstance(value, dict):
            return True
        self.problems.add(where, f"{field}expected an object, found {json_kind(value)}")
        return False

    def _name(self, value: Mapping[str, Any], field: str, where: str, prefix: str) -> str:
        name = value.get(field)
        if name is None:
            self.problems.add(where, f"field {prefix}{field}: missing; expected the name as text")
        elif not isinstance(name, str):
            self._wrong_type(where, f"{prefix}{field}", "text", name)
        elif not name.strip():
            self.problems.add(where, f"field {prefix}{field}: blank; expected the name as text")
        else:
            return name
        return ""

    def _text(self, value: Mapping[str, Any], field: str, where: str, prefix: str) -> str:
        text = value.get(field)
        if text is None:
            return ""
        if not isinstance(text, str):
            self._wrong_type(where, f"{prefix}{field}", "text", text)
            return ""
        return text

    def _wrong_type(self, where: str, field: str, expected: str, found: Any) -> None:
        self.problems.add(where, f"field {field}: expected {expected}, found {json_kind(found)}")

    def _count_ignored(self, value: Mapping[str, Any], carried: tuple[str, ...], prefix: str) -> None:
        for field, content in value.items():
            if field not in carried and content is not None:
                self._ignored[f"{prefix}{field}"] += 1
