"""Toolformer's augmented corpus C* as a TFDS data set: texts with tool calls in them, prepared from JSON Lines.

Source: Toolformer, arXiv 2302.04761, section 2: C* is the corpus C with calls inserted, so taking the calls out gives
C back. Needs the extra `tfds`; nothing else imports this file. Making the calls is not done here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from jaxtool.data.data_files import json_records, source_files
from jaxtool.data.sample_writer import SampleError
from jaxtool.tools.json_records import Problems, Record, json_kind

_FIELDS = {"start": int, "end": int, "tool": str, "input": str, "result": str}


@dataclass(frozen=True, kw_only=True)
class InsertedCall:
    """A call in a text: ` [tool(input) -> result]`, or ` [tool(input) ->]` where the result is empty.

    Attributes:
        start: character of the text at which the call begins, with its blank.
        end: the character behind its bracket.
        tool: name of the tool.
        input: what it was called with.
        result: what it gave.
    """

    start: int
    end: int
    tool: str
    input: str
    result: str

    @property
    def text(self) -> str:
        """How the call reads."""
        return f" [{self.tool}({self.input}) -> {self.result}]" if self.result else f" [{self.tool}({self.input}) ->]"


def without_calls(text: str, calls: Sequence[InsertedCall]) -> str:
    """The text of C that a text of C* was made from.

    Raises:
        SampleError: calls that overlap, aren't ascending, or don't read in the text as they should.
    """
    kept, at = [], 0
    for i, call in enumerate(calls):
        if not at <= call.start <= call.end <= len(text):
            raise SampleError(
                f"calls[{i}]: {call.start} to {call.end} is not a part of the {len(text):,} characters that lies "
                "behind the call before"
            )
        if text[call.start : call.end] != call.text:
            raise SampleError(f"calls[{i}]: the text has {text[call.start : call.end]!r}, expected {call.text!r}")
        kept.append(text[at : call.start])
        at = call.end
    return "".join([*kept, text[at:]])


class AugmentedCorpus(tfds.core.GeneratorBasedBuilder):
    """Texts with inserted calls.

    Features: `text`; `calls`, a sequence of `start`, `end`, `tool`, `input`, `result` (see `InsertedCall`); `source`,
    where the text comes from (a URL, say; "" where that isn't known).

    Args:
        sources: for each split a file, folder or pattern of .jsonl and .json files (each also with .gz); None to read
            what was prepared before. Records have `text`, and may have `calls` and `source`.
        **options: those of `tfds.core.DatasetBuilder`, such as `data_dir`.
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, sources: Mapping[str, str | Path] | None = None, **options: Any) -> None:
        self._sources = dict(sources or {})
        super().__init__(**options)

    def _info(self) -> Any:
        features = {
            "text": tfds.features.Text(),
            "calls": tfds.features.Sequence(
                {name: np.int64 if kind is int else tfds.features.Text() for name, kind in _FIELDS.items()}
            ),
            "source": tfds.features.Text(),
        }
        return tfds.core.DatasetInfo(
            builder=self,
            description="Texts with tool calls inserted where they help to predict what follows.",
            features=tfds.features.FeaturesDict(features),
            disable_shuffling=True,  # training shuffles; an example's number is then that of its record
        )

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[tuple[int, dict[str, Any]]]]:
        return {split: _examples(source) for split, source in self._sources.items()}

    def _generate_examples(self) -> Any:  # abstract in TFDS; the splits above have their generators already
        raise NotImplementedError


def prepare_augmented_corpus(sources: Mapping[str, str | Path], *, data_dir: str | Path) -> Path:
    """Writes the data set in array_record files, from which `tfds.data_source` reads at random.

    The splits are then `tfds:augmented_corpus:SPLIT` for `Documents`, or
    `tfds.data_source("augmented_corpus", split=..., data_dir=...)`.

    Args:
        sources: for each split its files; see `AugmentedCorpus`.
        data_dir: folder in which TFDS keeps data sets. A corpus that is there already is an error.

    Returns:
        The folder of the data set.

    Raises:
        FileNotFoundError: no such files.
        SampleError: no split, a corpus that is there already, or records that can't be used, by file, line and field.
    """
    if not sources:
        raise SampleError("no splits, expected at least one with its files")
    builder = AugmentedCorpus(sources=sources, data_dir=str(data_dir))
    folder = Path(str(builder.data_path))
    if folder.exists():
        raise SampleError(f"{folder}: is there already; remove it to prepare the corpus anew")
    for source in sources.values():  # TFDS would wrap the errors, and leave a part of the data set behind
        for _ in _examples(source):
            pass
    builder.download_and_prepare(file_format="array_record")
    return folder


def _examples(source: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    problems = Problems()
    number = 0
    for path in source_files(source, (".jsonl", ".json", ".ndjson")).files:
        for record in json_records(path, problems, Counter()):
            example = _example(f"{path}:{record.line}", record, problems)
            if example is not None:
                yield number, example
                number += 1
    problems.raise_if_any(SampleError, f"{source} can't be used as an augmented corpus")


def _example(where: str, record: Record, problems: Problems) -> dict[str, Any] | None:
    value = record.value
    if not isinstance(value, dict):
        problems.add(where, f"expected an object with text, calls and source, found {json_kind(value)}")
        return None
    before = len(problems)
    for name in value:
        if name not in ("text", "calls", "source"):
            problems.add(where, f"field {name}: expected only text, calls and source")
    text, source, calls = value.get("text"), value.get("source", ""), value.get("calls", [])
    for name, given in (("text", text), ("source", source)):
        if not isinstance(given, str):
            problems.add(where, f"field {name}: expected text, found {json_kind(given)}")
    if not isinstance(calls, list):
        problems.add(where, f"field calls: expected a list, found {json_kind(calls)}")
        return None
    for i, call in enumerate(calls):
        if not isinstance(call, dict) or set(call) != set(_FIELDS):
            found = ", ".join(call) if isinstance(call, dict) else json_kind(call)
            problems.add(where, f"field calls[{i}]: expected an object with {', '.join(_FIELDS)}, found {found}")
            continue
        for name, kind in _FIELDS.items():
            if type(call[name]) is not kind:
                problems.add(where, f"field calls[{i}].{name}: expected {json_kind(kind())}, found {call[name]!r}")
    if len(problems) > before or not isinstance(text, str):
        return None
    try:
        without_calls(text, [InsertedCall(**call) for call in calls])
    except SampleError as error:
        problems.add(where, f"field {error}")
        return None
    return {"text": text, "calls": calls, "source": source}
