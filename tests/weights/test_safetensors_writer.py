"""Written checkpoints against the safetensors library, and everything that can go wrong on the way."""

import json
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxtool.weights import WeightsError
from jaxtool.weights.safetensors_reader import SafetensorsFolder
from jaxtool.weights.safetensors_writer import SafetensorsWriter

INDEX = "model.safetensors.index.json"
DTYPES = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}

Listed = list[tuple[str, str, tuple[int, ...]]]
Tensors = dict[str, np.ndarray]

LISTED: Listed = [("b", "F16", (3,)), ("a", "F32", (4, 6)), ("c", "BF16", (5, 2, 2)), ("d", "F32", ())]


def values_of(listed: Listed) -> Tensors:
    rng = np.random.default_rng(0)
    return {name: np.asarray(rng.standard_normal(shape), DTYPES[dtype]) for name, dtype, shape in listed}


def write_all(folder: Path, listed: Listed, values: Tensors, **options: Any) -> None:
    with SafetensorsWriter(folder, listed, **options) as writer:
        for name, value in values.items():
            writer.write(name, value)


def read_back(folder: Path) -> tuple[Tensors, list[Path]]:
    """Everything in a folder, by the library and the index alone."""
    if not (folder / INDEX).exists():
        return load_file(folder / "model.safetensors"), [folder / "model.safetensors"]
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    files = sorted({folder / file for file in weight_map.values()})
    found: Tensors = {}
    for file in files:
        held = load_file(file)
        assert {name for name, of in weight_map.items() if of == file.name} == held.keys()
        found |= held
    return found, files


def assert_same(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].tobytes() == value.tobytes(), name


SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=60)
@given(st.data())
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any tensors, cut into any shards, written in any order and in any blocks."""
    folder = tmp_path_factory.mktemp("model")
    kinds = data.draw(st.lists(st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES), min_size=1, max_size=6))
    listed = [(f"layer.{i}.größe", dtype, shape) for i, (dtype, shape) in enumerate(kinds)]
    values = values_of(listed)
    shard_bytes = data.draw(st.integers(1, 200))
    with SafetensorsWriter(folder, listed, shard_bytes=shard_bytes) as writer:
        for name in data.draw(st.permutations(list(values))):
            value = values[name]
            if value.ndim == 0:
                writer.write(name, value)
                continue
            cuts = sorted(data.draw(st.lists(st.integers(0, len(value)), max_size=3)))
            for start, stop in zip([0, *cuts], [*cuts, len(value)], strict=True):
                writer.write(name, value[start:stop])

    found, files = read_back(folder)
    assert_same(found, values)
    assert sorted(folder.iterdir()) == sorted(files + [folder / INDEX] * (len(files) > 1))
    ours = SafetensorsFolder(folder)
    assert_same({name: ours.read(name, tuple(map(slice, value.shape))) for name, value in values.items()}, values)
    for file in files:
        with safe_open(file, framework="numpy") as opened:
            assert opened.metadata() == {"format": "pt"}
            held = list(opened.keys())
        header = int.from_bytes(file.read_bytes()[:8], "little")
        assert header % 8 == 0
        assert file.stat().st_size - 8 - header <= shard_bytes or sum(values[name].nbytes > 0 for name in held) == 1
    if len(files) > 1:
        total = sum(value.nbytes for value in values.values())
        assert json.loads((folder / INDEX).read_text())["metadata"] == {"total_size": total}
        assert [file.name for file in files] == [
            f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
        ]


def test_shards_are_filled_in_order(tmp_path: Path) -> None:
    listed: Listed = [(name, "F32", (size,)) for name, size in zip("abcde", (10, 10, 11, 40, 1), strict=True)]
    write_all(tmp_path, listed, values_of(listed), shard_bytes=80)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    assert [int(weight_map[name][6:11]) for name in "abcde"] == [1, 1, 2, 3, 4]


def test_blocks_need_not_be_contiguous(tmp_path: Path) -> None:
    values = values_of([("a", "F32", (6, 4))])
    write_all(tmp_path, [("a", "F32", (4, 6))], {"a": values["a"].T})
    assert_same(load_file(tmp_path / "model.safetensors"), {"a": values["a"].T})


@pytest.mark.torch
def test_torch_reads_mixed_widths_in_place(tmp_path: Path) -> None:
    """torch views the bytes as they lie, and refuses an odd place for a wide type."""
    torch = pytest.importorskip("torch")
    safetensors_torch = pytest.importorskip("safetensors.torch")
    values = values_of(LISTED)
    write_all(tmp_path, LISTED, values)
    found = safetensors_torch.load_file(tmp_path / "model.safetensors")
    for name, value in values.items():
        assert torch.equal(found[name].to(torch.float32), torch.from_numpy(value.astype(np.float32))), name


def test_nothing_under_the_final_names_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a kill leaves behind at any moment: partial names, and the index as the last file to be named."""
    named: list[str] = []
    rename = os.rename

    def watched(source: Path, target: Path) -> None:
        assert not (tmp_path / INDEX).exists()
        rename(source, target)
        named.append(target.name)

    monkeypatch.setattr(os, "rename", watched)
    values = values_of(LISTED)
    with SafetensorsWriter(tmp_path, LISTED, shard_bytes=1) as writer:
        for name, value in values.items():
            writer.write(name, value)
            assert all(path.name.endswith(".partial") for path in tmp_path.iterdir())
            with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
                SafetensorsFolder(tmp_path)
    assert named == [*(f"model-0000{number}-of-00004.safetensors" for number in range(1, 5)), INDEX]
    assert_same(read_back(tmp_path)[0], values)


