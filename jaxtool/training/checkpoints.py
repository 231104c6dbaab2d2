"""Numbered checkpoints of named arrays in a folder: written in the background, checked, pruned, restored.

A checkpoint is written beside its place and moved there when it is complete, so a kill at any moment leaves the ones
before it. What the arrays mean is in `saved_state`; which files make a checkpoint whole, in `checkpoint_files`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jaxtool.parallel import BARRIER_SECONDS, from_first, gather, process_names, publish, published
from jaxtool.training.checkpoint_files import (
    CUSTOM_METADATA,
    DamagedCheckpoint,
    Manifest,
    check_contents,
    check_sizes,
    checksums,
    read_manifest,
    remove_folder,
    share_of_files,
    sync_folder,
)

_GLANCE = 0.5  # seconds between looks at whether other processes failed
Arrays = Mapping[str, Any]  # by name: arrays to save, or their shapes, dtypes and shardings to restore


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a finished save took.

    Attributes:
        step: the checkpoint.
        blocking_seconds: the loop stood still: for the arrays to come to host memory, and for the save before.
        background_seconds: from then on until the checkpoint was complete, while the loop went on.
        bytes: size of the saved arrays.
    """

    step: int
    blocking_seconds: float
    background_seconds: float
    bytes: int


class CheckpointFolder:
    """The checkpoints in one folder.

    With several processes all of them call every method, in the same order; the folder is on a file system that they
    share. Writing is for one run at a time, reading for anyone.

    Args:
        path: the folder; made when needed.
        keep: newest checkpoints to keep.
        metric: name of the held-out metric by which the best checkpoint is kept as well (lower is better).
        warn: is told about damage (None: prints to stderr); only in process 0.
        timeout: seconds that processes wait for one another.
    """

    def __init__(
        self,
        path: Path,
        *,
        keep: int = 1,
        metric: str | None = None,
        warn: Callable[[str], None] | None = None,
        timeout: float = BARRIER_SECONDS,
    ) -> None:
        self.path = path
        self._keep = keep
        self._metric = metric
        self._warn = warn or _print_warning
        self._timeout = timeout
        self._writing = False
        self._damage: dict[int, str] = {}  # found while loading
        self._told: set[int] = set()
        self._moving = threading.Lock()  # no look while folders change their names
        self._thread: threading.Thread | None = None
        self._report: SaveReport | None = None
        self._error: Exception | None = None

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
        """Names of what a checkpoint holds; waits for the save in the background.

        Raises:
            FileNotFoundError: it doesn't exist.
        """
        self.wait()
        folder = self.path / str(step)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: there is no such checkpoint")
        return sorted(each.name for each in folder.iterdir() if each.is_dir())

    def _survey(self) -> dict[str, Any]:
        """`whole`: steps in order; `damaged`: steps with what is wrong; `best`. The same in all processes."""
        found: dict[str, Any] = from_first(f"checkpoints of {self.path}", self._look, timeout=self._timeout)
        return found

    def _look(self) -> dict[str, Any]:
        whole: dict[int, Manifest] = {}
        damaged: list[tuple[int, str]] = []
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
        steps = list(whole)
        if steps:
            for step, what in damaged:
                self._tell(step, what, steps[-1])
        metric = self._metric or next((each.metric for each in reversed(whole.values()) if each.metric), None)
        values = {step: each.value for step, each in whole.items() if each.value is not None and each.metric == metric}
        return {"whole": steps, "damaged": damaged, "best": min(values, key=values.__getitem__) if values else None}

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

        Waits for the save in the background first.

        Raises:
            DamagedCheckpoint: its files are not those that were written.
            ValueError: it holds something else than what is asked for.
        """
        self.wait()
        folder = self.path / str(step)
        known = self._verify(step, list(wanted))
        try:
            return ocp.load_checkpointables(folder, {name: dict(arrays) for name, arrays in wanted.items()})
        except Exception as error:  # orbax raises whatever its parts raise
            what = f"can't be read ({_reason(error)})"
            if not known:
                self._damage[step] = what
                raise DamagedCheckpoint(f"{folder}: the checkpoint {what}") from error
            raise ValueError(
                f"{folder}: the checkpoint {what}. Its files are whole: it holds another kind of state"
            ) from error

    def _verify(self, step: int, items: list[str]) -> bool:
        """Checks what is to be loaded, each process a share of the files; whether there was something to check by."""
        folder, problem, known = self.path / str(step), "", False
        try:
            manifest = read_manifest(folder)
            known = bool(manifest.files)
            check_sizes(folder, manifest)
            largest_first = sorted(manifest.files, key=lambda name: -manifest.files[name][0])
            needed = [name for name in largest_first if "/" not in name or name.split("/", 1)[0] in items]
            check_contents(folder, manifest, needed[jax.process_index() :: jax.process_count()])
        except DamagedCheckpoint as error:
            problem = str(error)
        problems = [each for each in gather(f"check of {folder}", problem, timeout=self._timeout) if each]
        if problems:
            self._damage[step] = problems[0]
            raise DamagedCheckpoint(f"{folder}: the checkpoint is damaged: {problems[0]}")
        return known

    # ---- writing ---------------------------------------------------------------------------------------------------

    def begin_writing(self) -> None:
        """Puts in order what a killed run left: what was complete is moved to its place, the rest deleted.

        Raises:
            ValueError: the folder can't be written.
        """
        self.wait()
        self._writing = True

        def tidy() -> None:
            try:
                for name in sorted(os.listdir(self.path)) if self.path.is_dir() else []:
                    self._tidy(name)
            except OSError as error:
                raise ValueError(f"{self.path}: expected a folder that can be written ({error})") from error

        from_first(f"order in {self.path}", tidy, timeout=self._timeout)

    def _tidy(self, name: str) -> None:
        path = self.path / name
        if found := re.fullmatch(r"\.(\d+)\.(saving|replaced)", name):
            with contextlib.suppress(DamagedCheckpoint):
                manifest = read_manifest(path)
                check_sizes(path, manifest)
                if manifest.files and not (self.path / found[1]).exists():
                    path.rename(self.path / found[1])
                    return
        if found or re.fullmatch(r"\.\d+\.(removed|saving\.orbax.*)|\d+\.orbax-checkpoint-tmp.*", name):
            shutil.rmtree(path)

    def save(self, step: int, items: Mapping[str, Arrays], *, value: float | None = None) -> None:
        """Begins a checkpoint; returns when the arrays may be changed or donated, and goes on in the background.

        Waits for the save before. `wait` or the next `save` raises what goes wrong later on.

        Args:
            step: number of the checkpoint; one of that number is replaced.
            items: arrays by name of the item and of the array.
            value: value of the metric at this step.

        Raises:
            ValueError: the save before, or this one, failed; what is there already stays.
        """
        began = time.monotonic()
        self.wait()
        temporary = self.path / f".{step}.saving"
        size = sum(int(leaf.nbytes) for leaf in jax.tree.leaves(dict(items)))
        manifest = Manifest(step=step, bytes=size, metric=self._metric, value=value)
        try:
            if jax.process_index() == 0:
                self.path.mkdir(parents=True, exist_ok=True)
                remove_folder(temporary)
            # orbax copies the arrays to host memory before it returns. On CPU that copy is a view of the array's
            # buffer; the runtime doesn't hand over a buffer that is viewed, so a step that donates it writes elsewhere.
            response = ocp.save_checkpointables_async(
                temporary, {name: dict(arrays) for name, arrays in items.items()}, custom_metadata=CUSTOM_METADATA
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failure(manifest, _reason(error)) from error
        blocking = time.monotonic() - began
        self._thread = threading.Thread(target=self._finish, args=(response, manifest, blocking), daemon=True)
        self._thread.start()

    def finished(self) -> SaveReport | None:
        """What the save took that finished since this was last asked; None if none did.

        Raises:
            ValueError: it failed. With several processes only `save` and `wait` say so, to all in the same place.
        """
        if self._thread is not None and not self._thread.is_alive() and jax.process_count() == 1:
            self.wait()
        report, self._report = self._report, None
        return report

    def wait(self) -> None:
        """Waits until the save in the background is complete.

        Raises:
            ValueError: it failed; the checkpoints before it stay as they are.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _finish(self, response: Any, manifest: Manifest, blocking: float) -> None:
        """The background part: waits for orbax, lists the files, moves the checkpoint to its place, prunes."""
        began = time.monotonic()
        log = logging.getLogger("absl")
        log.addFilter(_said_by_us)
        try:
            self._complete(response, manifest)
        except Exception as error:  # it is raised where the loop asks
            reason = error if isinstance(error, ValueError) else self._failure(manifest, _reason(error))
            self._error = reason
        else:
            self._report = SaveReport(
                step=manifest.step,
                blocking_seconds=blocking,
                background_seconds=time.monotonic() - began,
                bytes=manifest.bytes,
            )
        finally:
            log.removeFilter(_said_by_us)

    def _complete(self, response: Any, manifest: Manifest) -> None:
        temporary = self.path / f".{manifest.step}.saving"
        told: dict[str, Any] = {"problem": "", "files": {}}
        try:
            _wait_for(response, f"failed/{temporary}")
            told["files"] = checksums(temporary, share_of_files(temporary, jax.process_index(), jax.process_count()))
        except Exception as error:  # all processes learn of it below
            told["problem"] = _reason(error)
            publish(f"failed/{temporary}/{jax.process_index()}", told["problem"])
        answers = [json.loads(text) for text in gather(f"save to {self.path}", json.dumps(told), timeout=self._timeout)]
        failed = [process for process, answer in enumerate(answers) if answer["problem"]]

        def commit() -> None:
            try:
                if failed:
                    of = f"{process_names(failed[:1])}: " if len(answers) > 1 else ""
                    raise OSError(of + answers[failed[0]]["problem"])
                files = {name: tuple(pair) for answer in answers for name, pair in answer["files"].items()}
                dataclasses.replace(manifest, files=files).write(temporary)
                self._move_into_place(manifest.step)
            except OSError as error:
                with contextlib.suppress(OSError):
                    remove_folder(temporary)  # frees the disk for what is written elsewhere
                raise self._failure(manifest, _reason(error)) from error

        from_first(f"commit in {self.path}", commit, timeout=self._timeout)
        self._damage.pop(manifest.step, None)
        if jax.process_index() == 0:
            self._prune()

    def _move_into_place(self, step: int) -> None:
        final, replaced = self.path / str(step), self.path / f".{step}.replaced"
        with self._moving:
            if final.exists():
                remove_folder(replaced)
                final.rename(replaced)
            (self.path / f".{step}.saving").rename(final)
        sync_folder(self.path)
        remove_folder(replaced)

    def _prune(self) -> None:
        """Deletes all but the newest, the best and those that can't be judged; what was found damaged goes as well."""
        found = self._look()
        stay = {*found["whole"][-self._keep :], found["best"] if self._metric is not None else None}
        for step in [*(step for step, _ in found["damaged"]), *(step for step in found["whole"] if step not in stay)]:
            removed = self.path / f".{step}.removed"
            try:
                remove_folder(removed)
                with self._moving:
                    (self.path / str(step)).rename(removed)  # never half a checkpoint under its name
                remove_folder(removed)
            except OSError as error:
                self._warn(f"{self.path / str(step)}: the old checkpoint can't be deleted ({error.strerror})")
            self._damage.pop(step, None)

    def _failure(self, manifest: Manifest, reason: str) -> ValueError:
        free = ""
        with contextlib.suppress(OSError):
            free = f", {shutil.disk_usage(self.path).free:,} are free there"
        with contextlib.suppress(OSError, ValueError):
            older = [step for step in self._numbers() if step != manifest.step]
            free += f"; checkpoint {older[-1]} is untouched" if older else "; there is no earlier checkpoint"
        return ValueError(
            f"{self.path}: checkpoint {manifest.step} could not be written ({reason}). It needs {manifest.bytes:,} "
            f"bytes{free}. Make room and start the same command again"
        )


def _wait_for(response: Any, failures: str) -> None:
    """Waits for orbax; not if another process failed, which orbax would wait for until its own time is over."""
    if jax.process_count() == 1:
        response.result()
        return
    while True:
        began = time.monotonic()
        try:
            response.result(timeout=_GLANCE)
            return
        except TimeoutError:
            if time.monotonic() - began < _GLANCE / 2:  # it is orbax that waited in vain
                raise
            if published(failures):
                return


def _reason(error: BaseException) -> str:
    """The innermost message, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    return " ".join(str(error).split())[:400] or type(error).__name__


def _said_by_us(record: logging.LogRecord) -> bool:
    """Drops the stack trace that orbax logs of an error which it raises as well."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname


def _print_warning(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)
