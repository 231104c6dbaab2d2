"""Hidden states of one text in one pass, which tests of captures compare with."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jaxtool.decoding import Capture, DecodeModel, KVCache

LONGEST = 64


def states_alone(model: DecodeModel, tokens: Sequence[int]) -> np.ndarray:
    """States of every block of each token of a text of at most `LONGEST`, [tokens, L+1, D]."""
    whole = np.zeros((1, LONGEST), np.int32)
    whole[0, : len(tokens)] = tokens
    return np.stack([np.asarray(x)[0, : len(tokens)] for x in _states(model, whole)], axis=1)


@jax.jit
def _states(model: DecodeModel, tokens_bs: jax.Array) -> tuple[jax.Array, ...]:
    cache = KVCache.empty(model.config, model.rules, 1, LONGEST)
    return model.extend_captured(tokens_bs, np.array([LONGEST]), cache, Capture(tokens="all"))[2]
