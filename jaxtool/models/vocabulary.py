"""Growing and shrinking the vocabulary by tool rows, in the model and in the optimiser state.

Tool i is row `vocab_size + i` of the embedding, of the head and of its bias; the text tokenizer never learns about it.
Rows are padded to a multiple of 128 (times the `model` axis), and padding can never be predicted
(`LanguageModel.logits`). How new rows begin is in `row_initialisation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxtool.models.catalog_change import CatalogChange
from jaxtool.models.language_model import VOCABULARY_MULTIPLE, LanguageModel, LanguageModelConfig
from jaxtool.models.lora import lora_paths
from jaxtool.models.parameter_tree import abstract_model, parameters, with_parameters
from jaxtool.models.registry import build_model
from jaxtool.models.row_initialisation import ROW_PARAMETERS, RowInitialiser, TokenMean
from jaxtool.models.row_programs import moved_rows
from jaxtool.parallel import active_mesh_axes, check_mesh


def with_catalog(
    model: LanguageModel,
    change: CatalogChange,
    initialiser: RowInitialiser | Mapping[str, RowInitialiser] | None = None,
) -> LanguageModel:
    """`model` for another catalogue: tools that stay keep their rows bit for bit, wherever they move to.

    Text rows don't change. Rows of removed tools vanish, those of added tools begin as `initialiser` says.

    Args:
        model: the model; on a mesh, with that mesh active.
        change: from the model's tools to the new ones.
        initialiser: one for all row parameters, or one for each of `embedding` and (untied) `head`; the head's bias
            goes with the head. Not needed when no tool is added.

    Raises:
        ValueError: the change isn't one of this model's tools, initialisers are missing or surplus, or the model's mesh
            isn't active.
    """
    check_mesh(model.embedding_vd[...])
    if change.old_count != model.config.num_tools:
        raise ValueError(f"a change of {change.old_count:,} tools, the model has {model.config.num_tools:,}")
    if not change.added:
        return _resized(model, change, {})
    config, values = model.config, parameters(model)
    chosen = _by_part(initialiser, change, config)
    rows: dict[str, Any] = {}
    for path in _row_parameters(values):
        matrix_vd = values[path] if values[path].ndim == 2 else values[path][:, None]
        part = chosen["embedding" if path == "embedding_vd" else "head"]
        rows_td = part.rows(path, matrix_vd, config.text_tokens or config.vocab_size, change)
        rows[path] = rows_td if values[path].ndim == 2 else rows_td[:, 0]
    return _resized(model, change, rows)


def with_name_rows(model: LanguageModel, name_token_ids: Sequence[Sequence[int]]) -> LanguageModel:
    """`model` with one new row per tool, the mean of its name's token rows, in embedding and (untied) head."""
    change = CatalogChange.all_new(model.config.num_tools, len(name_token_ids))
    return with_catalog(model, change, TokenMean(token_ids=name_token_ids))


def with_tool_rows(model: LanguageModel, rows: Mapping[str, np.ndarray]) -> LanguageModel:
    """`model` whose tool rows are `rows[path]` [T, D] ([T] for a bias) for each row parameter.

    Raises:
        ValueError: a row parameter is missing or surplus, or a shape is not [T, D] with one T for all.
    """
    values, d = parameters(model), model.config.hidden_size
    paths = _row_parameters(values)
    if sorted(rows) != sorted(paths):
        raise ValueError(f"tool rows given for {sorted(rows)}, the model has {sorted(paths)}")
    shapes = {path: tuple(rows[path].shape) for path in paths}
    if len({shape[:1] for shape in shapes.values()}) != 1 or any(
        len(shape) != values[path].ndim or shape[1:] != values[path].shape[1:] for path, shape in shapes.items()
    ):
        bias = " and [T] for the bias" if "head_bias_v" in paths else ""
        raise ValueError(f"tool rows have shapes {shapes}, expected one [T, {d}]{bias}")
    change = CatalogChange.all_new(model.config.num_tools, shapes["embedding_vd"][0])
    return _resized(model, change, {path: rows[path].astype(values[path].dtype) for path in paths})


def without_tool_rows(model: LanguageModel) -> LanguageModel:
    """`model` with its text rows alone: bit for bit the rows it had before tools were added."""
    return _resized(model, CatalogChange.all_new(model.config.num_tools, 0), {})


def mean_rows(matrix_vd: jax.Array, token_ids: Sequence[Sequence[int]]) -> jax.Array:
    """Mean of the rows of each id list, [T, D] in the dtype of the matrix.

    Raises:
        ValueError: a list is empty or names a row that the matrix lacks.
    """
    change = CatalogChange.all_new(0, len(token_ids))
    return TokenMean(token_ids=token_ids).rows("embedding_vd", matrix_vd, matrix_vd.shape[0], change)


