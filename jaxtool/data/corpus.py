"""Language-model samples of a plain text corpus: every token of every document is learned once an epoch.

A document is BOS where the tokenizer has one, its text, and EOS. Toolformer's fine-tuning (arXiv 2302.04761, section 3)
takes them as they are, tool calls and results included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jaxtool.data.documents import Document, Documents
from jaxtool.data.sample_writer import PreparedSamples, SampleError, SampleWriter
from jaxtool.data.text_encoder import TextEncoder
from jaxtool.tools.json_records import counted

# Characters that are tokenised in one call: enough for all cores, little enough for memory.
_CALL = 2**22


def corpus_samples(
    documents: Documents | Iterable[Document],
    tokenizer: Any,
    *,
    max_tokens: int,
    vocabulary: int,
    long: str = "split",
    overlap: int = 0,
) -> PreparedSamples:
    """The samples of a corpus.

    BOS stands before a document if the tokenizer itself puts it before a text (GPT-2's and Qwen's don't): then the
    first token of the text is learned too, else it is given. The EOS that is learned is the tokenizer's `eos_token`,
    also where the model has further ids that end a text.

    Args:
        documents: what to read.
        tokenizer: the model's.
        max_tokens: tokens of a row (S); no sample is longer.
        vocabulary: text rows of the model: no id may lie behind them.
        long: what becomes of documents that are longer: "split" into consecutive windows, "cut" or "error".
        overlap: tokens that a further window repeats as context, without learning them again.

    Raises:
        SampleError: no text, data that can't be read, or ids outside of the vocabulary; names files and lines.
        FileNotFoundError: as `Documents`.
    """
    encoder = TextEncoder(tokenizer)
    end_id = tokenizer.eos_token_id
    if end_id is None:
        raise SampleError("the tokenizer has no EOS token, which ends a document")
    writer = SampleWriter(max_tokens=max_tokens, long=long, overlap=overlap)
    begin = [] if encoder.bos_id is None else [encoder.bos_id]
    without = 0
    for document, text, spans_ab in _encoded(documents, encoder):
        if not text.size:
            without += 1
            continue
        largest = max(int(text.max()), end_id, *begin)
        if largest >= vocabulary:
            raise SampleError(
                f"{document.file}:{document.line}: the tokenizer gives id {largest}, but the model has {vocabulary} "
                "text rows: this tokenizer is not the model's"
            )
        learned = np.ones(len(begin) + len(text) + 1, np.bool_)
        for first, last in document.unsupervised:
            inside = (spans_ab[:, 0] >= first) & (spans_ab[:, 1] <= last) & (spans_ab[:, 0] < spans_ab[:, 1])
            learned[len(begin) : -1] &= ~inside
        ids = np.concatenate([np.asarray(begin, np.int32), text, np.asarray([end_id], np.int32)])
        writer.add(ids, learned, file=document.file, line=document.line)
    notes = list(documents.notes) if isinstance(documents, Documents) else []
    if without:
        notes.append(f"{counted(without, 'document')} skipped: the tokenizer has no token for any of their characters")
    return writer.finish(notes=notes, source=documents.source if isinstance(documents, Documents) else "the corpus")


def _encoded(documents: Iterable[Document], encoder: TextEncoder) -> Iterator[tuple[Document, np.ndarray, np.ndarray]]:
    """Each document with its ids and, where parts of it are not to be learned, the place of each token in the text."""
    nowhere = np.zeros((0, 2), np.int64)
    waiting: list[Document] = []
    characters = 0
    for document in documents:
        waiting.append(document)
        characters += len(document.text)
        if characters > _CALL or document.unsupervised:
            plain = waiting[:-1] if document.unsupervised else waiting
            for each, ids in zip(plain, encoder.texts([each.text for each in plain]), strict=True):
                yield each, ids, nowhere
            if document.unsupervised:
                yield document, *encoder.text_with_spans(document.text)
            waiting, characters = [], 0
    for each, ids in zip(waiting, encoder.texts([each.text for each in waiting]), strict=True):
        yield each, ids, nowhere
