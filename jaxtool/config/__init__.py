"""Configuration dataclasses and the command line that fills them."""

from jaxtool.config.command_line import open_console, parse_run, run_parser, run_script, to_yaml
from jaxtool.config.run_config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    StageConfig,
    TrainableConfig,
)

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "EvaluationConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimizerConfig",
    "RunConfig",
    "StageConfig",
    "TrainableConfig",
    "open_console",
    "parse_run",
    "run_parser",
    "run_script",
    "to_yaml",
]
