"""The rules that say which tensor fills which parameter, and the check that each maps exactly once.

The tables of the ports are in `tensor_tables`. Reading bytes is in `safetensors_reader` and `gguf_reader`, cutting
out what a device needs in `sharded_read`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

LISTED = 20

EMBEDDING_PATH = "embedding_vd"
HEAD_PATH = "head_vd"

# Old transformers checkpoints store the rotary frequencies and causal masks, which follow from the config.
HARMLESS_TENSORS = re.compile(
    r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq|transformer\.h\.\d+\.attn\.(masked_)?bias"
)


class WeightsError(ValueError):
    """A checkpoint that can't be read or doesn't fit the model; names the files and tensors."""


@dataclass(frozen=True, kw_only=True)
class TensorRule:
    """How one parameter lies in a checkpoint.

    Attributes:
        path: dotted path of the parameter; under `blocks.` its first axis is the layer.
        hf: name in Hugging Face checkpoints, `{layer}` standing for the layer's number.
        gguf: name in GGUF files, likewise; empty where the format has no such model.
        axes: for each dimension of the file's tensor the parameter axes that it merges, outermost first; the
            layer axis isn't counted. `((1, 2), (0,))`: the file's [N*H, D] is the parameter's [D, N, H].
        rotary: GGUF files keep the rows of each head interleaved for llama.cpp's rotary embedding.
        vocabulary: parameter axis 0 holds the file's text rows first and may have more behind them.
    """

    path: str
    hf: str
    gguf: str = ""
    axes: tuple[tuple[int, ...], ...]
    rotary: bool = False
    vocabulary: bool = False

    @property
    def stacked(self) -> bool:
        return "{layer}" in self.hf


@dataclass(frozen=True, kw_only=True)
class FileTensor:
    """A tensor's shape (outermost dimension first), dtype by the format's name, and file."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class TensorFiles(Protocol):
    """An opened checkpoint of either format."""

    @property
    def source(self) -> Path:
        """The folder or file."""

    @property
    def tensors(self) -> Mapping[str, FileTensor]:
        """All tensors by name."""

    @property
    def readable_dtypes(self) -> frozenset[str]:
        """Dtypes that `read` can return in floating point, by the format's names."""

    @property
    def rotary_interleaved(self) -> bool:
        """Whether query and key rows are in llama.cpp's order."""

    def name_of(self, rule: TensorRule) -> str:
        """The rule's tensor name in this format, with `{layer}` where it has one."""

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """That part of a tensor in the file's row order, as float16, bfloat16 or float32."""


@dataclass(frozen=True, kw_only=True)
class PlannedParameter:
    """One parameter and the tensors that fill it: one name, or one for each layer."""

    rule: TensorRule
    leaf: jax.ShapeDtypeStruct
    names: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """A checked assignment of all tensors of a checkpoint to all parameters of a model.

    Attributes:
        parameters: what to read, in the table's order.
        repeated_head: name of a head tensor beside a tied embedding, which it must repeat byte for byte.
        notes: what was left unread or filled with zeros, with counts.
    """

    parameters: tuple[PlannedParameter, ...]
    repeated_head: str | None
    notes: tuple[str, ...]


