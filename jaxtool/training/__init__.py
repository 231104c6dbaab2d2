"""The training engine: loss, optimiser, step, run directory."""

from jaxtool.training.loss import supervised_loss
from jaxtool.training.optimizer import learning_rate_schedule, make_optimizer
from jaxtool.training.run_directory import RunDirectory
from jaxtool.training.step import (
    TrainState,
    TrainStep,
    abstract_state,
    initial_state,
    make_train_step,
    on_mesh,
)
from jaxtool.training.trainable import trained_count, trained_part, with_trained_part

__all__ = [
    "RunDirectory",
    "TrainState",
    "TrainStep",
    "abstract_state",
    "initial_state",
    "learning_rate_schedule",
    "make_optimizer",
    "make_train_step",
    "on_mesh",
    "supervised_loss",
    "trained_count",
    "trained_part",
    "with_trained_part",
]
