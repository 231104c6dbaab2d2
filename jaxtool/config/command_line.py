"""The command line of every script: `--config FILE` and an option for each field of the config dataclass.

Unknown and repeated keys and unknown options are errors, `--print_config` shows the resolved configuration, `--help`
lists every field.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import signal
import sys
import tempfile
import traceback
import typing
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jsonargparse
import yaml
from rich.console import Console
from rich.logging import RichHandler

from jaxtool.config.run_config import RunConfig
from jaxtool.config.stage_config import StageConfig

_PARSER_MODE = "yaml_unique_keys"
Config = TypeVar("Config")


def run_parser(description: str) -> jsonargparse.ArgumentParser:
    """A parser with `--config` and the fields of `RunConfig`; scripts add options of their own."""
    return config_parser(RunConfig, description)


def parse_run(parser: jsonargparse.ArgumentParser, arguments: Sequence[str] | None = None) -> tuple[RunConfig, Any]:
    """The run's configuration and the namespace with the script's own options.

    Ends the process with status 2 and a message when an option, key or value is wrong.
    """
    return parse_config(RunConfig, parser, arguments)


def config_parser(kind: type[Any], description: str) -> jsonargparse.ArgumentParser:
    """A parser with `--config` and the fields of a dataclass."""
    parser = jsonargparse.ArgumentParser(
        description=description,
        usage="%(prog)s [--config FILE] [--help] [--print_config] [--FIELD VALUE ...]",
        formatter_class=jsonargparse.DefaultHelpFormatter,
        parser_mode=_PARSER_MODE,
        allow_abbrev=False,  # a misspelt field is an error, not the field that begins like it
    )
    parser.add_argument("--config", action="config", help="YAML file with fields of the run; later options override it")
    parser.add_class_arguments(kind)
    return parser


def parse_config(
    kind: type[Config], parser: jsonargparse.ArgumentParser, arguments: Sequence[str] | None = None
) -> tuple[Config, Any]:
    """The dataclass with what was given, and the namespace with the script's own options; as `parse_run`."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        namespace = parser.parse_args(given)
    except UnicodeDecodeError as error:
        files = [value for option, value in itertools.pairwise(given) if option == "--config"]
        files += [option.removeprefix("--config=") for option in given if option.startswith("--config=")]
        parser.error(f"{', '.join(files)}: expected UTF-8 text, found byte 0x{error.object[error.start]:02x}")
    try:
        return _built(kind, namespace), namespace
    except ValueError as error:
        parser.error(str(error))


def _built(kind: Any, values: Any, outer: str = "") -> Any:
    """The dataclass `kind` of parsed values; errors name fields from the outermost one on."""
    hints, arguments = typing.get_type_hints(kind), {}
    for field in dataclasses.fields(kind):
        name, value, hint = f"{outer}{field.name}", values[field.name], hints[field.name]
        nested = dataclasses.is_dataclass(hint)
        # jsonargparse lets null pass for a field of any type.
        if value is None and type(None) not in typing.get_args(hint):
            wanted = "its fields" if nested else "a value"
            instead = "; a stage is skipped by its field epochs: 0" if nested and issubclass(hint, StageConfig) else ""
            raise ValueError(f"{name} is null, expected {wanted}{instead}")
        arguments[field.name] = _built(hint, value, f"{name}.") if nested else value
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{outer}{error}") from error


def _load(text: str, path: str = "") -> Any:
    """YAML as jsonargparse reads it, but a repeated key is an error: YAML's own rule is that the last one wins."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise yaml.YAMLError(str(error).replace('"<unicode string>"', path or "the value")) from error
    if path and not isinstance(root, yaml.MappingNode):
        found = "nothing" if root is None else "a list" if isinstance(root, yaml.SequenceNode) else repr(root.value)
        raise yaml.YAMLError(f"{path}: expected lines of FIELD: VALUE, found {found}")
    for key, line, before in _repeated_keys(root, set()):
        place = f"{path}, line {line}" if path else f"line {line}"
        raise yaml.YAMLError(f"{place}: the key {key!r} is repeated, it was given in line {before} already")
    value = jsonargparse.get_loader("yaml")(text)
    if isinstance(value, str) and isinstance(root, yaml.MappingNode) and path:
        # jsonargparse takes a mapping of nulls for a plain text.
        value = dict.fromkeys(key.value for key, _ in root.value)
    return value


def _repeated_keys(node: yaml.Node | None, seen: set[int]) -> Iterator[tuple[str, int, int]]:
    if node is None or id(node) in seen:  # an alias is the node it stands for
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _repeated_keys(item, seen)
    elif isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines:
                yield name, line, lines[name]
            lines[name] = line
            yield from _repeated_keys(value, seen)


jsonargparse.set_loader(_PARSER_MODE, _load, exceptions=(yaml.YAMLError,))


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
    # How files of weights and tokenizers are laid out is for those who convert them, not for those who train.
    for name in ("load", "tokenizers"):
        logging.getLogger(f"jaxtool.weights.{name}").setLevel(logging.WARNING)
    return console


def check_writable(path: Path, option: str) -> None:
    """Checks that the file of an option can be written, before the work whose result it shall hold.

    Raises:
        ValueError: something else is in its place, or its folder is absent or can't be written.
    """
    if path.exists() and not path.is_file():
        raise ValueError(f"{option} {path}: is {'a folder' if path.is_dir() else 'no plain file'}, expected a file")
    if not path.parent.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {path.parent}, make it first")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(f"{option} {path}: can't be written ({error.strerror})") from error


def run_script(main: Callable[[], None], *, interrupted: str = "", end: Callable[[int], object] = sys.exit) -> None:
    """Calls `main`; errors that jaxtool raises end the process with status 1 and their message alone.

    So do those of the system that name a file (it may not be read, it is a folder). Other faults raised elsewhere (a
    bug) keep their traceback. An interrupt (Ctrl-C) ends it with status 130
    and one line, which goes on with the text `interrupted`.

    Args:
        main: the script.
        interrupted: what is said behind "interrupted".
        end: ends the process with a status other than 0; scripts that run on several processes pass
            `jaxtool.parallel.end_process`.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)  # scripts have another one while they import
    try:
        main()
    except KeyboardInterrupt:
        print(f"interrupted{interrupted}", file=sys.stderr)
        end(130)
    except Exception as error:
        if isinstance(error, ValueError | FileNotFoundError) and _is_ours(error):
            print(f"error: {error}", file=sys.stderr)
        elif isinstance(error, OSError) and error.filename is not None:
            print(f"error: {error.filename}: {error.strerror}", file=sys.stderr)
        else:
            traceback.print_exc()
        end(1)


def _is_ours(error: BaseException) -> bool:
    raised_in = [frame.filename for frame in traceback.extract_tb(error.__traceback__)][-1]
    root = Path(__file__).resolve().parents[1]
    return Path(raised_in).resolve().is_relative_to(root) or Path(raised_in).parent.name in ("train", "infer")
