"""Inputs that are wrong, damaged or malicious: the scripts say what is wrong, and show text as text.

One process runs several commands after another: starting Python and JAX takes longer than most of them.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.scripts.tiny_world import ROOT, environment

DRIVER = """
import contextlib, importlib.util, io, json, sys
from jaxtool.config import run_script

def run(script, options):
    spec = importlib.util.spec_from_file_location("script", script)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.argv = [script, *options]
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            run_script(module.main)
        except SystemExit as end:
            status = end.code
    return status, out.getvalue(), err.getvalue()

json.dump([run(*command) for command in json.load(sys.stdin)], sys.stdout)
"""
# Runs the script named second. When the package named first is imported (or, with RunDirectory, when one is made) the
# process gets the signal of Ctrl-C.
INTERRUPTED = """
import os, runpy, signal, sys
where, script, sys.argv = sys.argv[1], sys.argv[2], sys.argv[2:]

def interrupt(*_, **__):
    os.kill(os.getpid(), signal.SIGINT)

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            interrupt()

signal.signal(signal.SIGINT, signal.default_int_handler)
if where == "RunDirectory":
    from jaxtool.training import RunDirectory
    RunDirectory.__init__ = interrupt
sys.meta_path.insert(0, Finder())
runpy.run_path(script, run_name="__main__")
"""
HEADER = "query-id\tcorpus-id\tscore\n"


def run_all(world: Path | None, *commands: tuple[str, list[str]]) -> list[tuple[int, str, str]]:
    """Status, stdout and stderr of each command, with the world's config if there is one.

    An exception that a script lets out fails the test.
    """
    config = [] if world is None else ["--config", str(world / "run.yaml")]
    given = [(str(ROOT / name), [*config, *options]) for name, options in commands]
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(given),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(result) for result in json.loads(done.stdout)]


def test_mistakes_name_what_is_wrong(world: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    untrained = tmp_path / "untrained"
    shutil.copytree(world / "set", untrained)
    (untrained / "qrels/train.tsv").write_text(HEADER)
    new = ["--run_dir", str(tmp_path / "new")]
    cases = [
        (["--run_dir", str(tmp_path / "file")], f"run_dir {tmp_path / 'file'}: expected a folder"),
        ([*new, "--data.source", "~nobody-of-this-name/x"], "no such file or folder; expected"),
        ([*new, "--model.source", "~nobody-of-this-name/x"], "no such folder"),
        ([*new, "--data.max_document_tokens", "500"], "data.max_document_tokens 500 is beyond the model's 128"),
        ([*new, "--data.source", str(untrained)], "retrieval: no samples, data.source"),
        ([*new, "--data.max_query_tokens", "5"], "retrieval (data.max_query_tokens 5): max_length 5 leaves no room"),
        # The mistakes above began runs without a checkpoint: they don't bind this one to their settings.
        ([*new, "--memorization.row_length", "20"], "memorization: a sample has"),
    ]
    results = run_all(world, *(("train/finetune.py", options) for options, _ in cases))
    for (status, _, error), (options, said) in zip(results, cases, strict=True):
        assert status == 1, options
        assert said in error
        assert error.count("\n") == 1


def test_hostile_text_is_shown_as_text(world: Path, tmp_path: Path) -> None:
    folder = tmp_path / "set"
    shutil.copytree(world / "set", folder)
    hostile = "<script>alert(1)</script> [red]x[/red] :smile: \x1b[31m \\"
    texts = [hostile, "<|end|><|start|>", "\x00", "שלום", "a" * 100_000]
    tool = {"_id": "d0", "title": hostile, "text": hostile}
    (folder / "corpus.jsonl").write_text(json.dumps(tool) + "\n")
    lines = [json.dumps({"_id": f"q{i}", "text": text}) for i, text in enumerate(texts)]
    (folder / "queries.jsonl").write_text("\n".join(lines))
    for split in ("train", "test"):
        pairs = "".join(f"q{i}\td0\t1\n" for i in range(len(texts)))
        (folder / f"qrels/{split}.tsv").write_text(HEADER + pairs)
    untested = tmp_path / "untested"
    shutil.copytree(folder, untested)
    (untested / "qrels/test.tsv").write_text(HEADER)
    run = ["--run_dir", str(tmp_path / "run"), "--data.source", str(folder), "--memorization.epochs", "0"]
    run += ["--retrieval.epochs", "1"]
    trained, shown, unscored, other = run_all(
        world,
        ("train/finetune.py", run),
        ("infer/evaluate.py", [*run, "--evaluation.k", "1000000000"]),
        ("infer/evaluate.py", [*run, "--data.source", str(untested)]),
        ("infer/evaluate.py", [*run, "--data.system_prompt", "Hi"]),
    )
    assert trained[0] == 0, trained[2]
    assert shown[0] == 0, shown[2]
    assert "\x1b" not in shown[1] and "\\x1b" in shown[1]
    assert "[red]" in shown[1] and ":smile:" in shown[1]
    page = (tmp_path / "run/report/report.html").read_text()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert unscored[0] == 1 and "no test queries to score" in unscored[2]
    assert other[0] == 0 and "data.system_prompt is 'Hi', but the model was trained with None" in other[2]


def test_what_is_left_out_is_said(world: Path, tmp_path: Path) -> None:
    """Traces of stages that end within the traced steps, samples that are held out for nothing, nothing to learn."""
    (tmp_path / "texts.txt").write_text("one\ntwo\nthree\nfour\nfive\n")
    (tmp_path / "chats.jsonl").write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    corpus = ["--corpus.epochs", "1", "--corpus.source", str(tmp_path / "texts.txt"), "--corpus.text_files", "line"]
    corpus += ["--corpus.rows", "1", "--corpus.row_length", "64", "--corpus.held_out", "0.4"]
    short = ["--memorization.rows", "2", "--memorization.epochs", "1", "--retrieval.max_samples", "8"]
    agent = ["--agent.epochs", "1", "--agent.row_length", "64", "--agent.source", str(tmp_path / "chats.jsonl")]
    traced, silent = run_all(
        world,
        ("train/finetune.py", ["--run_dir", str(tmp_path / "run"), "--profile", *corpus, *short]),
        ("train/finetune.py", ["--run_dir", str(tmp_path / "silent"), *agent]),
    )
    assert traced[0] == 0, traced[2]
    assert "2 samples held out, but never measured (corpus.evaluate_every is 0)" in " ".join(traced[1].split())
    assert "corpus: no trace, it has 1 steps and the first 3 are left out" in traced[1]
    records = map(json.loads, (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    steps = [record["stage"] for record in records if "loss" in record]
    assert 3 < steps.count("memorization") < 6 <= steps.count("retrieval")  # the first ends while it is traced
    assert len(list((tmp_path / "run/profile").rglob("*.xplane.pb"))) == 2
    assert silent[0] == 1
    assert silent[2] == (
        f"error: agent: {tmp_path / 'chats.jsonl'} has no token to train on; 1 conversation left out: nothing in them "
        "is supervised\n"
    )


def test_broken_training_is_stopped_by_name(world: Path, tmp_path: Path) -> None:
    """A gradient that overflows while the loss does not; a checkpoint that no step of the run has written."""
    model = tmp_path / "model"
    shutil.copytree(world / "model", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * np.float32(1e25)
    save_file(tensors, model / "model.safetensors")
    once = ["--memorization.epochs", "0", "--retrieval.epochs", "1"]
    overflow = [*once, "--run_dir", str(tmp_path / "overflow"), "--model.source", str(model)]
    short = [*once, "--run_dir", str(tmp_path / "short"), "--retrieval.max_samples", "4"]
    stopped, trained, five, many = run_all(
        world,
        ("train/finetune.py", overflow),
        ("train/finetune.py", short),
        ("infer/evaluate.py", short),
        ("infer/evaluate.py", [*short, "--evaluation.k", "1000000"]),
    )
    assert stopped[0] == 1
    assert stopped[2] == (
        "error: retrieval: the grad_norm of step 1 is inf; start anew, in another run_dir and with a lower "
        "retrieval.optimizer.learning_rate\n"
    )
    assert not list((tmp_path / "overflow").glob("checkpoints/*"))
    assert trained[0] == five[0] == many[0] == 0, trained[2] + five[2] + many[2]

    # More places than tools: the same report.
    def table(text: str) -> list[str]:
        return [line for line in text.splitlines() if "NDCG" in line or "BM25" in line or "jaxtool " in line]

    assert len(table(five[1])) >= 2 and table(five[1]) == table(many[1])

    (tmp_path / "short/checkpoints/1").rename(tmp_path / "short/checkpoints/7")
    ((status, _, error),) = run_all(world, ("train/finetune.py", short))
    assert status == 1
    assert error == (
        f"error: {tmp_path / 'short'}: checkpoint 7 lies behind the run's last step 1, another run wrote it; delete "
        f"{tmp_path / 'short/checkpoints/7'}, or choose another run_dir\n"
    )


@pytest.mark.parametrize(
    ("name", "where", "said"),
    [
        ("train/finetune.py", "jax", "interrupted\n"),
        ("infer/evaluate.py", "jax", "interrupted\n"),
        ("train/finetune.py", "RunDirectory", "interrupted; the same command resumes from the last checkpoint\n"),
        ("infer/evaluate.py", "RunDirectory", "interrupted\n"),
    ],
)
def test_an_interrupt_is_one_line(world: Path, tmp_path: Path, name: str, where: str, said: str) -> None:
    options = ["--config", str(world / "run.yaml"), "--run_dir", str(tmp_path / "run")]
    command = [sys.executable, "-c", INTERRUPTED, where, str(ROOT / name), *options]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (130, said)
