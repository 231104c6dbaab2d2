"""Choosing the next token of each row from its logits, with settings and randomness of the row's own.

What a row draws depends on its seed, its number and its place alone, never on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_LARGEST = 1e30  # float32 ends soon behind it
_SEED_STEP = 0x9E3779B9  # 2^32 over the golden ratio: seeds that users take (0, 1, 2, ...) don't meet


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the tokens of a text are chosen.

    Filters apply one after the other, to the probabilities at the temperature: the k most probable tokens, then the
    smallest set of most probable tokens with a sum of `top_p`, then those with at least `min_p` of the largest. A token
    as probable as the last one that a filter lets through passes too.

    Attributes:
        temperature: logits are divided by it; 0 takes the most probable token (the lowest id, if several are).
        top_k: only so many most probable tokens (0: all).
        top_p: above 0 and at most 1 (1: all).
        min_p: 0 to 1 (0: all).
        repetition_penalty: logits of tokens that the text holds already, prompt included, are divided by it where
            positive and multiplied where negative (Keskar et al. 2019; 1: none). It comes before the temperature.
        seed: of the draws.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    @classmethod
    def of(cls, settings: Any, sample: int = 0) -> Sampling:
        """From any object that has these fields; each sample of a prompt draws with a seed of its own."""
        found = {each.name: getattr(settings, each.name) for each in fields(cls)}
        return cls(**{**found, "seed": (found["seed"] + sample * _SEED_STEP) % 2**32})

    def __post_init__(self) -> None:
        for each in fields(self):
            value, whole = getattr(self, each.name), each.name in ("top_k", "seed")
            if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
                raise ValueError(f"{each.name} is {value!r}, expected a {'whole ' if whole else ''}number")

        def check(name: str, fine: bool, expected: str) -> None:
            if not fine:
                raise ValueError(f"{name} is {getattr(self, name)}, expected {expected}")

        # Logits divided by less than the smallest would be infinite.
        hot = 1 / _LARGEST < self.temperature < _LARGEST
        check("temperature", self.temperature == 0 or hot, "0 or a number from 1e-30 to 1e30")
        check("top_k", 0 <= self.top_k < 2**31, "0 or a positive number below 2^31")
        check("top_p", 0 < self.top_p <= 1, "a share above 0, up to 1")
        check("min_p", 0 <= self.min_p <= 1, "a share from 0 to 1")
        check("repetition_penalty", 1 / _LARGEST < self.repetition_penalty < _LARGEST, "a positive number below 1e30")
        check("seed", 0 <= self.seed < 2**32, "0 to 2^32 - 1")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class RowSampling:
    """Settings of B rows on the device; see `Sampling`.

    Attributes:
        temperature_b: float32.
        top_k_b: int32, 0 for all.
        top_p_b: float32.
        min_p_b: float32.
        repetition_penalty_b: float32.
        seed_b: uint32.
        number_b: int32, the row's number in its job: rows with one seed draw differently.
    """

    temperature_b: jax.Array
    top_k_b: jax.Array
    top_p_b: jax.Array
    min_p_b: jax.Array
    repetition_penalty_b: jax.Array
    seed_b: jax.Array
    number_b: jax.Array

    @classmethod
    def of(cls, rows: Sequence[Sampling], numbers: Sequence[int]) -> RowSampling:
        """Numpy arrays of the settings."""

        def column(name: str, dtype: type) -> jax.Array:
            return np.array([getattr(row, name) for row in rows], dtype)  # type: ignore[return-value]

        return cls(
            temperature_b=column("temperature", np.float32),
            top_k_b=column("top_k", np.int32),
            top_p_b=column("top_p", np.float32),
            min_p_b=column("min_p", np.float32),
            repetition_penalty_b=column("repetition_penalty", np.float32),
            seed_b=column("seed", np.uint32),
            number_b=np.asarray(numbers, np.int32),  # type: ignore[arg-type]
        )


def penalised(logits_bv: jax.Array, seen_bv: jax.Array, penalty_b: jax.Array) -> jax.Array:
    """Logits after the repetition penalty; `seen_bv` says which tokens the text holds."""
    penalty_b1 = penalty_b[:, None]
    changed_bv = jnp.where(logits_bv > 0, logits_bv / penalty_b1, logits_bv * penalty_b1)
    return jnp.where(seen_bv, changed_bv, logits_bv)


def filtered(logits_bv: jax.Array, sampling: RowSampling) -> jax.Array:
    """Logits at the temperature, -inf where a filter leaves a token out. Sorts the vocabulary once."""
    temperature_b1 = jnp.where(sampling.temperature_b > 0, sampling.temperature_b, 1.0)[:, None]
    logits_bv = logits_bv / temperature_b1
    vocabulary = logits_bv.shape[-1]
    sorted_bv = jnp.flip(jnp.sort(logits_bv, axis=-1), axis=-1)
    place_v = jnp.arange(vocabulary)
    top_k_b1 = jnp.where(sampling.top_k_b > 0, sampling.top_k_b, vocabulary)[:, None]
    kept_bv = jnp.where(place_v < top_k_b1, sorted_bv, -jnp.inf)
    probability_bv = jax.nn.softmax(kept_bv, axis=-1)
    before_bv = jnp.cumsum(probability_bv, axis=-1) - probability_bv
    within_bv = (before_bv < sampling.top_p_b[:, None]) | (place_v == 0)
    # All of them where nothing is asked for: a sum in float32 may reach 1 before the last token.
    within_bv |= (sampling.top_p_b >= 1)[:, None]
    within_bv &= jnp.isfinite(kept_bv)
    lowest_b1 = jnp.min(jnp.where(within_bv, sorted_bv, jnp.inf), axis=-1, keepdims=True)
    floor_b1 = sorted_bv[:, :1] + jnp.log(sampling.min_p_b)[:, None]  # -inf where there is none
    return jnp.where(logits_bv >= jnp.maximum(lowest_b1, floor_b1), logits_bv, -jnp.inf)


def choose(logits_bv: jax.Array, sampling: RowSampling, place_b: jax.Array, *, draws: bool) -> jax.Array:
    """The next token of each row, int32 [B].

    Args:
        logits_bv: float32, -inf for what can't be chosen; at least one token of each row can.
        sampling: settings of the rows.
        place_b: int32, how many tokens the row has been given before this one.
        draws: whether any row has a temperature; without, nothing is sorted or drawn.
    """
    best_b = jnp.argmax(logits_bv, axis=-1).astype(jnp.int32)
    if not draws:
        return best_b

    def noise(seed: jax.Array, number: jax.Array, place: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), number), place)
        return jax.random.gumbel(key, logits_bv.shape[-1:], jnp.float32)

    noise_bv = jax.vmap(noise)(sampling.seed_b, sampling.number_b, place_b)
    drawn_b = jnp.argmax(filtered(logits_bv, sampling) + noise_bv, axis=-1).astype(jnp.int32)
    return jnp.where(sampling.temperature_b > 0, drawn_b, best_b)
