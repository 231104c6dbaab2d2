"""Checkpoints and tokenizers in: Hugging Face folders and GGUF files."""

from jaxtool.weights.gguf_reader import GgufFile, llama_config_from_gguf
from jaxtool.weights.hf_config import ConfigError, llama_config_from_hf
from jaxtool.weights.load import plan_weights, read_config, read_weights, resolve_model
from jaxtool.weights.safetensors_reader import read_json_object
from jaxtool.weights.tensor_map import WeightPlan, WeightsError
from jaxtool.weights.tokenizers import TokenizerError, load_tokenizer

__all__ = [
    "ConfigError",
    "GgufFile",
    "TokenizerError",
    "WeightPlan",
    "WeightsError",
    "llama_config_from_gguf",
    "llama_config_from_hf",
    "load_tokenizer",
    "plan_weights",
    "read_config",
    "read_json_object",
    "read_weights",
    "resolve_model",
]
