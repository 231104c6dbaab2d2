"""Tiny models for tests: random parameters without a compiled initialiser, checkpoints loaded, log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxtool.models import (
    GPTJConfig,
    LanguageModel,
    LanguageModelConfig,
    LlamaConfig,
    abstract_model,
    build_model,
    parameters,
    with_parameters,
)
from jaxtool.parallel import AxisRules
from jaxtool.weights import read_config, read_weights

# A stored model with its tokenizer; made by data/make_tiny_llama.py.
TINY_LLAMA = Path(__file__).parent / "data" / "tiny_llama"

CONFIG = LlamaConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rope_theta=10_000.0,
)
# Heads wider than width / heads, as in the 4B model.
QWEN3_CONFIG = dataclasses.replace(CONFIG, head_dim=12, rms_norm_eps=1e-6, qk_norm=True)
GPTJ_CONFIG = GPTJConfig(
    vocab_size=100,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    head_dim=8,
    rotary_dim=4,
)
CONFIGS: dict[str, LanguageModelConfig] = {"llama": CONFIG, "qwen3": QWEN3_CONFIG, "gptj": GPTJ_CONFIG}


@contextmanager
def few_optimizations() -> Iterator[None]:
    """Tiny programs take longer to compile than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Effective in folders whose conftest imports this."""
    with few_optimizations():
        yield


def random_model(
    config: LanguageModelConfig = CONFIG,
    *,
    mesh: Mesh | None = None,
    rules: AxisRules = AxisRules(),  # noqa: B008 (frozen)
    seed: int = 0,
) -> Any:
    """A model with random parameters (norm scales off 1, biases off 0), the same on every mesh."""
    rng = np.random.default_rng(seed)

    def value(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = 0.3 * rng.standard_normal(leaf.shape)
        is_scale = "norm" in path and "bias" not in path
        return jax.device_put((noise + is_scale).astype(leaf.dtype), leaf.sharding)

    abstract = abstract_model(lambda: build_model(config, rules), mesh)
    return with_parameters(abstract, {path: value(path, leaf) for path, leaf in parameters(abstract).items()})


def load_model(path: Path, **changes: Any) -> Any:
    """The model of a checkpoint, its config changed by `changes`."""
    config = dataclasses.replace(read_config(path), **changes)
    abstract = abstract_model(lambda: build_model(config))
    return with_parameters(abstract, read_weights(path, parameters(abstract)))


def positions_of(segment_ids_bs: Any) -> np.ndarray:
    """int32 [B, S], counting from 0 wherever the segment changes."""
    segments = np.asarray(segment_ids_bs)
    positions = np.zeros(segments.shape, np.int32)
    for row, ids in enumerate(segments):
        for place in range(1, len(ids)):
            if ids[place] == ids[place - 1]:
                positions[row, place] = positions[row, place - 1] + 1
    return positions


def logits(model: LanguageModel, tokens_bs: Any, segment_ids_bs: Any = None, positions_bs: Any = None) -> np.ndarray:
    """float32 [B, S, V]; positions count from 0 in each segment, without segments each row is one."""
    tokens = np.asarray(tokens_bs, np.int32)
    segments = np.ones_like(tokens) if segment_ids_bs is None else np.asarray(segment_ids_bs, np.int32)
    positions = positions_of(segments) if positions_bs is None else np.asarray(positions_bs, np.int32)
    return np.asarray(_logits(model, tokens, positions, segments))


def log_probs(model: LanguageModel, tokens_bs: Any, segment_ids_bs: Any = None, positions_bs: Any = None) -> np.ndarray:
    """float64 [B, S, V] of the `logits`; the softmax is taken in numpy."""
    found = logits(model, tokens_bs, segment_ids_bs, positions_bs).astype(np.float64)
    found -= found.max(axis=-1, keepdims=True)
    found -= np.log(np.exp(found).sum(axis=-1, keepdims=True))
    return found


@jax.jit
def _logits(model: LanguageModel, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
    hidden = model(tokens, positions, segments)
    assert hidden.dtype == jnp.dtype(model.config.compute_dtype)
    return model.logits(hidden)
