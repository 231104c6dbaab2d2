"""Damaged checkpoints: whatever was done to the bytes, there is a `WeightsError` or exactly what was stored.

The independent truth is the safetensors library: nothing is accepted that it refuses, and what both accept is equal.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load, save, save_file

from jaxtool.weights import WeightsError, read_weights
from jaxtool.weights.safetensors_reader import SafetensorsFolder

Tensors = dict[str, np.ndarray]
Check = Callable[[bytes], Tensors | None]

STORED: Tensors = {
    "w": np.arange(6, dtype=np.float32).reshape(2, 3),
    "b": np.asarray([1, 2, 3], ml_dtypes.bfloat16),
}
FILE = save(STORED, metadata={"format": "pt"})
HEADER_BYTES = 8 + int.from_bytes(FILE[:8], "little")
DATA = FILE[HEADER_BYTES:]


def with_header(header: Any, data: bytes = DATA) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


@pytest.fixture(scope="module")
def check(tmp_path_factory: pytest.TempPathFactory) -> Check:
    """Reads a file of these bytes; None where it is refused. Fails where it says other than the library."""
    folder = tmp_path_factory.mktemp("model")

    def read(content: bytes) -> Tensors | None:
        (folder / "model.safetensors").write_bytes(content)
        try:
            reader = SafetensorsFolder(folder)
        except WeightsError as error:
            assert str(error).startswith(f"{folder}/model.safetensors: not a whole safetensors file ("), error
            return None
        found: Tensors = {}
        for name, tensor in reader.tensors.items():
            if tensor.dtype in reader.readable_dtypes:
                found[name] = reader.read(name, (slice(None),) * len(tensor.shape))
            else:
                with pytest.raises(WeightsError, match="its dtype is"):
                    reader.read(name, (slice(None),) * len(tensor.shape))
        try:
            theirs = load(content)
        except SafetensorError as error:
            pytest.fail(f"accepted {content!r}, which the library refuses: {error}")
        except (KeyError, AttributeError):  # a dtype that numpy doesn't have
            return found
        assert theirs.keys() == reader.tensors.keys()
        for name, value in found.items():
            assert (value.dtype, value.shape) == (theirs[name].dtype, theirs[name].shape)
            assert value.tobytes() == theirs[name].tobytes()
        return found

    return read


def test_the_whole_file(check: Check) -> None:
    found = check(FILE)
    assert found is not None
    assert found.keys() == STORED.keys()


def test_cut_off_anywhere(check: Check) -> None:
    assert [kept for kept in range(len(FILE)) if check(FILE[:kept]) is not None] == []


@pytest.mark.parametrize("surplus", [b"\0", FILE])
def test_longer_than_it_says(check: Check, surplus: bytes) -> None:
    assert check(FILE + surplus) is None


def test_any_flipped_bit_of_the_header(check: Check) -> None:
    """Either refused, or a name was hit (which no model expects then), or nothing that matters."""
    accepted = 0
    for bit in range(8 * HEADER_BYTES):
        content = bytearray(FILE)
        content[bit // 8] ^= 1 << bit % 8
        found = check(bytes(content))
        if found is not None:
            accepted += 1
            for name in found.keys() & STORED.keys():
                np.testing.assert_array_equal(found[name], STORED[name], strict=True)
            assert len(found) == len(STORED)
    assert 0 < accepted < HEADER_BYTES


@settings(max_examples=300)
@given(st.lists(st.tuples(st.integers(0, HEADER_BYTES - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_overwritten_bytes(check: Check, changes: list[tuple[int, int]]) -> None:
    content = bytearray(FILE)
    for place, value in changes:
        content[place] = value
    check(bytes(content))


JUNK = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = st.fixed_dictionaries(
    {
        "dtype": st.one_of(st.sampled_from(["F32", "F16", "BF16", "BOOL", "F4", "C64", "F8_E4M3"]), JUNK),
        "shape": st.one_of(st.lists(st.integers(0, 6), max_size=3), JUNK),
        "data_offsets": st.one_of(st.sampled_from([[0, 24], [24, 30], [0, 30], [12, 12], [6, 30], [0, 6]]), JUNK),
    }
)


@settings(max_examples=300)
@given(st.dictionaries(st.sampled_from(["w", "b", "__metadata__"]), st.one_of(FIELDS, FIELDS, JUNK), max_size=3))
def test_any_header(check: Check, header: dict[str, Any]) -> None:
    check(with_header(header))


W = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
B = {"dtype": "BF16", "shape": [3], "data_offsets": [24, 30]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"", "starts with b'', expected a curly bracket"),
        (b" {}", "starts with b' '"),
        (b"[]", r"starts with b'\['"),
        (b"{" * 50_000, "header: not JSON"),
        (b'{"w": 1' + b"1" * 5000 + b"}", "header: not JSON"),
        (b"{} {}", "header: not JSON: Extra data"),
        (b'{"\xff": 1}', "header: not JSON: 'utf-8'"),
        (b'{"w": 1, "w": 2}', "key 'w' appears twice"),
        (b'{"w": {"dtype": "F32", "dtype": "F16"}}', "key 'dtype' appears twice"),
        ({"\ud800": W}, r"tensor '\\ud800': the name is not valid Unicode"),
        ({"w": W, "b": B, "__metadata__": {"a": 1}}, "__metadata__ is .*expected an object of strings"),
        ({"w": W, "b": ["BF16", [3], [24, 30]]}, "tensor 'b' is .*expected an object of data_offsets, dtype, shape"),
        ({"w": W, "b": B | {"more": 1}}, "tensor 'b' is .*expected an object of data_offsets, dtype, shape"),
        ({"w": W, "b": {"dtype": "BF16", "shape": [3]}}, "tensor 'b' is .*expected an object of data_offsets"),
        ({"w": W, "b": B | {"dtype": "BF17"}}, "tensor 'b': field 'dtype' is 'BF17', expected one of F4,"),
        ({"w": W, "b": B | {"dtype": ["BF16"]}}, r"tensor 'b': field 'dtype' is \['BF16'\]"),
        ({"w": W, "b": B | {"dtype": "F16", "shape": [4]}}, "48 bits, but F16.* takes 64"),
        ({"w": W, "b": B | {"shape": [3.0]}}, r"field 'shape' is \[3.0\]"),
        ({"w": W, "b": B | {"shape": [3, True]}}, r"field 'shape' is \[3, True\]"),
        ({"w": W, "b": B | {"shape": [-3, -1]}}, r"field 'shape' is \[-3, -1\]"),
        ({"w": W, "b": B | {"shape": [2**62] * 70}}, "field 'shape' is"),
        ({"w": W, "b": B | {"shape": [2**32, 2**32, 3]}}, "48 bits, but BF16.* takes"),
        ({"w": W, "b": B | {"data_offsets": [30, 24]}}, "expected two ascending whole numbers"),
        ({"w": W, "b": B | {"data_offsets": [24, 30, 36]}}, "expected two ascending whole numbers"),
        ({"w": W, "b": B | {"data_offsets": [-6, 0]}}, "expected two ascending whole numbers"),
        ({"w": W, "b": B | {"data_offsets": [20, 26]}}, "tensor 'b' starts at byte .* and overlaps tensor 'w'"),
        ({"w": W, "b": B | {"data_offsets": [0, 6]}}, "overlaps"),
        (
            {"w": W, "b": B | {"data_offsets": [26, 32]}},
            "tensor 'b' starts at byte .* and leaves a gap behind tensor 'w'",
        ),
        ({"b": B}, "tensor 'b' starts at byte .* and leaves a gap behind the header"),
        ({"w": W}, "tensor 'w' ends at byte .*expected the end of the file"),
        (
            {"w": W, "b": B, "c": B | {"data_offsets": [30, 36]}},
            "tensor 'c' ends at byte .*expected the end of the file",
        ),
    ],
)
def test_header_that_the_format_does_not_allow(tmp_path: Path, header: Any, words: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(with_header(header))
    with pytest.raises(WeightsError, match=rf"model\.safetensors: not a whole safetensors file .*{words}"):
        SafetensorsFolder(tmp_path)


@pytest.mark.parametrize("length", [HEADER_BYTES - 7 + len(DATA), 10**8 + 1, 2**31, 2**63, 2**64 - 1])
def test_absurd_header_length(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + FILE[8:])
    with pytest.raises(WeightsError, match=f"a header of {length} bytes, expected at most {len(FILE) - 8} "):
        SafetensorsFolder(tmp_path)


class TestAfterOpening:
    @pytest.fixture
    def reader(self, tmp_path: Path) -> SafetensorsFolder:
        (tmp_path / "model.safetensors").write_bytes(FILE)
        return SafetensorsFolder(tmp_path)

    def read(self, reader: SafetensorsFolder) -> np.ndarray:
        return reader.read("w", (slice(None), slice(None)))

    def test_cut_off(self, reader: SafetensorsFolder) -> None:
        os.truncate(reader.source / "model.safetensors", HEADER_BYTES + 10)
        with pytest.raises(
            WeightsError,
            match=rf"model\.safetensors: can't read tensor w: the file ends at byte {HEADER_BYTES + 10}, exp",
        ):
            self.read(reader)

    def test_replaced(self, reader: SafetensorsFolder) -> None:
        """The files that were checked are the ones that are read."""
        other = reader.source / "other"
        other.write_bytes(save({"w": np.zeros(1, np.float32)}))
        other.replace(reader.source / "model.safetensors")
        np.testing.assert_array_equal(self.read(reader), STORED["w"])

    def test_failing_disk(self, reader: SafetensorsFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any) -> int:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(WeightsError, match=r"model\.safetensors: can't read tensor w: .*Input/output error"):
            self.read(reader)

    def test_short_reads_are_continued(self, reader: SafetensorsFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        preadv = os.preadv
        monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: preadv(fd, [buffers[0][:5]], offset))
        np.testing.assert_array_equal(self.read(reader), STORED["w"])


class TestModel:
    """The same through `read_weights`: the damage is told before any parameter is made."""

    Abstract = dict[str, jax.ShapeDtypeStruct]

    def refused(self, folder: Path, abstract: Abstract, words: str, kind: type[Exception] = WeightsError) -> None:
        with pytest.raises(kind, match=words):
            read_weights(folder, abstract)

    def edit_index(self, folder: Path, name: str, file: str) -> None:
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"][name] = file
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    def test_flipped_bit_in_a_name(self, model_folder: Path, abstract: Abstract) -> None:
        file = model_folder / "model.safetensors"
        file.write_bytes(file.read_bytes().replace(b'"lm_head.weight"', b'"lm_iead.weight"'))
        self.refused(model_folder, abstract, r"(?s)missing \(1\): lm_head\.weight.*surplus \(1\): lm_iead\.weight")

    def test_cut_off_shard(self, sharded_folder: Path, abstract: Abstract) -> None:
        file = sharded_folder / "model-00003-of-00003.safetensors"
        os.truncate(file, file.stat().st_size - 1)
        self.refused(sharded_folder, abstract, r"model-00003-of-00003\.safetensors: not a whole safetensors file")

    def test_missing_shard(self, sharded_folder: Path, abstract: Abstract) -> None:
        (sharded_folder / "model-00002-of-00003.safetensors").unlink()
        self.refused(sharded_folder, abstract, "model-00002-of-00003.*no such file", FileNotFoundError)

    @pytest.mark.parametrize("file", ["../model.safetensors", "/model.safetensors", "a/../../model.safetensors"])
    def test_index_that_leaves_the_folder(self, sharded_folder: Path, abstract: Abstract, file: str) -> None:
        self.edit_index(sharded_folder, "lm_head.weight", file)
        self.refused(sharded_folder, abstract, r"weight_map\['lm_head\.weight'\].*lies outside the model folder")

    @pytest.mark.parametrize("file", ["a\0b.safetensors", "x" * 300 + ".safetensors"])
    def test_index_with_an_impossible_name(self, sharded_folder: Path, abstract: Abstract, file: str) -> None:
        self.edit_index(sharded_folder, "lm_head.weight", file)
        self.refused(sharded_folder, abstract, r"\.safetensors: (no such file|can't be opened)", (ValueError, OSError))  # type: ignore[arg-type]

    def test_shards_behind_symbolic_links(
        self, tmp_path: Path, sharded_folder: Path, abstract: Abstract, expected: Tensors
    ) -> None:
        """As in the hub's cache, where a snapshot links to blobs elsewhere."""
        links = tmp_path / "snapshot"
        links.mkdir()
        for file in sharded_folder.iterdir():
            (links / file.name).symlink_to(file)
        found = read_weights(links, abstract)
        for path, value in expected.items():
            np.testing.assert_array_equal(found[path], value)

    def test_surplus_wrong_shape_wrong_dtype(self, model_folder: Path, hf_tensors: Tensors, abstract: Abstract) -> None:
        hf_tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(64, np.float32)
        hf_tensors["lm_head.weight"] = np.ascontiguousarray(hf_tensors["lm_head.weight"].T)
        hf_tensors["model.norm.weight"] = np.zeros(64, np.int64)
        save_file(hf_tensors, model_folder / "model.safetensors")
        self.refused(
            model_folder,
            abstract,
            r"(?s)surplus \(1\): model\.layers\.0\.self_attn\.q_proj\.bias \[64\] in model\.safetensors"
            r".*wrong shape \(1\): lm_head\.weight: expected \[272, 64\], found \[64, 272\] in model\.safetensors"
            r".*dtype not among BF16, F16, F32 \(1\): model\.norm\.weight: I64 in model\.safetensors",
        )

    def test_pickles_only(self, model_folder: Path, abstract: Abstract) -> None:
        (model_folder / "model.safetensors").rename(model_folder / "pytorch_model.bin")
        self.refused(model_folder, abstract, "only pickled weights .*unpickling runs code from the file")

    def test_file_that_may_not_be_opened(
        self, model_folder: Path, abstract: Abstract, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(*_: Any) -> int:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(os, "open", refuse)
        self.refused(model_folder, abstract, r"model\.safetensors: can't be opened: .*Permission denied")

    def test_damage_met_while_reading_is_not_swallowed(
        self, model_folder: Path, abstract: Abstract, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pieces are read in threads; the first error comes out, with file and tensor."""
        preadv, calls = os.preadv, 0

        def failing(*args: Any) -> int:
            nonlocal calls
            calls += 1
            if calls > 10:
                raise OSError(5, "Input/output error")
            return preadv(*args)

        monkeypatch.setattr(os, "preadv", failing)
        self.refused(
            model_folder, abstract, r"model\.safetensors: can't read tensor model\.layers\.\d.*: .*Input/output error"
        )
