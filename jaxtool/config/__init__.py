"""Configuration dataclasses and the command line that fills them."""

from jaxtool.config.command_line import (
    check_writable,
    config_parser,
    open_console,
    parse_config,
    parse_run,
    run_parser,
    run_script,
    to_yaml,
)
from jaxtool.config.offline_config import (
    ActivationsConfig,
    GenerateConfig,
    OfflineConfig,
    RetrieveConfig,
    SamplingConfig,
)
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
    "ActivationsConfig",
    "AgentConfig",
    "CheckpointConfig",
    "CorpusConfig",
    "DataConfig",
    "EvaluationConfig",
    "GenerateConfig",
    "MeshConfig",
    "MetricsConfig",
    "ModelConfig",
    "OfflineConfig",
    "OptimizerConfig",
    "ProcessConfig",
    "RetrieveConfig",
    "RunConfig",
    "SamplingConfig",
    "StageConfig",
    "TrainableConfig",
    "check_writable",
    "config_parser",
    "open_console",
    "parse_config",
    "parse_run",
    "run_parser",
    "run_script",
    "to_yaml",
]
