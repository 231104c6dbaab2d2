"""Tiny Llama checkpoints in both formats, written from the published layouts, not by the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

V, D, F, L, N, K, H = 272, 64, 96, 3, 4, 2, 16

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
USER_DEFINED = ["<note>"]
MERGES = ["Ġ t", "Ġt h", "Ġth e", "h e", "he l", "hel l", "hell o", "1 2", "12 3", "i n", "Ġ Ġ"]


@pytest.fixture
def hf_config() -> dict[str, Any]:
    """`config.json` in the words of transformers 4."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "eos_token_id": [1, 2],
        "hidden_act": "silu",
        "hidden_size": D,
        "initializer_range": 0.02,
        "intermediate_size": F,
        "max_position_embeddings": 128,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": N,
        "num_hidden_layers": L,
        "num_key_value_heads": K,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-5,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "transformers_version": "4.46.0",
        "use_cache": True,
        "vocab_size": V,
    }


@pytest.fixture
def hf_tensors() -> dict[str, np.ndarray]:
    """All tensors of an untied model under their Hugging Face names, no two values alike."""
    rng = np.random.default_rng(0)

    def values(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    tensors = {
        "model.embed_tokens.weight": values(V, D),
        "model.norm.weight": values(D),
        "lm_head.weight": values(V, D),
    }
    for layer in range(L):
        tensors |= {
            f"model.layers.{layer}.{name}.weight": values(*shape)
            for name, shape in {
                "input_layernorm": (D,),
                "self_attn.q_proj": (N * H, D),
                "self_attn.k_proj": (K * H, D),
                "self_attn.v_proj": (K * H, D),
                "self_attn.o_proj": (D, N * H),
                "post_attention_layernorm": (D,),
                "mlp.gate_proj": (F, D),
                "mlp.up_proj": (F, D),
                "mlp.down_proj": (D, F),
            }.items()
        }
    return tensors


@pytest.fixture
def expected(hf_tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The parameters those tensors make; Hugging Face linear layers are [out, in], ours [in, out]."""

    def stacked(name: str) -> np.ndarray:
        return np.stack([hf_tensors[f"model.layers.{layer}.{name}.weight"] for layer in range(L)])

    def heads(name: str, count: int) -> np.ndarray:
        return np.moveaxis(stacked(name).reshape(L, count, H, D), 3, 1)

    return {
        "embedding_vd": hf_tensors["model.embed_tokens.weight"],
        "head_vd": hf_tensors["lm_head.weight"],
        "final_norm_d": hf_tensors["model.norm.weight"],
        "blocks.attention_norm_d": stacked("input_layernorm"),
        "blocks.query_dnh": heads("self_attn.q_proj", N),
        "blocks.key_dkh": heads("self_attn.k_proj", K),
        "blocks.value_dkh": heads("self_attn.v_proj", K),
        "blocks.output_nhd": np.moveaxis(stacked("self_attn.o_proj").reshape(L, D, N, H), 1, 3),
        "blocks.mlp_norm_d": stacked("post_attention_layernorm"),
        "blocks.gate_df": np.swapaxes(stacked("mlp.gate_proj"), 1, 2),
        "blocks.up_df": np.swapaxes(stacked("mlp.up_proj"), 1, 2),
        "blocks.down_fd": np.swapaxes(stacked("mlp.down_proj"), 1, 2),
    }


@pytest.fixture
def abstract(expected: Mapping[str, np.ndarray]) -> dict[str, jax.ShapeDtypeStruct]:
    return {path: jax.ShapeDtypeStruct(value.shape, jnp.float32) for path, value in expected.items()}


@pytest.fixture
def model_folder(tmp_path: Path, hf_config: dict[str, Any], hf_tensors: dict[str, np.ndarray]) -> Path:
    """A folder with `model.safetensors`."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config))
    save_file(hf_tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded_folder(tmp_path: Path, hf_config: dict[str, Any], hf_tensors: dict[str, np.ndarray]) -> Path:
    """The same model in three shards with an index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(hf_config))
    names = sorted(hf_tensors)
    weight_map: dict[str, str] = {}
    for number in range(3):
        file = f"model-0000{number + 1}-of-00003.safetensors"
        part = {name: hf_tensors[name] for name in names[number::3]}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    )
    return folder


@pytest.fixture
def merges() -> list[str]:
    return MERGES


@pytest.fixture
def vocabulary() -> list[str]:
    """Special tokens, the 256 byte symbols, merged tokens and one user-defined token: V entries."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    merged = ["".join(merge.split(" ")) for merge in MERGES]
    tokens = [*SPECIAL, *bytes_to_unicode().values(), *merged, *USER_DEFINED]
    return tokens + [f"<unused{row}>" for row in range(V - len(tokens))]


WriteGguf = Callable[..., Path]


@pytest.fixture
def write_gguf(tmp_path: Path, hf_tensors: dict[str, np.ndarray], vocabulary: list[str]) -> WriteGguf:
    """Writes a GGUF file as llama.cpp's converter does; matrices in `dtype`, norms in float32."""

    def write(
        *,
        dtype: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        tied: bool = False,
        metadata: Mapping[str, Any] | None = None,
        tensors: Mapping[str, np.ndarray] | None = None,
        architecture: str = "llama",
    ) -> Path:
        path = tmp_path / "tiny.gguf"
        fields: dict[str, Any] = {
            f"{architecture}.block_count": L,
            f"{architecture}.context_length": 128,
            f"{architecture}.embedding_length": D,
            f"{architecture}.feed_forward_length": F,
            f"{architecture}.attention.head_count": N,
            f"{architecture}.attention.head_count_kv": K,
            f"{architecture}.rope.freq_base": 10000.0,
            f"{architecture}.rope.dimension_count": H,
            f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{architecture}.vocab_size": V,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": vocabulary,
            "tokenizer.ggml.token_type": [
                3 if token in SPECIAL else 4 if token in USER_DEFINED else 5 if "<unused" in token else 1
                for token in vocabulary
            ],
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_space_prefix": False,
            "tokenizer.chat_template": (
                "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
            ),
        }
        fields |= metadata or {}
        writer = gguf.GGUFWriter(path, architecture)
        for name, value in fields.items():
            _add(writer, name, value)
        for name, value in (_gguf_tensors(hf_tensors, tied, architecture) | dict(tensors or {})).items():
            if value.dtype != np.float32:
                writer.add_tensor(name, value)
                continue
            of_type = dtype if value.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(value, of_type), raw_dtype=of_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    match value:
        case None:  # left out
            return
        case bool():
            writer.add_bool(name, value)
        case int():
            writer.add_uint32(name, value)
        case float():
            writer.add_float32(name, value)
        case str():
            writer.add_string(name, value)
        case list():
            writer.add_array(name, value)
        case _:
            raise TypeError(name)


def _gguf_tensors(hf_tensors: Mapping[str, np.ndarray], tied: bool, architecture: str) -> dict[str, np.ndarray]:
    names = {
        "model.embed_tokens": "token_embd",
        "model.norm": "output_norm",
        "lm_head": "output",
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    written: dict[str, np.ndarray] = {}
    for hf_name, value in hf_tensors.items():
        stem = hf_name.removesuffix(".weight")
        if stem == "lm_head" and tied:
            continue
        if stem.startswith("model.layers."):
            layer, stem = stem.removeprefix("model.layers.").split(".", 1)
            name = f"blk.{layer}.{names[stem]}.weight"
        else:
            name = f"{names[stem]}.weight"
        if architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            # LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py
            heads = N if stem.endswith("q_proj") else K
            value = value.reshape(heads, 2, H // 2, D).swapaxes(1, 2).reshape(value.shape)
        written[name] = value
    return written
