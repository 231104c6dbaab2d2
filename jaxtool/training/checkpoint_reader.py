"""The checkpoints of a folder for those who read: which there are, which is the best, what is damaged, what they hold.

Several processes read the same: what process 0 sees of the folder counts, and the files are checked in shares. Writing
is in `checkpoints`.
"""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxtool.parallel import BARRIER_SECONDS, from_first, gather
from jaxtool.training.checkpoint_files import (
    DamagedCheckpoint,
    Manifest,
    check_contents,
    check_sizes,
    read_manifest,
)

_SLOWEST = 20e6  # bytes per second at which files are read at least
Arrays = Mapping[str, Any]  # by name: arrays to save, or their shapes, dtypes and shardings to restore


class CheckpointReader:
    """The checkpoints in one folder. With several processes all of them call every method, in the same order.

    Args:
        path: the folder, on a file system that all processes share.
        metric: name of the held-out metric by which a checkpoint is the best (None: that of the newest that has one).
        warn: is told about damage (None: prints to stderr); only in process 0.
        timeout: seconds that processes wait for one another.
    """

    def __init__(
        self,
        path: Path,
        *,
        metric: str | None = None,
        warn: Callable[[str], None] | None = None,
        timeout: float = BARRIER_SECONDS,
    ) -> None:
        self.path = path
        self._metric = metric
        self._warn = warn or _print_warning
        self._timeout = timeout
        self._writing = False
        self._damage: dict[int, str] = {}  # found while loading
        self._told: set[int] = set()
        self._moving = threading.Lock()  # no look while folders change their names

    # ---- which there are -------------------------------------------------------------------------------------------

    def newest(self) -> int | None:
        """The newest checkpoint that is whole by its files' sizes; None when there is none. Warns of damaged ones.

        Raises:
            ValueError: there are checkpoints, and all are damaged.
        """
        found = self._survey()
        if not found["whole"] and found["damaged"]:
            listed = "; ".join(f"{step} ({what})" for step, what in found["damaged"])
            raise ValueError(f"{self.path}: all checkpoints are damaged: {listed}. Delete the run to start anew")
        return found["whole"][-1] if found["whole"] else None

    def best(self) -> int | None:
        """The checkpoint with the lowest value of the metric, of equal ones the oldest; None where none has a value."""
        best: int | None = self._survey()["best"]
        return best

    def before(self, step: int) -> int | None:
        """The newest whole checkpoint that is older than `step`."""
        older = [each for each in self._survey()["whole"] if each < step]
        return older[-1] if older else None

    def items(self, step: int) -> list[str]:
        """Names of what a checkpoint holds.

        Raises:
            FileNotFoundError: it doesn't exist.
        """
        folder = self.path / str(step)
        if not folder.exists():
            raise FileNotFoundError(f"{folder}: there is no such checkpoint")
        return sorted(each.name for each in folder.iterdir() if each.is_dir()) if folder.is_dir() else []

    def _survey(self) -> dict[str, Any]:
        """The same in all processes: `whole`: steps in order; `damaged`: steps with what is wrong; `best`.

        `unsure` are those of the damaged ones that may be whole.
        """
        found: dict[str, Any] = from_first(f"checkpoints of {self.path}", self._look, timeout=self._timeout)
        return found

    def _look(self) -> dict[str, Any]:
        whole: dict[int, Manifest] = {}
        damaged: list[tuple[int, str]] = []
        unsure: list[int] = []
        with self._moving:
            for step in self._numbers():
                folder = self.path / str(step)
                try:
                    if step in self._damage:
                        raise DamagedCheckpoint(self._damage[step])
                    manifest = read_manifest(folder)
                    check_sizes(folder, manifest)
                    whole[step] = manifest
                except DamagedCheckpoint as error:
                    if folder.exists():  # else the run that writes here has pruned it meanwhile
                        damaged.append((step, str(error)))
                except OSError as error:  # perhaps for now only, so it isn't deleted
                    damaged.append((step, f"can't be read ({error.strerror})"))
                    unsure.append(step)
        steps = list(whole)
        if steps:
            for step, what in damaged:
                self._tell(step, what, steps[-1])
        metric = self._metric or next((each.metric for each in reversed(whole.values()) if each.metric), None)
        values = {step: each.value for step, each in whole.items() if each.value is not None and each.metric == metric}
        best = min(values, key=values.__getitem__) if values else None
        return {"whole": steps, "damaged": damaged, "unsure": unsure, "best": best}

    def _numbers(self) -> list[int]:
        names = os.listdir(self.path) if self.path.is_dir() else []
        return sorted(int(name) for name in names if re.fullmatch(r"0|[1-9]\d{0,17}", name))

    def _tell(self, step: int, what: str, newest: int) -> None:
        if step in self._told:
            return
        self._told.add(step)
        instead = f"checkpoint {newest} is used" if step > newest else "it is left out"
        later = ", and the next one that is saved replaces it" if self._writing else ""
        self._warn(f"{self.path / str(step)}: the checkpoint is damaged: {what}; {instead}{later}")

    # ---- reading ---------------------------------------------------------------------------------------------------

    def load(self, step: int, wanted: Mapping[str, Arrays]) -> dict[str, dict[str, Any]]:
        """The named items of a checkpoint in the dtypes and shardings that are asked for, on any mesh.

        Raises:
            DamagedCheckpoint: its files are not those that were written.
            ValueError: it holds something else than what is asked for.
        """
        folder = self.path / str(step)
        known = self._verify(step, list(wanted))
        try:
            return ocp.load_checkpointables(folder, {name: dict(arrays) for name, arrays in wanted.items()})
        except Exception as error:  # orbax raises whatever its parts raise
            what = f"can't be read ({reason_of(error)})"
            if not known:
                self._damage[step] = what
                raise DamagedCheckpoint(f"{folder}: the checkpoint {what}") from error
            raise ValueError(
                f"{folder}: the checkpoint {what}. Its files are whole: it holds another kind of state"
            ) from error

    def _verify(self, step: int, items: list[str]) -> bool:
        """Checks what is to be loaded, each process a share of the files; whether there was something to check by."""
        folder, problem, known, seconds = self.path / str(step), "", False, 0.0
        if not folder.exists():
            raise FileNotFoundError(f"{folder}: there is no such checkpoint")
        try:
            manifest = read_manifest(folder)
            known, seconds = bool(manifest.files), manifest.bytes / _SLOWEST
            check_sizes(folder, manifest)
            largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name][0])
            needed = [name for name in largest_first if "/" not in name or name.split("/", 1)[0] in items]
            check_contents(folder, manifest, needed[jax.process_index() :: jax.process_count()])
        except DamagedCheckpoint as error:
            problem = str(error)
        except OSError as error:
            problem = f"can't be read ({error.strerror})"
        problems = [each for each in gather(f"check of {folder}", problem, timeout=self._timeout + seconds) if each]
        if problems:
            self._damage[step] = problems[0]
            raise DamagedCheckpoint(f"{folder}: the checkpoint is damaged: {problems[0]}")
        return known


def reason_of(error: BaseException) -> str:
    """The innermost message of an error, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:400] or type(error).__name__


def _print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
