"""A model as a Hugging Face folder that transformers loads: the inverse of `load`, through the same tensor tables.

The folder appears whole or not at all. Its safetensors are written by `safetensors_writer`, its `config.json` is that
of `hf_config`, and the table of its tool rows is in `tool_ids`.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jaxtool.models import LanguageModel, LanguageModelConfig, parameters
from jaxtool.models.lora import without_lora
from jaxtool.weights.hf_config import config_to_hf
from jaxtool.weights.safetensors_header import NUMPY_DTYPES
from jaxtool.weights.safetensors_reader import read_json_object
from jaxtool.weights.safetensors_writer import SHARD_BYTES, SafetensorsWriter
from jaxtool.weights.tensor_map import TensorRule, WeightsError, check_tree, file_shape
from jaxtool.weights.tensor_tables import tensor_rules
from jaxtool.weights.tokenizers import eos_token_ids
from jaxtool.weights.tool_ids import check_names, write_tool_ids
from jaxtool.weights.tool_tokens import TokenizerError, tool_token, with_tool_tokens

logger = logging.getLogger(__name__)

_FORMAT_NAMES = {dtype.name: name for name, dtype in NUMPY_DTYPES.items()}
_SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def export_model(
    model: LanguageModel,
    folder: str | Path,
    *,
    tokenizer: Any,
    source: str | Path | None = None,
    tools: Sequence[str] = (),
    tool_tokens: bool = False,
    dtype: str | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes the model to `folder` as transformers reads it; tool rows follow the text rows, padding is left out.

    Parameters leave the devices tensor by tensor, and at most two are in host memory at a time. With several processes
    all must call this and the first one writes; each device then holds one tensor whole beside its own parts.

    A model with tools is used in transformers by id: `tool_ids.jsonl` says which row is which tool, and
    `generate(..., prefix_allowed_tokens_fn=lambda batch, ids: tool_ids)` chooses among them. With `tool_tokens` the
    tokenizer writes and reads tool i as `<|tool NAME|>`, too. Text rows that the tokenizer doesn't know get probability
    in transformers, whose configs can't say `text_tokens`.

    Args:
        model: the network; low-rank updates are merged on the way (which needs the model's mesh to be active).
        folder: new or empty.
        tokenizer: the text tokenizer, left as it is.
        source: folder or `.gguf` file of the pretrained model. A folder's `generation_config.json` (all its EOS ids) is
            kept; without one, special ids come from its `config.json` or the file's metadata, and from the tokenizer.
        tools: names of the tools in the order of their rows.
        tool_tokens: add a token for each tool to the saved tokenizer; see `with_tool_tokens`.
        dtype: of the stored tensors, "float32", "bfloat16" or "float16"; None: as the parameters are.
        shard_bytes: largest size of the data of a safetensors file.

    Returns:
        The folder.

    Raises:
        TokenizerError: the tokenizer has ids behind the text rows, or `tool_tokens` can't be added faithfully.
        ValueError: the folder exists with something in it, the names don't fit the tool rows, or values don't fit the
            dtype.
        WeightsError: the first of several processes has failed, in the others.
    """
    folder = Path(os.path.expanduser(folder)).resolve()
    source = None if source is None else Path(os.path.expanduser(source))
    config = model.config
    dtype = dtype or config.param_dtype
    if dtype not in _FORMAT_NAMES:
        raise ValueError(f"dtype is {dtype!r}, expected one of {', '.join(_FORMAT_NAMES)}")
    if len(tools) != config.num_tools:
        raise ValueError(f"{len(tools)} tool names given, expected one for each of the model's {config.num_tools}")
    if tool_tokens and not tools:
        raise ValueError("tool_tokens is set, but the model has no tools")
    check_names(tools)
    _check_tokenizer(tokenizer, config, tools)
    if tool_tokens:
        tokenizer, unused = with_tool_tokens(tokenizer, tools, config.vocab_size)
        if unused:
            logger.info(
                f"{folder}: {unused} unused tokens added to the tokenizer (<|unused_0|> to <|unused_{unused - 1}|>): "
                f"tool tokens begin at row {config.vocab_size:,}"
            )
    model = without_lora(model)
    fields = config_to_hf(dataclasses.replace(model.config, param_dtype=dtype))
    special_ids = _special_ids(source, tokenizer)
    generation = _generation_config(source, special_ids)
    fields |= special_ids | {name: generation[name] for name in _SPECIAL_IDS if generation.get(name) is not None}
    tensors = _file_tensors(model, folder)

    with _first_process(folder) as is_first:
        if is_first:
            _check_free(folder)
    arrays = _on_devices(tensors, dtype)
    with _first_process(folder) as is_first:
        try:
            if is_first:
                with _appearing(folder) as partial:
                    listed = [(tensor.name, _FORMAT_NAMES[dtype], tensor.shape) for tensor in tensors]
                    with SafetensorsWriter(partial, listed, shard_bytes=shard_bytes) as writer:
                        for tensor, value in _on_host(arrays):
                            writer.write(tensor.name, value)
                    tokenizer.save_pretrained(partial)
                    _name_tokenizer_class(partial / "tokenizer_config.json")
                    if tools:
                        write_tool_ids(partial, tools, config.vocab_size)
                    _write_json(partial / "generation_config.json", generation)
                    # Last: what a kill leaves behind can't be taken for a model.
                    _write_json(partial / "config.json", fields)
        finally:
            if jax.process_count() > 1:
                for _ in arrays:  # all processes compute each of them, or the others would wait for ever
                    pass
    return folder


