"""Files of training data: which ones a source names, and their records one by one, however large the file.

What records mean is decided in documents.py and chat_files.py. Strict like `jaxtool.tools.json_records`, which reads
whole files; only JSON arrays, which have no lines to go by, are read there.
"""

from __future__ import annotations

import glob
import gzip
import json
import math
import os
import re
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from jaxtool.data.sample_writer import SampleError
from jaxtool.tools.json_records import Problems, Record, counted, read_records

MOST_LINE_BYTES = 2**28
_GZIP = b"\x1f\x8b"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")
_GLOB = re.compile(r"[*?\[]")
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """Files that a source names.

    Attributes:
        files: in the order of their paths, the same on every machine.
        notes: what was left out.
    """

    files: tuple[Path, ...]
    notes: tuple[str, ...]


def source_files(source: str | Path, endings: tuple[str, ...]) -> SourceFiles:
    """The files of a folder (with its subfolders), of a pattern such as `data/*.jsonl`, or the one file itself.

    Args:
        source: path or pattern; `~` is the home folder.
        endings: of the files to read; each may be followed by `.gz`. Others in a folder are left out and noted.

    Raises:
        FileNotFoundError: nothing is there.
        SampleError: a file with another ending, or nothing with one of these.
    """
    expected = f"expected {', '.join(endings)} (each also with .gz)"
    path = Path(source).expanduser()
    if path.is_dir():
        found = sorted(_below(path), key=lambda file: file.relative_to(path).as_posix())
    elif path.exists():
        found = [path]
    elif _GLOB.search(str(path)):
        matches = [Path(match) for match in glob.glob(str(path), recursive=True)]
        found = sorted((match for match in matches if match.is_file()), key=lambda file: file.as_posix())
        if not found:
            raise FileNotFoundError(f"{source}: no file matches this pattern")
    else:
        raise FileNotFoundError(f"{source}: no such file or folder")
    files = [file for file in found if file.name.lower().removesuffix(".gz").endswith(endings)]
    others = [file for file in found if file not in set(files)]
    if not files:
        names = ", ".join(file.name for file in others[:5]) or "nothing"
        raise SampleError(f"{source}: {names}; {expected}")
    notes = []
    if others:
        names = ", ".join(file.name for file in others[:5]) + (", ..." if len(others) > 5 else "")
        notes.append(f"{counted(len(others), 'file')} of other kinds left out: {names}")
    return SourceFiles(files=tuple(files), notes=tuple(notes))


def _below(folder: Path) -> Iterator[Path]:
    """All files of a folder and its subfolders, links followed, each folder once."""
    seen = set()
    for directory, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(directory)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        yield from (Path(directory) / name for name in names)


def lines_of(path: Path, problems: Problems) -> Iterator[tuple[int, bytes]]:
    """Number (from 1) and bytes of each line, without its end (`\\n` or `\\r\\n`) and without a byte order mark.

    Damaged gzip data, UTF-16 and lines over 256 MiB are problems that end the reading of the file.
    """
    number = 0
    try:
        with _opened(path) as file:
            while line := file.readline(MOST_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    if line.startswith(_UTF16):
                        problems.add(f"{path}:1", "expected UTF-8 text, found UTF-16")
                        return
                    line = line.removeprefix(b"\xef\xbb\xbf")
                if len(line) > MOST_LINE_BYTES:
                    problems.add(f"{path}:{number}", f"a line of more than {MOST_LINE_BYTES:,} bytes")
                    return
                yield number, line.removesuffix(b"\n").removesuffix(b"\r")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        problems.add(f"{path}:{number + 1}", f"damaged or cut gzip file ({error})")


def json_records(path: Path, problems: Problems, counts: Counter[str]) -> Iterator[Record]:
    """The values of a JSON Lines file, read line by line, or of a file that holds one JSON array.

    Args:
        path: of a file, plain or gzip.
        problems: what can't be parsed is added here and skipped: bad UTF-8 or JSON, repeated keys, NaN and infinities,
            lone surrogates.
        counts: empty lines are counted here, as "empty line".
    """
    with _opened(path) as file:
        try:
            start = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
        except (EOFError, zlib.error, gzip.BadGzipFile):
            start = b""
    by_line = ".jsonl" in path.suffixes or ".ndjson" in path.suffixes
    if start.startswith(b"[") or not by_line:
        yield from read_records(path, problems)
        return
    for number, line in lines_of(path, problems):
        where = f"{path}:{number}"
        if not line.strip():
            counts["empty line"] += 1
            continue
        try:
            value = strict_json(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            problems.add(where, f"expected UTF-8 text, found byte 0x{line[error.start]:02x}")
        except ValueError as error:
            problems.add(where, str(error))
        else:
            yield Record(line=number, value=value)


def strict_json(text: str) -> Any:
    """The JSON value that is the text.

    Raises:
        ValueError: it isn't one, repeats a key, or holds NaN, an infinity or a lone surrogate; says what and where.
    """
    try:
        value = _STRICT.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error
    if _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise ValueError("holds a lone surrogate escape, which is not valid Unicode text") from None
    return value


def _opened(path: Path) -> IO[bytes]:
    file = path.open("rb")
    if file.read(2) != _GZIP:
        file.seek(0)
        return file
    file.close()
    return cast(IO[bytes], gzip.open(path, "rb"))


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"key {next(key for key in keys if keys.count(key) > 1)!r} appears more than once in an object"
        )
    return found


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    if math.isinf(value := float(text)):
        raise ValueError(f"number {text} is too large")
    return value


_STRICT = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_no_constant, parse_float=_finite)
