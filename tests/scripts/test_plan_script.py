"""The planner as a user runs it: on fake devices, with mistakes, and with the TPU compiler where it is installed."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import pytest
from rich.console import Console

from jaxtool.config import run_script
from tests.scripts.tiny_world import ROOT, environment

Script = Callable[..., subprocess.CompletedProcess[str]]


def compiled(*options: str) -> subprocess.CompletedProcess[str]:
    """The planner without a config file; compiling for a TPU takes minutes."""
    command = [sys.executable, str(ROOT / "train/plan.py"), "--retrieval.epochs", "0", "--json", *options]
    return subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=3600)


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")


def test_plan_for_fake_devices(script: Script) -> None:
    """The two stages have different shapes here (loss_chunk); the catalogue is read from the data."""
    done = script("train/plan.py", "--topology", "cpu:8", "--mesh.fsdp", "2", "--json", "--retrieval.epochs", "0")
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    assert record["topology"] == "cpu:8"
    assert record["stages"] == "memorization"
    assert record["mesh"] == {"data": 4, "fsdp": 2, "model": 1}
    assert record["fits"]
    assert record["optimizer_bytes"] == 2 * record["weight_bytes"] + 8
    assert record["peak_bytes"] >= record["argument_bytes"] > 3 * record["weight_bytes"]
    assert "10 tools" in done.stderr
    assert "decoding" not in done.stderr


def test_decoding_for_fake_devices(script: Script) -> None:
    """Next to the stages, or alone; the mesh is that of the run."""
    stages = ["--memorization.epochs", "0", "--retrieval.epochs", "0"]
    decoding = ["--decode_rows", "8", "--decode_length", "600", "--mesh.fsdp", "2", "--mesh.model", "2"]
    done = script("train/plan.py", "--topology", "cpu:8", "--json", *stages, *decoding)
    assert done.returncode == 0, done.stderr
    records = json.loads(done.stdout)
    assert [each["stages"] for each in records] == ["reading 512 tokens", "decoding"]
    for record in records:
        assert record["mesh"] == {"data": 2, "fsdp": 2, "model": 2}
        assert (record["rows"], record["row_length"], record["fits"]) == (8, 600, True)
        # float32 keys and values of two layers, of 2 heads x 8; and how many tokens a row has.
        assert record["cache_bytes"] == 2 * 2 * 8 * 600 * 2 * 8 * 4 // 8 + 4 * 8 // 4
        assert record["peak_bytes"] >= record["argument_bytes"] > record["weight_bytes"] + record["cache_bytes"]
    assert "10 tools" in done.stderr


MISTAKES = {
    "machine": (["--topology", "v5e-60"], "unknown accelerator type 'v5e-60'; near ones: v5litepod-64"),
    "mfu": (["--topology", "cpu:8", "--mfu", "0"], "mfu is 0.0, expected a share above 0, up to 1"),
    "model": (["--topology", "cpu:8", "--model.source", "SET", "--tools", "3"], "SET: no config.json"),
    "mesh": (
        ["--topology", "cpu:8", "--mesh.fsdp", "3", "--tools", "3"],
        "memorization on cpu:8: mesh data -1 x fsdp 3",
    ),
    "nothing": (
        ["--topology", "cpu:8", "--tools", "3", "--memorization.epochs", "0", "--retrieval.epochs", "0"],
        "decode_rows are all 0: nothing to plan",
    ),
    "decode_length": (["--topology", "cpu:8", "--decode_length", "0"], "decode_length is 0, expected 1 or more"),
    "libtpu": (["--topology", "v5e:8x8"], f"pip install 'jax[tpu]=={jax.__version__}'"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(
    mistake: str, world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(world / "set")
    options, message = MISTAKES[mistake]
    options = [folder if option == "SET" else option for option in options]
    spec = importlib.util.spec_from_file_location("plan", ROOT / "train/plan.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "open_console", Console)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["plan.py", "--config", str(world / "run.yaml"), *options])
    with pytest.raises(SystemExit) as ended:
        run_script(script.main)
    assert ended.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message.replace("SET", folder) in error


@pytest.mark.aot
@pytest.mark.slow
@needs_libtpu
def test_llama_3_8b_with_46985_tools_fits_32_chips_of_16_gib() -> None:
    """By MaxText's figure for the same model without tools (5.67 GiB at one row of 2,048 tokens on a chip)."""
    model = ["--model.source", str(ROOT / "configs/models/llama-3-8b"), "--model.remat", "full"]
    stage = ["--memorization.rows", "32", "--memorization.row_length", "2048"]
    options = ["--model.compute_dtype", "bfloat16", "--mesh.fsdp", "32", "--tools", "46985", "--targets", "1"]
    done = compiled("--topology", "v5e:4x8", *model, *stage, *options)
    assert done.returncode == 0, done.stderr
    (record,) = json.loads(done.stdout)
    assert record["hbm_bytes"] == 15.75 * 2**30
    assert record["weight_bytes"] == pytest.approx(4 * 8.416e9 / 32, rel=1e-2)
    assert record["peak_bytes"] < 10 * 2**30
    # The embedding is looked up where its columns are, only the head is gathered outside of the layers.
    head = 175_360 * 4096 * 2
    assert sum(each["bytes"] for each in record["collectives"] if each["kind"] == "all-gather") < 1.01 * head


@pytest.mark.aot
@pytest.mark.slow
@needs_libtpu
def test_what_does_not_fit_is_said_with_the_amount() -> None:
    model = ["--model.source", str(ROOT / "configs/models/llama-3-8b"), "--mesh.fsdp", "4", "--tools", "0"]
    done = compiled("--topology", "v5e-4", *model)
    assert done.returncode == 3, done.stderr
    (record,) = json.loads(done.stdout)
    assert not record["fits"]
    assert record["needed_bytes"] > record["hbm_bytes"]
    assert "does not fit: memorization on v5litepod-4" in done.stderr
    assert "weights and moments alone take 22.4" in done.stderr


@pytest.mark.aot
@pytest.mark.slow
@needs_libtpu
def test_gpt_j_6b_decodes_on_four_chips_of_16_gib() -> None:
    """16 texts of 2,048 tokens: 2 x 28 layers x 16 heads x 256 numbers for a token; four parts of all matrices."""
    model = ["--model.source", str(ROOT / "configs/models/gpt-j-6b"), "--model.compute_dtype", "bfloat16"]
    options = ["--memorization.epochs", "0", "--tools", "0", "--mesh.model", "4", "--decode_rows", "16"]
    done = compiled("--topology", "v5e-4", *model, *options)
    assert done.returncode == 0, done.stderr
    for record in json.loads(done.stdout):
        assert record["weight_bytes"] == pytest.approx(2 * 6.05e9 / 4, rel=1e-2)
        assert record["cache_bytes"] == pytest.approx(2 * 2 * 28 * 16 * 256 * 16 * 2048 / 4, rel=1e-6)
        assert record["weight_bytes"] + record["cache_bytes"] < record["peak_bytes"] < record["hbm_bytes"]
        # Each layer's attention and MLP are summed over the devices together; the embedding as well.
        assert sum(each["count"] + each["loop_count"] for each in record["collectives"]) < 2 * 28 + 8
