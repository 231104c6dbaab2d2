"""`train/finetune.py` on several processes: the same losses however the devices are divided, and stopping together."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from jaxtool.training import RunDirectory
from tests.scripts.tiny_world import ROOT, environment

pytestmark = pytest.mark.multiprocess
LIMIT = 280


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


def start(
    world: Path, run_dir: Path, *, processes: int, devices: int, options: Sequence[str]
) -> list[subprocess.Popen]:
    """Processes with so many devices each, joined at a free port."""
    command = [sys.executable, str(ROOT / "train/finetune.py"), "--config", str(world / "run.yaml")]
    shared = ["--run_dir", str(run_dir), *options]
    address = {"JAX_COORDINATOR_ADDRESS": f"localhost:{free_port()}", "JAX_NUM_PROCESSES": str(processes)}
    return [
        subprocess.Popen(
            [*command, *shared],
            env=environment(devices) | (address | {"JAX_PROCESS_ID": str(index)} if processes > 1 else {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(processes)
    ]


def finish(running: list[subprocess.Popen]) -> list[str]:
    """What each process wrote, all of them having ended with status 0."""
    texts = []
    try:
        for process in running:
            shown, said = process.communicate(timeout=LIMIT)
            assert process.returncode == 0, said
            texts.append(shown)
    finally:
        for process in running:
            process.kill()
    return texts


def losses(run_dir: Path) -> list[float]:
    return [record["loss"] for record in RunDirectory(run_dir).metrics()]


# Steps so small that rounding isn't amplified: what is compared is arithmetic, not chaos.
GENTLE = [
    f"--{stage}.optimizer.{field}"
    for stage in ("memorization", "retrieval")
    for field in ("learning_rate=3e-4", "epsilon=1e-3")
]


@pytest.mark.parametrize(
    ("epochs", "layouts"),
    [
        pytest.param(1, [(1, 8, "2,2,2"), (2, 4, "2,2,2")], id="two"),
        pytest.param(
            6, [(1, 8, "2,2,2"), (2, 4, "2,2,2"), (4, 2, "2,2,2"), (2, 4, "1,8,1")], id="four", marks=pytest.mark.slow
        ),
    ],
)
def test_loss_curves_are_the_same(
    world: Path, tmp_path: Path, epochs: int, layouts: list[tuple[int, int, str]]
) -> None:
    """One process with one device against others: within 1e-5, over 50 steps and more in the long form."""
    options = [*GENTLE, "--retrieval.epochs", str(epochs), "--checkpoints.every_steps", "0"]
    finish(start(world, tmp_path / "one", processes=1, devices=1, options=options))
    expected = losses(tmp_path / "one")
    assert len(expected) >= (50 if epochs == 6 else 12)
    for processes, devices, axes in layouts:
        run_dir = tmp_path / f"{processes}x{devices} {axes}"
        data, fsdp, model = axes.split(",")
        mesh = [f"--mesh.data={data}", f"--mesh.fsdp={fsdp}", f"--mesh.model={model}"]
        shown = finish(start(world, run_dir, processes=processes, devices=devices, options=[*options, *mesh]))
        assert "finished" in shown[0]
        for text in shown[1:]:  # process 0 speaks for all, but for the library that connects them
            # Its threads write into one another's lines.
            assert all("Gloo" in line or "peer ranks" in line for line in text.splitlines()), text
        np.testing.assert_allclose(losses(run_dir), expected, rtol=1e-5)


def test_two_processes_stop_together_and_one_goes_on(world: Path, tmp_path: Path) -> None:
    """SIGTERM to one of two: both end with status 0 and one checkpoint of the same step, from which one process goes
    on to the losses of a run that was never stopped."""
    options = [*GENTLE, "--checkpoints.every_steps", "0"]
    mesh = ["--mesh.data=2", "--mesh.fsdp=2", "--mesh.model=2"]
    run_dir = tmp_path / "stopped"
    running = start(world, run_dir, processes=2, devices=4, options=[*options, *mesh])
    deadline = time.monotonic() + LIMIT
    while len(RunDirectory(run_dir).metrics()) < 3:
        assert all(process.poll() is None for process in running), running[1].communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    os.kill(running[1].pid, signal.SIGTERM)
    shown = finish(running)
    assert "stopped by SIGTERM at process 1" in " ".join(shown[0].split())
    run = RunDirectory(run_dir)
    step = run.last_step()
    assert step is not None and step == len(run.metrics()) and 3 <= step < 50
    assert max(int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()) == step
    finish(start(world, run_dir, processes=1, devices=1, options=options))
    finish(start(world, tmp_path / "whole", processes=1, devices=1, options=options))
    np.testing.assert_allclose(losses(run_dir), losses(tmp_path / "whole"), rtol=1e-5)


def test_a_missing_process_is_named(world: Path, tmp_path: Path) -> None:
    options = ["--processes.count", "2", "--processes.index", "0", "--processes.start_seconds", "5"]
    (process,) = start(
        world,
        tmp_path / "run",
        processes=1,
        devices=1,
        options=[*options, "--processes.coordinator", f"localhost:{free_port()}"],
    )
    _, said = process.communicate(timeout=LIMIT)
    assert process.returncode == 1 and said.count("\n") == 1
    assert "1 of 2 processes did not start within 5 s: 1; started have 0" in said
