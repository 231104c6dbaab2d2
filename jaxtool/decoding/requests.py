"""What is asked of the engine, what comes back, and which prompts a model can read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jaxtool.decoding.sampling import Sampling
from jaxtool.models import LanguageModelConfig


@dataclass(frozen=True, kw_only=True)
class Request:
    """A text to be continued.

    Attributes:
        tokens: the prompt, at least one token.
        limit: tokens to generate at most, at least 1.
        sampling: how they are chosen.
        number: of the request in its job; requests with one seed draw differently.
        stop_ids: tokens that end the text; they count as generated.
        stop: strings that end the text; it is cut in front of them.
    """

    tokens: Sequence[int]
    limit: int
    sampling: Sampling = field(default_factory=Sampling)
    number: int = 0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Completion:
    """The continuation of a request.

    Attributes:
        request: its place in the list.
        tokens: what was generated, with the token that ended it.
        text: of these tokens, special tokens left out, up to a stop string; empty without a tokenizer.
        finish: "stop" for a stop token or string, "length" at the limit.
        stop: the stop string, or the stop token, that ended it; None at the limit.
        log_probs: of the tokens, under the model; None if they weren't asked for.
        captured: [L', D], what was captured of the prompt, or None.
        captured_tokens: [tokens, L', D], of the generated tokens, or None. The last token of a text is never read: NaN.
    """

    request: int
    tokens: list[int]
    text: str
    finish: str
    stop: str | int | None
    log_probs: list[float] | None = None
    captured: np.ndarray | None = None
    captured_tokens: np.ndarray | None = None


def check_prompt(config: LanguageModelConfig, tokens: Sequence[int], limit: int = 0) -> None:
    """Whether the model can read the prompt, and go on for `limit` tokens.

    Raises:
        ValueError: says why it can't.
    """
    if not len(tokens):
        raise ValueError("the prompt has no tokens, expected at least one")
    known = config.vocab_size + config.num_tools
    outside = [token for token in tokens if not (isinstance(token, int | np.integer) and 0 <= token < known)]
    if outside:
        raise ValueError(f"the prompt has the token {outside[0]!r}, expected a whole number from 0 to {known - 1}")
    longest = config.max_position_embeddings
    if len(tokens) + limit > longest:
        more = f", with {limit:,} to generate" if limit else ","
        raise ValueError(f"the prompt has {len(tokens):,} tokens{more} more than the model's {longest:,} positions")
