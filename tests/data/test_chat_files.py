"""Conversations of both formats, and every way in which a record can be wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxtool.data.chat_files import ChatFiles, Conversation, Message, ToolName
from jaxtool.data.sample_writer import SampleError


def read(tmp_path: Path, *rows: Any) -> tuple[list[Conversation], list[str]]:
    path = tmp_path / "chats.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows), encoding="utf-8")
    chats = ChatFiles(path)
    return list(chats), chats.notes


def turns(tmp_path: Path, row: Any) -> list[tuple[str, tuple[str | ToolName, ...], Any, bool | None]]:
    ((conversation,), _) = read(tmp_path, row)
    return [(message.role, message.content, dict(message.fields), message.train) for message in conversation.messages]


def test_openai(tmp_path: Path) -> None:
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
        {"function": {"name": "now", "arguments": ""}},
        {"function": {"name": "put", "arguments": {"b": [2]}}},
    ]
    row = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "Use "}, {"type": "tool", "name": "add"}],
                "name": "Ann",
            },
            {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None},
            {"role": "tool", "content": "3", "tool_call_id": "c1"},
            {"role": "assistant", "content": "It is 3.", "reasoning_content": "easy"},
        ]
    }
    made = [
        {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},
        {"type": "function", "function": {"name": "now", "arguments": {}}},
        {"type": "function", "function": {"name": "put", "arguments": {"b": [2]}}},
    ]
    assert turns(tmp_path, row) == [
        ("system", ("Be brief.",), {}, None),
        ("user", ("Use ", ToolName(name="add")), {"name": "Ann"}, None),
        ("assistant", (), {"tool_calls": made}, None),
        ("tool", ("3",), {"tool_call_id": "c1"}, None),
        ("assistant", ("It is 3.",), {"reasoning_content": "easy"}, None),
    ]


def test_sharegpt(tmp_path: Path) -> None:
    row = {
        "system": "Be brief.",
        "conversations": [
            {"from": "human", "value": "add"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "It is 3.", "weight": 0},
            {"from": "function", "value": "4"},
            {"from": "gpt", "value": "4."},
        ],
    }
    found = turns(tmp_path, row)
    assert [turn[0] for turn in found] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    assert found[2] == ("assistant", (), {"tool_calls": [call]}, None)
    assert found[4][3] is False


def test_marks_of_what_is_learned(tmp_path: Path) -> None:
    marks = [{"train": True}, {"train": False}, {"loss": True}, {"loss": False}, {"weight": 1}, {"weight": 0.0}, {}]
    row = {"conversations": [{"role": "assistant", "content": "x", **mark} for mark in [*marks, {"train": None}]]}
    assert [turn[3] for turn in turns(tmp_path, row)] == [True, False, True, False, True, False, None, None]


def test_old_function_calls_and_tools(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    chat = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "function_call": {"name": "add", "arguments": "{}"}},
    ]
    rows = [{"messages": chat, "tools": [tool]}, {"messages": chat, "tools": json.dumps([tool])}, {"messages": chat}]
    found, notes = read(tmp_path, *rows)
    assert [list(conversation.tools) for conversation in found] == [[tool], [tool], []]
    assert found[0].messages[1].fields["tool_calls"][0]["function"] == {"name": "add", "arguments": {}}
    assert notes == []


def test_places_and_notes(tmp_path: Path) -> None:
    chat = [{"role": "assistant", "content": "x"}]
    found, notes = read(tmp_path, {"messages": chat, "id": 1}, "", {"messages": chat, "id": 2, "source": "web"})
    assert [conversation.line for conversation in found] == [1, 3]
    assert found[0].file == str(tmp_path / "chats.jsonl")
    assert notes == ["1 empty line skipped", "fields of records that are not used: id (2), source (1)"]
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "array.json").write_text(json.dumps([{"messages": chat}, {"messages": chat}]))
    assert [x.file for x in ChatFiles(tmp_path)] == [str(tmp_path / "chats.jsonl")] * 2 + [
        str(tmp_path / "more" / "array.json")
    ] * 2
    assert Message(role="assistant", content=("x",), fields={}) == found[0].messages[0]


def with_turn(**turn: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}, turn]}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([], "expected an object with messages or conversations, found a list"),
        ({"id": 1}, "expected a field messages or conversations, found 'id'"),
        ({"messages": [], "conversations": []}, "expected a field messages or conversations, found both"),
        ({"messages": []}, "field messages: expected a list of messages, found an empty one"),
        ({"messages": {"role": "user"}}, "field messages: expected a list of messages, found an object"),
        ({"messages": ["x"]}, "field messages[0]: expected an object, found 'x'"),
        ({"messages": [{"role": "user"}], "system": 3}, "field system: expected text, found a number"),
        (
            {"messages": [{"role": "system", "content": "a"}], "system": "b"},
            "field system: there is a system message as well",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": {}}, "field tools: expected a list of objects"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": "[{]"}, "field tools: not valid JSON"),
        (
            with_turn(role="assistant", value="x", **{"from": "gpt"}),
            "field messages[1]: expected either role and content",
        ),
        (with_turn(content="x"), "field messages[1]: expected either role and content, or from and value"),
        (with_turn(role="narrator", content="x"), "field messages[1].role: expected one of system, developer, user"),
        (
            with_turn(role="user", content=3),
            "field messages[1].content: expected text or a list of parts, found a number",
        ),
        (
            with_turn(role="user", content=[{"type": "image_url", "image_url": "x"}]),
            'field messages[1].content[0]: expected {"type": "text", "text": ...} or {"type": "tool", "name": ...}',
        ),
        (with_turn(role="user", content=[{"type": "tool", "text": "x"}]), "field messages[1].content[0]: expected"),
        (
            with_turn(role="assistant", content=""),
            "field messages[1].content: expected text or tool_calls in a turn of",
        ),
        (with_turn(role="assistant"), "field messages[1].content: expected text or tool_calls"),
        (
            with_turn(role="user", content="x", tool_calls=[{}]),
            "field messages[1]: expected no tool_calls in a turn that",
        ),
        (with_turn(role="assistant", tool_calls=3), "field messages[1].tool_calls: expected a list of calls"),
        (
            with_turn(role="assistant", tool_calls=[{}]),
            "field messages[1].tool_calls[0]: expected a function with name",
        ),
        (
            with_turn(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]),
            "field messages[1].tool_calls[0].arguments: not valid JSON",
        ),
        (
            with_turn(role="assistant", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]),
            "field messages[1].tool_calls[0].arguments: expected an object, found a list",
        ),
        (with_turn(role="function_call", content="f()"), "field messages[1].content: expected calls as JSON"),
        (with_turn(role="assistant", content="x", train=1), "field messages[1].train: expected true or false, found 1"),
        (with_turn(role="assistant", content="x", weight=0.5), "field messages[1].weight: expected 0 or 1, found 0.5"),
        (
            with_turn(role="assistant", content="x", train=True, weight=0),
            "field messages[1]: train and weight contradict one another",
        ),
        (
            with_turn(role="user", content="x", loss=True),
            "field messages[1]: expected only turns of the assistant to be",
        ),
    ],
)
def test_bad_records(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(SampleError) as caught:
        read(tmp_path, {"messages": [{"role": "user", "content": "fine"}]}, row)
    heading, problem = str(caught.value).splitlines()
    assert heading.endswith("can't be used as conversations: 1 problem")
    assert problem.strip().startswith(f"{tmp_path / 'chats.jsonl'}:2: {words}")
