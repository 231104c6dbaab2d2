"""The training engine: loss, optimiser, step, metrics, run directory."""

from jaxtool.training.held_out import make_held_out
from jaxtool.training.loss import supervised_loss
from jaxtool.training.metrics import goodput
from jaxtool.training.optimizer import learning_rate_schedule, make_optimizer
from jaxtool.training.preemption import StopRequest
from jaxtool.training.progress import RunningStep, StageProgress, open_sinks
from jaxtool.training.run_directory import RunDirectory
from jaxtool.training.starting_model import base_config, run_config_of, starting_model
from jaxtool.training.step import (
    TrainState,
    TrainStep,
    abstract_state,
    initial_state,
    make_train_step,
    on_mesh,
)
from jaxtool.training.trainable import trained_count, trained_part, with_trained_part
from jaxtool.training.trained_model import TrainedModel, load_trained

__all__ = [
    "RunDirectory",
    "RunningStep",
    "StageProgress",
    "StopRequest",
    "TrainState",
    "TrainStep",
    "TrainedModel",
    "abstract_state",
    "base_config",
    "goodput",
    "initial_state",
    "learning_rate_schedule",
    "load_trained",
    "make_held_out",
    "make_optimizer",
    "make_train_step",
    "on_mesh",
    "open_sinks",
    "run_config_of",
    "starting_model",
    "supervised_loss",
    "trained_count",
    "trained_part",
    "with_trained_part",
]
