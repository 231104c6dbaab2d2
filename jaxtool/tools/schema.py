"""JSON schemas of tool arguments: made from ToolBench parameter lists, and with standard type names.

`Tool.parameters` keeps the schema as its source wrote it. Call `normalise_schema` where a standard schema is
needed (validating arguments, building a prompt for a chat template).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

STANDARD_TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")

# Lower-case names that say exactly a JSON type. BFCL writes Python and Java names, ToolBench capitals.
_EXACT = {
    **{name: name for name in STANDARD_TYPES},
    "dict": "object", "hashmap": "object", "map": "object",
    "float": "number", "double": "number",
    "int": "integer", "long": "integer", "short": "integer", "byte": "integer",
    "bool": "boolean",
    "list": "array", "arraylist": "array",
    "str": "string", "text": "string",
}  # fmt: skip
# Names that say more than the JSON type they become; the original stays beside it as "x-type".
_NARROWED = {
    "tuple": "array", "set": "array", "queue": "array", "stack": "array",
    "char": "string", "enum": "string", "date": "string", "time": "string", "binary": "string",
    "file": "string",
}  # fmt: skip
# "any" and "" restrict nothing, which JSON schema says by having no type.
_UNRESTRICTED = ("any", "")

_SCHEMA_KEYS = ("items", "additionalProperties", "not", "contains", "propertyNames", "if", "then", "else")
_SCHEMA_LIST_KEYS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SCHEMA_MAP_KEYS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


def normalise_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the schema in which every `type` is one of JSON schema's seven.

    "dict" becomes "object", "float" "number", "tuple" "array", "String" "string", ... Where the original says
    more than the JSON type ("tuple", "ENUM", "DATE (YYYY-MM-DD)") it is kept as "x-type"; an unknown
    type name is moved to "x-type" and leaves no `type`; "any" leaves no `type`. Properties that are called
    "type" are not types. Everything else is copied unchanged. Normalising twice changes nothing more.
    """
    result: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "type" and isinstance(value, str):
            result.update(json_type(value))
        elif key == "type" and isinstance(value, list) and all(isinstance(name, str) for name in value):
            result.update(_type_union(value))
        elif key in _SCHEMA_KEYS and isinstance(value, Mapping):
            result[key] = normalise_schema(value)
        elif key in (*_SCHEMA_LIST_KEYS, *_SCHEMA_KEYS) and isinstance(value, list):
            result[key] = [normalise_schema(v) if isinstance(v, Mapping) else v for v in value]
        elif key in _SCHEMA_MAP_KEYS and isinstance(value, Mapping):
            result[key] = {k: normalise_schema(v) if isinstance(v, Mapping) else v for k, v in value.items()}
        else:
            result[key] = value
    return result


def json_type(name: str) -> dict[str, str]:
    """The schema fragment for a type name: {"type": ...}, "x-type" where that would lose something, or {}."""
    key = name.strip().lower()
    if key in _EXACT:
        return {"type": _EXACT[key]}
    if key in _UNRESTRICTED:
        return {}
    # "DATE (YYYY-MM-DD)" and "TIME (24-hour HH:MM)" carry their format behind the type.
    head = key.split("(", maxsplit=1)[0].strip()
    return {"type": _NARROWED[head], "x-type": name} if head in _NARROWED else {"x-type": name}


def _type_union(names: list[str]) -> dict[str, Any]:
    fragments = [json_type(name) for name in names]
    lost = [name for name, fragment in zip(names, fragments, strict=True) if "x-type" in fragment]
    result: dict[str, Any] = {}
    if all("type" in fragment for fragment in fragments):
        result["type"] = list(dict.fromkeys(fragment["type"] for fragment in fragments))
    if lost:
        result["x-type"] = lost
    return result


def toolbench_schema(
    required: Sequence[Mapping[str, Any]], optional: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """The JSON schema of ToolBench's two parameter lists.

    Each parameter is a mapping with `name` (text) and, when known, `type`, `description` and `default`; null
    counts as absent. Types become JSON types as in `normalise_schema`. A default of "" is left out, since
    ToolBench writes it for "no default"; other defaults stay as written (text even for numbers).

    Returns:
        The schema, and the names that appeared more than once: JSON properties have one definition for a
        name, so the first one is taken, required before optional.
    """
    properties: dict[str, Any] = {}
    repeated: list[str] = []
    for parameter in (*required, *optional):
        name = parameter["name"]
        if name in properties:
            repeated.append(name)
            continue
        entry: dict[str, Any] = json_type(parameter.get("type") or "")
        if parameter.get("description"):
            entry["description"] = parameter["description"]
        if parameter.get("default") not in (None, ""):
            entry["default"] = parameter["default"]
        properties[name] = entry
    names = list(dict.fromkeys(parameter["name"] for parameter in required))
    return {"type": "object", "properties": properties, "required": names}, repeated
