"""Configuration dataclasses and the command line that fills them."""

from jaxtool.config.command_line import check_writable, open_console, parse_run, run_parser, run_script, to_yaml
from jaxtool.config.run_config import (
    CheckpointConfig,
    DataConfig,
    EvaluationConfig,
    MeshConfig,
    MetricsConfig,
    ModelConfig,
    ProcessConfig,
    RunConfig,
    TrainableConfig,
)
from jaxtool.config.stage_config import AgentConfig, CorpusConfig, OptimizerConfig, StageConfig

__all__ = [
    "AgentConfig",
    "CheckpointConfig",
    "CorpusConfig",
    "DataConfig",
    "EvaluationConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ProcessConfig",
    "RunConfig",
    "StageConfig",
    "TrainableConfig",
    "check_writable",
    "open_console",
    "parse_run",
    "run_parser",
    "run_script",
    "to_yaml",
]
