"""Tiny models of every port to export, with and without tools, and readers of what was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import safe_open

from jaxtool.models import (
    GPTJConfig,
    LanguageModel,
    LanguageModelConfig,
    LlamaConfig,
    RopeScaling,
    abstract_model,
    build_model,
    parameters,
    with_parameters,
)
from jaxtool.parallel import AxisRules
from jaxtool.weights import export_model, read_config, read_weights

TEXT = 264  # tokens of the tokenizer
TOOLS = ("get_weather", "café", "two words", "search", 'quote "\\" <|im_end|>', "工具", "get_weather_2")

LLAMA = LlamaConfig(
    vocab_size=TEXT,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope_theta=10_000.0,
)
GPTJ = GPTJConfig(
    vocab_size=TEXT + 16,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=8,
    rotary_dim=4,
    max_position_embeddings=64,
)
SCALED = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32)
CASES: dict[str, LanguageModelConfig] = {
    "llama": dataclasses.replace(LLAMA, rope_scaling=SCALED),
    "llama-tied-tools": dataclasses.replace(LLAMA, tie_word_embeddings=True, num_tools=len(TOOLS)),
    "qwen3-tied": dataclasses.replace(LLAMA, qk_norm=True, tie_word_embeddings=True),
    "qwen3-tools": dataclasses.replace(LLAMA, qk_norm=True, num_tools=len(TOOLS)),
    "gptj": GPTJ,
    "gptj-tools": dataclasses.replace(GPTJ, num_tools=len(TOOLS)),
}
WITH_TOOLS = [name for name, config in CASES.items() if config.num_tools]


def random_model(config: LanguageModelConfig, mesh: Mesh | None = None) -> LanguageModel:
    """Random parameters of which none is at its initial value, the same on every mesh; padded rows are zero."""
    rng = np.random.default_rng(0)
    rules = AxisRules() if mesh is None else AxisRules().fit(dict(mesh.shape), config.axis_sizes)[0]
    abstract = abstract_model(lambda: build_model(config, rules), mesh)
    values = {}
    for path, leaf in parameters(abstract).items():
        value = 0.3 * rng.standard_normal(leaf.shape) + ("norm" in path and "bias" not in path)
        if path in ("embedding_vd", "head_vd", "head_bias_v"):
            value[config.vocab_size + config.num_tools :] = 0
        values[path] = jax.device_put(value.astype(leaf.dtype), leaf.sharding)
    return with_parameters(abstract, values)


def exported(config: LanguageModelConfig, folder: Path, tokenizer: Any, **options: Any) -> Path:
    return export_model(random_model(config), folder, tokenizer=tokenizer, tools=TOOLS[: config.num_tools], **options)


def stored(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder, read by the safetensors library."""
    found: dict[str, np.ndarray] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "numpy") as tensors:
            found |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 (no mapping)
    return found


def loaded(folder: Path, **changes: Any) -> LanguageModel:
    config = dataclasses.replace(read_config(folder), **changes)
    abstract = abstract_model(lambda: build_model(config))
    return with_parameters(abstract, read_weights(folder, parameters(abstract)))


def assert_same_bits(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes(), name


def files(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}
