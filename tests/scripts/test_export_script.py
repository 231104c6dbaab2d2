"""`infer/export.py` as a user runs it, on a run whose checkpoint this process wrote."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
import transformers

from jaxtool.config import MeshConfig, parse_run, run_parser
from jaxtool.data import load_retrieval_set
from jaxtool.models import (
    LanguageModel,
    abstract_model,
    build_model,
    parameters,
    with_name_rows,
    with_parameters,
)
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training import RunDirectory, initial_state, make_optimizer
from jaxtool.weights import load_tokenizer, read_config, read_tool_ids, read_weights
from tests.scripts.test_hostile_inputs import run_all
from tests.scripts.tiny_world import TOPICS

Script = Callable[..., subprocess.CompletedProcess[str]]

# The second is an ordinary token, as the end of a turn is in many chat models.
GENERATION = {"eos_token_id": [1, 3], "temperature": 0.6}


@pytest.fixture(scope="module")
def trained(world: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LanguageModel]:
    root = tmp_path_factory.mktemp("export")
    shutil.copytree(world / "model", root / "model")
    (root / "model/generation_config.json").write_text(json.dumps(GENERATION))
    options = ["--config", str(world / "run.yaml"), "--run_dir", str(root / "run")]
    config, _ = parse_run(run_parser(""), [*options, "--model.source", str(root / "model")])
    data = load_retrieval_set(config.data.source, seed=config.seed)
    tokenizer, base = load_tokenizer(root / "model"), read_config(root / "model")
    plain = abstract_model(lambda: build_model(base))
    text = with_parameters(plain, read_weights(root / "model", parameters(plain)))
    model = with_name_rows(text, [tokenizer(tool.name)["input_ids"] for tool in data.catalog])
    run = RunDirectory(config.run_dir)
    run.start(config, model.config, data.catalog, tokenizer)
    run.save(7, initial_state(model, make_optimizer(config.retrieval.optimizer, 10)))
    run.close()
    return run.path, model


def test_the_folder_holds_the_model(trained: tuple[Path, LanguageModel], script: Script, tmp_path: Path) -> None:
    run_dir, model = trained
    done = script("infer/export.py", "--run_dir", str(run_dir), "--output", str(tmp_path / "out"), "--tool_tokens")
    assert done.returncode == 0, done.stderr
    assert "checkpoint 7, 10 tools" in done.stdout and f"{tmp_path / 'out'}: " in done.stdout
    folder = tmp_path / "out"
    config = read_config(folder)
    abstract = abstract_model(lambda: build_model(config))
    found, expected = read_weights(folder, parameters(abstract)), parameters(model)
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
    assert json.loads((folder / "generation_config.json").read_text()) == GENERATION
    tools = {f"get_{topic}": model.config.vocab_size + tool for tool, topic in enumerate(TOPICS)}
    assert read_tool_ids(folder) == tools
    by_transformers = transformers.AutoTokenizer.from_pretrained(folder)
    assert by_transformers("<|tool get_music|>")["input_ids"] == [tools["get_music"]]
    assert load_tokenizer(folder).get_vocab() == load_tokenizer(run_dir / "tokenizer").get_vocab()


def test_mistakes_end_with_one_line(trained: tuple[Path, LanguageModel], world: Path, tmp_path: Path) -> None:
    run = ["--run_dir", str(trained[0])]
    (tmp_path / "full").mkdir()
    (tmp_path / "full/precious").write_text("x")
    cases = [
        (run, "output"),
        ([*run, "--output", str(tmp_path / "full")], "full: exists already, expected a new or empty folder"),
        ([*run, "--output", str(tmp_path / "new"), "--dtype", "int8"], "dtype is 'int8', expected one of"),
        (["--run_dir", str(tmp_path), "--output", str(tmp_path / "new")], "train first"),
    ]
    results = run_all(world, *(("infer/export.py", options) for options, _ in cases))
    for (status, _, error), (options, said) in zip(results, cases, strict=True):
        assert status in (1, 2), options
        assert said in error and "Traceback" not in error
    assert [path.name for path in tmp_path.rglob("*")] == ["full", "precious"]


def test_training_on_an_exported_folder_keeps_the_learned_rows(
    trained: tuple[Path, LanguageModel], script: Script, world: Path, tmp_path: Path
) -> None:
    run_dir, model = trained
    done = script("infer/export.py", "--run_dir", str(run_dir), "--output", str(tmp_path / "out"), "--tool_tokens")
    assert done.returncode == 0, done.stderr
    shutil.copytree(world / "set", tmp_path / "data")
    corpus = tmp_path / "data/corpus.jsonl"
    lines = corpus.read_text().splitlines()
    added = json.dumps({"_id": "new", "title": "get_tides", "text": "about tides"})
    corpus.write_text("\n".join([added, *lines]) + "\n")  # every learned tool moves by one row
    # A rate so small that float32 weights don't move: what is trained are the rows it begins with.
    tiny = [
        f"--{stage}.{field}"
        for stage in ("memorization", "retrieval")
        for field in ("optimizer.learning_rate=1e-30", "epochs=1")
    ]
    options = ["--run_dir", str(tmp_path / "again"), *tiny]
    options += ["--model.source", str(tmp_path / "out"), "--data.source", str(tmp_path / "data")]
    done = script("train/finetune.py", *options)
    assert done.returncode == 0, done.stderr
    assert "10 tools before, 11 now: 10 kept (10 with another id), 1 added, 0 removed" in " ".join(done.stdout.split())
    run = RunDirectory(tmp_path / "again")
    config, names = run.model_config(), [tool.name for tool in run.catalog()]
    before = np.asarray(parameters(model)["embedding_vd"])
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    after = np.asarray(parameters(run.restore_model(run.last_step(), AxisRules(), mesh))["embedding_vd"])
    old_names = list(read_tool_ids(tmp_path / "out"))
    for tool, name in enumerate(names):
        if name in old_names:
            old = before[model.config.vocab_size + old_names.index(name)]
            np.testing.assert_array_equal(after[config.vocab_size + tool], old)
    assert config.vocab_size == model.config.vocab_size and config.num_tools == 11
