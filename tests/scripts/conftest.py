"""Fixtures that run the scripts on a tiny world."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.scripts.tiny_world import ROOT, environment, write_model, write_set

Script = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model/` (random weights), `set/` (10 tools, 200 training and 40 test queries) and `run.yaml`."""
    root = tmp_path_factory.mktemp("world")
    write_model(root / "model")
    write_set(root / "set")
    (root / "run.yaml").write_text(
        f"""
model: {{source: {root}/model}}
data: {{source: {root}/set, system_prompt: null, max_query_tokens: 40, max_document_tokens: 56}}
memorization: {{epochs: 2, rows: 8, row_length: 64, optimizer: {{learning_rate: 3.0e-3}}}}
retrieval: {{epochs: 6, rows: 8, row_length: 64, loss_chunk: 1, optimizer: {{learning_rate: 3.0e-3}}}}
checkpoints: {{every_steps: 5, keep: 2}}
"""
    )
    return root


@pytest.fixture
def script(world: Path) -> Script:
    """Runs a script of the repository on the world's config; returns the finished process."""

    def run(name: str, *options: str, devices: int = 1) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / name), "--config", str(world / "run.yaml"), *options]
        return subprocess.run(command, env=environment(devices), capture_output=True, text=True, timeout=300)

    return run
