"""Fine-tuning that is killed ten times at random moments, and ends as if nobody had touched it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxtool.config import MeshConfig
from jaxtool.models import parameters
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training import RunDirectory
from tests.scripts.tiny_world import ROOT, environment

# The moments of the kills: before the first step of an attempt (imports, data, restoring, compiling), some steps later,
# and some steps later while a checkpoint is being written.
KILLS = ["starting"] * 3 + ["training"] * 4 + ["writing"] * 3
# An attempt that is killed later does at most 1 + 7 + 1 steps and, until a checkpoint is begun, 2 more: seven of them
# are fewer than the 83 of the run, so none can end before its kill.
MOST_FURTHER_STEPS, EVERY = 7, 2
DEADLINE = 240.0


def start(world: Path, run_dir: Path) -> subprocess.Popen[str]:
    command = [sys.executable, str(ROOT / "train/finetune.py"), "--config", str(world / "run.yaml")]
    options = ["--run_dir", str(run_dir), "--checkpoints.every_steps", str(EVERY)]
    # Compiling is most of an attempt, and without optimisations the half of that.
    quick = environment() | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(
        [*command, *options], env=quick, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def steps_done(run_dir: Path) -> int:
    """Steps that were logged, those that were done twice counted twice."""
    log = run_dir / "metrics.jsonl"
    return log.read_bytes().count(b'"loss"') if log.exists() else 0


def unfinished(run_dir: Path) -> set[str]:
    """Checkpoints that are being written, or were when the process was killed."""
    folder = run_dir / "checkpoints"
    return {name for name in os.listdir(folder) if not name.isdigit()} if folder.exists() else set()


def weights(run_dir: Path) -> dict[str, np.ndarray]:
    run = RunDirectory(run_dir)
    step = run.last_step()
    assert step is not None
    model = run.restore_model(step, AxisRules(), make_mesh(MeshConfig(), jax.devices()[:1]))
    run.close()
    return {path: np.asarray(leaf) for path, leaf in parameters(model).items()}


@pytest.mark.slow
def test_a_run_killed_ten_times_ends_bit_for_bit(world: Path, tmp_path: Path) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "killed"
    launched = time.time()
    process = start(world, whole)
    said, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said
    expected = {record["step"]: record for record in RunDirectory(whole).records() if "loss" in record}
    assert len(expected) > len(KILLS) * (MOST_FURTHER_STEPS + 1)
    first_step_after = expected[1]["time"] - launched
    step_seconds = (expected[len(expected)]["time"] - expected[1]["time"]) / len(expected)

    drawn = random.Random(0)
    moments = drawn.sample(KILLS, len(KILLS))
    left = []  # unfinished checkpoints that each kill leaves
    for moment in moments:
        process = start(world, run_dir)
        try:
            wait_until(moment, process, run_dir, drawn, first_step_after, step_seconds)
        finally:
            process.kill()
            said, _ = process.communicate()
        assert process.returncode == -signal.SIGKILL, f"{moment} {len(left)}: ended before the kill: {said}"
        left.append(unfinished(run_dir))
    assert any(left), "no kill hit a checkpoint that was being written"

    process = start(world, run_dir)
    said, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, said
    assert "resuming" in said
    before, after = weights(whole), weights(run_dir)
    assert before.keys() == after.keys()
    for path in before:
        np.testing.assert_array_equal(after[path], before[path], err_msg=path)
    # In the order of the run, and also where a step was done again after a kill.
    records = [record for record in RunDirectory(run_dir).records() if "loss" in record]
    assert [record["step"] for record in RunDirectory(run_dir).metrics()] == list(expected)
    assert len(records) > len(expected)
    for record in records:
        for name in ("stage", "loss", "grad_norm", "correct", "supervised", "tokens"):
            assert record[name] == expected[record["step"]][name], (record["step"], name)


def wait_until(
    moment: str,
    process: subprocess.Popen[str],
    run_dir: Path,
    drawn: random.Random,
    first_step_after: float,
    step_seconds: float,
) -> None:
    """Waits for a random moment of an attempt."""
    before = steps_done(run_dir)
    if moment == "starting":  # not later than the first step: the machine may be less busy than it was
        at = time.monotonic() + drawn.uniform(0, first_step_after)
        wait_for(lambda: time.monotonic() >= at or steps_done(run_dir) > before, process)
        return
    until = before + 1 + drawn.randint(0, MOST_FURTHER_STEPS)
    wait_for(lambda: steps_done(run_dir) >= until, process)
    time.sleep(drawn.uniform(0, step_seconds))
    if moment == "writing":
        wait_for(lambda: bool(unfinished(run_dir)), process)
        time.sleep(drawn.uniform(0, 0.01))


def wait_for(reached: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not reached() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
