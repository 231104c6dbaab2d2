"""GGUF files: metadata, dequantised tensors in Hugging Face order, damaged files."""

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
    ConfigError,
    GgufFile,
    WeightsError,
    llama_config_from_gguf,
    read_config,
    read_weights,
)
from jaxtool.weights.hf_config import llama_config_from_hf

WriteGguf = Callable[..., Path]

Q = gguf.GGMLQuantizationType


def test_config_equals_the_one_of_the_hugging_face_folder(write_gguf: WriteGguf, hf_config: dict[str, Any]) -> None:
    assert read_config(write_gguf()) == llama_config_from_hf(hf_config, "config.json")


def test_tied_where_there_is_no_output_matrix(write_gguf: WriteGguf) -> None:
    assert read_config(write_gguf(tied=True)).tie_word_embeddings is True


def test_absent_metadata(write_gguf: WriteGguf) -> None:
    absent = [
        "llama.vocab_size",
        "llama.rope.dimension_count",
        "llama.rope.freq_base",
        "llama.attention.head_count_kv",
    ]
    config = read_config(write_gguf(metadata=dict.fromkeys(absent)))
    assert (config.vocab_size, config.head_dim, config.rope_theta, config.num_key_value_heads) == (
        272,
        16,
        1e4,
        4,
    )


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


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"llama.block_count": None}, "'llama.block_count' is missing"),
        ({"llama.block_count": "3"}, "'llama.block_count' is '3', expected int"),
        ({"llama.block_count": 0}, "'llama.block_count' is 0, expected a positive"),
        ({"llama.attention.head_count_kv": [2, 2, 2]}, r"'llama.attention.head_count_kv' is \[2, 2, 2\]"),
        ({"llama.attention.head_count_kv": 3}, "'llama.attention.head_count_kv' is 3, expected a divisor"),
        ({"llama.embedding_length": 66}, "'llama.embedding_length' is 66, expected a multiple"),
        ({"llama.attention.key_length": 15}, "only the head size 15|even"),
        ({"llama.rope.dimension_count": 8}, "'llama.rope.dimension_count' is 8, only the head size 16"),
        ({"llama.attention.value_length": 8}, "'llama.attention.value_length' is 8, only the head size 16"),
        ({"llama.rope.scaling.type": "yarn"}, "'llama.rope.scaling.type' is 'yarn', only 'none'"),
        ({"llama.rope.scaling.factor": 2.0}, "'llama.rope.scaling.factor' = 2.0 is not known"),
        ({"llama.attention.sliding_window": 4096}, "'llama.attention.sliding_window' = 4096 is not known"),
        ({"llama.expert_count": 8}, "'llama.expert_count' is 8, only 0"),
        ({"llama.vocab_size": 300}, "'llama.vocab_size' is 300, but token_embd.weight has 272 rows"),
        (
            {"llama.attention.layer_norm_rms_epsilon": None},
            "'llama.attention.layer_norm_rms_epsilon' is missing",
        ),
        ({"llama.rope.freq_base": -1.0}, "'llama.rope.freq_base' is -1.0"),
        ({"split.count": 2}, "split.count"),
    ],
)
def test_refused_metadata(write_gguf: WriteGguf, metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=rf"tiny\.gguf: .*({words})"):
        read_config(write_gguf(metadata=metadata))


def test_unscaled_rotary_is_stated_by_some_files(write_gguf: WriteGguf) -> None:
    harmless = {
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.finetuned": True,
        "quantize.imatrix.file": "x",
    }
    assert read_config(write_gguf(metadata=harmless)).rope_theta == 10000.0


def test_refused_architecture(write_gguf: WriteGguf) -> None:
    with pytest.raises(ConfigError, match=r"'general\.architecture' is 'qwen2', expected 'llama'"):
        read_config(write_gguf(architecture="qwen2"))


def test_rescaled_rotary_frequencies(write_gguf: WriteGguf) -> None:
    with pytest.raises(ConfigError, match=r"'rope_freqs\.weight' rescales the rotary embedding"):
        read_config(write_gguf(tensors={"rope_freqs.weight": np.ones(8, np.float32)}))


def test_surplus_and_unreadable_tensors(write_gguf: WriteGguf, abstract: Any) -> None:
    with pytest.raises(WeightsError, match=r"surplus \(1\): blk\.0\.attn_q\.bias \[64\] in tiny\.gguf"):
        read_weights(write_gguf(tensors={"blk.0.attn_q.bias": np.ones(64, np.float32)}), abstract)


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
            llama_config_from_gguf(GgufFile(damaged_path))
        except ValueError as error:
            assert "x.gguf" in str(error)

    check()
