"""Generation with a cache against full forward passes; rows that stop, go on, are read into and replaced."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.config import MeshConfig
from jaxtool.decoding import (
    Capture,
    Rows,
    RowSampling,
    Sampling,
    decode,
    decode_model,
    forget,
    keep_rows,
    padded,
    read,
    resize,
)
from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.models import LanguageModelConfig, lora_config
from jaxtool.parallel import make_mesh
from tests.decoding.states import states_alone
from tests.tiny_models import CONFIGS, log_probs, random_model

LIMIT, SLOTS = 12, 40
NO_STOP = np.full(1, -1, np.int32)
GREEDY = Sampling()
# Tools, padded rows and text rows that the tokenizer doesn't know: none but the tools may be predicted.
TINY: dict[str, LanguageModelConfig] = {
    name: dataclasses.replace(config, num_tools=9, text_tokens=90) for name, config in CONFIGS.items()
}
TINY["lora"] = lora_config(TINY["llama"], rank=4, alpha=8.0, projections=("query", "down"))


def prompts_of(rows: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(90, size=int(rng.integers(1, 17))).tolist() for _ in range(rows)]


def generate(
    model: DecodeModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sequence[Sampling],
    *,
    limits: Sequence[int] | None = None,
    stop: Sequence[int] = (),
    numbers: Sequence[int] | None = None,
    chunk: int = 0,
) -> tuple[list[list[int]], list[list[float]], Rows]:
    """Tokens and log-probabilities of each row; prompts read at once or in parts of `chunk` tokens."""
    rows = len(prompts)
    penalty = any(row.repetition_penalty != 1 for row in sampling)
    state = Rows.empty(model, rows=rows, slots=SLOTS, most=LIMIT, penalty=penalty)
    settings = RowSampling.of(sampling, range(rows) if numbers is None else numbers)
    limit_b = np.array(limits or [LIMIT] * rows, np.int32)
    stop_ids = np.array([*stop, -1], np.int32)
    draws = any(row.temperature > 0 for row in sampling)
    if not chunk:
        state = read(model, state, *padded(prompts), settings, limit_b, stop_ids, draws=draws)
    else:
        # The last part holds each row's last tokens, so that all choose behind their own prompt.
        for first in range(0, max(map(len, prompts)) - 1, chunk):
            part = [prompt[:-1][first : first + chunk] for prompt in prompts]
            state = read(model, state, *padded(part, chunk), settings, limit_b, stop_ids, draws=draws, last=False)
        state = read(model, state, *padded([p[-1:] for p in prompts]), settings, limit_b, stop_ids, draws=draws)
    state = decode(model, state, settings, limit_b, stop_ids, 1000, draws=draws)
    assert not np.asarray(state.active_b).any()
    return *results(state), state


def results(state: Rows) -> tuple[list[list[int]], list[list[float]]]:
    counts = np.asarray(state.count_b)
    tokens, found = np.asarray(state.tokens_bn), np.asarray(state.log_probs_bn)
    return (
        [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)],
        [row[:count].tolist() for row, count in zip(found, counts, strict=True)],
    )


def continued(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """The most probable tokens one by one, each from a whole forward pass."""
    tokens, found = list(prompt), []
    for _ in range(count):
        last = log_probs(model, np.pad([tokens], [(0, 0), (0, SLOTS - len(tokens))]))[0, len(tokens) - 1]
        tokens.append(int(last.argmax()))
        found.append(float(last.max()))
    return tokens[len(prompt) :], found


@pytest.fixture(scope="module", params=TINY)
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(TINY[request.param])


@pytest.mark.parametrize("chunk", [0, 5])
def test_greedy_is_the_argmax_of_whole_passes(model: Any, chunk: int) -> None:
    prompts = prompts_of(4)
    tokens, found, _ = generate(decode_model(model), prompts, [GREEDY] * 4, chunk=chunk)
    for row, prompt in enumerate(prompts):
        expected, expected_log_probs = continued(model, prompt, LIMIT)
        assert tokens[row] == expected
        np.testing.assert_allclose(found[row], expected_log_probs, atol=1e-4)
        assert all(token < 90 or 100 <= token < 109 for token in tokens[row])


@pytest.fixture(scope="module")
def llama() -> Any:
    return random_model(TINY["llama"])


MIXED = [
    GREEDY,
    Sampling(temperature=1.0, seed=3),
    Sampling(temperature=1.5, top_k=7, seed=3),
    Sampling(temperature=0.7, top_p=0.8, min_p=0.05, seed=4),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=1.0, repetition_penalty=0.8, seed=3),
]


def test_a_row_does_not_depend_on_the_others(llama: Any) -> None:
    model, prompts = decode_model(llama), prompts_of(6, seed=1)
    together = generate(model, prompts, MIXED)[:2]
    for row, (prompt, sampling) in enumerate(zip(prompts, MIXED, strict=True)):
        tokens, found, _ = generate(model, [prompt], [sampling], numbers=[row])
        assert tokens[0] == together[0][row]
        np.testing.assert_allclose(found[0], together[1][row], atol=1e-5)
    # Another order, each with its own number.
    order = [3, 0, 5, 1, 4, 2]
    moved, _, _ = generate(model, [prompts[i] for i in order], [MIXED[i] for i in order], numbers=order)
    assert moved == [together[0][i] for i in order]
    # One seed, other numbers: other draws.
    other, _, _ = generate(model, [prompts[1]] * 2, [MIXED[1]] * 2, numbers=[1, 2])
    assert other[0] == together[0][1] != other[1]


def test_what_rows_have_no_room_for(llama: Any) -> None:
    """Limits above the tokens that a row can generate end there; slots that rows fill can't be taken away."""
    model = decode_model(llama)
    tokens, _, state = generate(model, prompts_of(4), [GREEDY] * 4, limits=[LIMIT + 9] * 4)
    assert [len(some) for some in tokens] == [LIMIT] * 4
    held = int(np.max(state.cache.length_b))
    with pytest.raises(ValueError, match=f"slots is {held - 1}, but a row holds {held} tokens"):
        resize(model, state, slots=held - 1)


