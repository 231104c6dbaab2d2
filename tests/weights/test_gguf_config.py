"""The metadata of GGUF files as configs: equal to those of the same models as Hugging Face folders, or refused."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxtool.models import LlamaConfig
from jaxtool.weights import ConfigError, WeightsError, config_from_hf, read_config, read_weights

WriteGguf = Callable[..., Path]

HALF = 8  # divisors: half the head size of the tiny model
THETA = 500_000.0


def test_config_equals_the_one_of_the_hugging_face_folder(write_gguf: WriteGguf, hf_config: dict[str, Any]) -> None:
    assert read_config(write_gguf()) == config_from_hf(hf_config, "config.json")


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


def test_a_further_file_of_a_split_model(tmp_path: Path) -> None:
    """llama.cpp gives it no metadata but those of the split."""
    writer = gguf.GGUFWriter(tmp_path / "tiny-00002-of-00002.gguf", "llama")
    writer.kv_data[0].clear()
    writer.add_uint16("split.no", 1)
    writer.add_uint16("split.count", 2)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"00002-of-00002\.gguf: one of the 2 files of a split model"):
        read_config(tmp_path / "tiny-00002-of-00002.gguf")


def test_unscaled_rotary_is_stated_by_some_files(write_gguf: WriteGguf) -> None:
    harmless = {
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.finetuned": True,
        "quantize.imatrix.file": "x",
    }
    assert read_config(write_gguf(metadata=harmless)).rope_theta == 10000.0


def test_refused_architecture(write_gguf: WriteGguf) -> None:
    with pytest.raises(ConfigError, match=r"'general\.architecture' is 'qwen2', expected one of llama, qwen3"):
        read_config(write_gguf(architecture="qwen2"))


def divisors(
    factor: float, low: float = 1.0, high: float = 4.0, original: int = 8192, theta: float = THETA
) -> np.ndarray:
    """What llama.cpp's converter writes for Llama 3.1, in float64 and then rounded."""
    values = []
    for i in range(HALF):
        wavelength = 2 * math.pi * theta ** (i / HALF)
        share = (original / wavelength - low) / (high - low)
        values.append(1 / (min(max(share, 0), 1) * (1 - 1 / factor) + 1 / factor))
    return np.array(values, np.float32)


def llama31(hf_config: dict[str, Any], factor: float) -> dict[str, Any]:
    scaling = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    return hf_config | {
        "rope_theta": THETA,
        "rope_scaling": {"rope_type": "llama3", "factor": factor, **scaling},
    }


@pytest.mark.parametrize("factor", [8.0, 32.0, 2.5])
def test_llama_31_rescaling(
    write_gguf: WriteGguf, hf_config: dict[str, Any], expected: dict[str, np.ndarray], abstract: Any, factor: float
) -> None:
    path = write_gguf(metadata={"llama.rope.freq_base": THETA}, tensors={"rope_freqs.weight": divisors(factor)})
    assert read_config(path) == config_from_hf(llama31(hf_config, factor), "config.json")
    found = read_weights(path, abstract)
    assert found.keys() == expected.keys()
    for name in ("blocks.query_dnh", "blocks.key_dkh"):
        np.testing.assert_array_equal(found[name], expected[name])


def test_divisors_of_one_rescale_nothing(write_gguf: WriteGguf) -> None:
    config = read_config(write_gguf(tensors={"rope_freqs.weight": np.ones(HALF, np.float32)}))
    assert isinstance(config, LlamaConfig) and config.rope_scaling is None


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (divisors(8.0, high=8.0), r"divisor 4 is [\d.]+, expected [\d.]+ for Llama 3\.1's rescaling by 8\.0"),
        (divisors(8.0, original=4096), "divisor 4 is .*no other is implemented"),
        (divisors(8.0) * np.float32(1 + 1e-4), "divisor 0 is 1.0001"),
        (divisors(8.0, theta=1e6), "divisor 4 is"),
        (divisors(8.0)[:-1], "has 7 divisors, expected 8, half the head size"),
        (np.full(HALF, np.nan, np.float32), "holds nan to nan, expected divisors of at least 1"),
        (np.full(HALF, np.inf, np.float32), "holds inf to inf"),
        (np.full(HALF, 0.25, np.float32), "holds 0.25 to 0.25"),
        (np.full(HALF, -1, np.float32), "holds -1.0 to -1.0"),
    ],
)
def test_refused_divisors(write_gguf: WriteGguf, values: np.ndarray, words: str) -> None:
    path = write_gguf(metadata={"llama.rope.freq_base": THETA}, tensors={"rope_freqs.weight": values})
    with pytest.raises(ConfigError, match=rf"tiny\.gguf: tensor 'rope_freqs\.weight'.* {words}"):
        read_config(path)


