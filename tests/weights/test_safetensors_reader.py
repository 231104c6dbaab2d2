"""Model folders: good ones in both forms, and every way a folder can be wrong."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxtool.weights import WeightsError
from jaxtool.weights.safetensors_reader import SafetensorsFolder, read_json_object

INDEX = "model.safetensors.index.json"


def edit_index(folder: Path, change: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize("kind", ["model_folder", "sharded_folder"])
def test_reads_every_tensor(kind: str, request: pytest.FixtureRequest, hf_tensors: dict[str, np.ndarray]) -> None:
    folder = SafetensorsFolder(request.getfixturevalue(kind))
    assert folder.tensors.keys() == hf_tensors.keys()
    for name, value in hf_tensors.items():
        assert folder.tensors[name].shape == value.shape
        assert folder.tensors[name].dtype == "F32"
        part = folder.read(name, tuple(slice(1, size // 2) for size in value.shape))
        np.testing.assert_array_equal(part, value[tuple(slice(1, size // 2) for size in value.shape)])


def test_half_precision(tmp_path: Path) -> None:
    value = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    save_file({"b": value.astype(ml_dtypes.bfloat16), "h": value.astype(np.float16)}, tmp_path / "model.safetensors")
    folder = SafetensorsFolder(tmp_path)
    part = (slice(1, 3), slice(2, 5))
    assert folder.tensors["b"].dtype == "BF16"
    np.testing.assert_array_equal(folder.read("b", part), value.astype(ml_dtypes.bfloat16)[part])
    np.testing.assert_array_equal(folder.read("h", part), value.astype(np.float16)[part])


def test_symlinks_as_in_the_hub_cache(tmp_path: Path, sharded_folder: Path) -> None:
    links = tmp_path / "snapshot"
    links.mkdir()
    for file in sharded_folder.iterdir():
        (links / file.name).symlink_to(file)
    assert SafetensorsFolder(links).tensors.keys() == SafetensorsFolder(sharded_folder).tensors.keys()


@pytest.mark.parametrize("kept", [0, 5, 20, 1000, -1])
def test_cut_off_file(model_folder: Path, kept: int) -> None:
    file = model_folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(WeightsError, match=r"model\.safetensors: not a whole safetensors file"):
        SafetensorsFolder(model_folder)


@pytest.mark.parametrize(
    "content", [b"\xff" * 200, b"version https://git-lfs.github.com/spec/v1\n", b"PK\x03\x04" * 50]
)
def test_damaged_header(model_folder: Path, content: bytes) -> None:
    (model_folder / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match="not a whole safetensors file"):
        SafetensorsFolder(model_folder)


def test_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such model folder"):
        SafetensorsFolder(tmp_path / "none")


def test_missing_shard(sharded_folder: Path) -> None:
    (sharded_folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00003\.safetensors: no such file"):
        SafetensorsFolder(sharded_folder)


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "C:\\x.safetensors"]
)
def test_index_may_not_leave_the_folder(sharded_folder: Path, file: str) -> None:
    edit_index(sharded_folder, lambda index: index["weight_map"].update({"lm_head.weight": file}))
    with pytest.raises(WeightsError, match=r"weight_map\['lm_head\.weight'\].*outside the model folder"):
        SafetensorsFolder(sharded_folder)


@pytest.mark.parametrize("file", ["pytorch_model.bin", 3, None])
def test_index_names_another_kind_of_file(sharded_folder: Path, file: Any) -> None:
    edit_index(sharded_folder, lambda index: index["weight_map"].update({"lm_head.weight": file}))
    with pytest.raises(WeightsError, match=r"expected the name of a \.safetensors file"):
        SafetensorsFolder(sharded_folder)


@pytest.mark.parametrize("weight_map", [None, {}, ["a"]])
def test_index_without_map(sharded_folder: Path, weight_map: Any) -> None:
    edit_index(sharded_folder, lambda index: index.update({"weight_map": weight_map}))
    with pytest.raises(WeightsError, match="'weight_map'"):
        SafetensorsFolder(sharded_folder)


def test_index_lists_what_the_shard_lacks(sharded_folder: Path) -> None:
    file = "model-00001-of-00003.safetensors"
    edit_index(sharded_folder, lambda index: index["weight_map"].update({"ghost.weight": file}))
    with pytest.raises(WeightsError, match=r"listed but not there ghost\.weight; there but not listed none"):
        SafetensorsFolder(sharded_folder)


def test_shard_holds_what_the_index_lacks(sharded_folder: Path) -> None:
    edit_index(sharded_folder, lambda index: index["weight_map"].pop("lm_head.weight"))
    with pytest.raises(WeightsError, match=r"listed but not there none; there but not listed lm_head\.weight"):
        SafetensorsFolder(sharded_folder)


def test_index_beside_an_unrelated_single_file(sharded_folder: Path, model_folder: Path) -> None:
    (sharded_folder / "model.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes())
    with pytest.raises(WeightsError, match=r"both model\.safetensors and an"):
        SafetensorsFolder(sharded_folder)


def test_shards_without_index(sharded_folder: Path) -> None:
    (sharded_folder / INDEX).unlink()
    with pytest.raises(WeightsError, match=r"3 shards .* but no model\.safetensors\.index\.json"):
        SafetensorsFolder(sharded_folder)


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("pytorch_model.bin", "pickled weights .*unpickling runs code"),
        ("consolidated.00.pth", "pickled weights"),
        ("model-q8.gguf", "give the file itself, e.g. .*model-q8.gguf"),
        ("readme.md", "neither model.safetensors nor"),
    ],
)
def test_nothing_to_read(tmp_path: Path, file: str, words: str) -> None:
    (tmp_path / file).write_bytes(b"")
    with pytest.raises(WeightsError, match=words):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "not a JSON file"),
        (b"\xff\xfe", "not a JSON file"),
        (b"[" * 100_000, "not a JSON file"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
    ],
)
def test_json_errors_name_the_file(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(WeightsError, match=rf"config\.json: {words}"):
        read_json_object(tmp_path / "config.json")
