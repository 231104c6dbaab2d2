"""Loading a checkpoint into the model, the way the scripts do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxtool.models import Llama, abstract_model, parameters, with_parameters
from jaxtool.weights import read_config, read_weights


@pytest.fixture(scope="session")
def load() -> Callable[..., Llama]:
    """`load(folder_or_gguf, **config_changes)`: the model with the checkpoint's weights."""

    def load(path: Path, **changes: Any) -> Llama:
        config = dataclasses.replace(read_config(path), **changes)
        abstract = abstract_model(lambda: Llama(config, rngs=nnx.Rngs(0)))
        return with_parameters(abstract, read_weights(path, parameters(abstract)))

    return load


@pytest.fixture(scope="session")
def log_probs() -> Callable[..., np.ndarray]:
    """`log_probs(model, tokens_bs, segment_ids_bs=None)`: float64 [B, S, V], the softmax taken in numpy.

    Positions count from 0 in each segment; without segments each row is one.
    """

    @jax.jit
    def logits(model: Llama, tokens: jax.Array, positions: jax.Array, segments: jax.Array) -> jax.Array:
        return model.logits(model(tokens, positions, segments))

    def log_probs(model: Llama, tokens_bs: np.ndarray, segment_ids_bs: np.ndarray | None = None) -> np.ndarray:
        tokens_bs = np.asarray(tokens_bs, np.int32)
        segments = np.ones_like(tokens_bs) if segment_ids_bs is None else np.asarray(segment_ids_bs, np.int32)
        positions = np.zeros_like(tokens_bs)
        for row, ids in enumerate(segments):
            for place in range(1, len(ids)):
                if ids[place] == ids[place - 1]:
                    positions[row, place] = positions[row, place - 1] + 1
        found = np.array(logits(model, jnp.asarray(tokens_bs), positions, segments), np.float64)
        found -= found.max(axis=-1, keepdims=True)
        found -= np.log(np.exp(found).sum(axis=-1, keepdims=True))
        return found

    return log_probs
