"""The shape of SmolLM2-135M, as `LlamaConfig` has it here and in transformers."""

from __future__ import annotations

from typing import Any

SHAPE: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "max_position_embeddings": 8_192,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
}
