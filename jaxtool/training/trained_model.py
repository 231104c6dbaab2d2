"""A model to compute with, wherever it comes from: a run of `train/finetune.py`, or what `jaxtool.load` takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxtool.data import smollm2
from jaxtool.models import LanguageModel, without_lora
from jaxtool.parallel import AxisRules
from jaxtool.training.run_directory import RunDirectory
from jaxtool.weights import eos_token_ids, model_fingerprint, read_tool_ids
from jaxtool.weights.pretrained import load


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """A model, its tokenizer and its tools.

    Attributes:
        model: the network, low-rank updates merged.
        tokenizer: of text.
        eos_token_ids: every id that ends a text, ascending.
        tools: names of the tools, in the order of their rows; none for a model without.
        version: what tells its files from others of the same source: the checkpoint's step, or a fingerprint.
        settings: of the training, as `RunDirectory.settings`; empty for models that come from elsewhere.
    """

    model: LanguageModel
    tokenizer: Any
    eos_token_ids: tuple[int, ...]
    tools: tuple[str, ...]
    version: int | str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def tool_id(self, name: str) -> int:
        """The id of a tool's token.

        Raises:
            ValueError: there is no such tool.
        """
        try:
            return self.model.config.vocab_size + self.tools.index(name)
        except ValueError:
            raise ValueError(f"the model has no tool {name!r} among its {len(self.tools):,}") from None


def load_trained(
    source: str, mesh: Mesh, *, param_dtype: str = "", report: Callable[[str], object] = lambda line: None
) -> TrainedModel:
    """The model of a run directory (its newest checkpoint), a folder, a GGUF file or a hub id, on the active mesh.

    Args:
        source: where it is; "smollm2" for the embedded default.
        mesh: where the parameters go.
        param_dtype: of the parameters ("": float32 on CPU, bfloat16 elsewhere; a run keeps that of its training).
        report: called with a line for each axis that the mesh doesn't divide, and for a run that isn't finished.

    Raises:
        ValueError, FileNotFoundError: as `RunDirectory` and `jaxtool.load`, or a run without a checkpoint.
    """
    if not (Path(source) / "model.json").is_file():
        path = smollm2() if source == "smollm2" else source
        loaded = load(path, mesh=mesh, param_dtype=param_dtype or None, report=report)
        names = read_tool_ids(loaded.path) if loaded.path.is_dir() else {}
        return TrainedModel(
            model=loaded.model,
            tokenizer=loaded.tokenizer,
            eos_token_ids=loaded.eos_token_ids,
            tools=tuple(names),
            version=model_fingerprint(loaded.path),
        )
    run = RunDirectory(source)
    config, step = run.model_config(), run.last_step()
    if step is None:
        raise ValueError(f"{run.path}: no complete checkpoint yet, run train/finetune.py with its config first")
    if param_dtype not in ("", config.param_dtype):
        raise ValueError(f"{run.path} was trained in {config.param_dtype}, param_dtype is {param_dtype}: leave it out")
    unfinished = run.unfinished(step)
    if unfinished is not None:
        report(unfinished)
    rules, dropped = AxisRules().fit(dict(mesh.shape), config.axis_sizes)
    for line in dropped:
        report(line)
    tokenizer = run.tokenizer()
    return TrainedModel(
        model=without_lora(run.restore_model(step, rules, mesh)),
        tokenizer=tokenizer,
        eos_token_ids=eos_token_ids(run.path / "tokenizer", tokenizer),
        tools=tuple(tool.name for tool in run.catalog()),
        version=step,
        settings=run.settings(),
    )