@contextmanager
def _first_process(folder: Path) -> Iterator[bool]:
    """A step of which the first process has the work: whether this is that one. Fails in all processes or in none."""
    failure: Exception | None = None
    try:
        yield jax.process_index() == 0
    except Exception as error:
        failure = error
    done = failure is None
    if jax.process_count() > 1:
        done = bool(multihost_utils.broadcast_one_to_all(np.bool_(done)))
    if failure is not None:
        raise failure
    if not done:
        raise WeightsError(f"{folder}: the first process has failed to write it; its own message says why")


@dataclass(frozen=True, kw_only=True)
class _FileTensor:
    """A tensor to be written: its name and shape, and the parameter (and layer of it) that it comes from."""

    name: str
    shape: tuple[int, ...]
    rule: TensorRule
    leaf: jax.Array
    layer: int | None

    @property
    def order(self) -> tuple[int, ...]:
        """Parameter axes (without the layer) in the order of the file."""
        return tuple(axis for axes in self.rule.axes for axis in axes)


def _file_tensors(model: LanguageModel, where: Path) -> list[_FileTensor]:
    """All tensors of the model's checkpoint, in the order of the tensor table."""
    values = parameters(model)
    rules = {rule.path: rule for rule in tensor_rules(model.config)}
    check_tree(where, values, rules, model.config.tie_word_embeddings)
    rows = model.config.vocab_size + model.config.num_tools
    tensors: list[_FileTensor] = []
    for path, rule in rules.items():
        if path not in values:
            continue
        leaf = values[path]
        shape = file_shape(rule, leaf, rows, where)
        for layer in range(leaf.shape[0]) if rule.stacked else [None]:
            name = rule.hf.replace("{layer}", str(layer))
            tensors.append(_FileTensor(name=name, shape=shape, rule=rule, leaf=leaf, layer=layer))
    return tensors


def _on_host(arrays: Iterator[tuple[_FileTensor, jax.Array]]) -> Iterator[tuple[_FileTensor, np.ndarray]]:
    """Each tensor in the file's layout. While one is written, the next one is on its way."""
    before: tuple[_FileTensor, jax.Array] | None = None
    for tensor, array in arrays:
        array.copy_to_host_async()
        if before is not None:
            yield before[0], _finished(*before)
        before = tensor, array
    if before is not None:
        yield before[0], _finished(*before)


def _finished(tensor: _FileTensor, array: jax.Array) -> np.ndarray:
    value = np.asarray(array)
    if tensor.rule.vocabulary:
        value = value[: tensor.shape[0]]  # without padded rows
    value = value.reshape(tensor.shape)
    if value.dtype == np.float16 and tensor.leaf.dtype != np.float16 and not np.isfinite(value).all():
        raise WeightsError(
            f"tensor {tensor.name} has values beyond float16, which ends at 65,504; choose another dtype"
        )
    return value


