"""The model that a run begins with: pretrained weights, one row for each tool, low-rank factors where they're trained.

Shapes come from configs (`models`), weights from files (`weights`); what is trained from here on is in `step`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxtool.config import ModelConfig, TrainableConfig
from jaxtool.models import (
    CatalogChange,
    LanguageModel,
    LanguageModelConfig,
    TokenMean,
    abstract_model,
    build_model,
    catalog_change,
    lora_config,
    parameters,
    tools_config,
    with_catalog,
    with_lora,
    with_parameters,
)
from jaxtool.parallel import AxisRules
from jaxtool.tools import ToolCatalog
from jaxtool.weights import check_tokenizer_fits, read_config, read_tool_ids, read_weights


def base_config(source: Path, tokenizer: Any | None, settings: ModelConfig) -> LanguageModelConfig:
    """The pretrained model's config with the run's dtypes; rows that the tokenizer doesn't know are never predicted.

    Planning has no need of a tokenizer (None): then all rows count as known.

    Raises:
        ConfigError: a config that no port can express.
        TokenizerError: the tokenizer has ids that the model lacks.
    """
    base = read_config(source)
    known = base.vocab_size if tokenizer is None else check_tokenizer_fits(tokenizer, base, source)
    return dataclasses.replace(
        base,
        text_tokens=0 if known == base.vocab_size else known,
        param_dtype=settings.param_dtype,
        compute_dtype=settings.compute_dtype,
        remat=settings.remat,
    )


def run_config_of(base: LanguageModelConfig, tools: int, trainable: TrainableConfig) -> LanguageModelConfig:
    """The config with rows for the run's tools and, where they are trained, low-rank factors."""
    sized = tools_config(base, tools)
    if trainable.parameters != "lora":
        return sized
    return lora_config(
        sized, rank=trainable.lora_rank, alpha=trainable.lora_alpha, projections=trainable.lora_projections
    )


def starting_model(
    source: Path,
    base: LanguageModelConfig,
    sized: LanguageModelConfig,
    catalog: ToolCatalog,
    tokenizer: Any,
    rules: AxisRules,
    mesh: Mesh,
    *,
    seed: int,
) -> tuple[LanguageModel, CatalogChange]:
    """The pretrained model of `source` as `sized` says, on `mesh`, which is active.

    Tools that the model has learned before (an exported run) keep their rows; the others begin as the mean of the
    tokens of their name.

    Returns:
        The model, and what became of the tools that `source` knew.
    """
    divided = base.rows % mesh.shape["model"] == 0
    plain_config = base if divided else dataclasses.replace(base, padded_vocab_size=sized.rows)
    plain = abstract_model(lambda: build_model(plain_config, rules), mesh)
    model = with_parameters(plain, read_weights(source, parameters(plain)))
    learned = read_tool_ids(source) if source.is_dir() else {}
    change = catalog_change(list(learned), [tool.name for tool in catalog])
    names = [_name_ids(tokenizer, " " + tool.name_text()) for tool in catalog]
    model = with_catalog(model, change, TokenMean(token_ids=names))
    if sized.lora_projections:
        rank, alpha = sized.lora_rank, sized.lora_alpha
        model = with_lora(model, rank=rank, alpha=alpha, projections=sized.lora_projections, seed=seed)
    return model, change


def _name_ids(tokenizer: Any, text: str) -> Sequence[int]:
    return tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
