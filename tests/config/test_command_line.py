"""The command line: unknown names are errors, what is printed can be read back, values are checked."""

import logging
import signal
from pathlib import Path

import pytest
import yaml

from jaxtool.config import (
    RunConfig,
    StageConfig,
    check_writable,
    open_console,
    parse_run,
    run_parser,
    run_script,
    to_yaml,
)

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def parse(*arguments: str) -> RunConfig:
    return parse_run(run_parser("test"), list(arguments))[0]


def test_defaults_are_the_dataclass() -> None:
    assert parse() == RunConfig()


def test_file_then_options_override(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run_dir: here\nretrieval:\n  epochs: 3\n  optimizer:\n    learning_rate: 1.0e-3\n")
    config = parse("--config", str(file), "--retrieval.optimizer.learning_rate", "2e-4")
    assert (config.run_dir, config.retrieval.epochs) == ("here", 3)
    assert config.retrieval.optimizer.learning_rate == 2e-4
    assert config.memorization == StageConfig()


def test_what_is_printed_can_be_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--seed", "7", "--data.system_prompt", "null", "--mesh.fsdp", "2"]
    with pytest.raises(SystemExit) as end:
        parse(*arguments, "--print_config")
    assert end.value.code == 0
    file = tmp_path / "printed.yaml"
    file.write_text(capsys.readouterr().out)
    assert parse("--config", str(file)) == parse(*arguments)
    file.write_text(to_yaml(parse(*arguments)))
    assert parse("--config", str(file)) == parse(*arguments)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda path: path.name)
def test_shipped_configs_parse(file: Path) -> None:
    config = parse("--config", str(file))
    assert config.run_dir == yaml.safe_load(file.read_text())["run_dir"]


