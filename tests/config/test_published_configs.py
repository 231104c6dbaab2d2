"""Every file of configs/ is a run, and the model folders are the published configs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxtool.config import RunConfig, parse_run, run_parser
from jaxtool.weights import read_config
from tests.models.test_full_size import PUBLISHED, config_of

CONFIGS = Path(__file__).parents[2] / "configs"
DEVICES = {"v4-32": 16, "v5e-64": 64, "v5p-16": 8, "v6e-16": 16, "h100-8": 8}
FILES = sorted(CONFIGS.rglob("*.yaml"))


def run_of(path: Path) -> RunConfig:
    return parse_run(run_parser(""), ["--config", str(path)])[0]


@pytest.mark.parametrize("path", FILES, ids=[str(path.relative_to(CONFIGS)) for path in FILES])
def test_every_file_is_a_run(path: Path) -> None:
    run = run_of(path)
    if path.parent == CONFIGS:
        return
    devices = DEVICES[path.stem]
    shares = run.mesh.data * run.mesh.fsdp
    assert shares * run.mesh.model == devices
    for stage in (run.corpus, run.memorization, run.retrieval, run.agent):
        assert stage.epochs == 0 or stage.rows % (shares * stage.accumulate) == 0
    assert run.model.compute_dtype == "bfloat16"
    assert run.model.attention == "auto"


def test_every_machine_trains_the_same() -> None:
    """What differs between machines is the mesh, remat, micro-batches, chunks of the loss and batches of evaluation."""
    for folder in (path for path in CONFIGS.iterdir() if path.is_dir() and path.name != "models"):
        assert {path.stem for path in folder.iterdir()} == set(DEVICES)
        runs = [run_of(path) for path in folder.iterdir()]
        assert len({(run.run_dir, run.data, run.checkpoints, run.trainable, run.model.source) for run in runs}) == 1
        for name in ("corpus", "memorization", "retrieval", "agent"):
            stages = [getattr(run, name) for run in runs]
            assert len({(stage.epochs, stage.rows, stage.row_length, stage.optimizer) for stage in stages}) == 1


MODELS = {"gpt-j-6b": "GPT-J-6B", "llama-3-8b": "Llama-3-8B", "llama-3-70b": "Llama-3-70B"}


@pytest.mark.parametrize("folder", MODELS)
def test_model_folders_are_the_published_configs(folder: str) -> None:
    assert MODELS[folder] in PUBLISHED
    assert read_config(CONFIGS / "models" / folder) == config_of(MODELS[folder])
