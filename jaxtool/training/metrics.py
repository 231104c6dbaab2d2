"""What a run measures of itself: where the time goes, how much of the machine is used, and where the numbers are kept.

Values stay on the device until the next step runs; the loop fetches them one step late. `metrics.jsonl` is the record,
TensorBoard and Weights & Biases are shown the same numbers.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np

_FLUSH_SECONDS = 60.0  # between writes to disk of what TensorBoard shows
# bf16 FLOP/s of a device, dense, by the beginning of its `device_kind`; longer beginnings first.
_PEAKS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5p": 459e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1153.5e12,  # one of the two devices of a chip
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Published dense bf16 FLOP/s of a device; None for one that isn't known (CPUs among them)."""
    found = [kind for kind in _PEAKS if device_kind.startswith(kind)]
    return _PEAKS[max(found, key=len)] if found else None


class StepClock:
    """Splits wall time: each second since the last lap belongs to the named part it was spent in, or to "other"."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._lap = time.monotonic()

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts the time within to `name`. Parts don't nest."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self._parts[name] = self._parts.get(name, 0.0) + time.monotonic() - begin

    def lap(self) -> dict[str, float]:
        """Seconds since the last lap by part, "other" and the sum "seconds" among them."""
        now = time.monotonic()
        parts, self._parts = self._parts, {}
        total, self._lap = now - self._lap, now
        return parts | {"other": max(total - sum(parts.values()), 0.0), "seconds": total}


class Sink(Protocol):
    """Something that is shown numbers."""

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of a step."""

    def close(self) -> None:
        """Writes what is left."""


class TensorBoard:
    """Event files in a folder, for `tensorboard --logdir`.

    They are written in the caller's thread: that of tensorboardX's SummaryWriter dies where the disk is full, and
    whoever adds numbers then waits for it for ever.

    Raises:
        ValueError: the folder can't be written; by every method.
    """

    def __init__(self, folder: Path) -> None:
        from tensorboardX.event_file_writer import EventsWriter

        self._folder = folder
        self._flushed = -math.inf
        with self._writing():
            folder.mkdir(parents=True, exist_ok=True)
            self._events = EventsWriter(str(folder / "events"))

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of a step."""
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        numbers = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        now = time.monotonic()
        with self._writing():
            self._events.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=numbers)))
            if now - self._flushed > _FLUSH_SECONDS:
                self._flushed = now
                self._events.flush()

    def close(self) -> None:
        """Writes what is left."""
        with self._writing():
            self._events.close()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ValueError(
                f"{self._folder}: the event files of TensorBoard can't be written ({error.strerror}); the same command "
                "goes on from the last checkpoint, without them with metrics.tensorboard false"
            ) from error


class WandB:
    """A run at Weights & Biases; resumes the one of the same run directory.

    Raises:
        ValueError: the package isn't installed.
    """

    def __init__(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ValueError(
                f"metrics.wandb_project is {project!r}, but wandb isn't installed: pip install wandb"
            ) from error
        self._run = wandb.init(
            project=project, name=folder.name, id=folder.name, dir=str(folder), config=dict(config), resume="allow"
        )

    def show(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the numbers of a step."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Writes what is left."""
        self._run.finish()


def utilisation(flops: Mapping[str, float], seconds: float, devices: Sequence[jax.Device]) -> dict[str, float]:
    """Achieved FLOP/s per device, and as a share of the peak where that is known (model FLOPs utilisation).

    Args:
        flops: model FLOPs of a step by definition, e.g. "full" and "causal".
        seconds: the time they took.
        devices: all devices that shared the work, of one kind.

    Returns:
        `tflops_NAME` and, where the peak is known, `mfu_NAME` for each definition.
    """
    peak = peak_flops(devices[0].device_kind)
    found: dict[str, float] = {}
    for name, total in flops.items():
        rate = total / seconds / len(devices)
        found[f"tflops_{name}"] = rate / 1e12
        if peak is not None:
            found[f"mfu_{name}"] = rate / peak
    return found


def memory_bytes() -> dict[str, int]:
    """The largest memory in use so far: of the fullest local device where it says, and of this process."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if "peak_bytes_in_use" in each]
    unit = 1 if sys.platform == "darwin" else 1024
    found = {"host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit}
    return found | ({"device_peak_bytes": int(max(peaks))} if peaks else {})


def goodput(records: Sequence[Mapping[str, Any]], now: float) -> float | None:
    """Share of the time since the run's first start that went into steps which count.

    Steps that were done twice after a kill count once. Compilation, checkpoints, evaluation, restarts and the time
    between them are the rest.

    Args:
        records: of `metrics.jsonl`: those with `started` (Unix time), and those of steps with `step`, `seconds` and
            the parts of them that were no training (`checkpoint`, `evaluation`, `compilation`).
        now: Unix time.
    """
    starts = [record["started"] for record in records if "started" in record]
    if not starts or now <= min(starts):
        return None
    steps = {record["step"]: record for record in records if "step" in record and "seconds" in record}
    lost = ("checkpoint", "evaluation", "compilation")
    spent = sum(each["seconds"] - sum(each.get(part, 0.0) for part in lost) for each in steps.values())
    return float(np.clip(spent / (now - min(starts)), 0, 1))
