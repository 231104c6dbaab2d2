"""One run as one tree of frozen dataclasses; `configs/*.yaml` map onto it field by field.

Defaults are those of the ToolGen paper where it names them. Values are checked here, and errors begin with the field's
name; `command_line` reads YAML and options and puts the names of the outer fields before it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxtool.config.bounds import MOST_BATCH_TOKENS, MOST_RANK, MOST_ROWS, MOST_TOKENS, one_of, within
from jaxtool.config.stage_config import AgentConfig, CorpusConfig, StageConfig


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
        attention: "xla", "splash" (TPU), "cudnn" (GPU, half precision), or "auto" for what suits the machine.
    """

    source: str = "smollm2"
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: str = "elementwise"
    attention: str = "auto"

    def __post_init__(self) -> None:
        one_of("attention", self.attention, ("auto", "xla", "splash", "cudnn"))
        for name in ("param_dtype", "compute_dtype"):
            one_of(name, getattr(self, name), ("float32", "bfloat16"))
        one_of("remat", self.remat, ("elementwise", "full"))


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
        within("max_query_tokens", self.max_query_tokens, 1, MOST_TOKENS)
        within("max_document_tokens", self.max_document_tokens, 1, MOST_TOKENS)
        within("max_documents", self.max_documents, 0)


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
        one_of("parameters", self.parameters, ("full", "lora", "tool_rows"))
        within("lora_rank", self.lora_rank, 1, MOST_RANK)
        if not 0 < self.lora_alpha < math.inf:
            raise ValueError(f"lora_alpha is {self.lora_alpha}, expected a positive number")
        names = self.lora_projections
        if not names or len(set(names)) != len(names):
            raise ValueError(f"lora_projections is {list(names)}, expected different projections, and one at least")


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The processes of a run on several hosts. On TPU pods and under Slurm nothing has to be said.

    Attributes:
        coordinator: host of process 0, with or without :port (8476); "" takes it from the environment.
        count: number of processes (0: from the environment).
        index: this process's number (-1: from the environment).
        start_seconds: time in which all must have started; those that are missing are named.
        stop_seconds: time in which a run that is asked to stop (SIGTERM, Ctrl-C) has saved and ended.
    """

    coordinator: str = ""
    count: int = 0
    index: int = -1
    start_seconds: float = 300.0
    stop_seconds: float = 300.0

    def __post_init__(self) -> None:
        within("count", self.count, 0)
        within("index", self.index, -1)
        for name in ("start_seconds", "stop_seconds"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} is {getattr(self, name)}, expected a positive number")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where numbers are shown besides the terminal and metrics.jsonl.

    Attributes:
        tensorboard: write event files to the folder `tensorboard` of the run.
        wandb_project: show them at Weights & Biases too, in this project ("": don't).
    """

    tensorboard: bool = True
    wandb_project: str = ""


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
        within("every_steps", self.every_steps, 0)
        within("keep", self.keep, 1)


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """Retrieval on held-out queries.

    Attributes:
        k: ranked tools of a query, best first. At least 5, the places that the metrics look at; more than 5 don't
            change them.
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
        within("batch_size", self.batch_size, 1, MOST_ROWS)
        within("max_queries", self.max_queries, 0)
        within("examples", self.examples, 0)


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
        corpus: first stage, plain text; off unless it has epochs.
        memorization: second stage, document to tool.
        retrieval: third stage, query to tools.
        agent: last stage, conversations; off unless it has epochs.
        checkpoints: when to save.
        evaluation: what `infer/evaluate.py` measures.
        metrics: where numbers are shown.
        processes: several hosts as one run.
    """

    run_dir: str = "runs/default"
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    trainable: TrainableConfig = field(default_factory=TrainableConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    memorization: StageConfig = field(default_factory=StageConfig)
    retrieval: StageConfig = field(default_factory=StageConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    processes: ProcessConfig = field(default_factory=ProcessConfig)

    def __post_init__(self) -> None:
        if not self.run_dir.strip():
            raise ValueError("run_dir is empty, expected a folder")
        within("seed", self.seed, 0)
        tokens = self.evaluation.batch_size * self.data.max_query_tokens
        within("evaluation.batch_size x data.max_query_tokens", tokens, 1, MOST_BATCH_TOKENS)
