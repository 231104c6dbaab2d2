"""Floating-point operations of a forward pass and of a training step, by formula: for utilisation and for planning.

A multiply-add is two operations; only matrix products are counted, as in published figures, and what remat computes
twice counts once. Nothing here runs or compiles a model. XLA's own count is no use: it takes the body of a scan once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import numpy as np

from jaxtool.models.language_model import LanguageModelConfig, Projection


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a batch asks of a model, summed over its rows.

    Attributes:
        tokens: tokens that go through the blocks.
        pairs: pairs of a query and a key of the same text, those that causality forbids included: the sum of the
            squared lengths of the texts.
        positions: positions at which the head is computed.
    """

    tokens: int
    pairs: int
    positions: int

    @classmethod
    def of_rows(cls, segment_ids_bs: jax.typing.ArrayLike, positions: int) -> Work:
        """The work of packed rows without their padding.

        Args:
            segment_ids_bs: 1, 2, ... for the texts of a row, 0 for padding, [B, S].
            positions: supervised positions of the batch.
        """
        tokens = pairs = 0
        for row in np.asarray(segment_ids_bs):
            lengths = np.unique(row[row != 0], return_counts=True)[1].astype(np.int64)
            tokens += int(lengths.sum())
            pairs += int(np.square(lengths).sum())
        return cls(tokens=tokens, pairs=pairs, positions=positions)

    @classmethod
    def of_full_rows(cls, rows: int, row_length: int, positions: int | None = None) -> Work:
        """The work of rows that one text fills each; padding, if there is any, is counted as text.

        Args:
            rows: B.
            row_length: S.
            positions: positions of the head in all rows (None: every token).
        """
        tokens = rows * row_length
        return cls(tokens=tokens, pairs=tokens * row_length, positions=tokens if positions is None else positions)


@dataclass(frozen=True, kw_only=True)
class Flops:
    """Operations of a batch by part.

    Attributes:
        projections: matrix products with the weights of the blocks.
        attention: scores and weighted sums over all pairs; a causal mask makes half of them needless.
        head: products with the output matrix.
    """

    projections: int
    attention: int
    head: int

    @property
    def full(self) -> int:
        """All of it, attention not halved: the definition of most published figures."""
        return self.projections + self.attention + self.head

    @property
    def causal(self) -> int:
        """All of it with attention halved for causality: what has to be computed."""
        return self.projections + self.attention // 2 + self.head

    def by_definition(self) -> dict[str, float]:
        """Both totals by name, as utilisation is reported."""
        return {"full": float(self.full), "causal": float(self.causal)}


def forward_flops(config: LanguageModelConfig, work: Work) -> Flops:
    """Operations of one forward pass with the head at `work.positions`."""
    projections, factors, attention, head = _products(config, work)
    return Flops(projections=projections + factors, attention=attention, head=head)


def training_flops(config: LanguageModelConfig, work: Work, trained: str = "full") -> Flops:
    """Operations of one training step, forward and backward.

    A product costs two more in the backward pass, one for the gradient of each operand. A frozen matrix needs the one
    for the activations alone; of the head, where tool rows are trained, their columns have both.

    Args:
        config: the model.
        work: the batch.
        trained: "full", "lora" or "tool_rows", as `jaxtool.training.trained_part` has it.

    Raises:
        ValueError: `trained` is something else.
    """
    projections, factors, attention, head = _products(config, work)
    if trained == "full":
        return Flops(projections=3 * (projections + factors), attention=3 * attention, head=3 * head)
    if trained not in ("lora", "tool_rows"):
        raise ValueError(f"trained part is {trained!r}, expected one of full, lora, tool_rows")
    factors *= 3 if trained == "lora" else 2
    rows = head // config.rows * config.num_tools
    return Flops(projections=2 * projections + factors, attention=3 * attention, head=2 * head + rows)


def _products(config: LanguageModelConfig, work: Work) -> tuple[int, int, int, int]:
    """Forward operations of the plain projections, of low-rank factors, of attention and of the head."""
    layers, projections = config.num_hidden_layers, config.projections
    plain = sum(_size(config, projection.letters) for projection in projections.values())
    low_rank = sum(_factors(config, projections[name]) for name in config.lora_projections)
    width = config.num_attention_heads * config.head_dim
    return (
        2 * work.tokens * layers * plain,
        2 * work.tokens * layers * low_rank,
        2 * 2 * work.pairs * layers * width,
        2 * work.positions * config.rows * config.hidden_size,
    )


def _size(config: LanguageModelConfig, letters: str) -> int:
    return math.prod(config.letter_sizes[letter] for letter in letters)


def _factors(config: LanguageModelConfig, projection: Projection) -> int:
    inputs, outputs = projection.letters[: projection.inputs], projection.letters[projection.inputs :]
    return _size(config, inputs + "r") + _size(config, "r" + outputs)
