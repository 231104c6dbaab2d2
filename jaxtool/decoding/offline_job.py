"""The folder of an offline run: results in parts, each written whole or not at all, so that any kill can be resumed.

A part is a fixed set of rows, and what it holds depends on these and the settings alone. A run that was killed repeats
the parts that weren't finished, and ends with the same bytes as one that wasn't.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from safetensors.numpy import save

from jaxtool.data.prompt_rows import PromptLine

RESULTS = "results.jsonl"
_JOB = "job.json"


@dataclass(frozen=True, kw_only=True)
class Part:
    """Rows that are computed together.

    Attributes:
        number: of the part, from 0.
        lines: its rows, longest first.
        path: of its records.
    """

    number: int
    lines: tuple[PromptLine, ...]
    path: Path

    @property
    def arrays(self) -> Path:
        """Where arrays of the part go."""
        return self.path.with_suffix(".safetensors")


class OfflineJob:
    """The parts of a run, and which of them are this process's.

    Rows are sorted by the length of their lines, so that those of a part are about as long, and part i belongs to
    process i modulo their number.

    Args:
        output: the folder; made if it doesn't exist.
        lines: all rows.
        settings: what the results depend on besides the rows, as JSON values.
        part_rows: rows of a part.
        arrays: whether a part has arrays besides its records: without them it isn't finished.
        process: number of this process.
        processes: how many share the parts.

    Raises:
        ValueError: the folder holds results of other rows or settings (says which), or something else; or another
            process works in it.
    """

    def __init__(
        self,
        output: str | Path,
        lines: Sequence[PromptLine],
        settings: Mapping[str, Any],
        *,
        part_rows: int,
        arrays: bool = False,
        process: int = 0,
        processes: int = 1,
    ) -> None:
        self.folder = Path(output)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"{self.folder}: is a file, expected a folder for the results")
        by_length = sorted(lines, key=lambda line: (-len(line.text), line.row))
        groups = [by_length[first : first + part_rows] for first in range(0, len(by_length), part_rows)]
        width = max(5, len(str(len(groups))))
        self.parts = [
            Part(
                number=number,
                lines=tuple(group),
                path=self.folder / f"part-{number:0{width}}-of-{len(groups):0{width}}.jsonl",
            )
            for number, group in enumerate(groups)
        ]
        self.rows, self.arrays = len(lines), arrays
        self.process, self.processes = process, processes
        self.settings = {**settings, "rows": len(lines), "part_rows": part_rows, "input_sha256": _digest(lines)}
        self._begin()
        self._lock = self._take()

    def _begin(self) -> None:
        """Writes down what the results belong to, or checks it."""
        path = self.folder / _JOB
        if not path.exists():
            for pattern in ("part-*", RESULTS):
                if self.folder.is_dir() and any(self.folder.glob(pattern)):
                    raise ValueError(
                        f"{self.folder}: has {pattern} but no {_JOB}, expected a folder of its own for the results"
                    )
            self.folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(self.settings, indent=1, ensure_ascii=False) + "\n"
            write_whole(path, text.encode(), suffix=f".{self.process}")
            return
        try:
            before = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(before, dict):
                raise ValueError("no object")
        except ValueError as error:
            raise ValueError(f"{path}: damaged ({error}); expected the settings of the results beside it") from error
        now = json.loads(json.dumps(self.settings))
        differing = list(_differing(before, now))
        if differing:
            shown = "; ".join(f"{name} was {_short(old)}, now {_short(new)}" for name, old, new in differing)
            raise ValueError(
                f"{self.folder} holds results of another run: {shown}. Give another --output, or delete it"
            )

    def _take(self) -> IO[str]:
        lock = (self.folder / f".process-{self.process}.lock").open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            raise ValueError(f"{self.folder}: another run works in it as process {self.process}") from None
        return lock

    def own_parts(self) -> list[Part]:
        """This process's parts that aren't finished."""
        return [part for part in self.parts[self.process :: self.processes] if not self._done(part)]

    @property
    def own_rows(self) -> tuple[int, int]:
        """This process's rows: all of them, and those of finished parts."""
        own = self.parts[self.process :: self.processes]
        return sum(len(part.lines) for part in own), sum(len(part.lines) for part in own if self._done(part))

    @property
    def finished(self) -> bool:
        """Whether all parts of all processes are."""
        return all(map(self._done, self.parts))

    def _done(self, part: Part) -> bool:
        return part.path.exists() and (not self.arrays or part.arrays.exists())

    def write(self, part: Part, records: Sequence[Mapping[str, Any]]) -> None:
        """Finishes a part: a record for each of its rows, in the order of its rows.

        Raises:
            ValueError: records that aren't those of the part: a row would be lost or doubled.
        """
        if [record["row"] for record in records] != [line.row for line in part.lines]:
            raise ValueError(
                f"part {part.number} has the rows of {len(records)} records, not its own {len(part.lines)}"
            )
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        write_whole(part.path, text.encode())

    def merge(self) -> Path:
        """All records in the order of the input in one file, `results.jsonl`; the parts stay.

        Raises:
            ValueError: parts are missing or damaged; says how many, or which.
        """
        missing = sum(not self._done(part) for part in self.parts)
        if missing:
            raise ValueError(f"{self.folder}: {missing} of {len(self.parts)} parts are not finished")
        places: list[tuple[int, int, int]] = [(0, 0, 0)] * self.rows
        files = []
        try:
            for number, part in enumerate(self.parts):
                file = part.path.open("rb")
                files.append(file)
                at = found = 0
                for line, text in zip(part.lines, file, strict=False):
                    places[line.row] = (number, at, len(text))
                    at, found = at + len(text), found + 1
                if found < len(part.lines) or at < os.fstat(file.fileno()).st_size:
                    raise ValueError(
                        f"{part.path}: damaged, expected the records of {len(part.lines):,} rows, a line each; delete "
                        "it, and the same command computes them again"
                    )
            path = self.folder / RESULTS
            temporary = path.with_name(f".{path.name}.{self.process}.partial")
            with temporary.open("wb") as merged:
                for number, at, length in places:
                    files[number].seek(at)
                    merged.write(files[number].read(length))
                merged.flush()
                os.fsync(merged.fileno())
        finally:
            for file in files:
                file.close()
        os.replace(temporary, path)
        return path

    def records(self) -> Iterator[Mapping[str, Any]]:
        """The records of this process's finished parts."""
        for part in self.parts[self.process :: self.processes]:
            if self._done(part):
                with part.path.open(encoding="utf-8") as file:
                    yield from map(json.loads, file)

    def close(self) -> None:
        """Lets others work in the folder."""
        self._lock.close()


def write_whole(path: Path, data: bytes, *, suffix: str = "") -> None:
    """A file that is there with all its bytes or not at all, whenever the process or the machine stops."""
    temporary = path.with_name(f".{path.name}{suffix}.partial")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_arrays(path: Path, arrays: Mapping[str, np.ndarray], described: Mapping[str, Any]) -> None:
    """A safetensors file, whole or not at all; a description is in its metadata, as JSON in the field `description`."""
    # One field: safetensors writes several in an order that changes from run to run.
    write_whole(path, save(dict(arrays), {"description": json.dumps(described, ensure_ascii=False)}))


def _digest(lines: Sequence[PromptLine]) -> str:
    found = hashlib.sha256()
    for line in lines:
        found.update(f"{line.line} {len(line.text)} ".encode())
        found.update(line.text.encode("utf-8", "surrogatepass"))
    return found.hexdigest()


def _differing(before: Mapping[str, Any], now: Mapping[str, Any], outer: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Names of fields, "sampling.seed", that aren't the same, with both values."""
    for name in sorted(before.keys() | now.keys()):
        old, new = before.get(name), now.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            yield from _differing(old, new, f"{outer}{name}.")
        elif old != new:
            yield f"{outer}{name}", old, new


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."
