"""The command line: unknown names are errors, what is printed can be read back, values are checked."""

from pathlib import Path

import pytest
import yaml

from jaxtool.config import RunConfig, StageConfig, parse_run, run_parser, run_script, to_yaml

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
        (["--retrieval.epochs", "-1"], "epochs is -1"),
        (["--retrieval.optimizer.learning_rate", "0"], "learning_rate is 0"),
        (["--retrieval.optimizer.beta2", "1"], "beta2 is 1"),
        (["--model.compute_dtype", "float16"], "float16"),
        (["--model.remat", "some"], "remat"),
        (["--evaluation.k", "3"], "evaluation.k is 3"),
        (["--run_dir", " "], "run_dir"),
        (["--seed", "-1"], "seed is -1"),
        (["--retrieval.optimizer.weight_decay", "nan"], "weight_decay"),
        (["--config", "absent.yaml"], "absent.yaml"),
    ],
)
def test_errors_name_the_field(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(*arguments)
    assert end.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["nope: 1\n", "retrieval:\n  nope: 1\n", "- 1\n", "retrieval: [\n", "run_dir: ~\n", "data: ~\n"]
)
def test_bad_files(tmp_path: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(SystemExit) as end:
        parse("--config", str(file))
    assert end.value.code == 2
    assert capsys.readouterr().err


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
    assert capsys.readouterr().err == "error: stage.rows is 0, expected 1 or more\n"
    with pytest.raises(ValueError, match="invalid literal"):
        run_script(lambda: int("x") and None)
