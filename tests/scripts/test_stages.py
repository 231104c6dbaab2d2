"""`train/finetune.py` over all four stages: what is measured, held out, kept, traced, and how it stops on request."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from jaxtool.training import RunDirectory
from tests.scripts.tiny_world import ROOT, TOPICS, environment

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def stages(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A config with a corpus of sentences and conversations that call tools."""
    root = tmp_path_factory.mktemp("stages")
    with (root / "corpus.jsonl").open("w") as file:
        for i in range(40):
            topic = TOPICS[i % len(TOPICS)]
            file.write(json.dumps({"text": f"The {topic} of day {i} is [get_{topic}({i}) -> {i * i}] {i * i}."}) + "\n")
    with (root / "chats.jsonl").open("w") as file:
        for i in range(30):
            topic = TOPICS[i % len(TOPICS)]
            call = [{"type": "text", "text": "I use "}, {"type": "tool", "name": f"get_{topic}"}]
            turns = [
                {"role": "user", "content": f"{topic} {i}?"},
                {"role": "assistant", "content": call},
                {"role": "user", "content": "ok"},
                {"role": "assistant", "content": str(i), "train": i % 2 == 0},
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    settings = "rows: 4, row_length: 96, shorter_rows: [48], held_out: 0.2, evaluate_every: 4"
    optimizer = "{learning_rate: 3.0e-3, kind: adafactor, schedule: constant}"
    (root / "run.yaml").write_text(
        f"""
model: {{source: {world}/model}}
data: {{source: {world}/set, system_prompt: null, max_query_tokens: 40, max_document_tokens: 56}}
corpus: {{source: {root}/corpus.jsonl, epochs: 2, z_loss: 1.0e-4, {settings}, optimizer: {optimizer}}}
memorization: {{epochs: 1, rows: 8, row_length: 64, accumulate: 2}}
retrieval: {{epochs: 1, rows: 8, row_length: 64, evaluate_every: 100, optimizer: {{learning_rate: 3.0e-3}}}}
agent: {{source: {root}/chats.jsonl, epochs: 3, {settings}, optimizer: {{learning_rate: 3.0e-2}}}}
checkpoints: {{every_steps: 7, keep: 1}}
"""
    )
    return root / "run.yaml"


@pytest.fixture(scope="module")
def trained(stages: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    run_dir = tmp_path_factory.mktemp("run") / "whole"
    command = [sys.executable, str(ROOT / "train/finetune.py"), "--config", str(stages), "--profile"]
    done = subprocess.run([*command, "--run_dir", str(run_dir)], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return run_dir, done.stdout


def test_every_stage_is_trained_and_measured(trained: tuple[Path, str]) -> None:
    run_dir, shown = trained
    records = RunDirectory(run_dir).metrics()
    names = [record["stage"] for record in records]
    assert list(dict.fromkeys(names)) == ["corpus", "memorization", "retrieval", "agent"]
    assert [record["step"] for record in records] == list(range(1, len(records) + 1))
    for record in records:
        assert record["seconds"] == pytest.approx(
            sum(
                record.get(part, 0)
                for part in ("data", "device", "dispatch", "compilation", "checkpoint", "evaluation")
            )
            + record["other"],
            abs=2e-3,
        )
        assert record["tokens"] >= record["supervised"] > 0 and record["host_peak_bytes"] > 1e8
        assert record["tflops_full"] > record["tflops_causal"] > 0
        assert ("z_loss" in record) == (record["stage"] == "corpus")
    held_out = {name: [r for r in records if r["stage"] == name and "held_out_loss" in r] for name in set(names)}
    assert {name: len(found) > 0 for name, found in held_out.items()} == {
        "corpus": True,
        "memorization": False,
        "retrieval": True,
        "agent": True,
    }
    for name in ("corpus", "agent"):
        losses = [record["held_out_loss"] for record in held_out[name]]
        assert losses[-1] < 0.9 * losses[0] or min(losses) < losses[0]
        assert held_out[name][0]["held_out_perplexity"] == pytest.approx(math.exp(losses[0]), rel=1e-5)
    assert "held-out loss" in shown and "goodput" in shown
    # What is learned of a document is every token behind its first.
    first = records[0]
    assert first["supervised"] > 0.9 * first["tokens"]


def test_the_best_checkpoint_is_kept(trained: tuple[Path, str]) -> None:
    run_dir, _ = trained
    run = RunDirectory(run_dir)
    agent = [record for record in run.metrics() if record["stage"] == "agent" and "held_out_loss" in record]
    best = min(agent, key=lambda record: record["held_out_loss"])
    assert run.best_step() == best["step"] and run.last_step() == agent[-1]["step"]
    kept = {int(path.name) for path in (run_dir / "checkpoints").iterdir() if path.name.isdecimal()}
    assert kept == {best["step"], agent[-1]["step"]}


def test_traces_and_event_files(trained: tuple[Path, str]) -> None:
    run_dir, _ = trained
    assert list((run_dir / "profile").rglob("*.xplane.pb"))
    assert sum(path.stat().st_size for path in (run_dir / "tensorboard").iterdir()) > 10_000


def test_a_run_stops_on_request_and_goes_on(stages: Path, trained: tuple[Path, str], tmp_path: Path) -> None:
    """SIGTERM in the middle: status 0 and a checkpoint; the same command then ends as if nothing had been."""
    run_dir = tmp_path / "stopped"
    command = [sys.executable, str(ROOT / "train/finetune.py"), "--config", str(stages), "--run_dir", str(run_dir)]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    while len(RunDirectory(run_dir).metrics()) < 3:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    shown, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "stopped by SIGTERM: " in shown and "is saved at step" in shown
    assert "SIGTERM: the run saves after this step and ends" in said
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0 and "resuming" in done.stdout, done.stderr
    whole, again = (RunDirectory(path).metrics() for path in (trained[0], run_dir))
    for name in ("loss", "held_out_loss"):
        assert [record.get(name) for record in again] == [record.get(name) for record in whole]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--corpus.source", "absent.jsonl"], "absent.jsonl"),
        (["--corpus.source="], "corpus.source is empty"),
        (["--agent.held_out", "0.001"], "agent.held_out 0.001 of 30 samples leaves nothing on one side"),
        (["--memorization.evaluate_every", "3"], "nothing is held out of this stage"),
        (["--retrieval.accumulate", "3"], "retrieval.accumulate 3 does not divide rows 8"),
        (["--corpus.shorter_rows", "[96]"], "corpus.shorter_rows is [96], expected different lengths below"),
        (["--model.attention", "splash"], "attention is 'splash', but the devices are"),
        (["--data.source="], "data.source is empty and has no tools"),
    ],
)
def test_mistakes_end_with_one_line(stages: Path, tmp_path: Path, options: list[str], said: str) -> None:
    command = [sys.executable, str(ROOT / "train/finetune.py"), "--config", str(stages)]
    done = subprocess.run(
        [*command, "--run_dir", str(tmp_path / "run"), *options], env=environment(), capture_output=True, text=True
    )
    assert done.returncode in (1, 2)
    assert said in done.stderr and "Traceback" not in done.stderr


def test_plain_text_alone_needs_no_tools(stages: Path, tmp_path: Path) -> None:
    """Toolformer's fine-tuning: a corpus, no catalogue."""
    off = ["--memorization.epochs", "0", "--retrieval.epochs", "0", "--agent.epochs", "0", "--data.source="]
    command = [sys.executable, str(ROOT / "train/finetune.py"), "--config", str(stages), *off]
    done = subprocess.run(
        [*command, "--run_dir", str(tmp_path / "run")], env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    losses = [record["loss"] for record in RunDirectory(tmp_path / "run").metrics()]
    assert np.isfinite(losses).all() and RunDirectory(tmp_path / "run").model_config().num_tools == 0
