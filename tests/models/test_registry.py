"""Configs as plain JSON and back, and the network that belongs to each."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from jaxtool.models import (
    GPTJ,
    LanguageModelConfig,
    Llama,
    RopeScaling,
    abstract_model,
    build_model,
    config_from_json,
    config_to_json,
)
from tests.tiny_models import CONFIG, CONFIGS, GPTJ_CONFIG

SCALED = dataclasses.replace(
    CONFIG,
    rope_scaling=RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    ),
    lora_rank=4,
    lora_projections=("query", "value"),
)


@pytest.mark.parametrize("config", [*CONFIGS.values(), SCALED])
def test_json_round_trip(config: LanguageModelConfig) -> None:
    written = json.dumps(config_to_json(config))
    assert config_from_json(json.loads(written)) == config


def test_the_network_of_a_config() -> None:
    assert type(abstract_model(lambda: build_model(CONFIG))) is Llama
    assert type(abstract_model(lambda: build_model(GPTJ_CONFIG))) is GPTJ


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"architecture": "gpt2"}, "field 'architecture' is 'gpt2', expected one of llama, gptj"),
        ({"architecture": None}, "field 'architecture' is None"),
        ({"rotary_dim": 4}, "not the config of a llama model: .*rotary_dim"),
        ({"head_dim": 7}, "head_dim is 7"),
        ({"rope_scaling": {"factor": 8.0}}, "not the config of a llama model: .*low_freq_factor"),
        ({"num_key_value_heads": 0}, "not the config of a llama model"),
    ],
)
def test_errors(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        config_from_json(config_to_json(CONFIG) | change)
