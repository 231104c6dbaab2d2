"""What a train state is on disk: which named arrays a checkpoint holds, and the state put together from them again.

Where all of the model is trained, a checkpoint holds `parameters`; else `trained`, the part that is, and the frozen
weights lie once in a folder of their own. Optimiser state is `optimizer` in both. How arrays get to the disk and back
is in `checkpoints`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtool.models import (
    LanguageModel,
    LanguageModelConfig,
    abstract_model,
    build_model,
    parameters,
    with_parameters,
)
from jaxtool.parallel import AxisRules
from jaxtool.training.checkpoint_files import DamagedCheckpoint
from jaxtool.training.checkpoints import CheckpointFolder, SaveReport
from jaxtool.training.step import TrainState
from jaxtool.training.trainable import factor_paths, trained_part, with_trained_part


class SavedStates:
    """The train states of one run.

    Args:
        checkpoints: folder of the checkpoints.
        frozen: folder of the weights that are not trained.
        keep: newest checkpoints to keep.
        metric: name of the held-out metric by which the best one is kept as well.
        warn: is told about damaged checkpoints.
    """

    def __init__(
        self,
        checkpoints: Path,
        frozen: Path,
        *,
        keep: int = 1,
        metric: str | None = None,
        warn: Callable[[str], None] | None = None,
    ) -> None:
        self.checkpoints = CheckpointFolder(checkpoints, keep=keep, metric=metric, warn=warn)
        self._frozen = CheckpointFolder(frozen, warn=warn)
        self._frozen_written = False

    def begin_writing(self) -> None:
        """Puts in order what a killed run left (see `CheckpointFolder.begin_writing`)."""
        self.checkpoints.begin_writing()
        self._frozen.begin_writing()

    def save(self, step: int, state: TrainState, *, value: float | None = None) -> None:
        """Begins checkpoint `step`, with the held-out metric's value there; see `CheckpointFolder.save`."""
        items: dict[str, Any] = {"optimizer": _flat(state.optimizer_state)}
        if state.trained == "full":
            items["parameters"] = parameters(state.model)
        else:
            if not self._frozen_written:  # complete before the first checkpoint that needs it
                if self._frozen.newest() is None:
                    self._frozen.save(0, {"parameters": _frozen_parameters(state.model)})
                    self._frozen.wait()
                self._frozen_written = True
            items["trained"] = jax.jit(trained_part, static_argnums=1)(state.model, state.trained)
        self.checkpoints.save(step, items, value=value)

    def finished(self) -> SaveReport | None:
        """What the last save took, once; see `CheckpointFolder.finished`."""
        return self.checkpoints.finished()

    def restore(self, step: int, abstract: TrainState) -> TrainState:
        """The state of checkpoint `step` in the shardings of `abstract`; needs an active mesh (`jax.set_mesh`)."""
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

    def restore_newest(
        self, wanted: Callable[[int], TrainState | LanguageModel]
    ) -> tuple[int, TrainState | LanguageModel]:
        """The newest checkpoint that is undamaged, read whole; warns of those that are not.

        Args:
            wanted: from a step, the abstract state to restore, or the abstract model where that is all.

        Raises:
            ValueError: all checkpoints are damaged.
            FileNotFoundError: there is none.
        """
        while True:
            step = self.checkpoints.newest()
            if step is None:
                raise FileNotFoundError(f"{self.checkpoints.path}: there is no checkpoint")
            abstract = wanted(step)
            try:
                if isinstance(abstract, TrainState):
                    return step, self.restore(step, abstract)
                return step, self._restored(step, abstract, self._trained(step, abstract.config), {})[0]
            except DamagedCheckpoint:
                continue  # it counts as damaged from now on

    def restore_model(self, step: int, rules: AxisRules, mesh: Mesh, config: LanguageModelConfig) -> LanguageModel:
        """The model alone of checkpoint `step`, on `mesh`; low-rank factors stay apart (`without_lora` merges them)."""
        abstract = abstract_model(lambda: build_model(config, rules), mesh)
        with jax.set_mesh(mesh):
            return self._restored(step, abstract, self._trained(step, config), {})[0]

    def _trained(self, step: int, config: LanguageModelConfig) -> str:
        if "trained" not in self.checkpoints.items(step):
            return "full"
        return "lora" if config.lora_projections else "tool_rows"

    def _restored(
        self, step: int, abstract: LanguageModel, trained: str, others: dict[str, Any]
    ) -> tuple[LanguageModel, dict[str, Any]]:
        """The model of checkpoint `step`, and `others` of its items."""
        if trained == "full":
            found = self.checkpoints.load(step, {"parameters": parameters(abstract), **others})
            return with_parameters(abstract, found["parameters"]), found
        part = jax.eval_shape(lambda model: trained_part(model, trained), abstract)
        assert isinstance(part, dict)
        found = self.checkpoints.load(step, {"trained": part, **others})
        frozen = self._load_frozen(_frozen_parameters(abstract))
        factors = {path: found["trained"][path] for path in factor_paths(abstract)}
        model = with_parameters(abstract, frozen | factors)
        rows = {path: value for path, value in found["trained"].items() if path not in factors}
        return jax.jit(with_trained_part, donate_argnums=0)(model, rows), found

    def _load_frozen(self, wanted: dict[str, Any]) -> dict[str, Any]:
        if not self._frozen.path.is_dir():
            raise FileNotFoundError(
                f"{self._frozen.path} is missing: it holds the weights that were not trained, put it back"
            )
        try:
            return self._frozen.load(0, {"parameters": wanted})["parameters"]
        except ValueError as error:  # no older checkpoint can do without them
            raise ValueError(
                f"{self._frozen.path}: the weights that were not trained can't be read ({error}). Put the folder "
                "back, or delete the run to start anew"
            ) from error

    def close(self) -> None:
        """Waits for the save in the background; raises what went wrong in it."""
        self.checkpoints.wait()


def _frozen_parameters(model: LanguageModel) -> dict[str, Any]:
    """All but the low-rank factors. Tool rows are among them as they began: the matrices are stored whole."""
    factors = factor_paths(model)
    return {path: leaf for path, leaf in parameters(model).items() if path not in factors}


def _flat(tree: Any) -> dict[str, Any]:
    """Leaves by key path: independent of the classes of the tree, which orbax would not know."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}
