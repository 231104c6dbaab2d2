"""The command line of every script: `--config FILE` and an option for each field of the config dataclass.

Unknown keys and options are errors, `--print_config` shows the resolved configuration, `--help` lists every field.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from rich.console import Console
from rich.logging import RichHandler

from jaxtool.config.run_config import RunConfig


def run_parser(description: str) -> jsonargparse.ArgumentParser:
    """A parser with `--config` and the fields of `RunConfig`; scripts add options of their own."""
    parser = jsonargparse.ArgumentParser(
        description=description,
        usage="%(prog)s [--config FILE] [--help] [--print_config] [--FIELD VALUE ...]",
        formatter_class=jsonargparse.DefaultHelpFormatter,
    )
    parser.add_argument("--config", action="config", help="YAML file with fields of the run; later options override it")
    parser.add_class_arguments(RunConfig)
    return parser


def parse_run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str] | None = None) -> tuple[RunConfig, Any]:
    """The run's configuration and the namespace with the script's own options.

    Ends the process with status 2 and a message when an option, key or value is wrong.
    """
    namespace = parser.parse_args(arguments)
    names = [field.name for field in dataclasses.fields(RunConfig)]
    for key, value in namespace.items():
        # jsonargparse lets null pass for a field of any type.
        if value is None and key.split(".")[0] in names and key != "data.system_prompt":
            parser.error(f"{key} is null, expected a value")
    try:
        objects = parser.instantiate(namespace)
        return RunConfig(**{name: objects[name] for name in names}), objects
    except ValueError as error:
        parser.error(str(error))


def to_yaml(config: Any) -> str:
    """The dataclass as YAML that the same class can be read from."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False, allow_unicode=True)


def open_console() -> Console:
    """The terminal of a script: jaxtool's log messages go to it, other libraries' only from warnings on."""
    # Into a file or a pipe, rich would take 80 columns, too few for the tables.
    console = Console() if sys.stdout.isatty() else Console(width=160)
    handler = RichHandler(console=console, show_path=False, show_time=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler], force=True)
    logging.getLogger("jaxtool").setLevel(logging.INFO)
    return console


def run_script(main: Callable[[], None]) -> None:
    """Calls `main`; errors that jaxtool raises end the process with status 1 and their message alone.

    Faults raised elsewhere (a bug, a full disk) keep their traceback.
    """
    try:
        main()
    except (ValueError, FileNotFoundError) as error:
        if not _is_ours(error):
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted; the same command resumes from the last checkpoint", file=sys.stderr)
        sys.exit(130)


def _is_ours(error: BaseException) -> bool:
    raised_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1]
    root = Path(__file__).resolve().parents[1]
    return Path(raised_in).resolve().is_relative_to(root) or Path(raised_in).parent.name in ("train", "infer")
