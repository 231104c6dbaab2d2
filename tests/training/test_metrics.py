"""Time split, utilisation against published figures, goodput with restarts, sinks."""

from __future__ import annotations

import math
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.training import metrics


def devices(kind: str, count: int) -> Any:
    return [SimpleNamespace(device_kind=kind)] * count


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v6 lite", 918),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
    ],
)
def test_peaks(kind: str, teraflops: float) -> None:
    assert metrics.peak_flops(kind) == teraflops * 1e12


def test_a_cpu_has_no_published_peak() -> None:
    assert metrics.peak_flops(jax.devices()[0].device_kind) is None
    found = metrics.utilisation({"full": 6e12, "causal": 3e12}, 2.0, jax.devices()[:3])
    assert found == {"tflops_full": 1.0, "tflops_causal": 0.5}


def test_a_published_run() -> None:
    """Llama-3.1-8B on v6e-256: 7,207 tokens/s and chip of 57.9 GFLOP each (51.5 with causal halving)."""
    tokens = 256 * 7207
    flops = {"full": 57.92e9 * tokens, "causal": 51.48e9 * tokens}
    found = metrics.utilisation(flops, 1.0, devices("TPU v6 lite", 256))
    assert found["tflops_full"] == pytest.approx(417.4, rel=1e-3)
    assert found["mfu_full"] == pytest.approx(0.4546, rel=1e-3)
    assert found["mfu_causal"] == pytest.approx(0.404, rel=1e-3)


def test_every_second_has_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    clock = metrics.StepClock()
    for name, seconds in (("data", 2.0), (None, 1.0), ("device", 4.0), ("data", 0.5)):
        if name is None:
            now[0] += seconds
        else:
            with clock.part(name):
                now[0] += seconds
    assert clock.lap() == {"data": 2.5, "device": 4.0, "other": 1.0, "seconds": 7.5}
    now[0] += 3
    with pytest.raises(ZeroDivisionError), clock.part("checkpoint"):
        now[0] += 1
        raise ZeroDivisionError
    assert clock.lap() == {"checkpoint": 1.0, "other": 3.0, "seconds": 4.0}


def test_goodput_counts_each_step_once() -> None:
    records = [
        {"started": 1000.0},
        {"step": 1, "seconds": 30.0, "compilation": 20.0},
        {"step": 2, "seconds": 10.0},
        {"step": 3, "seconds": 10.0},  # lost by a kill, done again
        {"started": 1100.0},
        {"step": 3, "seconds": 12.0, "compilation": 2.0},
        {"step": 4, "seconds": 15.0, "checkpoint": 3.0, "evaluation": 2.0},
    ]
    assert metrics.goodput(records, now=1200.0) == pytest.approx((10 + 10 + 10 + 10) / 200)
    assert metrics.goodput([], now=5.0) is None and metrics.goodput(records, now=1000.0) is None


def test_memory() -> None:
    before = metrics.memory_bytes()
    assert 50e6 < before["host_peak_bytes"] < 64e9 and "device_peak_bytes" not in before
    ballast = np.ones(before["host_peak_bytes"] // 8 + 10**7)  # larger than anything so far
    assert metrics.memory_bytes()["host_peak_bytes"] > before["host_peak_bytes"] + 0.5 * ballast.nbytes * 0.1


def test_tensorboard_reads_what_was_shown(tmp_path: Path) -> None:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c

    board = metrics.TensorBoard(tmp_path)
    for step in range(3):
        board.show(step, {"loss": 2.0 - step, "perplexity": math.exp(2.0 - step)})
    board.close()
    (file,) = tmp_path.iterdir()
    content, values = file.read_bytes(), []
    while content:  # TFRecord: length, its checksum, data, its checksum
        length = int.from_bytes(content[:8], "little")
        data = content[12 : 12 + length]
        assert int.from_bytes(content[12 + length : 16 + length], "little") == masked_crc32c(data)
        event = Event.FromString(data)
        values += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        content = content[16 + length :]
    assert values[::2] == [(0, "loss", 2.0), (1, "loss", 1.0), (2, "loss", 0.0)]


def test_a_full_disk_ends_tensorboard_by_name(tmp_path: Path) -> None:
    """It is said where numbers are shown: a writer in the background would die, and its queue fill up for ever."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    board = metrics.TensorBoard(tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(ValueError, match="event files of TensorBoard can't be written"):
            for step in range(10_000):
                board.show(step, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    board.close()
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: the event files of TensorBoard can't be written"):
        metrics.TensorBoard(tmp_path / "file")


def test_wandb_is_optional(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    with pytest.raises(ValueError, match="wandb isn't installed: pip install wandb"):
        metrics.WandB("project", tmp_path, {})
    calls: list[Any] = []
    run = SimpleNamespace(log=lambda values, step: calls.append((values, step)), finish=lambda: calls.append("end"))
    fake = SimpleNamespace(init=lambda **options: calls.append(options) or run)
    monkeypatch.setitem(__import__("sys").modules, "wandb", fake)
    sink = metrics.WandB("project", tmp_path, {"seed": 3})
    sink.show(7, {"loss": 1.0})
    sink.close()
    assert calls[0]["project"] == "project" and calls[0]["resume"] == "allow" and calls[0]["config"] == {"seed": 3}
    assert calls[1:] == [({"loss": 1.0}, 7), "end"]