def test_rows_that_are_kept_exist(llama: Any) -> None:
    model = decode_model(llama)
    state = Rows.empty(model, rows=4, slots=8, most=1)
    for wrong in ([0, 4], [-1, 0], [], [[0]]):
        with pytest.raises(ValueError, match="row_p"):
            keep_rows(model, state, np.array(wrong, np.int32))
    assert keep_rows(model, state, np.array([3, 1])).count_b.shape == (2,)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    with jax.set_mesh(mesh):
        model = decode_model(random_model(llama.config, mesh=mesh))
        state = Rows.empty(model, rows=8, slots=8, most=1)
        with pytest.raises(ValueError, match="numbers of the 8 rows, the first 1 below 2 and so on"):
            keep_rows(model, state, np.array([0, 1, 4, 6], np.int32))
        assert keep_rows(model, state, np.array([0, 3, 4, 6], np.int32)).count_b.shape == (4,)


def test_limits_and_stop_tokens(llama: Any) -> None:
    model, prompts = decode_model(llama), prompts_of(4)
    whole, _, _ = generate(model, prompts, [GREEDY] * 4)
    stop = whole[2][4]
    tokens, _, state = generate(model, prompts, [GREEDY] * 4, limits=[1, 5, 12, 7], stop=[stop])
    for found, full, limit in zip(tokens, whole, [1, 5, 12, 7], strict=True):
        end = full.index(stop) + 1 if stop in full else len(full)
        assert found == full[: min(limit, end)]
    # The newest token is generated, not read.
    lengths = [len(prompt) + len(found) - 1 for prompt, found in zip(prompts, tokens, strict=True)]
    assert np.asarray(state.cache.length_b).tolist() == lengths


def test_rows_pause_are_read_into_and_are_replaced(llama: Any) -> None:
    """Row 1 gets a response, row 2 another prompt, row 3 nothing; the others go on where they were."""
    model, prompts = decode_model(llama), prompts_of(4)
    settings, limit_b = RowSampling.of([GREEDY] * 4, range(4)), np.full(4, LIMIT, np.int32)
    state = Rows.empty(model, rows=4, slots=SLOTS, most=LIMIT)
    state = read(model, state, *padded(prompts), settings, limit_b, NO_STOP, draws=False)
    state = decode(model, state, settings, limit_b, NO_STOP, 3, draws=False)
    first, _ = results(state)
    assert [len(row) for row in first] == [4] * 4

    response, prompt = [7, 8, 9], [5, 6, 7, 8, 9]
    state = forget(model, state, np.array([False, False, True, False]))
    tokens_bs, count_b = padded([[], [first[1][-1], *response], prompt, []])
    state = read(model, state, tokens_bs, count_b, settings, limit_b, NO_STOP, draws=False)
    assert np.asarray(state.active_b).all()
    state = decode(model, state, settings, np.array([12, 12, 12, 6], np.int32), NO_STOP, 1000, draws=False)
    tokens, _ = results(state)
    assert tokens[0] == continued(llama, prompts[0], LIMIT)[0]
    assert tokens[1] == [*first[1], *continued(llama, [*prompts[1], *first[1], *response], LIMIT - 4)[0]]
    assert tokens[2] == continued(llama, prompt, LIMIT)[0]
    assert tokens[3] == continued(llama, prompts[3], 6)[0]


