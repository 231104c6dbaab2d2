"""From a catalogue of functions and labelled queries to ranked tools, and what the scripts say on the way."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.scripts.test_hostile_inputs import run_all
from tests.scripts.tiny_world import TOPICS

Results = Mapping[str, tuple[int, str, str]]


def write_rows(path: Path, rows: Iterable[tuple[str, list[str]]]) -> Path:
    path.write_text("".join(json.dumps({"query": query, "tools": tools}) + "\n" for query, tools in rows))
    return path


def copied(run_dir: Path, copy: Path, last: int) -> list[str]:
    """A copy of the run whose checkpoints behind step `last` are not written yet; the options that name it."""
    shutil.copytree(run_dir, copy)
    for checkpoint in (copy / "checkpoints").iterdir():
        if int(checkpoint.name) > last:
            shutil.rmtree(checkpoint)
    return ["--run_dir", str(copy)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `tools.json`, `train.jsonl`, what is wrong, and soon `run/` and its copies."""
    root = tmp_path_factory.mktemp("own")
    functions = [{"type": "function", "function": {"name": f"get_{topic}", "description": topic}} for topic in TOPICS]
    (root / "tools.json").write_text(json.dumps(functions, indent=2))
    rows = [(f"{topic} {i}", [f"get_{topic}"]) for i in range(8) for topic in TOPICS]
    write_rows(root / "train.jsonl", rows)
    write_rows(root / "wrong.jsonl", [*rows, ("weather and news", ["get_weather", "get_new"])])
    (root / "q.json").write_text('["weather 1", {"query": "news 2", "tools": ["get_news"]}]')
    (root / "array.txt").write_text('["weather", "news"]')
    (root / "few").mkdir()
    (root / "few/tools.json").write_text(json.dumps(functions[:1]))
    write_rows(root / "few/train.jsonl", rows[:1])
    return root


@pytest.fixture(scope="module")
def options(root: Path) -> list[str]:
    options = ["--data.train_queries", str(root / "train.jsonl"), "--data.source", str(root / "tools.json")]
    options += ["--run_dir", str(root / "run"), "--retrieval.epochs", "1", "--checkpoints.every_steps", "2"]
    return [*options, "--checkpoints.keep", "9", "--evaluation.max_queries", "4"]


@pytest.fixture(scope="module")
def trained(root: Path, options: list[str], world: Path) -> Results:
    """What training printed, on the labelled queries and on wrong ones."""
    wrong = [*options, "--data.train_queries", str(root / "wrong.jsonl")]
    results = run_all(
        world, ("train/finetune.py", options), ("train/finetune.py", wrong), ("infer/evaluate.py", ["--help"])
    )
    return dict(zip(("trained", "wrong", "help"), results, strict=True))


def steps_of(run_dir: Path) -> dict[str, int]:
    return json.loads((run_dir / "stages.json").read_text())


@pytest.fixture(scope="module")
def asked(root: Path, options: list[str], world: Path, trained: Results) -> Results:
    """What the scripts print that use the run, and copies of it that stopped earlier."""
    end = steps_of(root / "run")["memorization"]
    stopped = {
        name: copied(root / "run", root / name, last)
        for name, last in (("inside", end + 2), ("before", end), ("first", 2), ("old", 999), ("damaged", 999))
    }
    (root / "old/stages.json").unlink()
    (root / "damaged/stages.json").write_text('{"retrieval": "all"}')
    copied(root / "run", root / "no_report", 999)
    (root / "no_report/report").write_text("")
    commands: dict[str, list[str]] = {
        "scored": [],
        "seed": ["--data.seed", "1"],
        **stopped,
        "train queries": ["--data.train_queries", "absent"],
        "other tools": ["--data.source", str(root / "few"), "--data.train_queries", "null"],
        "no report": ["--run_dir", str(root / "no_report")],
        "run file": ["--run_dir", str(root / "q.json")],
        "run absent": ["--run_dir", str(root / "absent")],
        "too short": ["--data.max_query_tokens", "5"],
        "too long": ["--data.max_query_tokens", "129"],
    }
    listed = [("infer/evaluate.py", [*options, *command]) for command in commands.values()]
    export = ("infer/export.py", [*options, *stopped["inside"], "--output", str(root / "exported")])
    return dict(zip([*commands, "export"], run_all(world, *listed, export), strict=True))


