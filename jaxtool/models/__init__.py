"""Network definitions and their parameter trees."""

from jaxtool.models.llama import Llama, LlamaConfig, padded_rows
from jaxtool.models.parameter_tree import abstract_model, initialise, parameters, with_parameters
from jaxtool.models.vocabulary import (
    mean_rows,
    resized_optimizer_state,
    tools_config,
    with_name_rows,
    with_tool_rows,
    without_tool_rows,
)

__all__ = [
    "Llama",
    "LlamaConfig",
    "abstract_model",
    "initialise",
    "mean_rows",
    "padded_rows",
    "parameters",
    "resized_optimizer_state",
    "tools_config",
    "with_name_rows",
    "with_parameters",
    "with_tool_rows",
    "without_tool_rows",
]
