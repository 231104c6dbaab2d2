"""The scripts over files of prompts as users run them: kills, processes, wrong rows and folders."""

from __future__ import annotations

import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from tests.scripts.test_hostile_inputs import run_all
from tests.scripts.tiny_world import ROOT, environment

ROWS = 40
# Runs the script named first, and kills itself when it is about to finish its n-th part.
KILLER = """
import os, runpy, signal, sys
n, sys.argv = int(sys.argv[1]), sys.argv[2:]
from jaxtool.decoding import OfflineJob
write = OfflineJob.write
def killed(self, *given):
    global n
    n -= 1
    if n == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, *given)
OfflineJob.write = killed
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = random.Random(0)
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows: list[Any] = []
    for number in range(ROWS):
        text = "".join(rng.choices("abcdefghij klmno", k=rng.randint(1, 50)))
        row: dict[str, Any] = {"prompt": text} if number % 3 else {"messages": [{"role": "user", "content": text}]}
        row["id"] = f"row {number}"
        if number % 4 == 1:
            row["sampling"] = {"temperature": 1.0, "max_new_tokens": rng.randint(1, 30), "samples": 2}
        rows.append(row)
    rows[7]["sampling"] = {"temperature": -1}
    rows[8] = {"prompt": ""}
    rows[9] = {"prompt": "x", "tokens": [1]}
    rows[10] = {"prompt": "x" * 100, "sampling": {"max_new_tokens": 100}}
    rows[11] = {"tokens": [1, 2, 999]}
    rows[12] = {"messages": [{"role": "robot", "content": "x"}]}
    lines = [json.dumps(row) for row in rows]
    lines[13] = "{broken"
    path.write_text("\n\n".join(lines) + "\n")
    return path


def command(script: str, model: Path, prompts: Path, output: Path, *options: str) -> list[str]:
    given = ["--model", str(model), "--input", str(prompts), "--output", str(output), "--rows", "8", *options]
    return [str(ROOT / script), *given]


GENERATE = ("--sampling.max_new_tokens", "12", "--part_rows", "7", "--log_probs", "true")


def run(arguments: list[str], devices: int = 1, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], env=environment(devices), capture_output=True, text=True, timeout=300, **more
    )


def files(folder: Path) -> dict[str, bytes]:
    """All files of results, hidden ones left out."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if not path.name.startswith(".")}


