"""Network definitions and their parameter trees."""

from jaxtool.models.attention import resolve_attention
from jaxtool.models.catalog_change import CatalogChange, catalog_change
from jaxtool.models.gptj import GPTJ, GPTJConfig
from jaxtool.models.language_model import LanguageModel, LanguageModelConfig, padded_rows
from jaxtool.models.llama import Llama, LlamaConfig
from jaxtool.models.lora import lora_config, lora_paths, with_lora, without_lora
from jaxtool.models.parameter_tree import abstract_model, initialise, parameters, with_parameters
from jaxtool.models.registry import PORTS, build_model, config_from_json, config_to_json
from jaxtool.models.rotary import RopeScaling
from jaxtool.models.row_initialisation import RowInitialiser, TextDistribution, TokenMean
from jaxtool.models.tool_rows import ToolBlock, ToolRows
from jaxtool.models.vocabulary import (
    mean_rows,
    resized_optimizer_state,
    tools_config,
    with_catalog,
    with_name_rows,
    with_tool_rows,
    without_tool_rows,
)

__all__ = [
    "GPTJ",
    "PORTS",
    "CatalogChange",
    "GPTJConfig",
    "LanguageModel",
    "LanguageModelConfig",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "RowInitialiser",
    "TextDistribution",
    "TokenMean",
    "ToolBlock",
    "ToolRows",
    "abstract_model",
    "build_model",
    "catalog_change",
    "config_from_json",
    "config_to_json",
    "initialise",
    "lora_config",
    "lora_paths",
    "mean_rows",
    "padded_rows",
    "parameters",
    "resized_optimizer_state",
    "resolve_attention",
    "tools_config",
    "with_catalog",
    "with_lora",
    "with_name_rows",
    "with_parameters",
    "with_tool_rows",
    "without_lora",
    "without_tool_rows",
]
