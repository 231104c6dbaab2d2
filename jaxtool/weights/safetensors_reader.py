"""A Hugging Face model folder of safetensors: `model.safetensors`, or an index with its shards.

Opens and checks files and reads parts of tensors by byte range. What the tensors are for is in `tensor_map`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxtool.weights.tensor_map import FileTensor, TensorRule, WeightsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class SafetensorsFolder:
    """The opened safetensors of a model folder. Files are memory-mapped: opening reads headers only.

    Raises:
        FileNotFoundError: the folder or a shard doesn't exist.
        WeightsError: no safetensors there, a file is damaged, or the index contradicts folder or shards.
    """

    readable_dtypes = frozenset({"F16", "BF16", "F32"})
    rotary_interleaved = False

    def __init__(self, folder: Path) -> None:
        self.source = folder
        self._handles: dict[Path, Any] = {}
        self.tensors: dict[str, FileTensor] = {}
        listed = _listed_tensors(folder)
        for file, names in listed.items():
            handle = self._open(file)
            held = set(handle.keys())
            if names is not None and held != names:
                raise WeightsError(
                    f"{folder / INDEX_FILE}: disagrees with {file.name}: listed but not there "
                    f"{_some(names - held)}; there but not listed {_some(held - names)}"
                )
            for name in sorted(held):
                part = handle.get_slice(name)
                self.tensors[name] = FileTensor(shape=tuple(part.get_shape()), dtype=part.get_dtype(), file=file)

    def name_of(self, rule: TensorRule) -> str:
        return rule.hf

    def read(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """That part of a tensor; only its bytes are read. An index must cut out at least one element."""
        tensor = self.tensors[name]
        try:
            part: np.ndarray = self._handles[tensor.file].get_slice(name)[index]
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{tensor.file}: can't read tensor {name}: {error}") from error
        return part

    def _open(self, file: Path) -> Any:
        if not file.is_file():
            raise FileNotFoundError(f"{file}: no such file, though {INDEX_FILE} lists it")
        try:
            self._handles[file] = safe_open(file, framework="numpy")
        except (SafetensorError, OSError, ValueError) as error:
            raise WeightsError(
                f"{file}: not a whole safetensors file ({file.stat().st_size} bytes): {error}"
            ) from error
        return self._handles[file]


def _listed_tensors(folder: Path) -> dict[Path, set[str] | None]:
    """The folder's weight files, each with the tensor names that the index gives it; None without index."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such model folder")
    index, single = folder / INDEX_FILE, folder / SINGLE_FILE
    if not index.is_file():
        if single.is_file():
            return {single: None}
        raise WeightsError(_nothing_to_read(folder))
    listed = _read_index(index)
    if single.is_file() and single not in listed:
        raise WeightsError(
            f"{folder}: both {SINGLE_FILE} and an {INDEX_FILE} that doesn't list it; remove the one that isn't meant"
        )
    return {file: names for file, names in listed.items()}


def _nothing_to_read(folder: Path) -> str:
    def names(pattern: str) -> list[str]:
        return sorted(path.name for path in folder.glob(pattern))

    if shards := names("model-*-of-*.safetensors"):
        return f"{folder}: {len(shards)} shards ({shards[0]}, ...) but no {INDEX_FILE}"
    if pickles := names("*.bin") + names("*.pth") + names("*.pt"):
        return (
            f"{folder}: only pickled weights ({pickles[0]}, ...): unpickling runs code from the file, "
            "so they aren't read; convert them to safetensors"
        )
    if gguf := names("*.gguf"):
        return f"{folder}: holds GGUF files; give the file itself, e.g. {folder / gguf[0]}"
    return f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE}"


def _read_index(index: Path) -> dict[Path, set[str]]:
    content = read_json_object(index)
    weight_map = content.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index}: field 'weight_map' is {type(weight_map).__name__}, expected a non-empty object")
    listed: dict[Path, set[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors"):
            raise WeightsError(f"{index}: weight_map[{name!r}] is {file!r}, expected the name of a .safetensors file")
        parts = PurePosixPath(file).parts
        if file.startswith("/") or ".." in parts or "\\" in file or ":" in file:
            raise WeightsError(f"{index}: weight_map[{name!r}] is {file!r}, which lies outside the model folder")
        listed.setdefault(index.parent / file, set()).add(name)
    return listed


def read_json_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a file.

    Raises:
        FileNotFoundError: no such file.
        WeightsError: not UTF-8, not JSON, not an object, or an object that has a key twice.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise WeightsError(f"{path}: key {key!r} appears twice in one object")
            found[key] = value
        return found

    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise WeightsError(f"{path}: not a JSON file: {error}") from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - 5} more" if len(ordered) > 5 else ""
    return (", ".join(ordered[:5]) + more) if ordered else "none"
