"""Plain text corpora: text files, JSON Lines, folders of them, and TFDS data sets, as documents one by one.

Tokens are made of them in corpus.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxtool.data.data_files import json_records, lines_of, source_files
from jaxtool.data.sample_writer import SampleError
from jaxtool.tools.json_records import Problems, Record, counted, json_kind, read_text

TEXT_ENDINGS = (".txt", ".jsonl", ".json", ".ndjson")
TEXT_FILES = ("file", "line")
_TFDS = re.compile(r"tfds:(?P<name>[\w./+-]+(?::\d+\.\d+\.\d+)?):(?P<split>[^:\[\]]+(?:\[[^\]]*\][^:\[\]]*)*)")


@dataclass(frozen=True, kw_only=True)
class Document:
    """A text of a corpus.

    Attributes:
        text: the text, with at least one character that isn't white space.
        file: file or data set that it comes from.
        line: its line there, from 1; of a data set the number of the example, from 1.
        unsupervised: parts of the text (begin, end) that are context only: tokens that lie in them are not learned.
    """

    text: str
    file: str
    line: int
    unsupervised: tuple[tuple[int, int], ...] = ()


class Documents:
    """The documents of a source, in an order that is the same on every machine.

    Args:
        source: a file, a folder with its subfolders, or a pattern such as `data/*.jsonl.gz`, of .txt, .jsonl and .json
            files (each also with .gz); or `tfds:NAME[/CONFIG][:VERSION]:SPLIT` for a data set that TFDS has prepared.
        text_field: field of the text in JSON and TFDS records; other fields are not read.
        text_files: what is a document in a .txt file, the whole "file" or each "line".
        unsupervised_field: field of JSON records with parts of the text not to be learned, `[[begin, end], ...]` in
            characters; None: there is none.
        data_dir: folder in which TFDS keeps its data sets (None: its default, `~/tensorflow_datasets`).

    Attributes:
        notes: after iteration, what was left out and how the files were read.

    Raises:
        FileNotFoundError: no such file, folder, match or data set.
        SampleError: a source of another form; in iteration, all records that can't be used, by file, line and field,
            or no record that has the unsupervised field.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        text_field: str = "text",
        text_files: str = "file",
        unsupervised_field: str | None = None,
        data_dir: str | Path | None = None,
    ) -> None:
        if text_files not in TEXT_FILES:
            raise SampleError(f"text_files is {text_files!r}, expected one of {', '.join(TEXT_FILES)}")
        self.source, self.text_field, self.text_files = str(source), text_field, text_files
        self.unsupervised_field, self.data_dir = unsupervised_field, data_dir
        self.notes: list[str] = []
        self._tfds = _TFDS.fullmatch(self.source)
        if self.source.startswith("tfds:") and self._tfds is None:
            raise SampleError(f"{self.source}: expected tfds:NAME[/CONFIG][:VERSION]:SPLIT")
        if self._tfds and unsupervised_field is not None:
            raise SampleError(f"unsupervised_field is {unsupervised_field!r}, but {self.source} has no JSON records")
        self._files = None if self._tfds else source_files(source, TEXT_ENDINGS)

    def __iter__(self) -> Iterator[Document]:
        problems, counts = Problems(), Counter[str]()
        found = self._from_tfds(self._tfds, problems) if self._tfds else self._from_files(problems, counts)
        documents = 0
        for document in found:
            documents += 1
            if document.text.strip():
                if not problems:  # once something is wrong, the rest is read for what else is
                    yield document
            else:
                counts["no text"] += 1
        problems.raise_if_any(SampleError, f"{self.source} can't be used as a corpus")
        if self.unsupervised_field is not None and documents and not counts["with unsupervised field"]:
            raise SampleError(
                f"{self.source}: none of {counted(documents, 'document')} has the field {self.unsupervised_field!r} "
                "(unsupervised_field), so all of the text would be learned"
            )
        self.notes = list(self._files.notes) if self._files else []
        if counts["empty line"]:
            self.notes.append(f"{counted(counts['empty line'], 'empty line')} skipped")
        if counts["no text"]:
            self.notes.append(f"{counted(counts['no text'], 'document')} without text skipped")
        if counts["crlf"]:
            self.notes.append(f"{counted(counts['crlf'], 'text file')} with \\r\\n at line ends, read as \\n")

    def _from_files(self, problems: Problems, counts: Counter[str]) -> Iterator[Document]:
        assert self._files is not None
        for path in self._files.files:
            if not path.name.lower().removesuffix(".gz").endswith(".txt"):
                for record in json_records(path, problems, counts):
                    document = self._from_record(str(path), record, problems, counts)
                    if document is not None:
                        yield document
            elif self.text_files == "line":
                yield from self._from_lines(path, problems, counts)
            else:
                before = len(problems)
                text = read_text(path, problems)
                if len(problems) == before and _is_text(text, f"{path}:1", problems):
                    counts["crlf"] += "\r\n" in text
                    yield Document(text=text.replace("\r\n", "\n"), file=str(path), line=1)

    def _from_lines(self, path: Path, problems: Problems, counts: Counter[str]) -> Iterator[Document]:
        for number, raw in lines_of(path, problems):
            where = f"{path}:{number}"
            try:
                line = raw.decode("utf-8")
            except UnicodeDecodeError as error:
                problems.add(where, f"expected UTF-8 text, found byte 0x{raw[error.start]:02x}")
                continue
            if not line.strip():
                counts["empty line"] += 1
            elif _is_text(line, where, problems):
                yield Document(text=line, file=str(path), line=number)

    def _from_record(self, file: str, record: Record, problems: Problems, counts: Counter[str]) -> Document | None:
        where, value = f"{file}:{record.line}", record.value
        if not isinstance(value, dict):
            problems.add(where, f"expected an object with a field {self.text_field!r}, found {json_kind(value)}")
            return None
        if self.text_field not in value:
            fields = ", ".join(map(repr, value)) or "none"
            problems.add(where, f"field {self.text_field!r} is missing; there are {fields}")
            return None
        text = value[self.text_field]
        if not isinstance(text, str):
            problems.add(where, f"field {self.text_field!r}: expected text, found {json_kind(text)}")
            return None
        spans: tuple[tuple[int, int], ...] = ()
        if self.unsupervised_field is not None:
            counts["with unsupervised field"] += self.unsupervised_field in value
            given = value.get(self.unsupervised_field, [])
            if not _are_spans(given, len(text)):
                problems.add(
                    where,
                    f"field {self.unsupervised_field!r}: expected parts [begin, end] of the {len(text):,} characters, "
                    "ascending",
                )
                return None
            spans = tuple((begin, end) for begin, end in given)
        return Document(text=text, file=file, line=record.line, unsupervised=spans)

    def _from_tfds(self, named: re.Match[str], problems: Problems) -> Iterator[Document]:
        source = tfds_source(named["name"], named["split"], self.data_dir)
        for number in range(len(source)):
            example = source[number]
            if self.text_field not in example:
                fields = ", ".join(map(repr, example))
                problems.add(self.source, f"field {self.text_field!r} is missing; there are {fields}")
                return
            text = example[self.text_field]
            if not isinstance(text, bytes):
                problems.add(self.source, f"field {self.text_field!r}: expected text, found {type(text).__name__}")
                return
            try:
                yield Document(text=text.decode("utf-8"), file=self.source, line=number + 1)
            except UnicodeDecodeError as error:
                problems.add(f"{self.source}:{number + 1}", f"field {self.text_field!r}: not UTF-8 text ({error})")


