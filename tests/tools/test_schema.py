"""Argument schemas: type names of data sets become JSON schema's, and nothing is lost on the way."""

import pytest

from jaxtool.tools import normalise_schema
from jaxtool.tools.schema import json_type, toolbench_schema


@pytest.mark.parametrize(
    ("name", "schema"),
    [
        ("dict", {"type": "object"}),
        ("HashMap", {"type": "object"}),
        ("float", {"type": "number"}),
        ("NUMBER", {"type": "number"}),
        ("String", {"type": "string"}),
        ("long", {"type": "integer"}),
        ("Boolean", {"type": "boolean"}),
        ("ArrayList", {"type": "array"}),
        ("tuple", {"type": "array", "x-type": "tuple"}),
        ("ENUM", {"type": "string", "x-type": "ENUM"}),
        ("DATE (YYYY-MM-DD)", {"type": "string", "x-type": "DATE (YYYY-MM-DD)"}),
        ("TIME (24-hour HH:MM)", {"type": "string", "x-type": "TIME (24-hour HH:MM)"}),
        ("any", {}),
        ("", {}),
        ("quaternion", {"x-type": "quaternion"}),
    ],
)
def test_type_names(name: str, schema: dict[str, str]) -> None:
    assert json_type(name) == schema


def test_normalises_everywhere_a_schema_stands_and_nowhere_else() -> None:
    given = {
        "type": "dict",
        "properties": {
            "type": {
                "type": "float",
                "description": "a property called type",
                "default": {"type": "dict"},
            },
            "rows": {"type": "tuple", "items": {"type": "dict", "properties": {"x": {"type": "any"}}}},
            "either": {"anyOf": [{"type": "String"}, {"type": ["float", "null"]}]},
        },
        "required": ["type"],
    }
    assert normalise_schema(given) == {
        "type": "object",
        "properties": {
            "type": {"type": "number", "description": "a property called type", "default": {"type": "dict"}},
            "rows": {
                "type": "array", "x-type": "tuple", "items": {"type": "object", "properties": {"x": {}}}
            },
            "either": {"anyOf": [{"type": "string"}, {"type": ["number", "null"]}]},
        },
        "required": ["type"],
    }  # fmt: skip
    assert given["type"] == "dict"  # the original is left alone
    assert normalise_schema(normalise_schema(given)) == normalise_schema(given)


def test_unions_with_any_restrict_nothing() -> None:
    assert normalise_schema({"type": ["string", "any"]}) == {}
    assert normalise_schema({"type": ["int", "long"]}) == {"type": ["integer"]}
    assert normalise_schema({"type": ["string", "blob"]}) == {"x-type": ["blob"]}


def test_toolbench_lists_become_one_schema() -> None:
    required = [{"name": "q", "type": "STRING", "description": "Words", "default": "tea"}]
    optional = [
        {"name": "page", "type": "NUMBER", "description": "", "default": ""},
        {"name": "q", "type": "NUMBER"},
        {"name": "flag", "type": None, "description": None, "default": False},
    ]
    schema, repeated = toolbench_schema(required, optional)
    assert schema == {
        "type": "object",
        "properties": {
            "q": {"type": "string", "description": "Words", "default": "tea"},
            "page": {"type": "number"},
            "flag": {"default": False},
        },
        "required": ["q"],
    }
    assert repeated == ["q"]
