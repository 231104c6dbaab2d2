"""Growing and shrinking the vocabulary by tool rows, in the model and in the optimiser state.

Tool i is row `vocab_size + i` of the embedding and of the head; the text tokenizer never learns about it. Rows are
padded to a multiple of 128 (times the `model` axis), and padding can never be predicted (`Llama.logits`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxtool.models.llama import VOCABULARY_MULTIPLE, Llama, LlamaConfig, padded_rows
from jaxtool.models.parameter_tree import abstract_model, parameters, with_parameters
from jaxtool.parallel import active_mesh_axes, reshard

ROW_MATRICES = ("embedding_vd", "head_vd")


def mean_rows(matrix_vd: jax.Array, token_ids: Sequence[Sequence[int]]) -> np.ndarray:
    """Mean of the rows of each id list, float32 [T, D].

    Raises:
        ValueError: a list is empty or names a row that the matrix lacks.
    """
    table_vd = np.asarray(matrix_vd.astype(jnp.float32))
    means_td = np.empty((len(token_ids), table_vd.shape[1]), np.float32)
    for tool, ids in enumerate(token_ids):
        if not ids:
            raise ValueError(f"tool {tool}: its name has no token, a row can't be initialised from nothing")
        if min(ids) < 0 or max(ids) >= len(table_vd):
            raise ValueError(f"tool {tool}: token ids {min(ids)} to {max(ids)} are outside the {len(table_vd)} rows")
        means_td[tool] = table_vd[np.asarray(ids)].mean(axis=0)
    return means_td


def with_name_rows(model: Llama, name_token_ids: Sequence[Sequence[int]]) -> Llama:
    """`model` with one row per tool, the mean of its name's token rows, in the embedding and (untied) in the head."""
    text = model.config.vocab_size
    matrices = {path: _whole(leaf, model)[:text] for path, leaf in parameters(model).items() if path in ROW_MATRICES}
    return with_tool_rows(model, {path: mean_rows(leaf, name_token_ids) for path, leaf in matrices.items()})


def with_tool_rows(model: Llama, rows: Mapping[str, np.ndarray]) -> Llama:
    """`model` whose tool rows are `rows[path]` [T, D] for each row matrix; text rows stay as they are.

    Raises:
        ValueError: a row matrix is missing or surplus, or its shape is not [T, D] with one T for all.
    """
    values = parameters(model)
    paths = [path for path in ROW_MATRICES if path in values]
    if sorted(rows) != sorted(paths):
        raise ValueError(f"tool rows given for {sorted(rows)}, the model has {sorted(paths)}")
    shapes = {path: rows[path].shape for path in paths}
    if len(set(shapes.values())) != 1 or any(len(s) != 2 or s[1] != model.config.hidden_size for s in shapes.values()):
        raise ValueError(f"tool rows have shapes {shapes}, expected one [T, {model.config.hidden_size}]")
    config = tools_config(model.config, next(iter(shapes.values()))[0])
    for path in paths:
        text_vd = _whole(values[path], model)[: config.vocab_size]
        values[path] = _assemble(text_vd, jnp.asarray(rows[path], text_vd.dtype), config, model)
    return _rebuilt(model, config, values)


def without_tool_rows(model: Llama) -> Llama:
    """`model` with its text rows alone: bit for bit the rows it had before tools were added."""
    d = model.config.hidden_size
    none = {path: np.zeros((0, d), np.float32) for path in ROW_MATRICES if path in parameters(model)}
    return with_tool_rows(model, none)


def tools_config(config: LlamaConfig, num_tools: int) -> LlamaConfig:
    """`config` for `num_tools` tools; rows are padded to 128 x the `model` axis of the active mesh."""
    rows = padded_rows(config.vocab_size, num_tools, VOCABULARY_MULTIPLE * active_mesh_axes().get("model", 1))
    return dataclasses.replace(config, num_tools=num_tools, padded_vocab_size=rows if num_tools else 0)


def resized_optimizer_state(state: Any, old: LlamaConfig, model: Llama) -> Any:
    """Optimiser state for the resized `model`: text rows and surviving tool rows keep their moments, new rows get zero.

    Args:
        state: optax state over the old model; the moments of `embedding_vd` and `head_vd` are resized.
        old: config of the model that `state` belongs to.
        model: the resized model.
    """
    new = model.config
    kept = min(old.num_tools, new.num_tools)

    def resized(moments: Any) -> Any:
        if not isinstance(moments, Llama):
            return moments
        values = parameters(moments)
        for path in ROW_MATRICES:
            if path in values:
                whole_vd = _whole(values[path], model)
                tools_td = jnp.zeros((new.num_tools, whole_vd.shape[1]), whole_vd.dtype)
                tools_td = tools_td.at[:kept].set(whole_vd[old.vocab_size : old.vocab_size + kept])
                values[path] = _assemble(whole_vd[: old.vocab_size], tools_td, new, model)
        return _rebuilt(moments, new, values)

    return jax.tree.map(resized, state, is_leaf=lambda node: isinstance(node, Llama))


def _whole(matrix_vd: jax.Array, model: Llama) -> jax.Array:
    """The matrix with its vocabulary axis gathered, so that rows can be cut off and appended."""
    return reshard(matrix_vd, model.rules.spec(None, "embed"))


def _assemble(text_vd: jax.Array, tools_td: jax.Array, config: LlamaConfig, model: Llama) -> jax.Array:
    padding = jnp.zeros((config.rows - config.vocab_size - config.num_tools, text_vd.shape[1]), text_vd.dtype)
    parts = [_whole(part, model) for part in (text_vd, tools_td, padding) if part.shape[0]]
    return reshard(jnp.concatenate(parts), model.rules.spec("vocabulary", "embed"))


def _rebuilt(model: Llama, config: LlamaConfig, values: Mapping[str, Any]) -> Llama:
    resized = abstract_model(lambda: Llama(config, model.rules, rngs=nnx.Rngs(0)))
    return with_parameters(resized, values, check_dtypes=False)
