"""Tiny models for tests: random parameters without a compiled initialiser, checkpoints loaded, log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh

from jaxtool.models import Llama, LlamaConfig, abstract_model, parameters, with_parameters
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


@pytest.fixture(autouse=True)
def quick_compilation() -> Iterator[None]:
    """Tiny programs take longer to compile than to run. Effective in folders whose conftest imports this."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def random_model(
    config: LlamaConfig = CONFIG,
    *,
    mesh: Mesh | None = None,
    rules: AxisRules = AxisRules(),  # noqa: B008 (frozen)
    seed: int = 0,
) -> Llama:
    """A model with random parameters (norm scales off 1), the same on every mesh."""
    rng = np.random.default_rng(seed)

    def value(path: str, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        noise = 0.3 * rng.standard_normal(leaf.shape)
        return jax.device_put((noise + ("norm" in path)).astype(leaf.dtype), leaf.sharding)

    abstract = abstract_model(lambda: Llama(config, rules, rngs=nnx.Rngs(0)), mesh)
    return with_parameters(abstract, {path: value(path, leaf) for path, leaf in parameters(abstract).items()})


def load_model(path: Path, **changes: Any) -> Llama:
    """The model of a checkpoint, its config changed by `changes`."""
    config = dataclasses.replace(read_config(path), **changes)
    abstract = abstract_model(lambda: Llama(config, rngs=nnx.Rngs(0)))
    return with_parameters(abstract, read_weights(path, parameters(abstract)))


def logits(model: Llama, tokens_bs: Any, segment_ids_bs: Any = None) -> np.ndarray:
    """float32 [B, S, V]; positions count from 0 in each segment, without segments each row is one."""
    tokens = np.asarray(tokens_bs, np.int32)
    segments = np.ones_like(tokens) if segment_ids_bs is None else np.asarray(segment_ids_bs, np.int32)
    positions = np.zeros_like(tokens)
    for row, ids in enumerate(segments):
        for place in range(1, len(ids)):
            if ids[place] == ids[place - 1]:
                positions[row, place] = positions[row, place - 1] + 1
    return np.asarray(_logits(model, tokens, positions, segments))


def log_probs(model: Llama, tokens_bs: Any, segment_ids_bs: Any = None) -> np.ndarray:
    """float64 [B, S, V] of the `logits`; the softmax is taken in numpy."""
    found = logits(model, tokens_bs, segment_ids_bs).astype(np.float64)
    found -= found.max(axis=-1, keepdims=True)
    found -= np.log(np.exp(found).sum(axis=-1, keepdims=True))
    return found


@jax.jit
def _logits(model: Llama, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
    hidden = model(tokens, positions, segments)
    assert hidden.dtype == jnp.dtype(model.config.compute_dtype)
    return model.logits(hidden)