def test_there_are_shipped_configs() -> None:
    assert {path.name for path in CONFIGS} >= {"quickstart.yaml", "toollens.yaml"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--nope", "1"], "--nope"),
        (["--retrieval.nope", "1"], "nope"),
        (["--retrieval.epochs", "many"], "epochs"),
        (["--retrieval.epochs", "-1"], "error: retrieval.epochs is -1"),
        (["--memorization.rows", "0"], "error: memorization.rows is 0, expected 1 to 65,536"),
        (["--memorization", "{rows: 0}"], "error: memorization.rows is 0"),
        (["--retrieval.optimizer.learning_rate", "0"], "error: retrieval.optimizer.learning_rate is 0"),
        (["--memorization.optimizer.learning_rate", ".inf"], "error: memorization.optimizer.learning_rate is inf"),
        (["--retrieval.optimizer.clip_norm", ".nan"], "error: retrieval.optimizer.clip_norm is nan"),
        (["--memorization.optimizer.beta2", "1"], "error: memorization.optimizer.beta2 is 1"),
        (["--data.max_documents", "-1"], "error: data.max_documents is -1"),
        (["--checkpoints.keep", "0"], "error: checkpoints.keep is 0"),
        (["--model.compute_dtype", "float16"], "error: model.compute_dtype is 'float16'"),
        (["--model.remat", "some"], "error: model.remat is 'some'"),
        (["--evaluation.k", "3"], "error: evaluation.k is 3, expected 5 or more: the metrics look at 5 places"),
        (["--run_dir", " "], "run_dir"),
        (["--seed", "-1"], "seed is -1"),
        (["--retrieval.optimizer.weight_decay", ".nan"], "weight_decay is nan"),
        (["--config", "absent.yaml"], "absent.yaml"),
    ],
)
def test_errors_name_the_field(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(*arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--memorization.rows", "1000000000"], "memorization.rows is 1000000000, expected 1 to 65,536"),
        (["--retrieval.row_length", "1000000000"], "retrieval.row_length is 1000000000, expected 2 to 131,072"),
        (["--retrieval.rows", "60000", "--retrieval.row_length", "60000"], "retrieval.rows x row_length is 3600000000"),
        (["--retrieval.epochs", "1000000000"], "retrieval.epochs is 1000000000, expected 0 to 1,000"),
        (["--evaluation.batch_size", "1000000000"], "evaluation.batch_size is 1000000000, expected 1 to 65,536"),
        (["--data.max_query_tokens", "1000000000"], "data.max_query_tokens is 1000000000, expected 1 to 131,072"),
        (["--data.max_document_tokens", "1000000000"], "data.max_document_tokens is 1000000000"),
        (
            ["--evaluation.batch_size", "60000", "--data.max_query_tokens", "60000"],
            "evaluation.batch_size x data.max_query_tokens is 3600000000, expected 1 to 67,108,864",
        ),
    ],
)
def test_sizes_that_no_memory_holds(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(*arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_large_jobs_are_let_through() -> None:
    arguments = ["--retrieval.rows", "8192", "--retrieval.row_length", "8192", "--evaluation.batch_size", "16384"]
    config = parse(*arguments, "--data.max_query_tokens", "4096", "--retrieval.optimizer.clip_norm", ".inf")
    assert config.retrieval.rows * config.retrieval.row_length == 2**26


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "seed: 1\nrun_dir: x\nseed: 2\n",
            "run.yaml, line 3: the key 'seed' is repeated, it was given in line 1 already",
        ),
        ("retrieval:\n  rows: 1\n  rows: 1\n", "run.yaml, line 3: the key 'rows' is repeated"),
        ("retrieval: {optimizer: {beta1: 0.5,\n beta1: 0.6}}\n", "run.yaml, line 2: the key 'beta1' is repeated"),
        ("memorization: {}\nretrieval: {}\nmemorization: {}\n", "run.yaml, line 3: the key 'memorization' is repeated"),
    ],
)
def test_repeated_keys(tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        parse("--config", str(file))
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_repeated_key_in_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--retrieval", "{rows: 1, rows: 2}")
    assert "the key 'rows' is repeated" in capsys.readouterr().err


def test_the_same_key_in_several_places_is_not_repeated(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("memorization: &stage {rows: 3, optimizer: {beta1: 0.5}}\nretrieval: *stage\n")
    config = parse("--config", str(file))
    assert config.memorization == config.retrieval and config.retrieval.optimizer.beta1 == 0.5
    file.write_text("memorization: &stage {rows: 3, epochs: 2}\nretrieval: {<<: *stage, rows: 4}\n")
    config = parse("--config", str(file))
    assert (config.memorization.rows, config.retrieval.rows, config.retrieval.epochs) == (3, 4, 2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "memorization: null\n",
            "memorization is null, expected its fields; a stage is skipped by its field epochs: 0",
        ),
        ("retrieval:\nseed: 1\n", "retrieval is null, expected its fields; a stage is skipped by its field epochs: 0"),
        ("data: ~\n", "data is null, expected its fields\n"),
        ("retrieval: {optimizer: null}\n", "retrieval.optimizer is null, expected its fields\n"),
        ("retrieval: {optimizer: {beta1: null}}\n", "retrieval.optimizer.beta1 is null, expected a value\n"),
        ("run_dir: ~\n", "run_dir is null, expected a value\n"),
    ],
)
def test_null_is_no_value(tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        parse("--config", str(file))
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("text", ["nope: 1\n", "retrieval:\n  nope: 1\n", "- 1\n", "retrieval: [\n"])
def test_bad_files(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        parse("--config", str(file))
    assert end.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"run_dir: gr\xfc\n", "run.yaml: expected UTF-8 text, found byte 0xfc"),
        ("seed: 1\n".encode("utf-16"), "run.yaml: expected UTF-8 text, found byte 0xff"),
        (b"seed: \x00\n", "run.yaml"),
        (b"retrieval:\n\trows: 8\n", "in run.yaml, line 2, column 1"),
        (b"# nothing yet\n", "run.yaml: expected lines of FIELD: VALUE, found nothing"),
        (b"- 1\n", "run.yaml: expected lines of FIELD: VALUE, found a list"),
        (b"hello\n", "run.yaml: expected lines of FIELD: VALUE, found 'hello'"),
    ],
)
@pytest.mark.parametrize("joined", [False, True])
def test_bad_files_are_named(
    tmp_path: Path, content: bytes, said: str, joined: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_bytes(content)
    with pytest.raises(SystemExit) as end:
        parse(*([f"--config={file}"] if joined else ["--config", str(file)]))
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_help_lists_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse("--help")
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert "--retrieval.optimizer.warmup_share" in out
    assert "share of the steps in which the rate rises" in " ".join(out.split())


def test_own_errors_are_one_line_and_foreign_ones_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_script(lambda: StageConfig(rows=0) and None)
    assert end.value.code == 1
    assert capsys.readouterr().err == "error: rows is 0, expected 1 to 65,536\n"
    with pytest.raises(SystemExit) as end:
        run_script(lambda: int("x") and None)
    assert end.value.code == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("Traceback") and lines[-1].startswith("ValueError: invalid literal")
    with pytest.raises(SystemExit) as end:
        run_script(lambda: Path(__file__).parent.read_text() and None)
    assert end.value.code == 1
    assert capsys.readouterr().err == f"error: {Path(__file__).parent}: Is a directory\n"
    ends: list[int] = []
    run_script(lambda: StageConfig(rows=0) and None, end=ends.append)
    assert ends == [1]


@pytest.mark.parametrize(
    ("words", "said"), [({}, "interrupted\n"), ({"interrupted": "; come again"}, "interrupted; come again\n")]
)
def test_an_interrupt_is_one_line(words: dict[str, str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run_script(lambda: signal.raise_signal(signal.SIGINT), **words)
    assert end.value.code == 130
    assert capsys.readouterr().err == said


def test_an_option_cut_short_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_run(run_parser("test"), ["--memorization.epoch", "3"])
    assert stopped.value.code != 0 and "memorization.epoch" in capsys.readouterr().err


def test_what_is_logged_about_the_layout_of_files_stays_out_of_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    for name in ("jaxtool", "jaxtool.weights.load", "jaxtool.weights.tokenizers"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)  # and back
    open_console()
    for name in ("data.assets", "weights.export", "weights.load", "weights.tokenizers"):
        logging.getLogger(f"jaxtool.{name}").info(f"note of {name}")
        logging.getLogger(f"jaxtool.{name}").warning(f"warning of {name}")
    shown = capsys.readouterr().out
    assert "note of data.assets" in shown and "note of weights.export" in shown
    assert "note of weights.load" not in shown and "note of weights.tokenizers" not in shown
    assert shown.count("warning of") == 4


def test_files_that_can_be_written(tmp_path: Path) -> None:
    for name in ("new", "old", "link"):
        (tmp_path / "old").write_text("kept")
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("old")
        check_writable(tmp_path / name, "--output")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "old"]
    assert (tmp_path / "old").read_text() == "kept"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("", ": is a folder, expected a file"),
        ("no/where", "no/where: there is no folder .*no, make it first"),
        ("file/in", "file/in: there is no folder .*file, make it first"),
        ("/dev/null", "--output /dev/null: is no plain file, expected a file"),
        ("/proc/jaxtool", "--output /proc/jaxtool: can't be written"),
    ],
)
def test_files_that_can_not_be_written(tmp_path: Path, path: str, said: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=said):
        check_writable(tmp_path / path, "--output")
