"""Exported folders against transformers, against the files a model came from, and against kills and mistakes."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxtool
from jaxtool.config import MeshConfig
from jaxtool.models import (
    parameters,
    with_parameters,
)
from jaxtool.models.lora import with_lora
from jaxtool.parallel import make_mesh
from jaxtool.weights import (
    WeightsError,
    eos_token_ids,
    export_model,
    generation_source,
    load_tokenizer,
    read_config,
    read_tool_ids,
)
from tests.tiny_models import TINY_LLAMA, log_probs, quick_compilation  # noqa: F401
from tests.weights.conftest import WriteGguf
from tests.weights.tiny_exports import (
    CASES,
    LLAMA,
    TEXT,
    TOOLS,
    WITH_TOOLS,
    assert_same_bits,
    exported,
    files,
    loaded,
    random_model,
    stored,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY_LLAMA)


def test_a_model_without_tools_gives_the_tensors_it_came_from(
    model_folder: Path, hf_tensors: dict[str, np.ndarray], tokenizer: Any, tmp_path: Path
) -> None:
    folder = export_model(loaded(model_folder), tmp_path / "out", tokenizer=tokenizer, source=model_folder)
    assert_same_bits(stored(folder), hf_tensors)
    assert not (folder / "tool_ids.jsonl").exists()


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_reading_back_gives_the_model_with_its_tools(name: str, tokenizer: Any, tmp_path: Path) -> None:
    config = CASES[name]
    folder = exported(config, tmp_path / "out", tokenizer)
    assert read_config(folder) == config
    assert_same_bits(parameters(loaded(folder)), parameters(random_model(config)))
    first = config.vocab_size
    assert read_tool_ids(folder) == {name: first + tool for tool, name in enumerate(TOOLS)}
    lines = (folder / "tool_ids.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(lines[1]) == {"id": first + 1, "name": "café"}
    again = export_model(loaded(folder), tmp_path / "again", tokenizer=load_tokenizer(folder), tools=TOOLS)
    assert files(again) == files(folder)


@pytest.mark.parametrize("name", ["llama-tied-tools", "gptj-tools"])
def test_one_and_eight_devices_write_the_same_files(name: str, tokenizer: Any, tmp_path: Path) -> None:
    config = CASES[name]
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    model = random_model(config, mesh)
    assert len(parameters(model)["embedding_vd"].sharding.device_set) == 8
    options: dict[str, Any] = {"tokenizer": tokenizer, "tools": TOOLS, "shard_bytes": 40_000}
    with jax.set_mesh(mesh):
        eight = export_model(model, tmp_path / "eight", **options)
    one = export_model(random_model(config), tmp_path / "one", **options)
    assert files(eight) == files(one)
    assert len(list(one.glob("*.safetensors"))) > 1
    assert_same_bits(stored(one), stored(exported(config, tmp_path / "whole", tokenizer)))


def test_two_tensors_are_on_the_host_at_a_time(tokenizer: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(LLAMA, hidden_size=256, intermediate_size=4096, num_hidden_layers=3)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    model = random_model(config, mesh)
    largest = 4 * 256 * 4096
    export_model(model, tmp_path / "compiles", tokenizer=tokenizer)
    tracemalloc.start()
    try:
        export_model(model, tmp_path / "out", tokenizer=tokenizer)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(value.nbytes for value in stored(tmp_path / "out").values()) > 9 * largest
    assert largest < peak < 2.5 * largest


def test_another_dtype(tokenizer: Any, tmp_path: Path) -> None:
    whole = stored(exported(LLAMA, tmp_path / "whole", tokenizer))
    for dtype, cast in (("bfloat16", ml_dtypes.bfloat16), ("float16", np.float16)):
        folder = exported(LLAMA, tmp_path / dtype, tokenizer, dtype=dtype)
        assert json.loads((folder / "config.json").read_text())["dtype"] == dtype
        found = parameters(loaded(folder, param_dtype="float32"))
        expected = parameters(random_model(LLAMA))
        assert_same_bits(found, {path: np.asarray(v).astype(cast).astype(np.float32) for path, v in expected.items()})
    assert whole["lm_head.weight"].dtype == np.float32
    model = random_model(LLAMA)
    large = with_parameters(model, parameters(model) | {"final_norm_d": jnp.full(32, 1e5)})
    with pytest.raises(WeightsError, match=r"model\.norm\.weight has values beyond float16"):
        export_model(large, tmp_path / "large", tokenizer=tokenizer, dtype="float16")
    with pytest.raises(ValueError, match="dtype is 'int8', expected one of float16, bfloat16, float32"):
        exported(LLAMA, tmp_path / "int8", tokenizer, dtype="int8")


def test_low_rank_updates_are_merged(tokenizer: Any, tmp_path: Path) -> None:
    model = with_lora(random_model(LLAMA), rank=2, alpha=6.0, projections=["query", "down"])
    rng = np.random.default_rng(1)
    values = parameters(model)
    for path in ("blocks.query_lora_rnh", "blocks.down_lora_rd"):
        values[path] = jnp.asarray(rng.standard_normal(values[path].shape), jnp.float32)
    folder = export_model(with_parameters(model, values), tmp_path / "out", tokenizer=tokenizer)
    found = stored(folder)
    wide = {path: np.asarray(value, np.float64) for path, value in values.items()}
    for layer in range(2):
        first, second = wide["blocks.down_lora_fr"][layer], wide["blocks.down_lora_rd"][layer]
        expected = (wide["blocks.down_fd"][layer] + 3.0 * first @ second).T
        np.testing.assert_allclose(found[f"model.layers.{layer}.mlp.down_proj.weight"], expected, atol=1e-5)
    assert found.keys() == stored(exported(LLAMA, tmp_path / "plain", tokenizer)).keys()


TWO_PROCESSES = """
import sys
import jax
from pathlib import Path
from jaxtool.config import MeshConfig
from jaxtool.models import parameters
from jaxtool.parallel import make_mesh
from jaxtool.weights import WeightsError, export_model, load_tokenizer
from jaxtool.weights.safetensors_writer import SafetensorsWriter
from tests.tiny_models import TINY_LLAMA
jax.distributed.initialize(sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
from tests.weights import tiny_exports as t
mesh = make_mesh(MeshConfig(data=1, fsdp=4, model=2))
model = t.random_model(t.CASES["llama-tied-tools"], mesh)
assert not parameters(model)["embedding_vd"].is_fully_addressable
folder = Path(sys.argv[3])
options = {"tokenizer": load_tokenizer(TINY_LLAMA), "tools": t.TOOLS, "shard_bytes": 40_000}
export_model(model, folder, **options)
assert (folder / "config.json").exists()


def refused(folder):  # by all processes alike: none may wait for the others
    try:
        export_model(model, folder, **options)
    except ValueError as error:
        return str(error)


first = jax.process_index() == 0
assert ("exists already" if first else "the first process has failed") in refused(folder)
written = SafetensorsWriter.write


def full(self, name, block):
    if "layers.1" in name:
        raise WeightsError("no space left")
    written(self, name, block)


SafetensorsWriter.write = full
assert ("no space left" if first else "the first process has failed") in refused(folder.with_name("full"))
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_write_the_same_files(tokenizer: Any, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TWO_PROCESSES, address, str(number), str(tmp_path / "two")],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0, said
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    one = exported(CASES["llama-tied-tools"], tmp_path / "one", tokenizer, shard_bytes=40_000)
    assert files(tmp_path / "two") == files(one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


class TestFolder:
    """It appears whole or not at all."""

    def test_an_occupied_folder_is_refused(self, tokenizer: Any, tmp_path: Path) -> None:
        (tmp_path / "full").mkdir()
        (tmp_path / "full/precious").write_text("x")
        (tmp_path / "file").write_text("x")
        for name in ("full", "file"):
            with pytest.raises(ValueError, match=rf"{name}: exists already, expected a new or empty folder"):
                exported(LLAMA, tmp_path / name, tokenizer)
        with pytest.raises(ValueError, match=r"below: expected a folder that can be made \(.*File exists"):
            exported(LLAMA, tmp_path / "file/below", tokenizer)
        assert files(tmp_path / "full") == {"precious": b"x"}
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full"]

    def test_an_empty_folder_is_filled(self, tokenizer: Any, tmp_path: Path) -> None:
        (tmp_path / "empty").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "empty")
        exported(LLAMA, tmp_path / "link", tokenizer)
        exported(LLAMA, tmp_path / "deep/er", tokenizer)
        assert (tmp_path / "link").is_symlink()
        assert files(tmp_path / "empty") == files(tmp_path / "deep/er")
        assert (tmp_path / "empty").stat().st_mode == (tmp_path / "deep").stat().st_mode

    def test_a_failure_leaves_nothing(self, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*_: object) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(type(tokenizer), "save_pretrained", full)
        with pytest.raises(OSError, match="no space left"):
            exported(LLAMA, tmp_path / "out", tokenizer)
        assert not list(tmp_path.iterdir())

    def test_a_kill_leaves_nothing_that_looks_like_a_model(self, tmp_path: Path) -> None:
        code = (
            "import os, signal\n"
            "from pathlib import Path\n"
            "from jaxtool.weights import export, load_tokenizer\n"
            "from tests.tiny_models import TINY_LLAMA\n"
            "from tests.weights.tiny_exports import LLAMA, exported\n"
            "export._write_json = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
            f"exported(LLAMA, Path({str(tmp_path / 'out')!r}), load_tokenizer(TINY_LLAMA))\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == -signal.SIGKILL, done.stderr
        (left,) = tmp_path.iterdir()
        assert left.name.startswith(".out.")
        assert (left / "model.safetensors").exists()  # it was killed late
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            read_config(left)


class TestSpecialIds:
    def test_of_the_source(self, model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
        own = {"eos_token_id": [2, 1], "do_sample": True, "temperature": 0.6}
        (model_folder / "generation_config.json").write_text(json.dumps(own))
        folder = exported(LLAMA, tmp_path / "out", tokenizer, source=generation_source(model_folder))
        assert json.loads((folder / "generation_config.json").read_text()) == own
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] == [2, 1]

    def test_of_its_config(self, model_folder: Path, tokenizer: Any, tmp_path: Path) -> None:
        folder = exported(LLAMA, tmp_path / "out", tokenizer, source=model_folder)
        ids = json.loads((folder / "generation_config.json").read_text())
        assert ids == {"bos_token_id": 1, "eos_token_id": [1, 2], "pad_token_id": tokenizer.pad_token_id}

    def test_of_the_tokenizer(self, tokenizer: Any, tmp_path: Path) -> None:
        folder = exported(LLAMA, tmp_path / "out", tokenizer)
        ids = json.loads((folder / "generation_config.json").read_text())
        assert ids == {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2}

    def test_of_its_config_where_the_generation_settings_say_none(
        self, model_folder: Path, tokenizer: Any, tmp_path: Path
    ) -> None:
        (model_folder / "generation_config.json").write_text(json.dumps({"do_sample": True}))
        folder = exported(LLAMA, tmp_path / "out", tokenizer, source=model_folder)
        assert json.loads((folder / "generation_config.json").read_text()) == {"do_sample": True}
        assert eos_token_ids(folder, tokenizer) == eos_token_ids(model_folder, tokenizer) == (1, 2)

    @pytest.mark.parametrize(("more", "ends"), [({}, 2), ({"tokenizer.ggml.eot_token_id": 1}, [1, 2])])
    def test_of_a_gguf_file(self, more: dict[str, Any], ends: Any, write_gguf: WriteGguf, tmp_path: Path) -> None:
        file = write_gguf(metadata=more)
        of_file = jaxtool.load(file)
        source = generation_source(str(file))
        export_model(of_file.model, tmp_path / "out", tokenizer=of_file.tokenizer, source=source)
        for name in ("config.json", "generation_config.json"):
            assert json.loads((tmp_path / "out" / name).read_text())["eos_token_id"] == ends
        assert jaxtool.load(tmp_path / "out").eos_token_ids == of_file.eos_token_ids

    def test_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "model.bin").write_text("")
        for source in ("nobody/nothing", "smollm2", str(tmp_path / "model.bin"), tmp_path / "absent"):
            assert generation_source(source) is None


@pytest.mark.torch
class TestTransformers:
    @pytest.fixture(autouse=True)
    def torch(self) -> Any:
        return pytest.importorskip("torch", reason="the parity oracle torch is not installed")

    def network(self, folder: Path) -> Any:
        import transformers

        network, found = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", attn_implementation="eager", output_loading_info=True
        )
        assert not any(found.values()), found
        return network.eval()

    @pytest.mark.parametrize("name", CASES)
    def test_equal_log_probs(self, name: str, torch: Any, tokenizer: Any, tmp_path: Path) -> None:
        config = CASES[name]
        rows = config.vocab_size + config.num_tools
        tokens = np.random.default_rng(2).integers(rows, size=(2, 48))
        tokens[:, -8:] = rows - 1 - np.arange(8) % max(config.num_tools, 1)
        network = self.network(exported(config, tmp_path / "out", tokenizer))
        with torch.no_grad():
            expected = torch.log_softmax(network(torch.tensor(tokens)).logits.double(), dim=-1).numpy()
        found = log_probs(random_model(config), tokens)
        assert expected.shape[-1] == rows
        assert np.abs(found[..., :rows] - expected).max() <= 1e-4
        assert np.all(found[..., rows:] == -np.inf)

    @pytest.mark.parametrize(("name", "dtype"), list(itertools.product(CASES, ["float32", "bfloat16"])))
    def test_there_and_back_changes_no_bit(self, name: str, dtype: str, tokenizer: Any, tmp_path: Path) -> None:
        config = dataclasses.replace(CASES[name], param_dtype=dtype)
        first = exported(config, tmp_path / "first", tokenizer)
        network = self.network(first)
        assert str(network.dtype) == f"torch.{dtype}"
        network.save_pretrained(tmp_path / "theirs")
        model = loaded(tmp_path / "theirs", param_dtype=dtype)
        assert model.config.vocab_size == config.vocab_size + config.num_tools
        second = export_model(model, tmp_path / "second", tokenizer=tokenizer)
        assert files(second)["model.safetensors"] == files(first)["model.safetensors"]

    def test_auto_tokenizer(self, tokenizer: Any, tmp_path: Path) -> None:
        import transformers

        messages = [{"role": "user", "content": "Say 1234 words — 𝄞"}]
        for name in ("llama", "qwen3-tied", "gptj"):
            found = transformers.AutoTokenizer.from_pretrained(exported(CASES[name], tmp_path / name, tokenizer))
            text = found.apply_chat_template(messages, tokenize=False)
            assert text == tokenizer.apply_chat_template(messages, tokenize=False)
            assert found(text)["input_ids"] == tokenizer(text)["input_ids"]
            assert found.eos_token_id == tokenizer.eos_token_id

    @pytest.mark.parametrize("tool_tokens", [False, True])
    def test_choosing_a_tool(self, tool_tokens: bool, torch: Any, tokenizer: Any, tmp_path: Path) -> None:
        import transformers

        config = CASES["llama-tied-tools"]
        folder = exported(config, tmp_path / "out", tokenizer, tool_tokens=tool_tokens)
        network, known = self.network(folder), transformers.AutoTokenizer.from_pretrained(folder)
        tools = {row: name for name, row in read_tool_ids(folder).items()}
        prompts = ["What is the weather?", "Find me 12 books", "x"]
        model = random_model(config)
        for prompt in prompts:
            given = known(prompt, return_tensors="pt")
            answer = network.generate(
                **given, max_new_tokens=1, do_sample=False, prefix_allowed_tokens_fn=lambda batch, ids: list(tools)
            )
            row = answer[0, -1].item()
            at_end = log_probs(model, given["input_ids"].numpy())[0, -1]
            assert row == TEXT + int(np.argmax(at_end[TEXT : TEXT + len(TOOLS)]))
            if tool_tokens:
                assert known.decode(answer[0, -1:]) == f"<|tool {tools[row]}|>"