def _on_devices(tensors: Sequence[_FileTensor], dtype: str) -> Iterator[tuple[_FileTensor, jax.Array]]:
    """Each tensor with its axes in the file's order; whole on every process."""
    for tensor in tensors:
        whole = None
        if not tensor.leaf.is_fully_addressable:
            assert isinstance(tensor.leaf.sharding, NamedSharding)
            whole = NamedSharding(tensor.leaf.sharding.mesh, PartitionSpec())
        in_order = jax.jit(_in_file_order, static_argnames=("order", "dtype"), out_shardings=whole)
        layer = None if tensor.layer is None else np.int32(tensor.layer)  # traced: one program for all layers
        yield tensor, in_order(tensor.leaf, layer, order=tensor.order, dtype=dtype)


def _in_file_order(
    leaf: jax.Array, layer: jax.typing.ArrayLike | None, *, order: tuple[int, ...], dtype: str
) -> jax.Array:
    value = leaf if layer is None else jax.lax.dynamic_index_in_dim(leaf, layer, keepdims=False)
    # A copy in any case: an array that came to the host stays there as long as it lives, and the parameter lives on.
    return jnp.copy(value.astype(dtype).transpose(order))


def _check_tokenizer(tokenizer: Any, config: LanguageModelConfig, tools: Sequence[str]) -> None:
    known: Mapping[str, int] = tokenizer.get_vocab()
    behind = {row: token for token, row in known.items() if row >= config.vocab_size}
    expected = {config.vocab_size + tool: tool_token(name) for tool, name in enumerate(tools)}
    for row, token in sorted(behind.items()):
        if expected.get(row) != token:
            raise TokenizerError(
                f"the tokenizer's token {token!r} has the id {row:,}, expected none behind the model's "
                f"{config.vocab_size:,} text rows but tool tokens"
            )


def _special_ids(source: Path | None, tokenizer: Any) -> dict[str, Any]:
    """Ids of BOS, EOS and padding: the tokenizer's, or what the source's `config.json` or metadata say."""
    ids: dict[str, Any] = {name: getattr(tokenizer, name) for name in _SPECIAL_IDS}
    if source is not None and source.is_file():
        ends = eos_token_ids(source, tokenizer)
        ids["eos_token_id"] = list(ends) if len(ends) > 1 else next(iter(ends), None)
    elif source is not None and (source / "config.json").is_file():
        config = read_json_object(source / "config.json")
        ids |= {name: config[name] for name in _SPECIAL_IDS if config.get(name) is not None}
    return {name: value for name, value in ids.items() if value is not None}


def _generation_config(source: Path | None, special_ids: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `generation_config.json`: the source's own, or its special ids."""
    if source is not None and (source / "generation_config.json").is_file():
        return dict(read_json_object(source / "generation_config.json"))
    return dict(special_ids)


def _name_tokenizer_class(file: Path) -> None:
    """The class under its older name, which transformers 4 and 5 both know."""
    settings = dict(read_json_object(file))
    if settings.get("tokenizer_class") == "TokenizersBackend":
        _write_json(file, settings | {"tokenizer_class": "PreTrainedTokenizerFast"})


def _write_json(path: Path, fields: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(fields, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_free(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise ValueError(f"{folder}: exists already, expected a new or empty folder to export to")
    if folder.is_mount():
        raise ValueError(f"{folder}: is a mount point, which can't appear whole; choose a folder inside it")
    left = re.compile(re.escape(f".{folder.name}.") + "[0-9a-f]{8}")
    for path in folder.parent.iterdir() if folder.parent.is_dir() else ():
        if left.fullmatch(path.name) and not (path / "config.json").exists():
            logger.warning(f"{path}: left over from an export that was interrupted (or still runs), delete it")


@contextmanager
def _appearing(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to write into, which takes its place at the end or is removed after an error.

    Raises:
        ValueError: it can't be made, or `folder` has meanwhile been filled by another program.
    """
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial.mkdir()
    except OSError as error:
        raise ValueError(f"{folder}: expected a folder that can be made ({error})") from error
    try:
        yield partial
        _check_free(folder)
        os.replace(partial, folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
