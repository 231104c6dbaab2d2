"""Any small config that transformers accepts and the whitelist lets pass: parity of the log-probabilities."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.torch_models import one_thread, random_reference, reference_log_probs, save, transformers
from tests.tiny_models import load_model, log_probs

pytestmark = pytest.mark.torch

S = 24
# Not farther: the last bit of torch's power, which isn't always correctly rounded, must not show.
POSITIONS = np.stack([np.arange(S), np.concatenate([np.arange(S // 2), 1000 + 7 * np.arange(S - S // 2)])])


def even(low: int, high: int) -> st.SearchStrategy[int]:
    return st.integers(low // 2, high // 2).map(lambda half: 2 * half)


@st.composite
def rope(draw: st.DrawFn) -> dict[str, Any]:
    theta = {"rope_theta": draw(st.sampled_from([10_000.0, 500_000.0, 1_000_000.0]) | st.floats(100.0, 1e7))}
    if draw(st.booleans()):
        return theta | {"rope_type": "default"}
    low = draw(st.floats(0.5, 2.0))
    return theta | {
        "rope_type": "llama3",
        "factor": draw(st.floats(1.0, 40.0)),
        "low_freq_factor": low,
        "high_freq_factor": low + draw(st.floats(0.5, 6.0)),
        "original_max_position_embeddings": draw(st.integers(16, 1024)),
    }


@st.composite
def llama_like(draw: st.DrawFn) -> Any:
    """Llama or Qwen3; grouped queries in every ratio from none to one key-value head."""
    kv_heads, groups = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    heads, head_dim = kv_heads * groups, draw(even(2, 14))
    kind = draw(st.sampled_from([transformers.LlamaConfig, transformers.Qwen3Config]))
    return kind(
        vocab_size=draw(st.integers(2, 77)),
        # Any multiple of the heads, mostly not heads x head size.
        hidden_size=heads * draw(st.integers(-(-4 // heads), 12)),
        intermediate_size=draw(st.integers(1, 50)),
        num_hidden_layers=draw(st.integers(1, 3)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        rope_parameters=draw(rope()),
        tie_word_embeddings=draw(st.booleans()),
        max_position_embeddings=4096,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )


@st.composite
def gptj(draw: st.DrawFn) -> Any:
    """GPT-J with all or part of each head rotated, and any inner width."""
    heads, head_dim = draw(st.integers(1, 5)), draw(even(4, 14))
    return transformers.GPTJConfig(
        vocab_size=draw(st.integers(2, 77)),
        n_embd=heads * head_dim,
        n_inner=draw(st.none() | st.integers(1, 50)),
        n_layer=draw(st.integers(1, 3)),
        n_head=heads,
        rotary_dim=draw(even(2, head_dim)),
        layer_norm_epsilon=draw(st.sampled_from([1e-6, 1e-5, 1e-3])),
        n_positions=2048,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )


CONFIGS = st.one_of(llama_like(), gptj())


def check(config: Any) -> None:
    with tempfile.TemporaryDirectory() as folder, one_thread():
        reference = random_reference(config)
        save(reference, Path(folder))
        tokens = np.random.default_rng(0).integers(config.vocab_size, size=POSITIONS.shape)
        expected = reference_log_probs(reference, tokens, POSITIONS)
        found = log_probs(load_model(Path(folder)), tokens, positions_bs=POSITIONS)
    assert np.abs(found - expected).max() <= 1e-4


@settings(max_examples=8)
@given(CONFIGS)
def test_log_probs(config: Any) -> None:
    check(config)


@pytest.mark.slow
@settings(max_examples=100)
@given(CONFIGS)
def test_log_probs_of_many(config: Any) -> None:
    check(config)
