"""How a stage is trained: optimiser, batches, and for the stages that read files of their own where those are.

The whole run is in `run_config`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from jaxtool.config.bounds import MOST_BATCH_TOKENS, MOST_EPOCHS, MOST_ROWS, MOST_TOKENS, one_of, share, within


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW or Adafactor with linear warm-up and clipping.

    Attributes:
        kind: "adamw", or "adafactor", whose state is small (no first moment, a factored second one).
        learning_rate: peak rate.
        schedule: after the warm-up "cosine", "linear" or "constant".
        warmup_share: share of the steps in which the rate rises linearly.
        final_share: rate at the last step as a share of the peak; not for "constant".
        beta1: decay of AdamW's first moment.
        beta2: decay of AdamW's second moment.
        epsilon: added to the root of AdamW's second moment.
        weight_decay: decoupled decay of matrices; norm scales are never decayed.
        clip_norm: largest global gradient norm (.inf: nothing is clipped).
    """

    kind: str = "adamw"
    learning_rate: float = 4e-5
    schedule: str = "cosine"
    warmup_share: float = 0.03
    final_share: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0

    def __post_init__(self) -> None:
        one_of("kind", self.kind, ("adamw", "adafactor"))
        one_of("schedule", self.schedule, ("cosine", "linear", "constant"))
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
class StageConfig:
    """One training stage over one kind of samples.

    Attributes:
        epochs: passes over the samples, at most 1,000; 0 skips the stage.
        max_samples: train on this many samples, drawn with the run's seed (0: all).
        rows: packed rows of a batch, over all devices; at most 65,536.
        accumulate: parts that a batch is computed in, one after the other, to need less memory; the result is the same.
        row_length: tokens of a row, at most 131,072. A batch has at most 2^26 (67 million) tokens.
        shorter_rows: further, smaller row lengths. A sample goes to the shortest rows that hold it; batches of shorter
            rows have more of them. Each length is compiled for itself.
        loss_chunk: supervised positions of a device, over all its rows, whose logits exist at a time. 0: as many as
            take 512 MiB in float32, or as much as the gradient of the head where that is more.
        evaluate_every: steps between measurements on held-out samples, also at the end of the stage (0: never).
            The checkpoint with the lowest loss is kept besides the newest.
        z_loss: weight of the squared log-normaliser of the softmax, which keeps logits small (0: none).
        optimizer: optimiser of the stage; it starts afresh in each stage.
    """

    epochs: int = 1
    max_samples: int = 0
    rows: int = 8
    row_length: int = 256
    shorter_rows: tuple[int, ...] = ()
    accumulate: int = 1
    loss_chunk: int = 0
    z_loss: float = 0.0
    evaluate_every: int = 0
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        within("epochs", self.epochs, 0, MOST_EPOCHS)
        within("max_samples", self.max_samples, 0)
        within("rows", self.rows, 1, MOST_ROWS)
        within("row_length", self.row_length, 2, MOST_TOKENS)
        within("loss_chunk", self.loss_chunk, 0)
        within("evaluate_every", self.evaluate_every, 0)
        if len(set(self.shorter_rows)) < len(self.shorter_rows) or any(
            not 2 <= length < self.row_length for length in self.shorter_rows
        ):
            raise ValueError(
                f"shorter_rows is {list(self.shorter_rows)}, expected different lengths below row_length "
                f"{self.row_length}"
            )
        within("accumulate", self.accumulate, 1, self.rows)
        if self.rows % self.accumulate:
            raise ValueError(f"accumulate {self.accumulate} does not divide rows {self.rows}")
        if not 0 <= self.z_loss < math.inf:
            raise ValueError(f"z_loss is {self.z_loss}, expected 0 or more")
        within("rows x row_length", self.rows * self.row_length, 2, MOST_BATCH_TOKENS)


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(StageConfig):
    """Language modelling on plain text, e.g. on a corpus augmented with tool calls (Toolformer).

    Attributes:
        epochs: passes over the samples, at most 1,000; 0 skips the stage.
        source: .txt, .jsonl or .json files (also .gz): a file, a folder or a pattern; or tfds:NAME[/CONFIG]:SPLIT.
        text_field: field of the text in JSON and TFDS records.
        text_files: what is a document in a .txt file, the whole "file" or each "line".
        unsupervised_field: field of JSON records with parts of the text not to be learned, [[begin, end], ...] in
            characters ("": none).
        data_dir: folder in which TFDS keeps its data sets ("": its default).
        long: what becomes of documents longer than a row: "split" into windows, "cut" (and counted), or "error".
        overlap: tokens that a further window repeats as context, without learning them again.
        held_out: share of the samples that is held out, drawn with the run's seed.
    """

    epochs: int = 0
    source: str = ""
    text_field: str = "text"
    text_files: str = "file"
    unsupervised_field: str = ""
    data_dir: str = ""
    long: str = "split"
    overlap: int = 0
    held_out: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("text_files", self.text_files, ("file", "line"))
        one_of("long", self.long, ("split", "cut", "error"))
        within("overlap", self.overlap, 0, self.row_length - 1)
        share("held_out", self.held_out)


@dataclass(frozen=True, kw_only=True)
class AgentConfig(StageConfig):
    """Conversations in which the model uses tools: OpenAI messages or ShareGPT, rendered by the chat template.

    Attributes:
        epochs: passes over the samples, at most 1,000; 0 skips the stage.
        source: .jsonl or .json files (also .gz): a file, a folder or a pattern.
        supervised: turns of the model to learn: all ("assistant"), the "last", or those "marked" by train, loss or
            weight.
        long: what becomes of conversations longer than a row: "error", "cut" at their end (and counted), or "split".
        held_out: share of the samples that is held out, drawn with the run's seed.
    """

    epochs: int = 0
    source: str = ""
    supervised: str = "assistant"
    long: str = "error"
    held_out: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("supervised", self.supervised, ("assistant", "last", "marked"))
        one_of("long", self.long, ("error", "cut", "split"))
        share("held_out", self.held_out)