def test_training_on_a_catalogue_and_labelled_queries(root: Path, trained: Results) -> None:
    status, out, error = trained["trained"]
    assert status == 0, error
    assert "of 80 queries, 20 are held out with seed 0 and 60 trained on" in out
    assert "data: 10 tools, 60 training queries; held out for evaluation 20 queries\n" in out
    assert "its vocabulary has 258 tokens of text and 10 of tools" in out
    lines = [json.loads(line) for line in (root / "run/metrics.jsonl").read_text().splitlines()]
    done = Counter(line["stage"] for line in lines if "loss" in line)
    assert steps_of(root / "run") == done
    status, _, error = trained["wrong"]
    assert status == 1
    assert "wrong.jsonl:81: field tools[1]: no tool named 'get_new' among 10 tools; nearest: 'get_news'" in error


def test_the_run_scores_its_held_out_queries(root: Path, asked: Results) -> None:
    assert asked["scored"][0] == 0 and asked["scored"][2] == ""
    rows = json.loads((root / "run/report/results.json").read_text())["results"]
    assert {row["group"] for row in rows} == {"test queries"} and {row["queries"] for row in rows} == {4}
    status, _, error = asked["seed"]
    assert status == 0 and "warning: data.seed is 1, but was 0 in training: where it decides the split" in error


