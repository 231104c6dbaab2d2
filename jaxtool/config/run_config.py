"""One run as one tree of frozen dataclasses; `configs/*.yaml` map onto it field by field.

Defaults are those of the ToolGen paper where it names them. Values are checked here, and errors begin with the field's
name; `command_line` reads YAML and options and puts the names of the outer fields before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Sizes behind these are slips of the pen: no published run comes near, and they'd be noticed when memory has run out.
MOST_EPOCHS = 1_000
MOST_ROWS = 65_536
MOST_TOKENS = 131_072  # of a row or prompt
MOST_BATCH_TOKENS = 2**26
MOST_RANK = 4_096


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Number of devices on each mesh axis.

    Attributes:
        data: replicas of the model; -1 takes all devices that the other axes leave.
        fsdp: parts that parameters, optimiser state and batch are cut into.
        model: parts that attention heads, MLP width and vocabulary are cut into.
    """

    data: int = -1
    fsdp: int = 1
    model: int = 1


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Where the pretrained model comes from and how it computes.

    Attributes:
        source: folder in Hugging Face format, GGUF file, hub id (owner/name), or "smollm2" for the embedded default.
        param_dtype: dtype of parameters and optimiser state (float32, bfloat16).
        compute_dtype: dtype of activations and matrix products. Use float32 on CPU, where bfloat16 is slow.
        remat: what the backward pass recomputes, "elementwise" (fast) or "full" (least memory).
    """

    source: str = "smollm2"
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "elementwise"

    def __post_init__(self) -> None:
        for name in ("param_dtype", "compute_dtype"):
            _one_of(name, getattr(self, name), ("float32", "bfloat16"))
        _one_of("remat", self.remat, ("elementwise", "full"))


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tools and queries, and how they are rendered.

    Attributes:
        source: "bfcl" for the embedded default, a folder in BEIR format (corpus.jsonl, queries.jsonl, qrels/), a folder
            with tools.json and train.jsonl (test.jsonl too, if there is one), or a catalogue of tools (a file of
            OpenAI-style functions, ToolBench JSON or our own JSON Lines) together with train_queries.
        train_queries: labelled queries for the catalogue: JSON Lines, rows {"query": text, "tools": [name, ...]}.
        test_queries: the same, for evaluation (null: part of train_queries is held out).
        seed: decides the split of a set that comes without one.
        system_prompt: text of the system turn; "" gives an empty one, null leaves it to the chat template.
        max_query_tokens: longest retrieval prompt, template included; longer queries are cut at their end and counted.
        max_document_tokens: the same for the documents of memorization.
        max_documents: documents of a tool to memorize (0: all); a tool has several when its sources disagree.
    """

    source: str = "bfcl"
    train_queries: str | None = None
    test_queries: str | None = None
    seed: int = 0
    system_prompt: str | None = ""
    max_query_tokens: int = 256
    max_document_tokens: int = 256
    max_documents: int = 0

    def __post_init__(self) -> None:
        _within("max_query_tokens", self.max_query_tokens, 1, MOST_TOKENS)
        _within("max_document_tokens", self.max_document_tokens, 1, MOST_TOKENS)
        _within("max_documents", self.max_documents, 0)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW with linear warm-up, cosine decay and clipping.

    Attributes:
        learning_rate: peak rate.
        warmup_share: share of the steps in which the rate rises linearly.
        final_share: rate at the last step as a share of the peak.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        epsilon: added to the root of the second moment.
        weight_decay: decoupled decay of matrices; norm scales are never decayed.
        clip_norm: largest global gradient norm.
    """

    learning_rate: float = 4e-5
    warmup_share: float = 0.03
    final_share: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("learning_rate", "epsilon"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive number")
        if not self.clip_norm > 0:  # infinity clips nothing
            raise ValueError(f"clip_norm is {self.clip_norm}, expected a positive number")
        for name in ("warmup_share", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 <= {name} < 1")
        if not 0 <= self.final_share <= 1:
            raise ValueError(f"final_share is {self.final_share}, expected 0 to 1")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay is {self.weight_decay}, expected 0 or more")


@dataclass(frozen=True, kw_only=True)
class TrainableConfig:
    """Which part of the model is trained, in all stages. What is not trained has no optimiser state.

    Attributes:
        parameters: "full" for all of it; "tool_rows" for the tools' rows of embedding and head alone; "lora" for these
            rows and low-rank updates of the projections.
        lora_rank: rank of the updates.
        lora_alpha: updates are scaled by lora_alpha / lora_rank.
        lora_projections: projections that have one: query, key, value, output, up, down, and for Llama gate.
    """

    parameters: str = "full"
    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_projections: tuple[str, ...] = ("query", "value")

    def __post_init__(self) -> None:
        _one_of("parameters", self.parameters, ("full", "lora", "tool_rows"))
        _within("lora_rank", self.lora_rank, 1, MOST_RANK)
        if not 0 < self.lora_alpha < math.inf:
            raise ValueError(f"lora_alpha is {self.lora_alpha}, expected a positive number")
        names = self.lora_projections
        if not names or len(set(names)) != len(names):
            raise ValueError(f"lora_projections is {list(names)}, expected different projections, and one at least")


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """One training stage over one kind of samples.

    Attributes:
        epochs: passes over the samples, at most 1,000; 0 skips the stage.
        max_samples: train on this many samples, drawn with the run's seed (0: all).
        rows: packed rows of a batch, over all devices; at most 65,536.
        row_length: tokens of a row, at most 131,072. A batch has at most 2^26 (67 million) tokens.
        loss_chunk: supervised positions of a row whose logits exist at a time (0: all).
        optimizer: optimiser of the stage; it starts afresh in each stage.
    """

    epochs: int = 1
    max_samples: int = 0
    rows: int = 8
    row_length: int = 256
    loss_chunk: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        _within("epochs", self.epochs, 0, MOST_EPOCHS)
        _within("max_samples", self.max_samples, 0)
        _within("rows", self.rows, 1, MOST_ROWS)
        _within("row_length", self.row_length, 2, MOST_TOKENS)
        _within("loss_chunk", self.loss_chunk, 0)
        _within("rows x row_length", self.rows * self.row_length, 2, MOST_BATCH_TOKENS)


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to write checkpoints. The end of each stage is always saved.

    Attributes:
        every_steps: steps between checkpoints (0: at the ends of stages only).
        keep: newest checkpoints to keep.
    """

    every_steps: int = 100
    keep: int = 1

    def __post_init__(self) -> None:
        _within("every_steps", self.every_steps, 0)
        _within("keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Retrieval on held-out queries.

    Attributes:
        k: ranked tools of a query, best first: the length of `tools` in the lines that infer/retrieve.py writes for
            --queries (as many as there are tools, if these are fewer). At least 5, the places that the metrics look at;
            more than 5 don't change them.
        batch_size: bounds the memory of a prefill, over all devices: it holds the tokens of this many of the longest
            queries. At most 65,536, and 2^26 (67 million) tokens with queries of data.max_query_tokens.
        max_queries: evaluate the first this many queries of each part (0: all).
        examples: queries shown with their top tools.
    """

    k: int = 5
    batch_size: int = 16
    max_queries: int = 0
    examples: int = 5

    def __post_init__(self) -> None:
        if self.k < 5:
            raise ValueError(f"k is {self.k}, expected 5 or more: the metrics look at 5 places")
        _within("batch_size", self.batch_size, 1, MOST_ROWS)
        _within("max_queries", self.max_queries, 0)
        _within("examples", self.examples, 0)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One run: fine-tuning a model on a catalogue, and retrieval with the result.

    Attributes:
        run_dir: folder of the run; the same command resumes what is in it.
        seed: decides sample order, packing and draws.
        model: the pretrained model.
        data: tools and queries.
        mesh: devices; may differ between the runs that resume one another.
        trainable: which part of the model is trained.
        memorization: first stage, document to tool.
        retrieval: second stage, query to tools.
        checkpoints: when to save.
        evaluation: what `infer/retrieve.py` measures.
    """

    run_dir: str = "runs/default"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    trainable: TrainableConfig = field(default_factory=TrainableConfig)
    memorization: StageConfig = field(default_factory=StageConfig)
    retrieval: StageConfig = field(default_factory=StageConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def __post_init__(self) -> None:
        if not self.run_dir.strip():
            raise ValueError("run_dir is empty, expected a folder")
        _within("seed", self.seed, 0)
        tokens = self.evaluation.batch_size * self.data.max_query_tokens
        _within("evaluation.batch_size x data.max_query_tokens", tokens, 1, MOST_BATCH_TOKENS)


def _within(name: str, value: int, least: int, most: int | None = None) -> None:
    if value < least or (most is not None and value > most):
        expected = f"{least} or more" if most is None else f"{least} to {most:,}"
        raise ValueError(f"{name} is {value}, expected {expected}")


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}, expected one of {', '.join(choices)}")
