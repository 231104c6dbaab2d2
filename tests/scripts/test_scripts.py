"""The two scripts as a user runs them: in processes of their own, on files, with kills and mistakes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest

import jaxtool
from jaxtool.config import MeshConfig
from jaxtool.models import parameters
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training import RunDirectory
from tests.scripts.tiny_world import ROOT, environment

Script = Callable[..., subprocess.CompletedProcess[str]]


# Runs the script named first with the arguments behind it, and kills itself when checkpoint 3 is complete.
KILLED_AFTER_3 = """
import os, runpy, signal, sys
from jaxtool.training import RunDirectory
save = RunDirectory.save
def save_and_die(run, step, state, **options):
    save(run, step, state, **options)
    if step == 3:
        while run.finished_save() is None:  # it goes on in the background
            pass
        os.kill(os.getpid(), signal.SIGKILL)
RunDirectory.save = save_and_die
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def arrays(run_dir: Path) -> dict[str, np.ndarray]:
    run = RunDirectory(run_dir)
    step = run.last_step()
    assert step is not None
    model = run.restore_model(step, AxisRules(), make_mesh(MeshConfig(), jax.devices()[:1]))
    run.close()
    return {path: np.asarray(leaf) for path, leaf in parameters(model).items()}


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    command = [sys.executable, str(ROOT / "train/finetune.py"), "--config", str(world / "run.yaml")]
    done = subprocess.run([*command, "--run_dir", str(run_dir)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    return run_dir


def test_training_learns_and_retrieval_reports(trained: Path, script: Script) -> None:
    losses = [record["loss"] for record in RunDirectory(trained).metrics() if record["stage"] == "retrieval"]
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])
    done = script("infer/evaluate.py", "--run_dir", str(trained))
    assert done.returncode == 0, done.stderr
    results = {row["system"]: row for row in json.loads((trained / "report/results.json").read_text())["results"]}
    assert results["jaxtool"]["queries"] == 40
    assert results["jaxtool"]["ndcg@1"] > 0.5  # 10 tools: chance is below 0.15
    page = (trained / "report/report.html").read_text()
    assert "get_weather" in page and "data:image/png;base64," in page
    assert (trained / "report/results.png").read_bytes().startswith(b"\x89PNG")


def test_a_finished_run_is_left_alone(trained: Path, script: Script) -> None:
    before = arrays(trained)
    done = script("train/finetune.py", "--run_dir", str(trained))
    assert done.returncode == 0 and "is finished" in done.stdout
    assert all(np.array_equal(before[path], leaf) for path, leaf in arrays(trained).items())


def test_a_killed_run_resumes_bit_for_bit(trained: Path, world: Path, script: Script, tmp_path: Path) -> None:
    """Killed in each stage, right after a checkpoint appeared; in the first one by itself, to meet its middle."""
    run_dir = tmp_path / "killed"
    command = [sys.executable, str(ROOT / "train/finetune.py"), "--config", str(world / "run.yaml")]
    whole = RunDirectory(trained).metrics()
    memorization = sum(record["stage"] == "memorization" for record in whole)
    assert memorization > 3
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            KILLED_AFTER_3,
            *command[1:],
            "--run_dir",
            str(run_dir),
            "--checkpoints.every_steps",
            "3",
        ],
        env=environment(),
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    target = 5 * (memorization // 5 + 2)
    process = subprocess.Popen(
        [*command, "--run_dir", str(run_dir)],
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 240
    while not (run_dir / "checkpoints" / str(target)).exists():
        assert process.poll() is None, "ended before the kill"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    done = script("train/finetune.py", "--run_dir", str(run_dir))
    assert done.returncode == 0, done.stderr
    assert "resuming" in done.stdout
    expected = arrays(trained)
    assert all(np.array_equal(expected[path], leaf) for path, leaf in arrays(run_dir).items())
    again = RunDirectory(run_dir).metrics()
    assert [record["loss"] for record in again] == [record["loss"] for record in whole]


def test_eight_devices_train_alike_and_resume_on_one(trained: Path, script: Script, tmp_path: Path) -> None:
    run_dir = tmp_path / "sharded"
    mesh = ["--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.model", "2", "--run_dir", str(run_dir)]
    options = [*mesh, "--evaluation.batch_size", "8"]
    done = script("train/finetune.py", *options, devices=8)
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in RunDirectory(run_dir).metrics()]
    expected = [record["loss"] for record in RunDirectory(trained).metrics()]
    np.testing.assert_allclose(losses[:10], expected[:10], rtol=1e-3)
    assert script("infer/evaluate.py", *options, devices=8).returncode == 0
    assert script("infer/evaluate.py", "--run_dir", str(run_dir)).returncode == 0
    # Rows are padded by the mesh that the run began on; another mesh takes them as they are.
    done = script("train/finetune.py", "--run_dir", str(run_dir))
    assert done.returncode == 0 and "is finished" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("train/finetune.py", ["--seed", "1"], "seed was 0, is 1"),
        ("train/finetune.py", ["--data.source", "nowhere"], "nowhere"),
        ("train/finetune.py", ["--model.source", "nowhere"], "nowhere"),
        ("train/finetune.py", ["--mesh.fsdp", "3"], "does not fit 1 devices"),
        ("train/finetune.py", ["--data.max_query_tokens", "1000"], "beyond the model's 128 positions"),
        ("infer/evaluate.py", ["--evaluation.batch_size", "0"], "batch_size is 0"),
    ],
)
def test_mistakes_end_with_one_line(trained: Path, script: Script, name: str, options: list[str], said: str) -> None:
    done = script(name, "--run_dir", str(trained), *options)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_retrieval_without_training(script: Script, tmp_path: Path) -> None:
    done = script("infer/evaluate.py", "--run_dir", str(tmp_path / "empty"))
    assert done.returncode == 1
    assert "train first" in done.stderr and "Traceback" not in done.stderr


def test_the_package_says_its_version() -> None:
    assert jaxtool.__version__.count(".") == 2
