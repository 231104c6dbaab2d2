"""Model folders: good ones in both forms, and every way a folder can be wrong."""

import json
import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxtool.weights import WeightsError, safetensors_reader
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


@given(st.data())
def test_any_part_of_any_shape(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Whichever way the runs of bytes are gathered: one by one, or whole rows through a buffer of any size."""
    folder = tmp_path_factory.mktemp("model")
    shape = data.draw(st.lists(st.integers(0, 6), max_size=4))
    value = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    save_file({"first": np.ones(1, np.float32), "value": value}, folder / "model.safetensors")
    reader = SafetensorsFolder(folder)
    ends = st.one_of(st.none(), st.integers(-7, 7))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_reader, "READ_THROUGH_BYTES", data.draw(st.sampled_from([0, 8, 32, 10**6])))
        patch.setattr(safetensors_reader, "BUFFER_BYTES", data.draw(st.sampled_from([1, 16, 100, 10**6])))
        for _ in range(3):
            index = tuple(slice(data.draw(ends), data.draw(ends)) for _ in shape)
            part = reader.read("value", index)
            np.testing.assert_array_equal(part, value[index])
            assert part.shape == value[index].shape


needs_proc = pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux's /proc")


@needs_proc
class TestBytesRead:
    """Counted by the reader and by the kernel."""

    @pytest.fixture
    def reader(self, tmp_path: Path) -> SafetensorsFolder:
        self.value = np.random.default_rng(0).standard_normal((64, 1 << 16), dtype=np.float32)  # rows of 256 KiB
        save_file({"before": np.ones(3, np.float32), "value": self.value}, tmp_path / "model.safetensors")
        return SafetensorsFolder(tmp_path)

    def kernel(self) -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    def count(self, reader: SafetensorsFolder, *index: slice) -> int:
        before, by_kernel = reader.bytes_read, self.kernel()
        part = reader.read("value", index)
        by_kernel = self.kernel() - by_kernel
        np.testing.assert_array_equal(part, self.value[index])
        count = reader.bytes_read - before
        assert count <= by_kernel <= count + 4096  # what the kernel said took a read as well
        return count

    def test_rows(self, reader: SafetensorsFolder) -> None:
        assert reader.bytes_read == 0
        assert self.count(reader, slice(3, 7), slice(None)) == 4 << 18
        assert self.count(reader, slice(5, 5), slice(None)) == 0

    def test_far_columns_are_skipped(self, reader: SafetensorsFolder) -> None:
        assert self.count(reader, slice(None), slice(100, 200)) == 64 * 400

    def test_near_columns_are_read_through(self, reader: SafetensorsFolder) -> None:
        # Through the buffer of 1 MiB, 4 rows at a time, without what lies outside the first and the last run.
        assert self.count(reader, slice(0, 8), slice(1000, 50_000)) == 2 * (3 * (1 << 18) + 49_000 * 4)

    @pytest.mark.parametrize("columns", [slice(None), slice(0, 100), slice(0, 50_000)])
    def test_memory_beside_the_result(self, reader: SafetensorsFolder, columns: slice) -> None:
        tracemalloc.start()
        try:
            part = reader.read("value", (slice(None), columns))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak <= part.nbytes + (1 << 20) + (1 << 16)


def test_several_threads(model_folder: Path, hf_tensors: dict[str, np.ndarray]) -> None:
    reader = SafetensorsFolder(model_folder)

    def read(name: str) -> np.ndarray:
        return reader.read(name, (slice(None),) * hf_tensors[name].ndim)

    names = sorted(hf_tensors) * 20
    with ThreadPoolExecutor(8) as pool:
        for name, part in zip(names, pool.map(read, names), strict=True):
            np.testing.assert_array_equal(part, hf_tensors[name])
    assert reader.bytes_read == 20 * sum(value.nbytes for value in hf_tensors.values())


@needs_proc
def test_files_are_closed_with_the_object(sharded_folder: Path) -> None:
    def opened() -> int:
        return sum(path.resolve().parent == sharded_folder for path in Path("/proc/self/fd").iterdir())

    reader = SafetensorsFolder(sharded_folder)
    assert opened() == 3
    del reader
    assert opened() == 0


def test_steps_are_refused(model_folder: Path) -> None:
    with pytest.raises(ValueError, match=r"tensor model\.norm\.weight: index .* has a step"):
        SafetensorsFolder(model_folder).read("model.norm.weight", (slice(0, 64, 2),))


def test_dtype_that_is_listed_but_not_read(tmp_path: Path) -> None:
    save_file({"mask": np.ones(4, np.bool_)}, tmp_path / "model.safetensors")
    reader = SafetensorsFolder(tmp_path)
    assert reader.tensors["mask"].dtype == "BOOL"
    with pytest.raises(WeightsError, match=r"model\.safetensors: can't read tensor mask: its dtype is BOOL"):
        reader.read("mask", (slice(None),))


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
        (b"{", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b'{"a": 1, "a": 2}', "key 'a' appears twice"),
    ],
)
def test_json_errors_name_the_file(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(WeightsError, match=rf"config\.json: {words}"):
        read_json_object(tmp_path / "config.json")
