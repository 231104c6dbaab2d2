"""The table of tool rows, damaged and whole, and tool tokens in the tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import AddedToken

from jaxtool.weights import TokenizerError, WeightsError, export_model, load_tokenizer, read_config, read_tool_ids
from jaxtool.weights.pretrained import load
from tests.tiny_models import TINY_LLAMA, quick_compilation  # noqa: F401
from tests.weights.tiny_exports import CASES, LLAMA, TEXT, TOOLS, exported, files, loaded, random_model


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY_LLAMA)


class TestToolIds:
    @pytest.mark.parametrize(
        ("content", "said"),
        [
            ("", "last line is empty or cut off"),
            ('{"id": 264, "name": "a"}', "last line is empty or cut off"),
            ('{"id": 264, "name": "a"}\n\n', ":2: not JSON"),
            ('{"id": 264}\n', ":1: has the fields id, expected id and name"),
            ('{"id": "264", "name": "a"}\n', ":1: field 'id' is '264', expected a whole number"),
            ('{"id": true, "name": "a"}\n', ":1: field 'id' is True, expected a whole number"),
            ('{"id": 264, "name": "a"}\n{"id": 266, "name": "b"}\n', ":2: field 'id' is 266, expected 265"),
            ('{"id": 264, "name": ""}\n', ":1: field 'name' is '', expected a non-empty text"),
            ('{"id": 264, "name": "a"}\n{"id": 265, "name": "a"}\n', ":2: field 'name' is 'a', which is the tool of"),
            ('{"id": 264, "name": "a"}\n', "its 1 tools are rows 264 to 264, expected the last ones of the 272 rows"),
        ],
    )
    def test_damaged_tables(self, content: str, said: str, model_folder: Path) -> None:
        (model_folder / "tool_ids.jsonl").write_text(content)
        with pytest.raises(WeightsError) as error:
            read_config(model_folder)
        assert said in str(error.value) and "tool_ids.jsonl" in str(error.value)

    def test_no_tools_and_no_folder(self, model_folder: Path) -> None:
        assert read_tool_ids(model_folder) == {}
        with pytest.raises(FileNotFoundError, match="no such model folder"):
            read_tool_ids(model_folder / "absent")

    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (TOOLS[:2], "2 tool names given, expected one for each of the model's 7"),
            (("",) * 7, "tool 0: its name is empty"),
            ("abcdefg", "expected a sequence of names, found the text 'abcdefg'"),
            ((*"abcdef", 7), "tool 6: its name is 7, expected a text"),
            ((*TOOLS[:6], "café"), "tool 6: its name 'café' is that of tool 1 already"),
            ((*TOOLS[:6], "\ud800"), "tool 6: its name .* is not valid Unicode"),
        ],
    )
    def test_names_must_fit(self, names: Any, said: str, tokenizer: Any, tmp_path: Path) -> None:
        model = random_model(CASES["qwen3-tools"])
        with pytest.raises(ValueError, match=said):
            export_model(model, tmp_path / "out", tokenizer=tokenizer, tools=names)
        assert not list(tmp_path.iterdir())


class TestToolTokens:
    """Token i has exactly row `vocab_size + i`, and its text comes back."""

    @pytest.mark.parametrize("name", ["qwen3-tools", "gptj-tools"])
    def test_tokens_are_rows(self, name: str, tokenizer: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        config = CASES[name]
        with caplog.at_level("INFO", logger="jaxtool"):
            folder = exported(config, tmp_path / "out", tokenizer, tool_tokens=True)
        found = transformers.AutoTokenizer.from_pretrained(folder)
        assert len(tokenizer) == TEXT  # the caller's stays as it is
        assert len(found) == config.vocab_size + len(TOOLS)
        for tool, row in read_tool_ids(folder).items():
            text = f"<|tool {tool}|>"
            assert (
                found(f"a{text}b", add_special_tokens=False)["input_ids"]
                == [*found("a")["input_ids"], row] + (found("b", add_special_tokens=False)["input_ids"])
            )
            assert found.decode([row]) == text
            assert found.decode([row], skip_special_tokens=True) == ""
            assert row not in found(text, split_special_tokens=True)["input_ids"]
        unused = [f"<|unused_{i}|>" for i in range(config.vocab_size - TEXT)]
        assert found.convert_tokens_to_ids(unused) == list(range(TEXT, config.vocab_size))
        assert ("16 unused tokens added" in caplog.text) == (name == "gptj-tools")
        text = "Call 2025 times get_weather <|im_end|> <|tool nothing|>, s'il vous plaît.\n"
        assert found(text)["input_ids"] == tokenizer(text)["input_ids"]
        # What was exported so can be exported again, with and without the option.
        for option in (True, False):
            again = export_model(
                loaded(folder), tmp_path / str(option), tokenizer=found, tools=TOOLS, tool_tokens=option
            )
            assert files(again)["tokenizer.json"] == files(folder)["tokenizer.json"]
        assert load(folder).model.config.num_tools == len(TOOLS)

    @pytest.mark.parametrize("saved_by", ["jaxtool", "transformers", "transformers 4"])
    def test_a_loaded_tokenizer_knows_text_alone(self, saved_by: str, tokenizer: Any, tmp_path: Path) -> None:
        """What the export added is taken out again, also where transformers has saved the tokenizer since."""
        folder = exported(CASES["gptj-tools"], tmp_path / "out", tokenizer, tool_tokens=True)
        if saved_by != "jaxtool":
            transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
        if saved_by == "transformers 4":  # which repeats added tokens in three more places
            added = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
            settings = json.loads((folder / "tokenizer_config.json").read_text())
            settings["added_tokens_decoder"] = {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"} for token in added
            }
            settings["additional_special_tokens"] = [token["content"] for token in added[-3:]]
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
            (folder / "special_tokens_map.json").write_text(
                json.dumps({"additional_special_tokens": settings["additional_special_tokens"]})
            )
            (folder / "added_tokens.json").write_text(json.dumps({token["content"]: token["id"] for token in added}))
        before = files(folder)
        found = load_tokenizer(folder)
        assert found.get_vocab() == tokenizer.get_vocab()
        assert found.added_tokens_decoder.keys() == tokenizer.added_tokens_decoder.keys()
        assert found.all_special_tokens == tokenizer.all_special_tokens
        assert found.chat_template == tokenizer.chat_template and found.name_or_path == str(folder)
        text = f"Call 2025 times <|im_end|> <|tool {TOOLS[0]}|>.\n"
        assert found(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert files(folder) == before

    def test_tokens_of_another_name_stay_and_are_said(self, tokenizer: Any, tmp_path: Path) -> None:
        """Tool rows that somebody named otherwise are not ours to take out."""
        config = CASES["qwen3-tools"]
        folder = exported(config, tmp_path / "out", tokenizer)
        other = load_tokenizer(folder)
        other.add_tokens(["<tool 0>"])
        other.save_pretrained(folder)
        with pytest.raises(TokenizerError, match=r"has ids up to 264 \('<tool 0>'\), expected at most 263"):
            load(folder)

    @pytest.mark.parametrize("taken", ["<|tool search|>", "<|unused_3|>"])
    def test_collisions(self, taken: str, tokenizer: Any, tmp_path: Path) -> None:
        other = load_tokenizer(TINY_LLAMA)
        other.add_tokens([AddedToken(taken, special=True)])
        with pytest.raises(TokenizerError) as error:
            exported(CASES["gptj-tools"], tmp_path / "out", other, tool_tokens=True)
        assert repr(taken) in str(error.value) and "already (id 264)" in str(error.value)

    def test_tokens_behind_the_text_rows(self, tokenizer: Any, tmp_path: Path) -> None:
        other = load_tokenizer(TINY_LLAMA)
        other.add_tokens(["surplus"])
        for config in (LLAMA, CASES["qwen3-tools"]):
            with pytest.raises(TokenizerError, match="token 'surplus' has the id 264, expected none behind"):
                exported(config, tmp_path / "out", other)

    def test_no_tools(self, tokenizer: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="the model has no tools"):
            exported(LLAMA, tmp_path / "out", tokenizer, tool_tokens=True)