def test_leftovers_of_a_killed_process_are_overwritten(tmp_path: Path) -> None:
    killed = SafetensorsWriter(tmp_path, LISTED, shard_bytes=1)
    killed.__enter__()
    killed.write("a", values_of(LISTED)["a"][:2])
    assert len(list(tmp_path.iterdir())) == 4
    write_all(tmp_path, LISTED, values_of(LISTED))
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    killed._close()


@pytest.mark.parametrize("shard_bytes", [1, 10**9])
def test_an_exception_leaves_nothing(tmp_path: Path, shard_bytes: int) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        SafetensorsWriter(tmp_path, LISTED, shard_bytes=shard_bytes) as writer,
    ):
        writer.write("b", values_of(LISTED)["b"])
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_incomplete(tmp_path: Path) -> None:
    values = values_of(LISTED)
    with (
        pytest.raises(WeightsError, match=r"3 of 4 tensors are not whole, the first is a \(48 of 96 bytes\)"),
        SafetensorsWriter(tmp_path, LISTED) as writer,
    ):
        writer.write("b", values["b"])
        writer.write("a", values["a"][:2])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fails_at", [1, 3, 5])
def test_renaming_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int) -> None:
    rename, calls = os.rename, 0

    def failing(source: Path, target: Path) -> None:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise PermissionError(13, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", failing)
    with pytest.raises(WeightsError, match=r"can't rename the finished files: .*Permission denied"):
        write_all(tmp_path, LISTED, values_of(LISTED), shard_bytes=1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("held", ["model.safetensors", INDEX, "model-00001-of-00002.safetensors"])
def test_folder_with_weights_is_left_alone(tmp_path: Path, held: str) -> None:
    (tmp_path / held).write_bytes(b"precious")
    with pytest.raises(WeightsError, match=f"already holds weights \\({held}"):
        write_all(tmp_path, LISTED, values_of(LISTED))
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(held, b"precious")]


def test_folder_is_made_and_other_files_stay(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    write_all(folder, LISTED, values_of(LISTED))
    other = tmp_path / "config.json"
    other.write_text("{}")
    write_all(tmp_path, LISTED, values_of(LISTED))
    assert other.read_text() == "{}"


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(WeightsError, match="file: can't write weights there"):
        write_all(tmp_path / "file", LISTED, values_of(LISTED))


@contextmanager
def file_size_limit(most: int) -> Iterator[None]:
    """The kernel lets no file grow beyond this, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(("most", "what"), [(100, "the header"), (10_000, "tensor big")])
def test_no_room_by_the_kernels_word(tmp_path: Path, most: int, what: str) -> None:
    listed: Listed = [("big", "F32", (100, 100))]
    with (
        pytest.raises(WeightsError, match=rf"model\.safetensors: can't write {what}: File too large; .* 40000 bytes"),
        file_size_limit(most),
    ):
        write_all(tmp_path, listed, values_of(listed))
    assert not list(tmp_path.iterdir())


def test_disk_full_after_a_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pwrite, room = os.pwrite, 1000

    def filling(descriptor: int, data: memoryview, offset: int) -> int:
        nonlocal room
        if room == 0:
            raise OSError(28, "No space left on device")
        count = pwrite(descriptor, data[:room], offset)
        room -= count
        return count

    monkeypatch.setattr(os, "pwrite", filling)
    listed: Listed = [("big", "F32", (100, 100))]
    with pytest.raises(WeightsError, match="can't write tensor big: No space left on device"):
        write_all(tmp_path, listed, values_of(listed))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "block", "words"),
    [
        ("x", np.zeros(3, np.float16), "tensor x is not among those announced"),
        ("b", np.zeros(3, np.float32), r"tensor b is float16\[3\], found a block float32\[3\]"),
        ("b", np.zeros(3, ">f2"), r"tensor b is float16\[3\], found a block >f2\[3\]"),
        ("b", np.zeros((3, 1), np.float16), r"found a block float16\[3, 1\]"),
        ("a", np.zeros((6, 4), np.float32), r"found a block float32\[6, 4\]"),
        ("a", np.zeros(24, np.float32), r"found a block float32\[24\]"),
        ("b", np.zeros(4, np.float16), "tensor b is 6 bytes, but 0 are written already and the block has 8"),
        ("d", np.zeros(1, np.float32), r"tensor d is float32\[\], found a block float32\[1\]"),
    ],
)
def test_wrong_block(tmp_path: Path, name: str, block: np.ndarray, words: str) -> None:
    with pytest.raises(WeightsError, match=words), SafetensorsWriter(tmp_path, LISTED) as writer:
        writer.write(name, block)


@pytest.mark.parametrize(
    ("listed", "words"),
    [
        ([], "no tensors"),
        ([("a", "F32", (1,)), ("a", "F16", (2,))], "'a' is empty, reserved or there twice"),
        ([("__metadata__", "F32", (1,))], "reserved"),
        ([("", "F32", (1,))], "empty"),
        ([("a", "I64", (1,))], "tensor a: dtype 'I64', expected one of F16, BF16, F32"),
        ([("a", "F32", (2, -1))], r"tensor a: shape \[2, -1\]"),
    ],
)
def test_wrong_list(tmp_path: Path, listed: Listed, words: str) -> None:
    with pytest.raises(WeightsError, match=words):
        SafetensorsWriter(tmp_path, listed)


def test_shards_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="shard_bytes is 0"):
        SafetensorsWriter(tmp_path, LISTED, shard_bytes=0)
