"""The folder of a run: what it was asked to do, its checkpoints and its metrics.

A run directory holds all that inference needs (model config, catalogue, tokenizer, checkpoints), so it can be copied to
another machine. Checkpoints are orbax; everything else is JSON or YAML. Where a part of the model is trained, they hold
that part and its optimiser state; the frozen weights are written once, to `frozen`.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import yaml
from jax.sharding import Mesh

from jaxtool.config import RunConfig, to_yaml
from jaxtool.models import LanguageModel, LanguageModelConfig, config_from_json, config_to_json
from jaxtool.parallel import AxisRules, from_first, gather, process_names
from jaxtool.tools import ToolCatalog
from jaxtool.training.checkpoint_files import DamagedCheckpoint, write_atomically
from jaxtool.training.checkpoints import SaveReport
from jaxtool.training.saved_state import SavedStates
from jaxtool.training.step import TrainState
from jaxtool.weights import load_tokenizer, read_json_object

# Fields that decide what is learned. A run can only be resumed with the same ones; the others may change.
_IDENTITY = ("seed", "model", "data", "trainable", "corpus", "memorization", "retrieval", "agent")
# Among them these only say how it is computed, and what is measured beside.
_HOW = ("remat", "attention", "accumulate", "loss_chunk", "evaluate_every")
# Network file systems show a new file late.
_SHARED_SECONDS = 60.0


class RunDirectory:
    """Reads and writes one run's folder.

    Args:
        path: the folder; made when needed. With several processes it must be on a file system that all share, and all
            of them make the same calls.
        keep: newest checkpoints to keep.
        metric: name of a held-out metric, lower is better; the checkpoint with the best value is kept as well.
        warn: is told about damaged checkpoints (None: prints to stderr).
    """

    def __init__(
        self,
        path: str | Path,
        *,
        keep: int = 1,
        metric: str | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.path = Path(os.path.expanduser(path)).absolute()
        self._frozen = self.path / "frozen"
        self._states = SavedStates(self.path / "checkpoints", self._frozen, keep=keep, metric=metric, warn=warn)
        self._lock: Any = None  # the open file that holds the lock

    # ---- what the run is -------------------------------------------------------------------------------------------

    def start(
        self, config: RunConfig, model: LanguageModelConfig, catalog: ToolCatalog, tokenizer: Any
    ) -> LanguageModelConfig:
        """Writes the run's description, or checks that the one of its checkpoints is the same.

        The folder is this process's alone until `close` or its end. What a run without a checkpoint left is replaced.

        Returns:
            The run's model config: `model`, padded to as many rows as its checkpoints have (the mesh may have changed).

        Raises:
            ValueError: the folder can't be written, another process trains in it, or it holds a run of another
                configuration, model or catalogue.
        """
        from_first(f"lock of {self.path}", self._take)
        try:
            self._check_shared()
            self._states.begin_writing()
            step = self.last_step()
            from_first(
                f"description in {self.path}",
                lambda: self._describe(config, model, catalog, tokenizer, new=step is None),
            )
        except BaseException:
            self._release()
            raise
        if step is None:
            return model
        return dataclasses.replace(self.model_config(), remat=model.remat, attention=model.attention)

    def _describe(
        self, config: RunConfig, model: LanguageModelConfig, catalog: ToolCatalog, tokenizer: Any, *, new: bool
    ) -> None:
        if new:
            for name in ("metrics.jsonl", "samples.json", "stages.json"):
                (self.path / name).unlink(missing_ok=True)
            if self._frozen.exists():
                shutil.rmtree(self._frozen)
        else:
            self._check_same(config, model, catalog)
            model = self.model_config()
        with self._writing("catalog.jsonl") as path:
            catalog.save(path)
        with self._writing("tokenizer") as path:
            tokenizer.save_pretrained(path)
        self._write("model.json", json.dumps(config_to_json(model), indent=1))
        self._write("config.yaml", to_yaml(config))

    def _write(self, name: str, text: str) -> None:
        with self._writing(name) as path:
            write_atomically(path, text)

    @contextmanager
    def _writing(self, name: str) -> Iterator[Path]:
        """The path of a file to write; that it can't be written is a ValueError which names it."""
        path = self.path / name
        try:
            yield path
        except Exception as error:
            if not isinstance(error, OSError) and type(error) is not Exception:  # tokenizers raises the latter
                raise
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise ValueError(
                f"{path}: can't be written ({reason}); when it can, the same command goes on from the last checkpoint"
            ) from error

    def _check_shared(self) -> None:
        """Checks that all processes see what process 0 writes."""
        if jax.process_count() == 1:
            return
        mark = self.path / ".shared"

        def write_mark() -> str:
            token = os.urandom(16).hex()
            write_atomically(mark, token)
            return token

        token = from_first(f"mark in {self.path}", write_mark)
        seen, deadline = False, time.monotonic() + _SHARED_SECONDS
        while not seen and time.monotonic() < deadline:
            with suppress(OSError):
                seen = mark.read_text(encoding="utf-8") == token
            time.sleep(0 if seen else 0.5)
        answers = gather(f"mark seen in {self.path}", "seen" if seen else "", timeout=2 * _SHARED_SECONDS)
        blind = [process for process, answer in enumerate(answers) if not answer]
        if jax.process_index() == 0:
            mark.unlink(missing_ok=True)
        if blind:
            raise ValueError(
                f"run_dir {self.path}: {process_names(blind)} can't see what process 0 writes there; with several "
                "processes it must be on a file system that all of them share"
            )

    def _take(self) -> None:
        """Makes the folder and locks it; the system releases the lock of a process that was killed."""
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / ".lock").open("a")
        except OSError as error:
            raise ValueError(f"run_dir {self.path}: expected a folder that can be written ({error})") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.close()
            raise ValueError(f"run_dir {self.path}: another process is training in it") from error
        except OSError:
            pass  # a file system without locks
        self._lock = lock

    def check_samples(self, fingerprints: Mapping[str, str]) -> None:
        """Records what each stage trains on, or checks that it is what the run began with.

        Raises:
            ValueError: a stage's samples have changed, so that a resumed run would mix two data sets.
        """
        path = self.path / "samples.json"
        if path.exists():
            before = read_json_object(path)
            changed = sorted(name for name in fingerprints if before.get(name) != fingerprints[name])
            if changed:
                raise ValueError(
                    f"{self.path}: the samples of {' and '.join(changed)} are not those the run began with (data, "
                    "tokenizer or chat template have changed); choose another run_dir"
                )
        if jax.process_index() == 0:
            self._write(path.name, json.dumps(dict(fingerprints), indent=1))

    def record_stages(self, steps: Mapping[str, int]) -> None:
        """Records the stages in their order, and how many steps each has: what `unfinished` compares with."""
        if jax.process_index() == 0:
            self._write("stages.json", json.dumps(dict(steps), indent=1))

    def unfinished(self, step: int) -> str | None:
        """How far training had come at checkpoint `step`, in words; None where that is its end.

        Raises:
            ValueError: `stages.json` is damaged.
        """
        path = self.path / "stages.json"
        if not path.exists():  # older runs have none
            return f"{self.path}: has no stages.json, which says how many steps training takes: it may be unfinished"
        stages = read_json_object(path)
        if not stages or not all(type(steps) is int and steps > 0 for steps in stages.values()):
            raise ValueError(f"{path}: expected the number of steps of each stage, put it back or delete it")
        done, names = step, list(stages)
        for place, name in enumerate(names):
            if done < stages[name] or (done == stages[name] and place + 1 < len(names)):
                later = ", ".join(f"{other} ({stages[other]:,} steps)" for other in names[place + 1 :])
                return (
                    f"{self.path}: training is not finished, stage {name} stopped at step {done:,} of {stages[name]:,} "
                    f"(the last checkpoint){f', {later} has not begun' if later else ''}"
                )
            done -= stages[name]
        return None

    def _check_same(self, config: RunConfig, model: LanguageModelConfig, catalog: ToolCatalog) -> None:
        before = self.settings()
        if not before:
            raise ValueError(
                f"{self.path}: has checkpoints but no config.yaml that says what they were trained with; put it back, "
                "or choose another run_dir"
            )
        now = yaml.safe_load(to_yaml(config))
        defaults = yaml.safe_load(to_yaml(RunConfig()))  # of settings that an older run didn't have
        changed = sorted(
            _differences({k: _filled(before.get(k), defaults[k]) for k in _IDENTITY}, {k: now[k] for k in _IDENTITY})
        )
        if changed:
            raise ValueError(
                f"{self.path}: holds a run with other settings: {'; '.join(changed)}. "
                "Choose another run_dir, or delete the folder to start anew"
            )
        if self.catalog().fingerprint != catalog.fingerprint:
            raise ValueError(
                f"{self.path}: its catalogue has other tools than the data have now; choose another run_dir"
            )
        shape, stored = (
            dataclasses.replace(each, padded_vocab_size=0, remat="full", attention="xla")
            for each in (model, self.model_config())
        )
        if shape != stored:
            raise ValueError(
                f"{self.path}: its model has another shape than {config.model.source}; choose another run_dir"
            )

    def settings(self) -> dict[str, Any]:
        """The configuration that the run was started with, as nested mappings; empty without `config.yaml`.

        Raises:
            ValueError: the file is damaged.
        """
        path = self.path / "config.yaml"
        if not path.exists():
            return {}
        try:
            settings = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            found = " ".join(str(error).split())[:300]
            raise ValueError(f"{path}: not a YAML file ({found}), put it back or delete it") from error
        if not isinstance(settings, dict) or not isinstance(settings.get("data"), dict):
            raise ValueError(f"{path}: expected the fields of a run, put it back or delete it")
        return settings

    def model_config(self) -> LanguageModelConfig:
        """The config of the run's model, tool rows included.

        Raises:
            FileNotFoundError: the run has none, or there is no such folder.
            ValueError: the file is damaged.
        """
        path = self._existing("model.json")
        fields = read_json_object(path)
        try:
            return config_from_json(fields)
        except ValueError as error:
            raise ValueError(f"{path}: not the config of a model ({error})") from error

    def catalog(self) -> ToolCatalog:
        """The tools, in the order of their rows."""
        return ToolCatalog.load(self._existing("catalog.jsonl"))

    def tokenizer(self) -> Any:
        """The text tokenizer."""
        return load_tokenizer(self._existing("tokenizer"))

    def _existing(self, name: str) -> Path:
        if not self.path.is_dir():
            found = "is a file" if self.path.exists() else "no such folder"
            raise FileNotFoundError(f"run_dir {self.path}: {found}; expected the folder of a run, train first")
        if not (self.path / name).exists():
            raise FileNotFoundError(f"{self.path / name} is missing: put it back, or train first (train/finetune.py)")
        return self.path / name

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, step: int, state: TrainState, *, value: float | None = None) -> None:
        """Begins checkpoint `step`, which goes on in the background; the state may be donated to the next step.

        What goes wrong then is raised by the next `save`, by `close`, and with a single process by `finished_save`.

        Args:
            step: steps of all stages so far.
            state: what to save.
            value: the held-out metric's value at this step, if it was measured.

        Raises:
            ValueError: the save before, or this one, failed; the checkpoints there are stay as they are.
        """
        self._states.save(step, state, value=value)

    def finished_save(self) -> SaveReport | None:
        """What a save took that has become complete since this was last asked."""
        return self._states.finished()

    def last_step(self) -> int | None:
        """The newest complete checkpoint; None when there is none. Interrupted saves don't count.

        Damaged ones are passed over with a warning, as far as the sizes of their files show it.

        Raises:
            ValueError: all checkpoints are damaged.
        """
        return self._states.checkpoints.newest()

    def best_step(self) -> int | None:
        """The checkpoint with the lowest value of the held-out metric; None where no checkpoint has one."""
        return self._states.checkpoints.best()

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of checkpoint `step` in the shardings of `abstract`, whatever mesh it was saved from.

        `state.step` counts the steps of the stage and is the caller's to set. Needs an active mesh (`jax.set_mesh`).

        Raises:
            ValueError: the checkpoint is damaged, or holds another kind of state.
        """
        with self._hint(step):
            return self._states.restore(step, abstract)

    def restore_newest(
        self, wanted: Callable[[int], TrainState | LanguageModel]
    ) -> tuple[int, TrainState | LanguageModel]:
        """Step and contents of the newest checkpoint that is undamaged to the last bit; warns of those that are not.

        Args:
            wanted: what to restore from a checkpoint of that step: an abstract state, or an abstract model where the
                optimiser starts afresh. Needs an active mesh (`jax.set_mesh`).

        Raises:
            ValueError: all checkpoints are damaged.
            FileNotFoundError: there is none.
        """
        return self._states.restore_newest(wanted)

    def restore_model(
        self, step: int, rules: AxisRules, mesh: Mesh, config: LanguageModelConfig | None = None
    ) -> LanguageModel:
        """The model alone of checkpoint `step`, on `mesh`; low-rank factors stay apart (`without_lora` merges them).

        Raises:
            ValueError: the checkpoint is damaged, or holds another kind of model.
        """
        with self._hint(step):
            return self._states.restore_model(step, rules, mesh, config or self.model_config())

    @contextmanager
    def _hint(self, step: int) -> Iterator[None]:
        try:
            yield
        except DamagedCheckpoint as error:
            before = self._states.checkpoints.before(step)
            instead = "no older one is whole" if before is None else f"delete this folder to use checkpoint {before}"
            raise ValueError(f"{error}; {instead}") from error

    def close(self) -> None:
        """Waits for the last save and gives the folder free; raises what went wrong in it."""
        try:
            self._states.close()
        finally:
            self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- metrics ---------------------------------------------------------------------------------------------------

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends one line to `metrics.jsonl`; a line that a kill left half-written is ended first.

        Raises:
            ValueError: the file can't be written.
        """
        if jax.process_index() == 0:
            with self._writing("metrics.jsonl") as path, path.open("a+b") as file:
                half = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write((b"\n" if half else b"") + json.dumps(record).encode() + b"\n")

    def records(self) -> list[dict[str, Any]]:
        """All records as they were logged, without half-written lines."""
        path = self.path / "metrics.jsonl"
        found: list[dict[str, Any]] = []
        for line in path.read_bytes().split(b"\n") if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a kill can leave half a line; its step was done again
            if isinstance(record, dict):  # half a line may read as a number
                found.append(record)
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """What is known of each step, in the order of the first time it was done; of what was done twice the later."""
        steps: dict[int, dict[str, Any]] = {}
        for record in self.records():
            if "step" in record:
                steps.setdefault(record["step"], {}).update(record)
        return list(steps.values())


def _filled(settings: Any, defaults: Any) -> Any:
    """Settings with the defaults of those that are missing."""
    if not isinstance(defaults, dict):
        return settings
    given = settings if isinstance(settings, dict) else {}
    return given | {key: _filled(given[key], value) if key in given else value for key, value in defaults.items()}


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in (before.keys() | now.keys()) - set(_HOW):
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield f"{name} was {before!r}, is {now!r}"
