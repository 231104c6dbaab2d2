"""Configuration of offline inference over a file of prompts: generation and activations."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxtool.config.bounds import MOST_SAMPLES, within
from jaxtool.config.run_config import MeshConfig, ProcessConfig


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How texts are continued where their row doesn't say otherwise.

    Attributes:
        max_new_tokens: tokens to generate at most.
        temperature: logits are divided by it; 0 takes the most probable token.
        top_k: only so many most probable tokens (0: all).
        top_p: only the most probable tokens with this share of the probability (1: all).
        min_p: only tokens with at least this share of the largest probability (0: all).
        repetition_penalty: of tokens that the text holds already (1: none).
        seed: of the draws; texts and samples of one seed draw differently.
        stop: strings that end a text; it is cut in front of them.
        stop_at_eos: whether the model's EOS tokens end a text.
        samples: continuations of each prompt.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_at_eos: bool = True
    samples: int = 1

    def __post_init__(self) -> None:
        within("max_new_tokens", self.max_new_tokens, 1)
        within("samples", self.samples, 1, MOST_SAMPLES)
        if "" in self.stop:
            raise ValueError("stop has an empty text, which every text holds; expected texts with characters")


@dataclass(frozen=True, kw_only=True)
class OfflineConfig:
    """A model, a file of prompts and a folder for the results.

    Attributes:
        model: run directory of train/finetune.py, folder in Hugging Face format, GGUF file or hub id (owner/name).
        input: prompts, a JSON object a line (.jsonl, or .jsonl.gz).
        output: folder for the results; the same command resumes what is unfinished in it.
        param_dtype: dtype of the weights, float32 or bfloat16 ("": float32 on CPU, bfloat16 elsewhere).
        rows: texts that are computed at the same time.
        read_tokens: tokens of prompts that are read at once.
        part_rows: prompts of a part, which is one file of the results and what a run that was killed repeats at most.
        mesh: how the devices of a process share the work; each process has a model of its own.
        processes: of the run; they share the parts.
    """

    model: str
    input: str
    output: str
    param_dtype: str = ""
    rows: int = 64
    read_tokens: int = 1024
    part_rows: int = 512
    mesh: MeshConfig = field(default_factory=MeshConfig)
    processes: ProcessConfig = field(default_factory=ProcessConfig)

    def __post_init__(self) -> None:
        for name in ("rows", "read_tokens", "part_rows"):
            within(name, getattr(self, name), 1)
        if self.param_dtype not in ("", "float32", "bfloat16"):
            raise ValueError(f"param_dtype is {self.param_dtype!r}, expected float32 or bfloat16")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig(OfflineConfig):
    """Generation for a file of prompts; see `OfflineConfig`.

    Attributes:
        sampling: how texts are continued.
        log_probs: write the log-probability of each generated token, under the model.
    """

    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    log_probs: bool = False


@dataclass(frozen=True, kw_only=True)
class ActivationsConfig(OfflineConfig):
    """Activations of a file of prompts; see `OfflineConfig`.

    Attributes:
        blocks: which of 0 (embedding) to L (behind the final norm), ascending; negative ones count from the end.
            Empty: all.
        tokens: "last" token of the prompt, or "mean" over it.
        dtype: of the stored states, float32 or bfloat16.
    """

    blocks: tuple[int, ...] = ()
    tokens: str = "last"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokens not in ("last", "mean"):
            raise ValueError(f"tokens is {self.tokens!r}, expected last or mean")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is {self.dtype!r}, expected float32 or bfloat16")


@dataclass(frozen=True, kw_only=True)
class RetrieveConfig(OfflineConfig):
    """Tools for a file of queries; see `OfflineConfig`.

    Attributes:
        input: queries: text with one a line, or JSON (.jsonl; .json for an array) with a text, or an object with a
            field query or text, or a prompt as for generation, in each; `.gz` may follow.
        read_tokens: tokens of prompts that are read at once, of the search for names; tool tokens take rows times the
            longest prompt.
        keep: ranked tools of a query, best first.
        tools: a file of tools (JSON, as for training, or a name a line), whose names are searched for token by token;
            empty: the model's own tool tokens are ranked.
        beams: of the search for names; at least keep.
        normalize: scores of names are relative to all that the model can predict ("full"), to the tokens that occur in
            names at that place ("slice") or to those that may come next ("allowed").
        score_end: whether the probability that a name ends counts in its score.
        length_exponent: scores of names are divided by this power of their tokens, the end counted if it is scored; 0
            leaves them.
        chunk: forced tokens of names that are read at once (0: 4 up to 64 beams of all rows together, else 1).
        no_tool: a name for none of the tools, ranked among them ("": there is none).
        system_prompt: of queries; null: that of the model's training, or what the chat template puts.
        max_query_tokens: of a query's prompt, longer ones are cut at their end; 0: those of the training, or 256, or
            what the model's positions leave.
    """

    keep: int = 5
    tools: str = ""
    beams: int = 10
    normalize: str = "full"
    score_end: bool = True
    length_exponent: float = 0.0
    chunk: int = 0
    no_tool: str = ""
    system_prompt: str | None = None
    max_query_tokens: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        within("keep", self.keep, 1)
        within("beams", self.beams, 1)
        within("chunk", self.chunk, 0)
        within("max_query_tokens", self.max_query_tokens, 0)
        if self.tools and self.keep > self.beams:
            raise ValueError(f"keep is {self.keep}, more than beams {self.beams}; expected at most as many")
        if not self.tools:
            names = ("read_tokens", "beams", "normalize", "score_end", "length_exponent", "chunk", "no_tool")
            for name in names:
                if getattr(self, name) != getattr(RetrieveConfig, name):
                    raise ValueError(f"{name} is for names of tools, and tools is not given")
