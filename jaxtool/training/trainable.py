"""Which part of a model is trained: all of it, low-rank factors with the tool rows, or the tool rows alone.

A part is taken out of the model, differentiated and updated by itself, and put back: what is frozen has no gradient and
no optimiser state. The setting itself is `jaxtool.config.TrainableConfig`.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxtool.models import LanguageModel, ToolRows, lora_paths, parameters, with_parameters
from jaxtool.models.row_initialisation import ROW_PARAMETERS

# The model itself, or arrays by path: low-rank factors, and of a vocabulary matrix the block of its tool rows.
TrainedPart = LanguageModel | dict[str, jax.Array]


def trained_part(model: LanguageModel, trained: str) -> TrainedPart:
    """The part of the model that is trained.

    Args:
        model: the network, on devices or inside a compiled function.
        trained: "full", "lora" or "tool_rows".

    Returns:
        The model itself for "full", else arrays by path: blocks of the tool rows [T rounded up to 128, D], with "lora"
        the low-rank factors as well.

    Raises:
        ValueError: the model has no low-rank factors or tool rows to train, or `trained` is something else.
    """
    config = model.config
    if trained == "full":
        return model
    if trained not in ("lora", "tool_rows"):
        raise ValueError(f"trained part is {trained!r}, expected one of full, lora, tool_rows")
    if trained == "tool_rows" and not config.num_tools:
        raise ValueError("tool_rows are to be trained, but the model has no tools")
    if trained == "lora" and not config.lora_projections:
        raise ValueError("low-rank factors are to be trained, but the model has none; with_lora adds them")
    values = parameters(model)
    part = {path: values[path] for path in factor_paths(model)} if trained == "lora" else {}
    if config.num_tools:
        block = model.tool_block
        part |= {path: block.read(values[path]) for path in ROW_PARAMETERS if path in values}
    return part


def factor_paths(model: LanguageModel) -> list[str]:
    """Paths of the low-rank factors."""
    return [path for pair in lora_paths(model.config).values() for path in pair]


def for_gradient(model: LanguageModel, part: TrainedPart) -> tuple[LanguageModel, ToolRows | None]:
    """The model and tool rows for the loss, as functions of `part` where it takes a gradient.

    The tool rows of `part` must be those that the model has: the loss reads the model's.
    """
    if isinstance(part, LanguageModel):
        return part, None
    rows = {path: value for path, value in part.items() if path in ROW_PARAMETERS}
    factors = {path: value for path, value in part.items() if path not in ROW_PARAMETERS}
    return with_parameters(model, parameters(model) | factors), rows or None


def with_trained_part(model: LanguageModel, part: TrainedPart) -> LanguageModel:
    """`model` with the values of `part`; all others, text rows and rows of padding among them, stay bit for bit."""
    if isinstance(part, LanguageModel):
        return part
    values = parameters(model)
    block = model.tool_block
    return with_parameters(
        model,
        values
        | {path: block.write(values[path], new) if path in ROW_PARAMETERS else new for path, new in part.items()},
    )


def trained_count(model: LanguageModel, trained: str) -> int:
    """Number of parameters that are trained; rows that only fill up a block don't count."""
    if trained == "full":
        return sum(leaf.size for leaf in parameters(model).values())
    values: dict[str, Any] = parameters(model)
    rows = sum(
        values[path].size // values[path].shape[0] * model.config.num_tools for path in ROW_PARAMETERS if path in values
    )
    factors = sum(values[path].size for path in factor_paths(model)) if trained == "lora" else 0
    return rows + factors