def plan_tensors(
    files: TensorFiles,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    *,
    vocab_size: int,
    rules: tuple[TensorRule, ...],
) -> WeightPlan:
    """Assigns every tensor of the checkpoint to a parameter; no tensor data is read.

    A model whose tree has no `head_vd` is tied: a head tensor in the file is then accepted, to be compared
    with the embedding by the reader.

    Args:
        files: the opened checkpoint.
        abstract: parameters by dotted path, floating point.
        vocab_size: rows of embedding and head in the checkpoint: text rows, and tool rows where it has any.
        rules: the table.

    Raises:
        WeightsError: listing the tensors that are missing, surplus, of another shape or of a dtype that can't
            be read (20 of each kind, and their number).
    """
    by_path = {rule.path: rule for rule in rules}
    tied = HEAD_PATH not in abstract
    check_tree(files.source, abstract, by_path, tied)

    parameters: list[PlannedParameter] = []
    notes: list[str] = []
    expected: dict[str, tuple[int, ...]] = {}
    for path, rule in by_path.items():
        if path not in abstract:
            continue
        leaf = abstract[path]
        template = files.name_of(rule)
        layers = leaf.shape[0] if rule.stacked else 1
        if layers > len(files.tensors):  # before a name is made for each
            raise WeightsError(
                f"{files.source}: the config says {layers:,} layers, the files hold {len(files.tensors):,} tensors"
            )
        names = tuple(template.replace("{layer}", str(layer)) for layer in range(layers))
        shape = file_shape(rule, leaf, vocab_size, files.source)
        expected |= dict.fromkeys(names, shape)
        parameters.append(PlannedParameter(rule=rule, leaf=leaf, names=names))
        if rule.vocabulary and leaf.shape[0] > vocab_size:
            notes.append(f"{path}: {leaf.shape[0] - vocab_size} rows behind the {vocab_size} of the file are zero")

    surplus = files.tensors.keys() - expected.keys()
    harmless = sorted(name for name in surplus if HARMLESS_TENSORS.fullmatch(name))
    surplus -= set(harmless)
    if harmless:
        notes.append(
            f"{files.source}: {len(harmless)} tensors that follow from the config not read: {_listed(harmless)}"
        )
    repeated_head = files.name_of(by_path[HEAD_PATH])
    if tied and repeated_head in surplus:
        surplus.remove(repeated_head)
        expected[repeated_head] = expected[files.name_of(by_path[EMBEDDING_PATH])]
        notes.append(f"{files.source}: {repeated_head} repeats the tied embedding and is not read twice")
    _check_tensors(files, expected, surplus)
    return WeightPlan(
        parameters=tuple(parameters),
        repeated_head=repeated_head if tied and repeated_head in files.tensors else None,
        notes=tuple(notes),
    )


def check_tree(
    source: Path, abstract: Mapping[str, jax.ShapeDtypeStruct], by_path: Mapping[str, TensorRule], tied: bool
) -> None:
    """Raises WeightsError where a model has other parameters than the table, or one of another rank or kind."""
    unknown = sorted(abstract.keys() - by_path.keys())
    absent = sorted(by_path.keys() - abstract.keys() - ({HEAD_PATH} if tied else set()))
    if unknown or absent:
        raise WeightsError(
            f"{source}: the model's parameters are not those of the tensor table: "
            f"unknown {_listed(unknown)}, absent {_listed(absent)}"
        )
    for path, leaf in abstract.items():
        rank = sum(map(len, by_path[path].axes)) + by_path[path].stacked
        if len(leaf.shape) != rank or not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise WeightsError(
                f"{source}: parameter {path} is {leaf.dtype}{list(leaf.shape)}, "
                f"expected {rank} axes of a floating dtype"
            )


def file_shape(rule: TensorRule, leaf: jax.ShapeDtypeStruct, vocab_size: int, source: Path) -> tuple[int, ...]:
    """The shape of the tensor (of each tensor, where there is one for each layer) that the parameter `leaf` fills.

    Raises:
        WeightsError: the parameter has fewer rows than the vocabulary.
    """
    shape = tuple(leaf.shape[1:] if rule.stacked else leaf.shape)
    if rule.vocabulary:
        if shape[0] < vocab_size:
            raise WeightsError(f"{source}: parameter {rule.path} has {shape[0]} rows, the vocabulary {vocab_size}")
        shape = (vocab_size, *shape[1:])
    return tuple(math.prod(shape[axis] for axis in axes) for axes in rule.axes)


def _check_tensors(files: TensorFiles, expected: Mapping[str, tuple[int, ...]], surplus: set[str]) -> None:
    problems: list[str] = []

    def report(kind: str, items: list[str]) -> None:
        if items:
            problems.append(f"{kind} ({len(items)}): {_listed(items)}")

    found = files.tensors
    shared = [name for name in expected if name in found]
    report("missing", [f"{name} {list(shape)}" for name, shape in expected.items() if name not in found])
    report(
        "surplus",
        [f"{name} {list(found[name].shape)} in {found[name].file.name}" for name in sorted(surplus)],
    )
    report(
        "wrong shape",
        [
            f"{name}: expected {list(expected[name])}, found {list(found[name].shape)} in {found[name].file.name}"
            for name in shared
            if found[name].shape != expected[name]
        ],
    )
    report(
        f"dtype not among {', '.join(sorted(files.readable_dtypes))}",
        [
            f"{name}: {found[name].dtype} in {found[name].file.name}"
            for name in shared
            if found[name].dtype not in files.readable_dtypes
        ],
    )
    if problems:
        raise WeightsError("\n  ".join([f"{files.source}: the tensors don't fit the model", *problems]))


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
