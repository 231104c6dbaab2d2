"""The training stages of a run: their samples, packed into batches, and what is held out to measure them by.

Stages come in one order: `corpus` (plain language modelling), `memorization` (document to tool), `retrieval` (query to
tools), `agent` (conversations that use tools). A stage without epochs is left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxtool.config import AgentConfig, CorpusConfig, RunConfig, StageConfig
from jaxtool.data import (
    ChatEncoder,
    ChatFiles,
    ChatPrompts,
    ChatTemplate,
    Documents,
    PackedBatches,
    PreparedSamples,
    Query,
    RetrievalSet,
    SampleArrays,
    SampleError,
    chat_samples,
    check_readable,
    corpus_samples,
)
from jaxtool.models import LanguageModelConfig
from jaxtool.toolgen.samples import SampleSet, document_text, memorization_samples, retrieval_samples
from jaxtool.tools import ToolCatalog
from jaxtool.tools.json_records import counted

Say = Callable[[str], object]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One stage, ready to train.

    Attributes:
        name: corpus, memorization, retrieval or agent.
        settings: how it is trained.
        batches: what it is trained on; its order follows from the run's seed.
        held_out: samples that it isn't trained on, in one epoch; None without any.
    """

    name: str
    settings: StageConfig
    batches: PackedBatches
    held_out: PackedBatches | None


def training_stages(
    config: RunConfig, data: RetrievalSet, tokenizer: Any, base: LanguageModelConfig, shares: int, say: Say
) -> list[Stage]:
    """The stages of a run in order.

    Args:
        config: the run.
        data: catalogue and queries.
        tokenizer: the model's.
        base: config of the model without tools.
        shares: devices that share a batch.
        say: is told what was read, cut and left out, line by line.

    Raises:
        ValueError: no stage has epochs, a stage has no samples, or samples, rows and positions don't fit one another.
    """
    makers = {"corpus": _corpus, "memorization": _memorization, "retrieval": _retrieval, "agent": _agent}
    stages = []
    for name, make in makers.items():
        settings: StageConfig = getattr(config, name)
        if settings.epochs == 0:
            if name in ("memorization", "retrieval"):
                say(f"{name}: skipped ({name}.epochs is 0)")
            continue
        micro = settings.rows // settings.accumulate
        if micro % shares:
            parts = f", {settings.accumulate} parts of {micro}," if settings.accumulate > 1 else ""
            raise ValueError(
                f"{name}.rows {settings.rows}{parts} is not a multiple of the {shares} devices that share a batch "
                f"(mesh.data x mesh.fsdp)"
            )
        try:
            made = make(config, data, tokenizer, base, say)
        except SampleError as error:
            raise SampleError(f"{name}: {error}") from error
        stages.append(_stage(name, settings, *made, seed=config.seed, say=say))
    if not stages:
        raise ValueError(
            f"{', '.join(f'{name}.epochs' for name in makers)} are all 0: nothing to train, set one to 1 or more"
        )
    return stages


def _stage(
    name: str, settings: StageConfig, samples: Samples, held_out: Samples | None, notes: str, *, seed: int, say: Say
) -> Stage:
    available = len(samples)
    if 0 < settings.max_samples < available:
        chosen = np.sort(np.random.default_rng(seed).permutation(available)[: settings.max_samples])
        samples = SampleArrays.of(samples).subset(chosen.tolist())

    def packed(samples: Samples, epochs: int) -> PackedBatches:
        try:
            return PackedBatches(
                samples,
                rows=settings.rows,
                row_length=settings.row_length,
                epochs=epochs,
                seed=seed,
                shorter_rows=settings.shorter_rows,
            )
        except ValueError as error:
            limit = {"memorization": "data.max_document_tokens", "retrieval": "data.max_query_tokens"}.get(name)
            hint = f" ({limit}; the tool is one token more)" if limit and len(samples) else ""
            raise ValueError(f"{name}: {error}{hint}") from error

    batches = packed(samples, settings.epochs)
    held = packed(held_out, 1) if settings.evaluate_every and held_out is not None and len(held_out) else None
    if settings.evaluate_every and held is None:
        raise ValueError(f"{name}.evaluate_every is {settings.evaluate_every}, but nothing is held out of this stage")
    measured = ""
    if held_out is not None and len(held_out):
        never = f", but never measured ({name}.evaluate_every is 0)" if held is None else ""
        measured = f"; {counted(len(held_out), 'sample')} held out{never}"
    say(
        f"{name}: {len(samples):,} of {available:,} samples x {settings.epochs} epochs, {batches.tokens:,} tokens in "
        f"{batches.steps:,} steps, rows {batches.filled:.0%} full; {notes}{measured}"
    )
    return Stage(name=name, settings=settings, batches=batches, held_out=held)


Samples = Sequence[Any]
_Made = tuple[Samples, Samples | None, str]


