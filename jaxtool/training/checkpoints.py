"""Numbered checkpoints of named arrays in a folder: written in the background, put in their place, pruned.

A checkpoint is written beside its place and moved there when it is complete, so a kill at any moment leaves the ones
before it. Reading is in `checkpoint_reader`; what the arrays mean, in `saved_state`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
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
    check_sizes,
    checksums,
    read_manifest,
    remove_folder,
    share_of_files,
    sync_folder,
)
from jaxtool.training.checkpoint_reader import Arrays, CheckpointReader, reason_of

_GLANCE = 0.5  # seconds between looks at whether other processes failed


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


class CheckpointFolder(CheckpointReader):
    """The checkpoints in one folder, for the run that writes them: one at a time.

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
        super().__init__(path, metric=metric, warn=warn, timeout=timeout)
        self._keep = keep
        self._saves = 0
        self._thread: threading.Thread | None = None
        self._report: SaveReport | None = None
        self._error: Exception | None = None

    def items(self, step: int) -> list[str]:
        """As `CheckpointReader.items`, after the save in the background."""
        self.wait()
        return super().items(step)

    def load(self, step: int, wanted: Mapping[str, Arrays]) -> dict[str, dict[str, Any]]:
        """As `CheckpointReader.load`, after the save in the background."""
        self.wait()
        return super().load(step, wanted)

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
            raise self._failure(manifest, reason_of(error)) from error
        self._saves += 1
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
            reason = error if isinstance(error, ValueError) else self._failure(manifest, reason_of(error))
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
        failures = f"failed save {self._saves} to {self.path}"
        told: dict[str, Any] = {"problem": "", "files": {}}
        try:
            _wait_for(response, failures)
            told["files"] = checksums(temporary, share_of_files(temporary, jax.process_index(), jax.process_count()))
        except Exception as error:  # all processes learn of it below
            told["problem"] = reason_of(error)
            publish(f"{failures}/{jax.process_index()}", told["problem"])
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
                raise self._failure(manifest, reason_of(error)) from error

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
        """Deletes all but the newest and the best; what was found damaged goes as well."""
        found = self._look()
        stay = {*found["whole"][-self._keep :], *found["unsure"], found["best"] if self._metric is not None else None}
        for step in sorted({*found["whole"], *(step for step, _ in found["damaged"])} - stay):
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
        free, after = "", ""
        with contextlib.suppress(OSError):
            free = f", {shutil.disk_usage(self.path).free:,} are free there"
            older = [step for step in self._numbers() if step != manifest.step]
            after = f"; checkpoint {older[-1]} is untouched, the same command goes on from it" if older else ""
        return ValueError(
            f"{self.path}: checkpoint {manifest.step} could not be written ({reason}). It needs {manifest.bytes:,} "
            f"bytes{free}{after or '; there is no earlier one'}"
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


def _said_by_us(record: logging.LogRecord) -> bool:
    """Drops the stack trace that orbax logs of an error which it raises as well."""
    return record.levelno < logging.ERROR or "orbax" not in record.pathname