def test_longest_wavelength_within_the_blend(write_gguf: WriteGguf) -> None:
    """With such a base no divisor is the factor itself, so it can't be told."""
    values = divisors(8.0, theta=2000.0)
    assert 1 < values.max() < 7
    path = write_gguf(metadata={"llama.rope.freq_base": 2000.0}, tensors={"rope_freqs.weight": values})
    with pytest.raises(ConfigError, match="divisor 7 is"):
        read_config(path)


def test_other_divisors(write_gguf: WriteGguf) -> None:
    long = {"rope_factors_long.weight": np.ones(HALF, np.float32)}
    with pytest.raises(ConfigError, match=r"'rope_factors_long\.weight' rescales .* not implemented"):
        read_config(write_gguf(tensors=long))
    with pytest.raises(WeightsError, match=r"'rope_freqs\.weight' is I32\[8\], expected a vector in one of BF16"):
        read_config(write_gguf(tensors={"rope_freqs.weight": np.ones(HALF, np.int32)}))


@pytest.fixture
def qwen3(hf_config: dict[str, Any], hf_tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    """`config.json` of a Qwen3 model, whose norms of queries and keys are added to the tensors."""
    rng = np.random.default_rng(1)
    for layer in range(3):
        for name in ("q_norm", "k_norm"):
            values = rng.standard_normal(2 * HALF, dtype=np.float32)
            hf_tensors[f"model.layers.{layer}.self_attn.{name}.weight"] = values
    changed = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 2 * HALF, "rope_theta": 1e6}
    return {name: value for name, value in hf_config.items() if name not in ("mlp_bias", "pretraining_tp")} | changed


QWEN3_METADATA = {
    "qwen3.attention.key_length": 2 * HALF,
    "qwen3.attention.value_length": 2 * HALF,
    "qwen3.rope.freq_base": 1e6,
    "qwen3.rope.dimension_count": None,
    "qwen3.vocab_size": None,
}


@pytest.mark.parametrize("tied", [False, True])
def test_qwen3_equals_its_safetensors(
    write_gguf: WriteGguf,
    qwen3: dict[str, Any],
    hf_tensors: dict[str, np.ndarray],
    abstract: dict[str, jax.ShapeDtypeStruct],
    tmp_path: Path,
    tied: bool,
) -> None:
    path = write_gguf(architecture="qwen3", metadata=QWEN3_METADATA, tied=tied)
    (tmp_path / "config.json").write_text(json.dumps(qwen3 | {"tie_word_embeddings": tied}))
    save_file({n: v for n, v in hf_tensors.items() if not (tied and "head" in n)}, tmp_path / "model.safetensors")
    config = read_config(path)
    assert config == read_config(tmp_path)
    assert isinstance(config, LlamaConfig) and config.qk_norm
    for name in ("query_norm_h", "key_norm_h"):
        abstract[f"blocks.{name}"] = jax.ShapeDtypeStruct((3, 2 * HALF), jnp.float32)
    if tied:
        del abstract["head_vd"]
    found, original = read_weights(path, abstract), read_weights(tmp_path, abstract)
    assert found.keys() == original.keys() == abstract.keys()
    for name, value in original.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_whitelists_are_by_architecture(write_gguf: WriteGguf, qwen3: dict[str, Any]) -> None:
    for metadata, words in (
        ({"qwen3.expert_count": 0}, "'qwen3.expert_count' = 0 is not known"),
        ({"qwen3.rope.scaling.type": "yarn"}, "'qwen3.rope.scaling.type' is 'yarn', only 'none'"),
        ({"qwen3.pooling_type": 3}, "'qwen3.pooling_type' = 3 is not known"),
    ):
        with pytest.raises(ConfigError, match=words):
            read_config(write_gguf(architecture="qwen3", metadata=QWEN3_METADATA | metadata))
    with pytest.raises(ConfigError, match="rescales the rotary embedding, which qwen3 has no use for"):
        read_config(
            write_gguf(architecture="qwen3", metadata=QWEN3_METADATA, tensors={"rope_freqs.weight": divisors(8.0)})
        )