@pytest.fixture(scope="module")
def whole(world: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "out"
    done = run(command("infer/generate.py", world / "model", prompts, output, *GENERATE))
    assert done.returncode == 0, done.stderr
    assert "40 rows in" in done.stdout and "7 rows have an error" in done.stdout
    return output


def test_every_row_has_its_result_in_the_order_of_the_input(whole: Path, prompts: Path) -> None:
    records = [json.loads(line) for line in (whole / "results.jsonl").read_text().splitlines()]
    assert [record["row"] for record in records] == list(range(ROWS))
    expected = {
        7: "temperature is -1",
        8: "field prompt: the text has no tokens",
        9: "expected one of the fields prompt, messages, tokens; found prompt and tokens",
        10: "100 tokens, with 100 to generate more than the model's 128 positions",
        11: "field tokens[2]: expected an id of the model, found 999",
        12: "messages[0].role: expected one of",
        13: "not valid JSON",
    }
    for row, record in enumerate(records):
        if row in expected:
            assert "outputs" not in record
            assert record["error"].startswith(f"{prompts}:{2 * row + 1}")
            assert expected[row] in record["error"]
            continue
        assert record["id"] == f"row {row}"
        assert len(record["outputs"]) == (2 if row % 4 == 1 else 1)
        for output in record["outputs"]:
            assert len(output["tokens"]) == len(output["log_probs"])
            assert output["finish_reason"] == ("length" if output["stop"] is None else "stop")
    drawn = [record["outputs"] for row, record in enumerate(records) if row % 4 == 1 and row not in expected]
    assert sum(first["tokens"] != second["tokens"] for first, second in drawn) > len(drawn) // 2


def test_a_killed_run_ends_with_the_same_bytes(world: Path, prompts: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = command("infer/generate.py", world / "model", prompts, output, *GENERATE)
    for part in (2, 3):
        killed = run(["-c", KILLER, str(part), *arguments])
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(list(output.glob("part-*"))) == 3
    resumed = run(arguments)
    assert resumed.returncode == 0, resumed.stderr
    assert "19 rows in" in resumed.stdout and "21 were there already" in resumed.stdout
    assert files(output) == files(whole)
    again = run(arguments)
    assert again.returncode == 0 and "0 rows in" in again.stdout
    assert files(output) == files(whole)


def test_two_processes_share_the_parts(world: Path, prompts: Path, whole: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    arguments = command("infer/generate.py", world / "model", prompts, output, *GENERATE)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    together = ("--processes.coordinator", f"localhost:{port}", "--processes.count", "2")
    running = [
        subprocess.Popen(
            [sys.executable, *arguments, *together, "--processes.index", str(index)],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for index in range(2)
    ]
    for process in running:
        text, _ = process.communicate(timeout=300)
        assert process.returncode == 0, text
    found, expected = files(output), files(whole)
    for name in expected:
        assert found[name] == expected[name], name


def test_several_devices_give_the_same_texts(world: Path, prompts: Path, whole: Path, tmp_path: Path) -> None:
    options = ("--mesh.data", "2", "--mesh.fsdp", "2", "--mesh.model", "2")
    output = tmp_path / "out"
    done = run(command("infer/generate.py", world / "model", prompts, output, *GENERATE, *options), devices=8)
    assert done.returncode == 0, done.stderr
    one, other = ((folder / "results.jsonl").read_text().splitlines() for folder in (whole, output))
    for line, expected in zip(map(json.loads, other), map(json.loads, one), strict=True):
        for made, wanted in zip(line.get("outputs", ()), expected.get("outputs", ()), strict=True):
            np.testing.assert_allclose(made.pop("log_probs"), wanted.pop("log_probs"), atol=1e-4)
        assert line == expected


def test_a_folder_of_other_results_is_left_alone(world: Path, prompts: Path, whole: Path, tmp_path: Path) -> None:
    before = files(whole)
    other = tmp_path / "other.jsonl"
    other.write_text('{"prompt": "x"}\n')
    changed, damaged = tmp_path / "changed", tmp_path / "damaged"
    shutil.copytree(world / "model", changed)
    tensors = load_file(changed / "model.safetensors")
    save_file(tensors | {"model.norm.weight": tensors["model.norm.weight"] * 2}, changed / "model.safetensors")
    shutil.copytree(whole, damaged)
    part = damaged / "part-00001-of-00006.jsonl"
    part.write_text(part.read_text().partition("\n")[0] + "\n")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/results.jsonl").write_text("mine")
    refused = (
        (command("infer/generate.py", world / "model", prompts, whole), "holds results of another run: "),
        (command("infer/generate.py", world / "model", other, whole, *GENERATE), "input_sha256 was"),
        (command("infer/generate.py", world / "model", tmp_path / "none", tmp_path / "x"), "no such file of prompts"),
        (command("infer/generate.py", world / "model", tmp_path, tmp_path / "x"), "is a folder, expected a file"),
        (command("infer/generate.py", world / "model", prompts, other), "is a file, expected a folder"),
        (command("infer/generate.py", world / "set", other, tmp_path / "x"), "config.json"),
        (command("infer/generate.py", changed, prompts, whole, *GENERATE), "; version was "),
        (command("infer/generate.py", world / "model", other, tmp_path / "taken"), "has results.jsonl but no job.json"),
        (
            command("infer/generate.py", world / "model", prompts, damaged, *GENERATE),
            "damaged, expected the records of 7",
        ),
    )
    results = run_all(None, *(("infer/generate.py", arguments[1:]) for arguments, _ in refused))
    for (status, _, error), (_, message) in zip(results, refused, strict=True):
        assert status == 1 and message in error, error
    assert files(whole) == before
    assert (tmp_path / "taken/results.jsonl").read_text() == "mine"


def test_an_interrupt_is_one_line(world: Path, prompts: Path, tmp_path: Path) -> None:
    arguments = command("infer/generate.py", world / "model", prompts, tmp_path / "out", *GENERATE)
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "out").is_dir() or not list((tmp_path / "out").glob("part-*")):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and errors == "interrupted; the same command resumes\n"


def test_activations_of_prompts(world: Path, prompts: Path, tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    output, options = tmp_path / "out", ("--part_rows", "16", "--blocks", "[0,1,-1]", "--read_tokens", "64")
    arguments = command("infer/activations.py", world / "model", prompts, output, *options)
    killed = run(["-c", KILLER, "2", *arguments])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    [finished] = output.glob("part-*.jsonl")
    finished.with_suffix(".safetensors").unlink()  # without its states a part isn't finished
    done = run(arguments)
    assert done.returncode == 0, done.stderr
    model = transformers.AutoModelForCausalLM.from_pretrained(world / "model").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(world / "model")
    rows = [json.loads(line) for line in prompts.read_text().splitlines() if line and not line.startswith("{broken")]
    by_id = {row.get("id"): row for row in rows}
    seen = 0
    for record in map(json.loads, (output / "results.jsonl").read_text().splitlines()):
        if "error" in record:
            continue
        with safe_open(output / record["file"], "np") as file:
            states, row = file.get_tensor("states")[record["index"]], file.get_tensor("row")[record["index"]]
            assert json.loads(file.metadata()["description"])["blocks"] == [0, 1, 2]
        given = by_id[record["id"]] if "id" in record else {"prompt": "x" * 100}
        if "messages" in given:
            chat = tokenizer.apply_chat_template(given["messages"], add_generation_prompt=True, tokenize=False)
            ids = tokenizer(chat, add_special_tokens=False)["input_ids"]
        else:
            ids = tokenizer(given["prompt"])["input_ids"]
        assert (row, record["tokens"]) == (record["row"], len(ids))
        with torch.no_grad():
            found = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        expected = np.stack([x[0, -1].numpy() for x in found])
        np.testing.assert_allclose(states, expected, atol=2e-5 * np.abs(expected).max())
        seen += 1
    assert seen == ROWS - 5  # settings for generation don't matter: rows 7 and 10 have states


def test_tools_by_name_for_queries(world: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same prompts; names from a text file; a killed run ends with the same bytes."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "programs"))  # the runs compile alike
    names = ["get_weather", "get", "rent_boat"]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n")
    options = ("--tools", str(tmp_path / "names.txt"), "--keep", "4", "--no_tool", "no tool", "--part_rows", "16")
    output = tmp_path / "out"
    arguments = command("infer/retrieve.py", world / "model", prompts, output, *options)
    killed = run(["-c", KILLER, "2", *arguments])
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = run(arguments)
    assert done.returncode == 0, done.stderr
    assert "24 rows in" in done.stdout and "16 were there already" in done.stdout
    whole = run(command("infer/retrieve.py", world / "model", prompts, tmp_path / "whole", *options))
    assert whole.returncode == 0, whole.stderr
    assert files(output) == files(tmp_path / "whole")
    records = [json.loads(line) for line in (output / "results.jsonl").read_text().splitlines()]
    assert sum("error" in record for record in records) == 5
    for record in records:
        if "error" not in record:
            ranked = record["ranked"]
            assert {(tool["tool"], tool["id"]) for tool in ranked} == {*zip(names, range(3), strict=True), (None, None)}
            assert [tool["score"] for tool in ranked] == sorted((tool["score"] for tool in ranked), reverse=True)

    # None of these is the model's fault, and none writes results or spoils others'.
    before = files(output)
    (tmp_path / "names.txt").write_text("\n".join([*names[:2], "rent_ship"]) + "\n")
    refused = {
        (): "the model has no tool tokens; --tools names a file of tools",
        options: "holds results of another run: tools_sha256 was ",
        (*options, "--no_tool", "get"): "names.txt: no_tool is 'get', the name of tool 1",
        (*options, "--score_end", "false"): 'search was ["BeamSearch(beams=10, ',
        (*options, "--max_query_tokens", "117"): "128 positions, of which names take up to 12; expected at most 116",
    }
    results = run_all(
        None,
        *(
            ("infer/retrieve.py", command("infer/retrieve.py", world / "model", prompts, output, *given)[1:])
            for given in refused
        ),
    )
    for (status, _, error), message in zip(results, refused.values(), strict=True):
        assert status == 1 and message in error, error
    assert files(output) == before
