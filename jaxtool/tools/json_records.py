"""Strict reading of JSON and JSON Lines, record by record, each with its line number.

Plain or gzip files (told apart by content), UTF-8 with or without a byte order mark. A file holds one value,
a JSON array of values, or one value after another (JSON Lines). Duplicate keys, NaN and infinities, numbers
beyond double precision and lone surrogates are problems: Python's default would drop or change data there.
All problems of an input are collected, so that one error can tell all of it.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHOWN = 20


class Problems:
    """Everything found wrong with an input, in order."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, where: str, message: str) -> None:
        self.messages.append(f"{where}: {message}")

    def __len__(self) -> int:
        return len(self.messages)

    def raise_if_any(self, error: type[ValueError], heading: str) -> None:
        """Raise `error` with the heading, the number of problems and the first 20, if there are any."""
        if self.messages:
            raise error(listing(f"{heading}: {counted(len(self), 'problem')}", self.messages))


def listing(heading: str, lines: list[str]) -> str:
    """The heading with up to 20 of the lines below it, and how many were left out."""
    shown = [heading, *(f"  {line}" for line in lines[:SHOWN])]
    if len(lines) > SHOWN:
        shown.append(f"  ... and {len(lines) - SHOWN:,} more")
    return "\n".join(shown)


def counted(number: int, singular: str, plural: str = "") -> str:
    """ "1 tool", "1,234 tools"."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


_KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true/false",
    int: "a number",
    float: "a number",
    type(None): "null",
}


def json_kind(value: Any) -> str:
    """What a JSON value is, in words for an error message."""
    return _KINDS.get(type(value), type(value).__name__)


@dataclass(frozen=True, kw_only=True)
class Record:
    """A JSON value and the line (from 1) on which it starts."""

    line: int
    value: Any


def read_text(path: Path, problems: Problems) -> str:
    """The text of a plain or gzip file, without byte order mark; "" and a problem when it can't be read.

    Raises:
        FileNotFoundError: There is no such file.
    """
    data = path.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError, zlib.error) as error:
            problems.add(f"{path}:1", f"damaged or cut gzip file ({error})")
            return ""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.add(f"{path}:{line}", f"expected UTF-8 text, found byte 0x{data[error.start]:02x}")
        return ""


def read_records(path: Path, problems: Problems) -> list[Record]:
    """All values of a JSON or JSON Lines file; what can't be parsed is added to `problems` and skipped.

    Raises:
        FileNotFoundError: There is no such file.
    """
    return list(_Scanner(read_text(path, problems), str(path), problems).records())


def parse_value(text: str, where: str) -> Any:
    """The one JSON value of a text, by the rules of this module.

    Raises:
        ValueError: says what is wrong; begins with `where`.
    """
    try:
        value, end = _STRICT.raw_decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error.msg} (column {error.colno})") from None
    except RecursionError:
        raise ValueError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    rest = text[end:].lstrip()
    if rest:
        raise ValueError(f"{where}: text behind the JSON value (column {len(text) - len(rest) + 1})")
    if _SURROGATE_ESCAPE.search(text):
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError(f"{where}: holds a lone surrogate escape, which is not valid Unicode text") from None
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {repeated!r} appears more than once in one object")
    return result


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"number {text} is too large")
    return value


_STRICT = json.JSONDecoder(object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_float=_finite_float)
# Finds where a value that breaks one of the rules above ends, so that reading goes on behind it.
_LENIENT = json.JSONDecoder(parse_int=str)
_BLANK = re.compile(r"[ \t\r\n]*")
_NEXT_START = re.compile(r"^[{\[]", re.MULTILINE)
_SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


class _Scanner:
    def __init__(self, text: str, path: str, problems: Problems) -> None:
        self.text, self.path, self.problems = text, path, problems
        self.position = 0
        self._counted, self._line = 0, 1

    def records(self) -> Iterator[Record]:
        self._skip_blank()
        if self.text.startswith("[", self.position):
            yield from self._array()
            return
        while self.position < len(self.text):
            start = self.position
            record = self._value()
            if record is not None:
                yield record
            elif self.position == start:
                # Unparsable: go on at the next line that starts a value (in JSON Lines, the next line).
                following = _NEXT_START.search(self.text, start + 1)
                self.position = following.start() if following else len(self.text)
            self._skip_blank()

    def _array(self) -> Iterator[Record]:
        self.position += 1
        self._skip_blank()
        more = not self.text.startswith("]", self.position)
        while more:
            start = self.position
            record = self._value()
            if record is not None:
                yield record
            elif self.position == start:
                return
            self._skip_blank()
            more = self.text.startswith(",", self.position)
            if more:
                self.position += 1
                self._skip_blank()
        where = f"{self.path}:{self._line_at(self.position)}"
        if not self.text.startswith("]", self.position):
            self.problems.add(where, 'expected "," or "]" in the JSON array; nothing was read after this place')
            return
        self.position += 1
        self._skip_blank()
        if self.position < len(self.text):
            self.problems.add(f"{self.path}:{self._line_at(self.position)}", "text after the end of the JSON array")

    def _value(self) -> Record | None:
        """The value at the position, which moves behind it; None and a problem when it isn't acceptable."""
        start = self.position
        line = self._line_at(start)
        where = f"{self.path}:{line}"
        try:
            value, end = _STRICT.raw_decode(self.text, start)
        except json.JSONDecodeError as error:
            place = "" if error.lineno == line else f"line {error.lineno} "
            self.problems.add(where, f"not valid JSON: {error.msg} ({place}column {error.colno})")
            return None
        except RecursionError:
            self.problems.add(where, "JSON nested too deeply")
            return None
        except ValueError as error:
            self.problems.add(where, str(error))
            # A syntax error further on leaves the position: the caller looks for the next start.
            with contextlib.suppress(ValueError, RecursionError):
                self.position = _LENIENT.raw_decode(self.text, start)[1]
            return None
        self.position = end
        if _SURROGATE_ESCAPE.search(self.text, start, end):
            try:
                json.dumps(value, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError:
                self.problems.add(where, "holds a lone surrogate escape, which is not valid Unicode text")
                return None
        return Record(line=line, value=value)

    def _skip_blank(self) -> None:
        match = _BLANK.match(self.text, self.position)
        assert match is not None  # the pattern matches the empty text
        self.position = match.end()

    def _line_at(self, position: int) -> int:
        self._line += self.text.count("\n", self._counted, position)
        self._counted = position
        return self._line
