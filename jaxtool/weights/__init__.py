"""Checkpoints and tokenizers, in (Hugging Face folders and GGUF files) and out (Hugging Face folders)."""

from jaxtool.weights.export import export_model
from jaxtool.weights.fingerprint import model_fingerprint
from jaxtool.weights.gguf_config import config_from_gguf
from jaxtool.weights.gguf_reader import GgufFile
from jaxtool.weights.hf_config import config_from_hf, config_to_hf
from jaxtool.weights.hf_fields import ConfigError
from jaxtool.weights.load import generation_source, plan_weights, read_config, read_weights, resolve_model
from jaxtool.weights.safetensors_reader import read_json_object
from jaxtool.weights.tensor_map import WeightPlan, WeightsError
from jaxtool.weights.tokenizers import check_tokenizer_fits, eos_token_ids, load_tokenizer
from jaxtool.weights.tool_ids import read_tool_ids
from jaxtool.weights.tool_tokens import TokenizerError

__all__ = [
    "ConfigError",
    "GgufFile",
    "TokenizerError",
    "WeightPlan",
    "WeightsError",
    "check_tokenizer_fits",
    "config_from_gguf",
    "config_from_hf",
    "config_to_hf",
    "eos_token_ids",
    "export_model",
    "generation_source",
    "load_tokenizer",
    "model_fingerprint",
    "plan_weights",
    "read_config",
    "read_json_object",
    "read_tool_ids",
    "read_weights",
    "resolve_model",
]
