"""How new tool rows begin: strategies that give first values for one row parameter at a time.

A row from the tokens of the tool's name says what the tool is called, one from its document also what it does, and a
draw from the distribution of the text rows says nothing but fits the model. Where rows go is decided in `vocabulary`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import jax
import numpy as np

from jaxtool.models.catalog_change import CatalogChange
from jaxtool.models.row_programs import column_axes, normal_rows, row_moments, token_means

ROW_PARAMETERS = ("embedding_vd", "head_vd", "head_bias_v")

# Keeps the Cholesky factor of a singular covariance real: above the float32 error of its eigenvalues, and far below
# what any sample could show.
_RIDGE = 1e-5


class RowInitialiser(Protocol):
    """A strategy for the first values of new rows."""

    def rows(self, parameter: str, matrix_vd: jax.Array, text_tokens: int, change: CatalogChange) -> jax.Array:
        """Rows of the added tools in ascending order, [T, D] in the dtype of the matrix.

        Args:
            parameter: one of `ROW_PARAMETERS`.
            matrix_vd: its rows; a bias is a matrix of width 1.
            text_tokens: rows that belong to tokens of the tokenizer, from the first on.
            change: the new tools.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class TokenMean:
    """Each row is the mean of the rows of some tokens: those of the tool's name (as in ToolGen), or of its document.

    A head's bias begins with the mean of these tokens' biases, so that the new logit is the mean of theirs.

    Attributes:
        token_ids: one list for each tool of the new catalogue; those of tools that stay aren't read and may be empty.
        text: what the tokens are of, for messages.
    """

    token_ids: Sequence[Sequence[int]]
    text: str = "name"

    def rows(self, parameter: str, matrix_vd: jax.Array, text_tokens: int, change: CatalogChange) -> jax.Array:
        """See `RowInitialiser`.

        Raises:
            ValueError: not one list for each tool, or a list of an added tool is empty or has an id that is no token.
        """
        if len(self.token_ids) != change.new_count:
            raise ValueError(
                f"tokens of {len(self.token_ids):,} {self.text}s, expected those of all {change.new_count:,} tools"
            )
        chosen = []
        for tool in change.added_ids.tolist():
            ids = np.asarray(self.token_ids[tool])
            if ids.size == 0:
                raise ValueError(f"tool {tool}: its {self.text} has no token, a row can't be initialised from nothing")
            if ids.ndim != 1 or ids.dtype.kind not in "iu":
                raise ValueError(f"tool {tool}: its {self.text} is {self.token_ids[tool]!r:.80}, expected token ids")
            if ids.min() < 0 or ids.max() >= text_tokens:
                raise ValueError(
                    f"tool {tool}: token ids {ids.min()} to {ids.max()} are outside the {text_tokens} rows of tokens"
                )
            chosen.append(ids)
        return token_means(matrix_vd, chosen)


@dataclass(frozen=True, kw_only=True)
class TextDistribution:
    """Rows drawn from a normal distribution with the mean and the scaled covariance of the text rows.

    Rows near the mean of all tokens are what keeps the new logits from dominating before training: Hewitt,
    "Initializing New Word Embeddings for Pretrained Language Models" (2021), where the covariance is scaled by 1e-5;
    transformers' `resize_token_embeddings` scales it by 1e-9. The smaller one vanishes in the rounding of bfloat16
    rows, which then are all the same. A bias is drawn by itself, from the mean and variance of the text biases.

    Attributes:
        scale: factor on the covariance; 1 draws rows as different as tokens are, 0 gives the mean.
        seed: with the parameter's name and the tool's id, decides the draw.
    """

    scale: float = 1e-5
    seed: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and self.scale >= 0):
            raise ValueError(f"scale is {self.scale}, expected a finite number from 0 up")

    def rows(self, parameter: str, matrix_vd: jax.Array, text_tokens: int, change: CatalogChange) -> jax.Array:
        """See `RowInitialiser`."""
        mean_d, covariance_de = (np.asarray(moment, np.float64) for moment in row_moments(matrix_vd, text_tokens))
        width = len(mean_d)
        # The tiny term serves text rows that are all the same.
        ridge = _RIDGE * np.trace(covariance_de) / width + 1e-30
        factor_de = math.sqrt(self.scale) * np.linalg.cholesky(covariance_de + ridge * np.eye(width))
        return normal_rows(
            mean_d.astype(np.float32),
            factor_de.astype(np.float32),
            change.added_ids,
            jax.random.fold_in(jax.random.key(self.seed), ROW_PARAMETERS.index(parameter)),
            axes=column_axes(matrix_vd),
            dtype=str(matrix_vd.dtype),
        )
