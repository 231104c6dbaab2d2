"""Low-rank updates (LoRA) of a loaded model: factors added, and merged into the weights again.

How a block applies them is in `language_model`; that they alone are trained is `jaxtool.training.trainable`'s matter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxtool.models.language_model import LanguageModel, LanguageModelConfig, lora_names
from jaxtool.models.parameter_tree import abstract_model, parameters, with_parameters
from jaxtool.models.registry import build_model
from jaxtool.parallel import active_mesh_axes, einsum


def lora_config(
    config: LanguageModelConfig, *, rank: int, alpha: float, projections: Sequence[str]
) -> LanguageModelConfig:
    """`config` with updates of rank `rank`, scaled by alpha / rank, for the projections of these names.

    Raises:
        ValueError: the rank is not positive, or the architecture has no such projection.
    """
    return dataclasses.replace(config, lora_rank=rank, lora_alpha=float(alpha), lora_projections=tuple(projections))


def lora_paths(config: LanguageModelConfig) -> dict[str, tuple[str, str]]:
    """Paths of the two factors by the path of the weight that they update."""
    paths = {}
    for name in config.lora_projections:
        projection = config.projections[name]
        first, second = lora_names(name, projection)
        paths[f"blocks.{name}_{projection.letters}"] = (f"blocks.{first}", f"blocks.{second}")
    return paths


def with_lora(
    model: LanguageModel, *, rank: int, alpha: float, projections: Sequence[str], seed: int = 0
) -> LanguageModel:
    """`model` with low-rank factors, the second of each pair zero: its logits stay the same.

    Abstract models give abstract ones. On a mesh the factors are born in their shardings.

    Raises:
        ValueError: the model has factors already, or as for `lora_config`.
    """
    if model.config.lora_projections:
        raise ValueError("the model has low-rank factors already, merge them first (without_lora)")
    config = lora_config(model.config, rank=rank, alpha=alpha, projections=projections)
    paths = [path for pair in lora_paths(config).values() for path in pair]

    def factors() -> dict[str, Any]:
        values = parameters(build_model(config, model.rules, seed=seed))  # the rest of it is never computed
        return {path: values[path] for path in paths}

    values = parameters(model)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in values.values()):
        mesh = jax.sharding.get_mesh() if active_mesh_axes() else None
        target = abstract_model(lambda: build_model(config, model.rules), mesh)
        return with_parameters(target, values | {path: parameters(target)[path] for path in paths})
    target = abstract_model(lambda: build_model(config, model.rules))
    return with_parameters(target, values | jax.jit(factors)())


def without_lora(model: LanguageModel) -> LanguageModel:
    """`model` with the updates merged into its weights: W + alpha / rank x A B, computed in float32.

    The sum is rounded to the dtype of the weights; in bfloat16 that loses the part of an update below a weight's last
    bit. A model without factors is returned as it is, an abstract one loses its factors.
    """
    config = model.config
    if not config.lora_projections:
        return model
    plain = dataclasses.replace(config, lora_rank=0, lora_projections=())
    scale = config.lora_alpha / config.lora_rank
    values = parameters(model)
    for weight_path, (first_path, second_path) in lora_paths(config).items():
        weight, first, second = values[weight_path], values.pop(first_path), values.pop(second_path)
        if isinstance(weight, jax.ShapeDtypeStruct):
            continue
        letters = weight_path.rsplit("_", 1)[1]
        inputs = len(letters) - (second.ndim - 2)
        with jax.default_matmul_precision("highest"):
            update = einsum(
                f"l{letters[:inputs]}r,lr{letters[inputs:]}->l{letters}",
                first.astype(jnp.float32),
                second.astype(jnp.float32),
                out=jax.typeof(weight).sharding.spec,
            )
        values[weight_path] = (weight.astype(jnp.float32) + scale * update).astype(weight.dtype)
    return with_parameters(abstract_model(lambda: build_model(plain, model.rules)), values)
