"""From a config to its network, and from a config to plain JSON and back. The one list of ports."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from flax import nnx

from jaxtool.models.gptj import GPTJ, GPTJConfig
from jaxtool.models.language_model import DEFAULT_RULES, LanguageModel, LanguageModelConfig
from jaxtool.models.llama import Llama, LlamaConfig
from jaxtool.models.rotary import RopeScaling
from jaxtool.parallel import AxisRules

PORTS: Mapping[str, tuple[type[LanguageModelConfig], type[LanguageModel]]] = {
    "llama": (LlamaConfig, Llama),
    "gptj": (GPTJConfig, GPTJ),
}


def build_model(config: LanguageModelConfig, rules: AxisRules = DEFAULT_RULES, *, seed: int = 0) -> LanguageModel:
    """The network of `config`, randomly initialised; wrap it in `abstract_model` or `initialise`."""
    _, network = PORTS[config.architecture]
    return network(config, rules, rngs=nnx.Rngs(seed))  # type: ignore[arg-type, call-arg]


def config_to_json(config: LanguageModelConfig) -> dict[str, Any]:
    """The config as plain JSON values, the port's name as `architecture`; without the implementation of attention."""
    fields = dataclasses.asdict(config)
    del fields["attention"]  # belongs to the devices of a run, not to the model
    return {"architecture": config.architecture, **fields}


def config_from_json(fields: Mapping[str, Any]) -> LanguageModelConfig:
    """The config that `config_to_json` wrote.

    Raises:
        ValueError: the architecture is unknown, or a field is missing, unknown or impossible.
    """
    values = dict(fields)
    architecture = values.pop("architecture", None)
    if architecture not in PORTS:
        raise ValueError(f"field 'architecture' is {architecture!r}, expected one of {', '.join(PORTS)}")
    try:
        if isinstance(values.get("rope_scaling"), Mapping):
            values["rope_scaling"] = RopeScaling(**values["rope_scaling"])
        if "lora_projections" in values:
            values["lora_projections"] = tuple(values["lora_projections"])
        return PORTS[architecture][0](**values)
    except (TypeError, ArithmeticError) as error:
        raise ValueError(f"not the config of a {architecture} model: {error}") from error