def tfds_source(name: str, split: str, data_dir: str | Path | None) -> Any:
    """Random access to a split of a data set that TFDS has prepared on disk, in the array_record format.

    Nothing is downloaded or prepared here: a training run of many processes must not.

    Raises:
        FileNotFoundError: the data set isn't there.
        SampleError: TFDS isn't installed, the split doesn't exist, or the data are in another format.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise SampleError(
            f"tfds:{name}: tensorflow-datasets can't be imported ({error}): pip install 'jaxtool[tfds]'"
        ) from error
    where = f"tfds:{name}:{split}"
    folder = "its default folder" if data_dir is None else str(data_dir)
    try:
        builder = tfds.builder(name, data_dir=None if data_dir is None else str(data_dir))
    except tfds.core.registered.DatasetNotFoundError as error:
        raise FileNotFoundError(f"{where}: TFDS has no such data set, and there is none in {folder}") from error
    except (AssertionError, ValueError) as error:  # TFDS asserts that versions exist
        raise SampleError(f"{where}: {_first_line(error)}") from error
    if not builder.data_path.exists():
        raise FileNotFoundError(
            f"{where}: not prepared in {folder}; download_and_prepare(file_format='array_record') of its builder would"
        )
    try:
        return builder.as_data_source(split=split)
    except NotImplementedError as error:
        raise SampleError(
            f"{where}: {_first_line(error)}; expected a data set prepared with file_format='array_record'"
        ) from error
    except (ValueError, KeyError) as error:
        raise SampleError(f"{where}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _is_text(text: str, where: str, problems: Problems) -> bool:
    if "\0" in text:
        problems.add(where, "holds a NUL character: expected UTF-8 text, found UTF-16 or binary data")
        return False
    return True


def _are_spans(value: Any, length: int) -> bool:
    if not isinstance(value, list):
        return False
    done = 0
    for span in value:
        if not isinstance(span, list) or len(span) != 2 or any(type(x) is not int for x in span):
            return False
        if not done <= span[0] <= span[1] <= length:
            return False
        done = span[1]
    return True
