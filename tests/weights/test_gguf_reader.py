"""GGUF files: tensors in Hugging Face order, damaged files. Quantised blocks are in `test_gguf_blocks`."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxtool.weights import (
    GgufFile,
    WeightsError,
    config_from_gguf,
    read_weights,
)

WriteGguf = Callable[..., Path]

Q = gguf.GGMLQuantizationType


@pytest.mark.parametrize("dtype", [Q.F32, Q.F16, Q.BF16, Q.Q8_0, Q.Q4_0, Q.Q4_1])
def test_weights(
    write_gguf: WriteGguf,
    dtype: Q,
    expected: dict[str, np.ndarray],
    hf_tensors: dict[str, np.ndarray],
    abstract: Any,
) -> None:
    found = read_weights(write_gguf(dtype=dtype), abstract)
    assert found.keys() == expected.keys()
    # Largest rounding error of each format, relative to the largest value in a row.
    tolerance = {
        Q.F32: 0,
        Q.F16: 2**-11,
        Q.BF16: 2**-8,
        Q.Q8_0: 0.5 / 127 + 2**-11,
        Q.Q4_0: 1.01 / 8,
        Q.Q4_1: 1.02 / 15,
    }
    for path, value in expected.items():
        assert found[path].dtype == np.float32
        bound = tolerance[dtype] * np.abs(value).max() if "norm" not in path else 0
        np.testing.assert_allclose(found[path], value, rtol=0, atol=bound, err_msg=path)


def test_rows_are_unpermuted_exactly(write_gguf: WriteGguf, hf_tensors: dict[str, np.ndarray], abstract: Any) -> None:
    """Quantising goes row by row, so quantised rows in Hugging Face order are the exact truth."""
    found = read_weights(write_gguf(dtype=Q.Q4_0), abstract)
    for path, name, heads in (("blocks.query_dnh", "q", 4), ("blocks.key_dkh", "k", 2)):
        for layer in range(3):
            rows = hf_tensors[f"model.layers.{layer}.self_attn.{name}_proj.weight"]
            rows = gguf.quants.dequantize(gguf.quants.quantize(rows, Q.Q4_0), Q.Q4_0)
            for head in range(heads):
                for i in (0, 1, 7, 8, 15):
                    np.testing.assert_array_equal(found[path][layer, :, head, i], rows[head * 16 + i])


def test_tied_head_that_repeats_the_embedding(
    write_gguf: WriteGguf, hf_tensors: dict[str, np.ndarray], abstract: dict[str, jax.ShapeDtypeStruct]
) -> None:
    del abstract["head_vd"]
    same = {"output.weight": hf_tensors["model.embed_tokens.weight"]}
    assert "head_vd" not in read_weights(write_gguf(tensors=same), abstract)
    with pytest.raises(WeightsError, match=r"output\.weight in tiny\.gguf differs from token_embd\.weight"):
        read_weights(write_gguf(), abstract)


def test_surplus_and_unreadable_tensors(write_gguf: WriteGguf, abstract: Any) -> None:
    with pytest.raises(WeightsError, match=r"surplus \(1\): blk\.0\.attn_q\.bias \[64\] in tiny\.gguf"):
        read_weights(write_gguf(tensors={"blk.0.attn_q.bias": np.ones(64, np.float32)}), abstract)
    unreadable = {"blk.1.attn_k.weight": np.ones((32, 64), np.int32)}
    with pytest.raises(
        WeightsError, match=r"dtype not among BF16, .*Q6_K.*: blk\.1\.attn_k\.weight: I32 in tiny\.gguf"
    ):
        read_weights(write_gguf(tensors=unreadable), abstract)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it starts with b''"),
        (b"PK\x03\x04" + bytes(50), "it starts with b'PK"),
        (b"GGUF", "GGUF version bytes b''"),
        (b"GGUF\x01\x00\x00\x00" + bytes(16), "expected version 2 or 3"),
        (b"GGUF\x00\x00\x00\x03" + bytes(16), "little-endian"),
        (b"GGUF\x03\x00\x00\x00" + b"\xff" * 16, "damaged or cut off"),
    ],
)
def test_not_gguf(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(WeightsError, match=rf"x\.gguf: .*{words}"):
        GgufFile(tmp_path / "x.gguf")


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.gguf: no such file"):
        GgufFile(tmp_path / "none.gguf")


def test_cut_off_anywhere(write_gguf: WriteGguf) -> None:
    path = write_gguf()
    whole = path.read_bytes()
    file = GgufFile(path)
    end = max(tensor.data_offset + tensor.n_bytes for tensor in file._by_name.values())
    start = min(tensor.data_offset for tensor in file._by_name.values())
    for kept in [*range(0, start, 97), start, (start + end) // 2, end - 1]:
        path.write_bytes(whole[:kept])
        with pytest.raises(WeightsError, match=r"tiny\.gguf"):
            GgufFile(path)
    path.write_bytes(whole[:end])
    assert GgufFile(path).tensors == file.tensors


def test_length_beyond_the_file_is_not_walked(tmp_path: Path) -> None:
    """An array that claims 2**40 numbers is refused where the file ends, not after counting so far."""
    path = tmp_path / "x.gguf"
    header = b"GGUF" + struct.pack("<IQQ", 3, 0, 1)
    array = struct.pack("<Q1sIIQ", 1, b"a", gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32, 2**40)
    path.write_bytes(header + array + bytes(8))
    with pytest.raises(WeightsError, match=r"x\.gguf: damaged or cut off .*needs 61 bytes, has 57"):
        GgufFile(path)


@pytest.fixture(scope="module")
def damaged_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damaged") / "x.gguf"


def test_damaged_header_is_a_value_error(write_gguf: WriteGguf, damaged_path: Path) -> None:
    """Whatever byte of the header is wrong, the file loads or raises ValueError; nothing hangs."""
    path = write_gguf(metadata={"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.token_type": [1]})
    whole = path.read_bytes()
    header = min(tensor.data_offset for tensor in GgufFile(path)._by_name.values())

    @settings(max_examples=150)
    @given(st.lists(st.tuples(st.integers(8, header - 1), st.integers(0, 255)), min_size=1, max_size=3))
    def check(changes: list[tuple[int, int]]) -> None:
        content = bytearray(whole)
        for position, value in changes:
            content[position] = value
        damaged_path.write_bytes(content)
        try:
            config_from_gguf(GgufFile(damaged_path))
        except ValueError as error:
            assert "x.gguf" in str(error)

    check()


def test_tensors_lie_one_behind_the_other(write_gguf: WriteGguf, tmp_path: Path) -> None:
    content = bytearray(write_gguf().read_bytes())
    name = b"blk.0.attn_v.weight"
    # name, number of dimensions (4 bytes), two dimensions (16), type (4), offset (8)
    offset = content.index(name) + len(name) + 24
    for bit in (2, 5, 9):  # not aligned, then aligned but elsewhere
        changed = bytearray(content)
        changed[offset + bit // 8] ^= 1 << bit % 8
        path = tmp_path / f"changed{bit}.gguf"
        path.write_bytes(changed)
        with pytest.raises(WeightsError, match=r"starts at byte \d+, expected \d+|damaged or cut off"):
            GgufFile(path)
