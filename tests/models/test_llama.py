"""What only Llama and its relatives have: a tied head, grouped heads, QK norm."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.models import parameters, with_parameters
from tests.tiny_models import CONFIG, QWEN3_CONFIG, log_probs, logits, random_model

TOKENS = np.random.default_rng(0).integers(CONFIG.vocab_size, size=(1, 5))


def test_tied_head_is_the_embedding() -> None:
    tied, untied = random_model(dataclasses.replace(CONFIG, tie_word_embeddings=True)), random_model()
    assert parameters(untied).keys() - parameters(tied).keys() == {"head_vd"}
    assert tied.head_rows() is tied.embedding_vd[...]
    assert untied.head_rows() is untied.head_vd[...]
    # Equal to an untied model whose head is a copy, and different from one with another head.
    values = parameters(tied) | {"head_vd": tied.embedding_vd[...]}
    found = logits(tied, TOKENS)
    np.testing.assert_allclose(found, logits(with_parameters(untied, values), TOKENS), atol=1e-5)
    assert np.abs(found - logits(untied, TOKENS)).max() > 1


def test_qk_norm_makes_the_size_of_queries_and_keys_irrelevant() -> None:
    model = random_model(dataclasses.replace(QWEN3_CONFIG, rms_norm_eps=1e-12))
    values = parameters(model)
    assert values["blocks.query_norm_h"].shape == values["blocks.key_norm_h"].shape == (2, 12)
    larger = {path: 7 * values[path] for path in ("blocks.query_dnh", "blocks.key_dkh")}
    np.testing.assert_allclose(
        log_probs(with_parameters(model, values | larger), TOKENS), log_probs(model, TOKENS), atol=1e-4
    )
    # Not so the scales of the norms, which are there for queries and for keys.
    for path in ("blocks.query_norm_h", "blocks.key_norm_h"):
        other = with_parameters(model, values | {path: jnp.ones_like(values[path])})
        assert np.abs(log_probs(other, TOKENS) - log_probs(model, TOKENS)).max() > 1e-3, path


def test_config_errors() -> None:
    with pytest.raises(ValueError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"):
        dataclasses.replace(CONFIG, num_key_value_heads=3)