def _memorization(config: RunConfig, data: RetrievalSet, tokenizer: Any, base: LanguageModelConfig, say: Say) -> _Made:
    catalog = data.catalog
    if config.data.max_documents:
        kept = config.data.max_documents - 1
        catalog = ToolCatalog([dataclasses.replace(tool, documents=tool.documents[:kept]) for tool in catalog])
        left_out = sum(len(tool.documents) for tool in data.catalog) - sum(len(tool.documents) for tool in catalog)
        say(
            f"memorization: {left_out:,} documents left out, those behind the first {config.data.max_documents:,} of "
            "their tool (data.max_documents; 0 takes all)"
        )
    prompts = _prompts(config, "memorization", "max_document_tokens", tokenizer, base)
    texts = [
        Query(text=document_text(tool, document), where=f"tool {tool.name}")
        for tool in catalog
        for document in (tool.document(), *tool.documents)
    ]
    _check_texts("memorization", config, texts, prompts, say)
    found = memorization_samples(catalog, prompts, base.vocab_size)
    return found.samples, None, _cuts(found, "max_document_tokens")


def _retrieval(config: RunConfig, data: RetrievalSet, tokenizer: Any, base: LanguageModelConfig, say: Say) -> _Made:
    prompts = _prompts(config, "retrieval", "max_query_tokens", tokenizer, base)
    _check_texts("retrieval", config, [Query.of(query) for query in data.train], prompts, say)
    found = retrieval_samples(data.train, prompts, base.vocab_size)
    held_out = None
    if config.retrieval.evaluate_every:
        held_out = retrieval_samples(data.test, prompts, base.vocab_size).samples
    return found.samples, held_out, _cuts(found, "max_query_tokens")


def _prompts(config: RunConfig, name: str, limit: str, tokenizer: Any, base: LanguageModelConfig) -> ChatPrompts:
    longest = getattr(config.data, limit)
    if base.max_position_embeddings < longest:
        raise ValueError(
            f"data.{limit} {longest} is beyond the model's {base.max_position_embeddings} positions, "
            "lower it to that or less"
        )
    try:
        return ChatPrompts(tokenizer, system_prompt=config.data.system_prompt, max_length=longest)
    except ValueError as error:
        raise ValueError(f"{name} (data.{limit} {longest}): {error}") from error


def _check_texts(name: str, config: RunConfig, texts: Sequence[Query], prompts: ChatPrompts, say: Say) -> None:
    if not texts:
        raise ValueError(
            f"{name}: no samples, data.source {config.data.source or 'is empty and'} has no "
            f"{'tools' if name == 'memorization' else 'training queries'}; {name}.epochs 0 skips the stage"
        )
    for line in check_readable(texts, prompts):
        say(f"{name}: {line}")


def _cuts(found: SampleSet, limit: str) -> str:
    if not found.cut_samples:
        return "no text is cut"
    return f"{found.cut_samples:,} texts are longer than data.{limit} and lose {found.cut_tokens:,} tokens"


def _corpus(config: RunConfig, data: RetrievalSet, tokenizer: Any, base: LanguageModelConfig, say: Say) -> _Made:
    settings = config.corpus
    if not settings.source:
        raise ValueError("corpus.source is empty, expected a file, a folder, a pattern or tfds:NAME:SPLIT")
    _check_positions("corpus", settings, base)
    documents = Documents(
        settings.source,
        text_field=settings.text_field,
        text_files=settings.text_files,
        unsupervised_field=settings.unsupervised_field or None,
        data_dir=settings.data_dir or None,
    )
    found = corpus_samples(
        documents,
        tokenizer,
        max_tokens=settings.row_length,
        vocabulary=base.vocab_size,
        long=settings.long,
        overlap=settings.overlap,
    )
    return _divided("corpus", settings, found, config.seed)


def _agent(config: RunConfig, data: RetrievalSet, tokenizer: Any, base: LanguageModelConfig, say: Say) -> _Made:
    settings = config.agent
    if not settings.source:
        raise ValueError("agent.source is empty, expected a file, a folder or a pattern of conversations")
    _check_positions("agent", settings, base)
    encoder = ChatEncoder(
        ChatTemplate(tokenizer, system_prompt=config.data.system_prompt),
        tool_id=(lambda name: base.vocab_size + data.catalog.index(name)) if len(data.catalog) else None,
        vocabulary=base.vocab_size,
    )
    found = chat_samples(
        ChatFiles(settings.source),
        encoder,
        max_tokens=settings.row_length,
        long=settings.long,
        supervised=settings.supervised,
    )
    return _divided("agent", settings, found, config.seed)


def _check_positions(name: str, settings: StageConfig, base: LanguageModelConfig) -> None:
    if base.max_position_embeddings < settings.row_length:
        raise ValueError(
            f"{name}.row_length {settings.row_length} is beyond the model's {base.max_position_embeddings} positions, "
            "lower it to that or less"
        )


def _divided(name: str, settings: CorpusConfig | AgentConfig, found: PreparedSamples, seed: int) -> _Made:
    """What is trained on and what is held out: a share of the samples, drawn with the seed."""
    notes = "; ".join(found.notes) or f"{found.documents:,} documents, nothing is cut"
    count = round(settings.held_out * len(found.samples))
    if settings.held_out and not 0 < count < len(found.samples):
        raise ValueError(
            f"{name}.held_out {settings.held_out} of {len(found.samples)} samples leaves nothing on one side"
        )
    if not count:
        return found.samples, None, notes
    order = np.random.default_rng((seed, 1)).permutation(len(found.samples))
    held_out, trained = np.sort(order[:count]).tolist(), np.sort(order[count:]).tolist()
    return found.samples.subset(trained), found.samples.subset(held_out), notes
