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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import yaml
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from jaxtool.config import RunConfig, TrainableConfig, to_yaml
from jaxtool.models import (
    LanguageModel,
    LanguageModelConfig,
    abstract_model,
    build_model,
    config_from_json,
    config_to_json,
    parameters,
    with_parameters,
)
from jaxtool.parallel import AxisRules
from jaxtool.tools import ToolCatalog
from jaxtool.training.step import TrainState
from jaxtool.training.trainable import factor_paths, trained_part, with_trained_part
from jaxtool.weights import load_tokenizer, read_json_object

# Fields that decide what is learned. A run can only be resumed with the same ones; the others may change.
_IDENTITY = ("seed", "model", "data", "trainable", "memorization", "retrieval")


class RunDirectory:
    """Reads and writes one run's folder.

    Args:
        path: the folder; made when needed. With several processes it must be on a file system that all share.
        keep: newest checkpoints to keep.
    """

    def __init__(self, path: str | Path, *, keep: int = 1) -> None:
        self.path = Path(os.path.expanduser(path)).absolute()
        self._keep = keep
        self._writing = False
        self._lock: Any = None  # the open file that holds the lock
        self._checkpointer: ocp.training.Checkpointer | None = None

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
        self._writing = True
        if jax.process_index() == 0:
            self._take()
        if self.last_step() is not None:
            self._check_same(config, model, catalog)
            model = self.model_config()
        elif jax.process_index() == 0:
            for name in ("metrics.jsonl", "samples.json"):
                (self.path / name).unlink(missing_ok=True)
            if self._frozen.exists():
                shutil.rmtree(self._frozen)
        if jax.process_index() == 0:
            catalog.save(self.path / "catalog.jsonl")
            tokenizer.save_pretrained(self.path / "tokenizer")
            _write(self.path / "model.json", json.dumps(config_to_json(model), indent=1))
            _write(self.path / "config.yaml", to_yaml(config))
        return model

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
            _write(path, json.dumps(dict(fingerprints), indent=1))

    def _check_same(self, config: RunConfig, model: LanguageModelConfig, catalog: ToolCatalog) -> None:
        before = self.settings()
        if not before:
            raise ValueError(
                f"{self.path}: has checkpoints but no config.yaml that says what they were trained with; put it back, "
                "or choose another run_dir"
            )
        now = yaml.safe_load(to_yaml(config))
        before.setdefault("trainable", yaml.safe_load(to_yaml(TrainableConfig())))  # older runs train everything
        changed = sorted(_differences({k: before.get(k) for k in _IDENTITY}, {k: now[k] for k in _IDENTITY}))
        if changed:
            raise ValueError(
                f"{self.path}: holds a run with other settings: {'; '.join(changed)}. "
                "Choose another run_dir, or delete the folder to start anew"
            )
        if self.catalog().fingerprint != catalog.fingerprint:
            raise ValueError(
                f"{self.path}: its catalogue has other tools than the data have now; choose another run_dir"
            )
        stored = self.model_config()
        if dataclasses.replace(stored, padded_vocab_size=0) != dataclasses.replace(model, padded_vocab_size=0):
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
            FileNotFoundError: the run has none.
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
        if not (self.path / name).exists():
            raise FileNotFoundError(f"{self.path / name} is missing: put it back, or train first (train/finetune.py)")
        return self.path / name

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def save(self, step: int, state: TrainState) -> None:
        """Saves the state as checkpoint `step`; returns when it is complete.

        Not in the background: the next step takes over (donates) the buffers that would still be read.
        """
        items = {"optimizer": _flat(state.optimizer_state)}
        if state.trained == "full":
            items["parameters"] = parameters(state.model)
        else:
            self._save_frozen(state.model)
            items["trained"] = jax.jit(trained_part, static_argnums=1)(state.model, state.trained)
        self._opened().save_checkpointables(step, items, force=True)

    def _save_frozen(self, model: LanguageModel) -> None:
        """Writes what this run never changes, once. A save that was interrupted is begun anew."""
        with ocp.training.Checkpointer(self._frozen, cleanup_tmp_directories=True) as checkpointer:
            if checkpointer.latest is None:
                checkpointer.save_checkpointables(0, {"parameters": _frozen_parameters(model)})

    @property
    def _frozen(self) -> Path:
        return self.path / "frozen"

    def last_step(self) -> int | None:
        """The newest complete checkpoint; None when there is none. Interrupted saves don't count."""
        if not (self.path / "checkpoints").is_dir():
            return None
        latest = self._opened().latest
        return None if latest is None else latest.step

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of checkpoint `step` in the shardings of `abstract`, whatever mesh it was saved from.

        `state.step` counts the steps of the stage and is the caller's to set. Needs an active mesh (`jax.set_mesh`).
        """
        whole = NamedSharding(jax.sharding.get_mesh(), PartitionSpec())

        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            # Step counts of the optimiser come from no parameter, so nothing says where they live: everywhere.
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding or whole)

        optimizer = {name: placed(leaf) for name, leaf in _flat(abstract.optimizer_state).items()}
        model, found = self._restored(step, abstract.model, abstract.trained, {"optimizer": optimizer})
        leaves, structure = jax.tree_util.tree_flatten_with_path(abstract.optimizer_state)
        optimizer_state = jax.tree_util.tree_unflatten(
            structure, [found["optimizer"][jax.tree_util.keystr(path)] for path, _ in leaves]
        )
        return dataclasses.replace(abstract, model=model, optimizer_state=optimizer_state)

    def restore_model(
        self, step: int, rules: AxisRules, mesh: Mesh, config: LanguageModelConfig | None = None
    ) -> LanguageModel:
        """The model alone of checkpoint `step`, on `mesh`; low-rank factors stay apart (`without_lora` merges them)."""
        config = config or self.model_config()
        abstract = abstract_model(lambda: build_model(config, rules), mesh)
        trained = "full"
        if (self.path / "checkpoints" / str(step) / "trained").exists():
            trained = "lora" if config.lora_projections else "tool_rows"
        with jax.set_mesh(mesh):
            return self._restored(step, abstract, trained, {})[0]

    def _restored(
        self, step: int, abstract: LanguageModel, trained: str, others: Mapping[str, Any]
    ) -> tuple[LanguageModel, dict[str, Any]]:
        """The model of checkpoint `step`, and `others` of its items."""
        if trained == "full":
            found = self._load(step, {"parameters": parameters(abstract), **others})
            return with_parameters(abstract, found["parameters"]), found
        part = jax.eval_shape(lambda model: trained_part(model, trained), abstract)
        found = self._load(step, {"trained": part, **others})
        frozen = self._load_frozen(_frozen_parameters(abstract))
        factors = {path: found["trained"][path] for path in factor_paths(abstract)}
        model = with_parameters(abstract, frozen | factors)
        rows = {path: value for path, value in found["trained"].items() if path not in factors}
        return jax.jit(with_trained_part, donate_argnums=0)(model, rows), found

    def _load(self, step: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._opened().load_checkpointables(step, dict(wanted))
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(
                f"{self.path / 'checkpoints' / str(step)}: the checkpoint can't be read ({str(error)[:300]}). "
                "Delete this folder to fall back on an earlier one"
            ) from error

    def _load_frozen(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        if not self._frozen.is_dir():
            raise FileNotFoundError(
                f"{self._frozen} is missing: it holds the weights that were not trained, put it back"
            )
        try:
            with ocp.training.Checkpointer(self._frozen, cleanup_tmp_directories=False) as checkpointer:
                return checkpointer.load_checkpointables(0, {"parameters": dict(wanted)})["parameters"]
        except (ValueError, KeyError, OSError) as error:
            raise ValueError(
                f"{self._frozen}: the weights that were not trained can't be read ({str(error)[:300]}). Put the folder "
                "back, or delete the run to start anew"
            ) from error

    def close(self) -> None:
        """Waits for the last save; raises what went wrong in it."""
        if self._checkpointer is not None:
            self._checkpointer.close()
            self._checkpointer = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _opened(self) -> ocp.training.Checkpointer:
        if self._checkpointer is None:
            self._checkpointer = ocp.training.Checkpointer(
                self.path / "checkpoints",
                preservation_policy=ocp.training.preservation_policies.LatestN(self._keep),
                # Only by the process that writes the run: what looks left over may be its save in progress.
                cleanup_tmp_directories=self._writing,
            )
        return self._checkpointer

    # ---- metrics ---------------------------------------------------------------------------------------------------

    def log(self, record: Mapping[str, Any]) -> None:
        """Appends one line to `metrics.jsonl`; a line that a kill left half-written is ended first."""
        if jax.process_index() == 0:
            with (self.path / "metrics.jsonl").open("a+b") as file:
                half = file.tell() > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
                file.write((b"\n" if half else b"") + json.dumps(record).encode() + b"\n")

    def metrics(self) -> list[dict[str, Any]]:
        """All records; of a step that was done twice (after a kill) the later one, and no half-written line."""
        path = self.path / "metrics.jsonl"
        records: dict[Any, dict[str, Any]] = {}
        for line in path.read_bytes().split(b"\n") if path.exists() else []:
            try:
                record = json.loads(line)
            except ValueError:
                continue  # a kill can leave half a line; its step was done again
            if isinstance(record, dict):  # half a line may read as a number
                records[record.get("step")] = record
        return list(records.values())


def _frozen_parameters(model: LanguageModel) -> dict[str, Any]:
    """All but the low-rank factors. Tool rows are among them as they began: the matrices are stored whole."""
    factors = factor_paths(model)
    return {path: leaf for path, leaf in parameters(model).items() if path not in factors}


def _flat(tree: Any) -> dict[str, Any]:
    """Leaves by key path: independent of the classes of the tree, which orbax would not know."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in before.keys() | now.keys():
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}".lstrip("."))
    elif before != now:
        yield f"{name} was {before!r}, is {now!r}"


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
