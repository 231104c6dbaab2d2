"""What only GPT-J has: biases, also of the head, and a partly rotated head size."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from jaxtool.models import parameters, with_parameters
from tests.tiny_models import GPTJ_CONFIG, log_probs, logits, random_model

TOKENS = np.random.default_rng(0).integers(GPTJ_CONFIG.vocab_size, size=(1, 12))


def test_every_bias_counts() -> None:
    model = random_model(GPTJ_CONFIG)
    values = parameters(model)
    biases = [path for path in values if "bias" in path]
    assert biases == [
        "blocks.down_bias_d",
        "blocks.norm_bias_d",
        "blocks.up_bias_f",
        "final_norm_bias_d",
        "head_bias_v",
    ]
    exact = log_probs(model, TOKENS)
    for path in biases:
        without = with_parameters(model, values | {path: 0 * values[path]})
        assert np.abs(log_probs(without, TOKENS) - exact).max() > 1e-2, path


def test_head_bias_is_added_to_the_logits() -> None:
    model = random_model(GPTJ_CONFIG)
    values = parameters(model)
    without = with_parameters(model, values | {"head_bias_v": 0 * values["head_bias_v"]})
    np.testing.assert_allclose(
        logits(model, TOKENS) - logits(without, TOKENS), np.broadcast_to(values["head_bias_v"], (1, 12, 100)), atol=1e-5
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tie_word_embeddings": True}, "GPT-J's biased head is implemented untied only"),
        ({"rotary_dim": 3}, "rotary_dim is 3, expected an even number from 2 to the head size 8"),
        ({"rotary_dim": 0}, "rotary_dim is 0"),
        ({"rotary_dim": 10}, "rotary_dim is 10"),
    ],
)
def test_config_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(GPTJ_CONFIG, **changes)
