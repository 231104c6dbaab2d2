"""The setting that says what is trained: its way through YAML and the command line, and its limits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxtool.config import RunConfig, TrainableConfig, parse_run, run_parser, to_yaml


def test_through_yaml_and_options(tmp_path: Path) -> None:
    expected = TrainableConfig(parameters="lora", lora_rank=4, lora_alpha=2.5, lora_projections=("query", "up"))
    (tmp_path / "run.yaml").write_text(to_yaml(RunConfig(trainable=expected)))
    config, _ = parse_run(run_parser(""), ["--config", str(tmp_path / "run.yaml")])
    assert config.trainable == expected
    options = ["--trainable.parameters", "lora", "--trainable.lora_rank", "4", "--trainable.lora_alpha", "2.5"]
    config, _ = parse_run(run_parser(""), [*options, "--trainable.lora_projections", "[query, up]"])
    assert config.trainable == expected
    config, _ = parse_run(run_parser(""), [])
    assert config.trainable == TrainableConfig() and config.trainable.parameters == "full"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("parameters", "head", "parameters is 'head', expected one of full, lora, tool_rows"),
        ("lora_rank", 0, "lora_rank is 0, expected 1 to 4,096"),
        ("lora_rank", 5_000, "lora_rank is 5000, expected 1 to 4,096"),
        ("lora_alpha", 0.0, "lora_alpha is 0.0, expected a positive number"),
        ("lora_alpha", float("nan"), "lora_alpha is nan, expected a positive number"),
        ("lora_projections", (), r"lora_projections is \[\], expected different projections"),
        ("lora_projections", ("up", "up"), r"lora_projections is \['up', 'up'\], expected different"),
    ],
)
def test_limits(field: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        TrainableConfig(**{field: value})


def test_errors_name_the_outer_field(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse_run(run_parser(""), ["--trainable.lora_rank", "0"])
    assert "trainable.lora_rank is 0, expected 1 to 4,096" in capsys.readouterr().err