def test_states_of_a_token_that_is_read_with_a_response(llama: Any) -> None:
    """The last token in front of a response is read with it, in one or two parts; so is its state."""
    model, capture = decode_model(llama), Capture(blocks=(1, -1), generated=True)
    prompts, response = [[5, 6, 7], [8, 9]], [11, 12, 13, 14]
    settings = RowSampling.of([GREEDY] * 2, range(2))
    given: dict[str, Any] = {"draws": False, "capture": capture}
    state = Rows.empty(model, rows=2, slots=SLOTS, most=LIMIT, capture=capture)
    state = read(model, state, *padded(prompts), settings, np.array([4, 9]), NO_STOP, **given)
    state = decode(model, state, settings, np.array([4, 9]), NO_STOP, 6, **given)
    last = int(state.tokens_bn[0, 3])
    limits = np.array([7, 9])
    state = read(model, state, *padded([[last, *response[:1]], []], 4), settings, limits, NO_STOP, last=False, **given)
    state = read(model, state, *padded([response[1:], []], 4), settings, limits, NO_STOP, **given)
    state = decode(model, state, settings, limits, NO_STOP, 20, **given)
    tokens = np.asarray(state.tokens_bn)
    first, second = tokens[0, :7].tolist(), tokens[1, :9].tolist()
    texts = [[*prompts[0], *first[:4], *response, *first[4:]], [*prompts[1], *second]]
    for row, places in enumerate(([3, 4, 5, 6, 11, 12], range(2, 10))):  # the last token of each row is never read
        expected = states_alone(model, texts[row])[list(places)][:, [1, 2]]
        np.testing.assert_allclose(np.asarray(state.captured_bnld)[row, : len(expected)], expected, atol=1e-4)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1), (1, 4, 2)])
def test_eight_devices(sizes: tuple[int, int, int]) -> None:
    config = TINY["llama"]
    prompts = prompts_of(8, seed=2)
    sampling = [MIXED[row % len(MIXED)] for row in range(8)]
    expected = generate(decode_model(random_model(config)), prompts, sampling)[:2]
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], model=sizes[2]))
    with jax.set_mesh(mesh):
        tokens, found, state = generate(decode_model(random_model(config, mesh=mesh)), prompts, sampling)
        assert state.cache.keys_bkht[0].sharding.spec[0] is not None
    assert tokens == expected[0]
    for one, other in zip(found, expected[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4)


def test_a_donated_model_is_gone_and_its_copy_complete() -> None:
    model, prompts = random_model(TINY["llama"]), prompts_of(2)
    expected = generate(decode_model(model), prompts, [GREEDY] * 2)[0]
    made = decode_model(model, donate=True)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(model.blocks))
    assert generate(made, prompts, [GREEDY] * 2)[0] == expected


def test_no_program_is_compiled_twice(llama: Any) -> None:
    model = decode_model(llama)
    generate(model, prompts_of(4), [GREEDY] * 4, limits=[3, 4, 5, 6])
    before = read._cache_size(), decode._cache_size()
    prompts = prompts_of(4)
    generate(model, [prompt[::-1] for prompt in prompts], [GREEDY] * 4, limits=[5, 5, 9, 12], stop=[])
    assert (read._cache_size(), decode._cache_size()) == before


def test_weights_are_arguments_and_no_step_asks_the_host(llama: Any) -> None:
    """Closed over, weights would be constants of the program."""
    model = decode_model(llama)
    state = Rows.empty(model, rows=2, slots=SLOTS, most=LIMIT, penalty=True)
    settings = RowSampling.of([Sampling(temperature=1.0, top_p=0.9, repetition_penalty=1.1)] * 2, range(2))
    text = decode.lower(model, state, settings, np.array([3, 4]), NO_STOP, 5, draws=True).as_text()
    assert "callback" not in text
    filled = re.findall(r"stablehlo\.constant dense<(?:\"|\[).*> : tensor<([0-9x]*)", text)
    assert max(np.prod([int(size) for size in shape.rstrip("x").split("x")]) for shape in filled) <= 16


def test_prompts_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="prompt 1 has 3 tokens, expected at most 2"):
        padded([[1], [1, 2, 3]], 2)
