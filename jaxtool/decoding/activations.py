"""Activations of many prompts: nothing is generated, and the head is never computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxtool.decoding.buckets import LONGEST_READ, SHORTEST_READ, from_the_end, power
from jaxtool.decoding.capture import Capture
from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.generation import padded, read
from jaxtool.decoding.prefix import common_prefix, read_prefix, with_prefix
from jaxtool.decoding.requests import check_prompt
from jaxtool.decoding.rows import Rows, shares
from jaxtool.decoding.sampling import RowSampling, Sampling


def prompt_states(
    model: DecodeModel,
    prompts: Sequence[Sequence[int]],
    capture: Capture,
    *,
    rows: int = 64,
    read_tokens: int = 1024,
    progress: Callable[[int, int], object] = lambda read, made: None,
) -> Iterator[tuple[int, np.ndarray]]:
    """What is captured of each prompt: its number and [L', D], longest prompts first.

    What all prompts begin with is read once, where the capture is of the last token.

    Args:
        model: the model.
        prompts: token ids, none of them empty or with ids that the model doesn't have.
        capture: blocks, and "last" or "mean".
        rows: prompts that are read together at most; on a mesh a multiple of the devices that share a batch.
        read_tokens: tokens that are read at once: as many prompts as fit.
        progress: is told how many tokens were read, and 0.

    Raises:
        ValueError: a prompt that the model can't read, or a capture that it doesn't have.
    """
    for number, prompt in enumerate(prompts):
        try:
            check_prompt(model.config, prompt)
        except ValueError as error:
            raise ValueError(f"prompt {number}: {error}") from None
    parts = shares(model.rules)
    prefix = common_prefix(prompts) if capture.tokens == "last" else ()
    prefix_cache = read_prefix(model, prefix) if prefix else None
    progress(len(prefix), 0)
    queue = sorted(range(len(prompts)), key=lambda i: (-len(prompts[i]), i))
    while queue:
        length = power(min(len(prompts[queue[0]]) - len(prefix), LONGEST_READ), SHORTEST_READ)
        together = max(min(read_tokens // length, rows) // parts, 1) * parts
        taken, queue = queue[:together], queue[together:]
        texts = [list(prompts[i][len(prefix) :]) for i in taken] + [[]] * (together - len(taken))
        slots = len(prefix) + -(-max(map(len, texts)) // length) * length
        state = Rows.empty(model, rows=together, slots=slots, most=1, log_probs=False, capture=capture)
        if prefix_cache is not None:
            state = with_prefix(model, state, prefix_cache, np.arange(together, dtype=np.int32))
        settings = RowSampling.of([Sampling()] * together, range(together))
        for pieces, _ in from_the_end(texts, length):
            state = read(
                model,
                state,
                *padded(pieces, length),
                settings,
                np.ones(together, np.int32),
                np.full(1, -1, np.int32),
                draws=False,
                last=False,
                capture=capture,
            )
        found = np.asarray(state.captured_bld.astype(capture.dtype))
        progress(sum(map(len, texts)), 0)
        yield from zip(taken, found, strict=False)