def tools_config(config: LanguageModelConfig, num_tools: int) -> LanguageModelConfig:
    """`config` for `num_tools` tools; rows are padded to 128 x the `model` axis of the active mesh.

    Without tools there is no padding, unless the text rows alone don't divide by that axis.
    """
    parts = active_mesh_axes().get("model", 1)
    if num_tools == 0 and config.vocab_size % parts == 0:
        return dataclasses.replace(config, num_tools=0, padded_vocab_size=0)
    rows = -(-(config.vocab_size + num_tools) // (VOCABULARY_MULTIPLE * parts)) * VOCABULARY_MULTIPLE * parts
    return dataclasses.replace(config, num_tools=num_tools, padded_vocab_size=rows)


def resized_optimizer_state(
    state: Any, old: LanguageModelConfig, model: LanguageModel, change: CatalogChange | None = None
) -> Any:
    """Optimiser state for the resized `model`: text rows and surviving tool rows keep their moments, new rows get zero.

    Every tree in the state that has the form of the model is resized, also where leaves are masked
    (`optax.MaskedNode`) or reduced to one number per row (as in Adafactor), and every mapping with blocks of tool rows
    (where only these are trained). Beside low-rank factors such blocks appear with the first tool and vanish with the
    last. Anything else stays as it is.

    Args:
        state: optax state over the old model.
        old: config of the model that `state` belongs to.
        model: the resized model.
        change: the change that resized it; None: tools are known by their ids, the first ones survive.

    Raises:
        ValueError: `state` doesn't belong to `old`, or `change` doesn't lead from `old` to `model`.
    """
    new = model.config
    change = change or CatalogChange.of_counts(old.num_tools, new.num_tools)
    if (change.old_count, change.new_count) != (old.num_tools, new.num_tools) or old.vocab_size != new.vocab_size:
        raise ValueError(
            f"a change from {change.old_count:,} to {change.new_count:,} tools, the models have {old.num_tools:,} and "
            f"{new.num_tools:,} behind {old.vocab_size:,} and {new.vocab_size:,} text rows"
        )
    wanted, block = parameters(model), model.tool_block
    factors = {path for pair in lora_paths(new).values() for path in pair}
    old_block = dataclasses.replace(block, count=old.num_tools)
    source_v, source_x = _sources(change, old.vocab_size, new.rows), _sources(change, 0, block.size)

    def moved(path: str, moments: Any, rows: int, source: np.ndarray, axis: str | None) -> Any:
        if path not in ROW_PARAMETERS or not hasattr(moments, "shape"):
            return moments
        each = wanted[path].shape[1:]
        if moments.shape not in ((rows, *each), (rows,)):
            if moments.shape in (each, (1,)):  # reduced over the rows, or a stand-in
                return moments
            raise ValueError(f"{path}: optimiser state of shape {list(moments.shape)}, expected {[rows, *each]}")
        if moments.shape == each:
            raise ValueError(f"{path}: as many rows as columns, optimiser state of shape [{rows}] may belong to either")
        same = moments.ndim == 1 + len(each)
        return moved_rows(moments, source, out=model.rules.spec(axis, *("embed",) * len(each)) if same else None)

    def resized(node: Any) -> Any:
        if isinstance(node, LanguageModel):
            leaves = jax.tree.leaves(node, is_leaf=_is_masked)
            if len(leaves) != len(wanted):
                raise ValueError(f"optimiser state of {len(leaves)} parameters, the model has {len(wanted)}")
            pairs = zip(wanted, leaves, strict=True)
            leaves = [moved(path, leaf, old.rows, source_v, "vocabulary") for path, leaf in pairs]
            return jax.tree.unflatten(jax.tree.structure(model), leaves)
        if is_part(node):
            axis = block.rows_axis
            part = {path: moved(path, leaf, old_block.size, source_x, axis) for path, leaf in node.items()}
            if not part.keys() & factors or bool(old.num_tools) == bool(new.num_tools):
                return part
            if old.num_tools:
                return {path: leaf for path, leaf in part.items() if path not in ROW_PARAMETERS}
            if any(getattr(leaf, "shape", None) != wanted[path].shape for path, leaf in part.items()):
                raise ValueError("this optimiser's state can't be given tool rows, begin a new one")
            return part | {path: jnp.zeros_like(block.read(wanted[path])) for path in _row_parameters(wanted)}
        return node

    def is_part(node: Any) -> bool:
        """Whether the node is arrays by path, of tool rows or low-rank factors."""
        return isinstance(node, dict) and any(path in node for path in factors.union(ROW_PARAMETERS))

    return jax.tree.map(resized, state, is_leaf=lambda node: isinstance(node, LanguageModel) or is_part(node))


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)


def _row_parameters(values: Mapping[str, Any]) -> list[str]:
    return [path for path in ROW_PARAMETERS if path in values]


def _by_part(
    initialiser: RowInitialiser | Mapping[str, RowInitialiser] | None, change: CatalogChange, c: LanguageModelConfig
) -> Mapping[str, RowInitialiser]:
    expected = ("embedding",) if c.tie_word_embeddings else ("embedding", "head")
    if initialiser is None:
        raise ValueError(f"{change.added:,} tools are added, expected an initialiser for their rows")
    if not isinstance(initialiser, Mapping):
        return dict.fromkeys(expected, initialiser)
    if sorted(initialiser) != sorted(expected):
        tie = "tied to the embedding" if c.tie_word_embeddings else "untied and needs rows of its own"
        raise ValueError(
            f"initialisers for {', '.join(sorted(initialiser)) or 'nothing'}, expected {' and '.join(expected)}: "
            f"the head is {tie}"
        )
    return initialiser


def _sources(change: CatalogChange, first: int, rows: int) -> np.ndarray:
    """Old row of each of the `rows` new ones, -1 for added tools and padding; tools begin at row `first`. int32 [V]."""
    source_v = np.full(rows, -1, np.int32)
    source_v[:first] = np.arange(first)
    source_v[first : first + change.new_count] = [-1 if source is None else first + source for source in change.sources]
    return source_v


def _resized(model: LanguageModel, change: CatalogChange, rows: Mapping[str, Any]) -> LanguageModel:
    """`model` after the change, `rows[path]` being those of the added tools."""
    config, values = tools_config(model.config, change.new_count), parameters(model)
    source_v = _sources(change, config.vocab_size, config.rows)
    place_t = config.vocab_size + change.added_ids
    for path in _row_parameters(values):
        new = (rows[path], place_t) if path in rows else ()
        out = model.rules.spec("vocabulary", *("embed",) * (values[path].ndim - 1))
        values[path] = moved_rows(values[path], source_v, *new, out=out)
    return with_parameters(abstract_model(lambda: build_model(config, model.rules)), values)
