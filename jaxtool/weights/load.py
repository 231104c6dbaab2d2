"""From a model's name to its config and its weights as sharded arrays, whichever format it is in.

The formats are in `hf_config`, `safetensors_reader` and `gguf_reader`; building the module is the caller's.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path

import huggingface_hub
import jax
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
)

from jaxtool.models import LanguageModelConfig
from jaxtool.weights.gguf_config import config_from_gguf
from jaxtool.weights.gguf_reader import GgufFile
from jaxtool.weights.hf_config import config_from_hf
from jaxtool.weights.safetensors_reader import SafetensorsFolder, read_json_object
from jaxtool.weights.sharded_read import check_repeated_head, read_parameter
from jaxtool.weights.tensor_map import TensorFiles, WeightPlan, WeightsError, plan_tensors
from jaxtool.weights.tensor_tables import tensor_rules
from jaxtool.weights.tool_ids import TOOL_IDS_FILE, read_tool_ids

logger = logging.getLogger(__name__)

# Of PEFT; its weights are in adapter_model.safetensors.
ADAPTER_FILE = "adapter_config.json"
# Weights, configs and tokenizers; never pickles.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt", TOOL_IDS_FILE)

_NOT_FETCHED = (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    OSError,
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(source: str | Path) -> Path:
    """A local model folder or `.gguf` file as it is, a hub id (`owner/name`) as a downloaded folder.

    Raises:
        FileNotFoundError: nothing there, and no hub id that can be fetched.
        ValueError: a file that isn't GGUF.
    """
    path = Path(os.path.expanduser(source))
    if path.is_dir() and source != "":  # Path("") is the working folder
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise ValueError(f"{source}: expected a model folder, a .gguf file or a hub id owner/name")
        return path
    if not isinstance(source, str) or source.lower().endswith(".gguf") or not _HUB_ID.fullmatch(source):
        raise FileNotFoundError(f"{source}: no such folder or .gguf file, and not a hub id owner/name")
    try:
        # Top level only: repositories keep copies in other formats in subfolders.
        folder = huggingface_hub.snapshot_download(source, allow_patterns=list(HUB_PATTERNS), ignore_patterns=["*/*"])
    except _NOT_FETCHED as error:
        raise FileNotFoundError(
            f"{source}: no such local folder, and neither fetched from the Hugging Face hub nor in its cache: {error}"
        ) from error
    return Path(folder)


def generation_source(source: str | Path) -> Path | None:
    """The folder or `.gguf` file with a pretrained model's special ids, for `export_model`; no weights are fetched.

    None for what is neither, nor on the hub or in its cache.
    """
    path = Path(os.path.expanduser(source))
    if path.is_dir() or (path.is_file() and path.suffix.lower() == ".gguf"):
        return path
    if not isinstance(source, str) or path.exists() or not _HUB_ID.fullmatch(source):
        return None
    try:
        settings = ["generation_config.json", "config.json"]
        return Path(huggingface_hub.snapshot_download(source, allow_patterns=settings))
    except _NOT_FETCHED:
        return None


def read_config(path: str | Path) -> LanguageModelConfig:
    """The config of a model folder (`config.json`) or GGUF file (metadata).

    A folder with `tool_ids.jsonl` (see `export`) has those tools; its `config.json` counts their rows as vocabulary.

    Raises:
        FileNotFoundError: no such file.
        ConfigError: a field that this port can't express.
        WeightsError: a damaged file.
    """
    path = Path(path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise FileNotFoundError(f"{path / 'config.json'}: no such file{_instead_of_a_model(path)}")
        config = config_from_hf(read_json_object(path / "config.json"), str(path / "config.json"))
        return _with_tools(config, path)
    return config_from_gguf(GgufFile(path))


def _instead_of_a_model(folder: Path) -> str:
    """What a folder without `config.json` is, where that can be seen, and what to do about it."""
    if files := sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf"):
        return f"; the folder holds GGUF files: give the file itself, e.g. {files[0]}"
    if (folder / ADAPTER_FILE).is_file():
        return f"; the folder holds an adapter ({ADAPTER_FILE}): merge it into its base model and give that one"
    return ""


def _with_tools(config: LanguageModelConfig, folder: Path) -> LanguageModelConfig:
    """The config with text and tool rows told apart, by the folder's table of tools."""
    rows = list(read_tool_ids(folder).values())
    if not rows:
        return config
    if rows[0] == 0 or rows[-1] != config.vocab_size - 1:
        raise WeightsError(
            f"{folder / TOOL_IDS_FILE}: its {len(rows)} tools are rows {rows[0]} to {rows[-1]}, expected the last ones "
            f"of the {config.vocab_size} rows of config.json, behind at least one of text"
        )
    return dataclasses.replace(config, vocab_size=rows[0], num_tools=len(rows))


def plan_weights(path: str | Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> WeightPlan:
    """Checks that a checkpoint fits a model, from headers alone; the plan's notes count what isn't read.

    Raises:
        WeightsError: see `plan_tensors`.
    """
    return _open_and_plan(Path(path), abstract)[1]


def read_weights(path: str | Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """All parameters of a model from a folder of safetensors or a GGUF file.

    Each process reads the byte ranges that its devices hold (whole rows of quantised tensors) and keeps one
    parameter at a time on the host. Rows of embedding and head behind the checkpoint's vocabulary are zero.

    Args:
        path: local folder or `.gguf` file.
        abstract: parameters by dotted path; dtype and sharding of each result are the leaf's.

    Raises:
        WeightsError: a damaged file, or tensors that don't fit; see `plan_tensors`.
        ConfigError: see `read_config`.
    """
    files, plan = _open_and_plan(Path(path), abstract)
    for note in plan.notes:
        logger.info(note)
    check_repeated_head(files, plan)
    return {planned.rule.path: read_parameter(files, planned) for planned in plan.parameters}


def _open_and_plan(path: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> tuple[TensorFiles, WeightPlan]:
    files: SafetensorsFolder | GgufFile
    config: LanguageModelConfig
    if path.is_dir():
        if (path / ADAPTER_FILE).is_file():  # transformers would load it, and the base model that it names
            raise WeightsError(
                f"{path / ADAPTER_FILE}: an adapter beside the weights, which would not be applied; merge it into the "
                "weights, or take it out of the folder to load them without it"
            )
        config, files = read_config(path), SafetensorsFolder(path)
    else:
        files = GgufFile(path)
        config = config_from_gguf(files)
    rows = config.vocab_size + config.num_tools
    return files, plan_tensors(files, abstract, vocab_size=rows, rules=tensor_rules(config))
