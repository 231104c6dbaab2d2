"""`jaxtool.load` as a user calls it: every format, tools, meshes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jaxtool
from jaxtool.config import MeshConfig
from jaxtool.models import catalog_change, parameters, with_catalog
from jaxtool.parallel import make_mesh
from jaxtool.weights import TokenizerError, WeightsError, load_tokenizer
from tests.weights.conftest import WriteGguf
from tests.weights.test_export import TINY_LLAMA
from tests.weights.tiny_exports import CASES, GPTJ, LLAMA, TEXT, TOOLS, exported, random_model

IDS = np.arange(2, 14, dtype=np.int32)[None]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(TINY_LLAMA)


def logits(loaded: Any) -> np.ndarray:
    with loaded.on_mesh():
        hidden = jax.jit(loaded.model.__call__)(IDS, np.arange(IDS.shape[1], dtype=np.int32)[None], np.ones_like(IDS))
        return np.asarray(loaded.model.logits(hidden))


@pytest.mark.parametrize("name", CASES)
def test_what_was_exported_comes_back(name: str, tokenizer: Any, tmp_path: Path) -> None:
    folder = exported(CASES[name], tmp_path / "out", tokenizer)
    loaded = jaxtool.load(str(folder))
    config = dataclasses.replace(CASES[name], text_tokens=0 if CASES[name].vocab_size == TEXT else TEXT)
    assert loaded.model.config == dataclasses.replace(config, padded_vocab_size=loaded.model.config.padded_vocab_size)
    for path, value in parameters(random_model(CASES[name])).items():
        found = parameters(loaded.model)[path]
        real = config.vocab_size + config.num_tools if path.startswith(("embedding", "head")) else len(value)
        np.testing.assert_array_equal(found[:real], value[:real])
    assert loaded.eos_token_ids == (tokenizer.eos_token_id,) and loaded.path == folder and loaded.mesh is None


def test_rows_without_a_token_are_never_predicted(tokenizer: Any, tmp_path: Path) -> None:
    loaded = jaxtool.load(exported(dataclasses.replace(GPTJ, num_tools=3), tmp_path / "out", tokenizer))
    found = logits(loaded)[0, -1]
    assert np.isfinite(found[:TEXT]).all()
    assert np.isneginf(found[TEXT : GPTJ.vocab_size]).all()
    assert np.isfinite(found[GPTJ.vocab_size : GPTJ.vocab_size + 3]).all()
    assert np.isneginf(found[GPTJ.vocab_size + 3 :]).all()


def test_a_mesh_changes_nothing_but_the_layout(tokenizer: Any, tmp_path: Path) -> None:
    folder = exported(dataclasses.replace(LLAMA, num_tools=len(TOOLS)), tmp_path / "out", tokenizer)
    alone = jaxtool.load(folder)
    spread = jaxtool.load(folder, mesh=make_mesh(MeshConfig(data=2, fsdp=2, model=2)))
    for path, value in parameters(spread.model).items():
        np.testing.assert_array_equal(value, parameters(alone.model)[path])
    assert len(parameters(spread.model)["blocks.gate_df"].sharding.device_set) == 8
    lines: list[str] = []
    jaxtool.load(folder, mesh=make_mesh(MeshConfig(model=8)), report=lines.append)
    assert any("kv_heads (2) is not divisible by 8" in line for line in lines)
    with pytest.raises(ValueError, match="lie on a mesh, but none is active"):
        spread.model(IDS, IDS, np.ones_like(IDS))
    with pytest.raises(ValueError, match="lie on a mesh, but none is active"):
        with_catalog(spread.model, catalog_change(TOOLS, []))


def test_dtypes(tokenizer: Any, tmp_path: Path) -> None:
    folder = exported(LLAMA, tmp_path / "out", tokenizer)
    stored = jaxtool.load(folder, param_dtype="bfloat16", compute_dtype="float32")
    assert {leaf.dtype for leaf in parameters(stored.model).values()} == {jnp.dtype(jnp.bfloat16)}
    assert stored.model.config.compute_dtype == "float32"
    assert jaxtool.load(folder, param_dtype="bfloat16").model.config.compute_dtype == "bfloat16"
    with pytest.raises(ValueError, match="param_dtype is 'float8', expected float32 or bfloat16"):
        jaxtool.load(folder, param_dtype="float8")


def test_a_gguf_file(write_gguf: WriteGguf) -> None:
    loaded = jaxtool.load(write_gguf())
    assert loaded.eos_token_ids == (2,)
    assert np.isfinite(logits(loaded)[..., : loaded.model.config.vocab_size - 1]).any()


def test_a_gguf_file_with_its_ending_in_capitals(write_gguf: WriteGguf, tmp_path: Path) -> None:
    assert jaxtool.load(write_gguf().rename(tmp_path / "TINY.GGUF")).path.name == "TINY.GGUF"


def test_folders_that_hold_something_else(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "quantised").mkdir()
    (tmp_path / "quantised/tiny.Q4_0.gguf").write_bytes(b"GGUF")
    with pytest.raises(FileNotFoundError, match=r"holds GGUF files: give the file itself, e\.g\. .*tiny\.Q4_0\.gguf"):
        jaxtool.load(tmp_path / "quantised")
    folder = exported(LLAMA, tmp_path / "adapted", tokenizer)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(WeightsError, match=r"adapter_config\.json: an adapter beside the weights"):
        jaxtool.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds an adapter \(adapter_config\.json\): merge it"):
        jaxtool.load(folder)


def test_a_tokenizer_that_does_not_fit(tokenizer: Any, tmp_path: Path) -> None:
    folder = exported(LLAMA, tmp_path / "out", tokenizer)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": TEXT, "content": "<|one too many|>"})
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=rf"vocab_size {TEXT}, but the tokenizer in .* has ids up to {TEXT}"):
        jaxtool.load(folder)


def test_nothing_there() -> None:
    with pytest.raises(FileNotFoundError, match="no such folder"):
        jaxtool.load("absent/folder/of/models")
    with pytest.raises(AttributeError, match="no attribute 'lode'"):
        jaxtool.lode  # noqa: B018


def test_tool_tokens_do_not_make_unknown_rows_known(tokenizer: Any, tmp_path: Path) -> None:
    config = dataclasses.replace(GPTJ, num_tools=3)
    plain = jaxtool.load(exported(config, tmp_path / "plain", tokenizer))
    named = jaxtool.load(exported(config, tmp_path / "named", tokenizer, tool_tokens=True))
    assert len(named.tokenizer) == TEXT
    assert named.model.config == plain.model.config and named.model.config.text_tokens == TEXT
    np.testing.assert_array_equal(logits(named), logits(plain))


@pytest.mark.parametrize("row", [TEXT, -1, -TEXT, -(2**31)])
@pytest.mark.parametrize("block", [False, True])
def test_an_id_without_a_row_is_no_other_row(row: int, block: bool, tokenizer: Any, tmp_path: Path) -> None:
    loaded = jaxtool.load(exported(LLAMA, tmp_path / "out", tokenizer))
    ids = jnp.asarray([[3, row]])
    model = loaded.model
    tool_rows = {"embedding_vd": jnp.zeros((0, LLAMA.hidden_size)), "head_vd": jnp.zeros((0, LLAMA.hidden_size))}
    hidden = model(ids, jnp.asarray([[0, 1]]), jnp.ones_like(ids), tool_rows=tool_rows if block else None)
    assert np.isnan(hidden[:, 1]).all()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_weights_that_are_no_numbers(dtype: str, value: float, tokenizer: Any, tmp_path: Path) -> None:
    folder = exported(LLAMA, tmp_path / "out", tokenizer, dtype=dtype)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.self_attn.k_proj.weight"
    tensors[name][3, 7] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(WeightsError, match=rf"model.safetensors: tensor {name} .* not a number at \[3, 7\]"):
        jaxtool.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10**6}, r"the config says 1,000,000 layers, the files hold 21 tensors"),
        ({"rope_theta": 10**400}, "field 'rope_theta' is 1000000.*, expected a positive number below 1e38"),
        ({"rope_theta": 1e37}, "rope_theta is 1e.37, expected a number above 1 and below 1e30"),
    ],
)
def test_a_number_in_the_config_that_no_model_has(
    change: dict[str, Any], message: str, tokenizer: Any, tmp_path: Path
) -> None:
    folder = exported(LLAMA, tmp_path / "out", tokenizer)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=message):
        jaxtool.load(folder)