def test_the_run_ranks_tools_for_queries(root: Path, asked: Results) -> None:
    """Texts, lines of JSON, an array; some for a few tools alone; what can't be used is told in its record."""
    assert asked["scored"][0] == 0
    lines = [
        *({"query": f"{topic} 1", "id": topic} for topic in TOPICS),
        "news 2",
        {"text": "news 2", "tools": ["get_news"], "allowed": ["get_news", "get_movie", "get_hotel"]},
        {"prompt": "news", "query": "x"},
        {"query": " "},
        {"query": "news", "allowed": ["get_news", "get_no"]},
        {"query": "news", "allowed": []},
        {"query": "news " * 40},
        {"query": "news", "ranked": 1},
        {"messages": [{"role": "user", "content": "news 2"}]},
    ]
    (root / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = ["--model", str(root / "run"), "--output"]
    several, array, text, again, longer, nothing, unread = run_all(
        None,
        ("infer/retrieve.py", [*given, str(root / "several"), "--input", str(root / "lines.jsonl"), "--keep", "20"]),
        ("infer/retrieve.py", [*given, str(root / "array"), "--input", str(root / "q.json"), "--part_rows", "1"]),
        ("infer/retrieve.py", [*given, str(root / "text"), "--input", str(root / "array.txt")]),
        ("infer/retrieve.py", [*given, str(root / "array"), "--input", str(root / "q.json"), "--keep", "4"]),
        (
            "infer/retrieve.py",
            [*given, str(root / "x"), "--input", str(root / "q.json"), "--max_query_tokens", "129"],
        ),
        ("infer/retrieve.py", [*given, str(root / "x"), "--input", str(root / "q.json"), "--beams", "4"]),
        ("infer/retrieve.py", [*given, str(root / "x"), "--input", str(root / "q.json"), "--read_tokens", "4"]),
    )
    assert several[0] == 0, several[2]
    assert "5 rows have an error" in several[1]
    assert "1 query cut to 40 tokens at the end" in several[1]
    records = [json.loads(line) for line in (root / "several/results.jsonl").read_text().splitlines()]
    assert [record["row"] for record in records] == list(range(len(lines)))
    wrong = {
        12: "expected one of the fields query, text, prompt, messages, tokens; found query and prompt",
        13: "field query: the query is empty",
        14: "field allowed: there is no tool 'get_no' among the 10",
        15: "field allowed: expected a list of at least one name of a tool",
        17: "field 'ranked' is a field of the result",
    }
    for row, record in enumerate(records):
        if row in wrong:
            assert record["error"].startswith(f"{root / 'lines.jsonl'}:{row + 1}") and wrong[row] in record["error"]
            continue
        names = [tool["tool"] for tool in record["ranked"]]
        assert sorted(names) == sorted(record.get("allowed") or [f"get_{topic}" for topic in TOPICS])
        assert all(tool["tool"] == f"get_{TOPICS[tool['id']]}" for tool in record["ranked"])
        probabilities = [tool["probability"] for tool in record["ranked"]]
        assert probabilities == sorted(probabilities, reverse=True)
        assert sum(probabilities) == pytest.approx(1, abs=1e-5)
    assert records[11]["tools"] == ["get_news"] and records[16]["cut"] > 100
    # A conversation of one turn is the query's prompt.
    assert [tool["id"] for tool in records[18]["ranked"]] == [tool["id"] for tool in records[10]["ranked"]]

    assert array[0] == 0, array[2]
    found = [json.loads(line) for line in (root / "array/results.jsonl").read_text().splitlines()]
    assert [record["query"] for record in found] == ["weather 1", "news 2"]
    assert found[0]["ranked"] == [pytest.approx(tool, abs=1e-6) for tool in records[0]["ranked"][:5]]
    assert text[0] == 1 and "array.txt:1: begins like JSON" in text[2]
    assert again[0] == 1 and "holds results of another run: keep was 5, now 4" in again[2]
    assert longer[0] == 1 and "max_query_tokens is 129, the model has 128 positions; expected at most 128" in longer[2]
    assert nothing[0] == 2 and "beams is for names of tools, and tools is not given" in nothing[2]
    assert unread[0] == 2 and "read_tokens is for names of tools, and tools is not given" in unread[2]
    assert not (root / "x").exists()

    # As a run that was killed in its second part leaves the folder.
    before = {path.name: path.read_bytes() for path in (root / "array").glob("[!.]*")}
    assert len(before) == 4
    (root / "array/results.jsonl").unlink()
    (root / "array/part-00001-of-00002.jsonl").unlink()
    (root / "array/.part-00001-of-00002.jsonl.partial").write_text('{"row": 1, "qu')
    ((status, out, error),) = run_all(
        None, ("infer/retrieve.py", [*given, str(root / "array"), "--input", str(root / "q.json"), "--part_rows", "1"])
    )
    assert status == 0, error
    assert "1 rows in" in out and "1 were there already" in out
    assert {path.name: path.read_bytes() for path in (root / "array").glob("[!.]*")} == before


def test_a_run_that_stopped_is_used_with_a_warning(root: Path, asked: Results) -> None:
    stages = steps_of(root / "run")
    memorization, retrieval = stages["memorization"], stages["retrieval"]
    assert list(stages) == ["memorization", "retrieval"] and memorization % 2 == 0 and retrieval > 2
    stopped = "training is not finished, stage {} stopped at step {} of {} (the last checkpoint)"
    unbegun = f", retrieval ({retrieval} steps) has not begun"
    inside = f"{root / 'inside'}: {stopped.format('retrieval', 2, retrieval)}"
    expected = {
        "inside": inside,
        "before": f"{root / 'before'}: {stopped.format('memorization', memorization, memorization)}{unbegun}",
        "first": f"{root / 'first'}: {stopped.format('memorization', 2, memorization)}{unbegun}",
        "old": f"{root / 'old'}: has no stages.json, which says how many steps training takes: it may be unfinished",
        "export": inside,
    }
    for name, said in expected.items():
        status, _, error = asked[name]
        assert (status, error) == (0, f"warning: {said}; train/finetune.py with the same options goes on from there\n")
    assert "training is not finished" in (root / "before/report/report.html").read_text()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("damaged", "stages.json: expected the number of steps of each stage"),
        ("train queries", "absent: no such file of train queries"),
        ("other tools", "few: its 1 tools are not the 10 that"),
        ("no report", "report: expected a folder for the report that can be written"),
        ("run file", "q.json: is a file; expected the folder of a run"),
        ("run absent", "absent: no such folder; expected the folder of a run"),
        (
            "too short",
            "with data.max_query_tokens 5: max_length 5 leaves no room for text, the chat template alone has",
        ),
        ("too long", "129 is beyond the model's 128 positions"),
    ],
)
def test_what_can_not_work_is_told_before_the_checkpoint_is_read(asked: Results, name: str, said: str) -> None:
    assert "restored in" in asked["scored"][1]
    status, out, error = asked[name]
    assert status == 1
    assert said in error and "restored in" not in out


def test_help_says_what_goes_in_and_what_comes_out(trained: Results) -> None:
    status, out, _ = trained["help"]
    out = re.sub(r"\s+", " ", out)
    assert status == 0
    for said in (
        "ranked tools of a query, best first. At least 5",
        'rows {"query": text, "tools": [name, ...]}',
    ):
        assert said in out
