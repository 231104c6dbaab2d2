"""The steps of a run as they are shown: a bar with loss, speed and time left, and a record of each step.

What is measured is in `metrics`; the loop itself is the script's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from jaxtool.config import MetricsConfig
from jaxtool.models import LanguageModelConfig
from jaxtool.models.flops import Work, training_flops
from jaxtool.training.metrics import Sink, StepClock, TensorBoard, WandB, memory_bytes, utilisation
from jaxtool.training.run_directory import RunDirectory


@dataclass(frozen=True, kw_only=True)
class RunningStep:
    """A step that was started and whose numbers have not been fetched.

    Attributes:
        step: its number in the run, from 1.
        work: tokens, pairs and supervised positions of its batch.
        metrics: scalars on the device.
    """

    step: int
    work: Work
    metrics: Mapping[str, jax.Array]


def open_sinks(config: MetricsConfig, run: Path, settings: Mapping[str, Any]) -> list[Sink]:
    """The sinks that are asked for, on process 0; none elsewhere.

    Raises:
        ValueError: a package is missing, or the folder can't be written.
    """
    if jax.process_index():
        return []
    sinks: list[Sink] = [TensorBoard(run / "tensorboard")] if config.tensorboard else []
    return sinks + ([WandB(config.wandb_project, run, settings)] if config.wandb_project else [])


class StageProgress:
    """Shows and records the steps of a stage; a context manager.

    Args:
        name: of the stage.
        begin: steps of the run before the stage.
        at: steps of the stage that are done.
        total: its steps.
        run: takes the records.
        sinks: are shown the numbers.
        config: of the model, to count operations.
        trained: which part is trained, for the same reason.
        console: where the bar is drawn; on process 0 alone.
    """

    def __init__(
        self,
        name: str,
        *,
        begin: int,
        at: int,
        total: int,
        run: RunDirectory,
        sinks: Sequence[Sink],
        config: LanguageModelConfig,
        trained: str,
        console: Console,
    ) -> None:
        self.clock = StepClock()
        self._name, self._begin, self._run, self._sinks = name, begin, run, sinks
        self._config, self._trained = config, trained
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s{task.fields[mfu]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False, compact=True),
            console=console,
            disable=jax.process_index() != 0,
        )
        self._task = self._bar.add_task(name, total=total, completed=at, loss=math.nan, speed=0.0, mfu="")

    def __enter__(self) -> StageProgress:
        self._bar.start()
        self.clock.lap()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def finish(self, running: RunningStep) -> dict[str, float]:
        """Waits for a step, then shows and records it; what the clock measured since the last one is its time.

        Returns:
            Its metrics.
        """
        with self.clock.part("device"):
            values = {name: float(value) for name, value in running.metrics.items()}
        parts = self.clock.lap()
        seconds = parts["seconds"] - sum(parts.get(name, 0.0) for name in ("checkpoint", "evaluation", "compilation"))
        speed = running.work.tokens / max(seconds, 1e-9)
        flops = training_flops(self._config, running.work, self._trained).by_definition()
        used = utilisation(flops, max(seconds, 1e-9), jax.devices())
        numbers = {**values, "tokens": running.work.tokens, "tokens_per_second": speed, **used, **memory_bytes()}
        self._run.log(
            {
                "step": running.step,
                "stage": self._name,
                **{name: value if isinstance(value, int) else _short(value) for name, value in numbers.items()},
                **{name: round(value, 4) for name, value in parts.items()},
                "time": round(time.time(), 3),
            }
        )
        for sink in self._sinks:
            sink.show(running.step, numbers | {f"seconds/{name}": value for name, value in parts.items()})
        mfu = f"  MFU {used['mfu_causal']:.1%} (causal)" if "mfu_causal" in used else ""
        self._bar.update(self._task, completed=running.step - self._begin, loss=values["loss"], speed=speed, mfu=mfu)
        return values

    def measured(self, step: int, values: Mapping[str, float]) -> None:
        """Shows and records what was measured on held-out samples after a step."""
        numbers = {f"held_out_{name}": value for name, value in values.items()}
        self._run.log({"step": step, "stage": self._name, **{name: _short(value) for name, value in numbers.items()}})
        for sink in self._sinks:
            sink.show(step, numbers)
        self._bar.console.print(
            f"{self._name}: step {step:,}, held-out loss {values['loss']:.4f}, perplexity {values['perplexity']:.4g}, "
            f"{values['correct']:.1%} of {values['supervised']:,.0f} tokens right",
            highlight=False,
        )


def _short(value: float) -> float:
    """Seven digits, which float32 has, and JSON that every reader takes (no NaN)."""
    return float(f"{value:.7g}") if math.isfinite(value) else str(value)  # type: ignore[return-value]
