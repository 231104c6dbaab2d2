"""Many requests through few rows against each of them alone: lengths, stops, seeds, prefixes, meshes, programs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.config import MeshConfig
from jaxtool.decoding import Capture, Completion, Engine, Request, Sampling, decode_model, keep_rows
from jaxtool.decoding.buckets import bucket, power
from jaxtool.decoding.prefix import common_prefix
from jaxtool.parallel import make_mesh
from tests.decoding.states import states_alone
from tests.tiny_models import CONFIGS, log_probs, random_model

CONFIG = dataclasses.replace(CONFIGS["llama"], num_tools=9, text_tokens=90)
SAMPLINGS = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=1.4, top_p=0.9, seed=5)]


class Letters:
    """A tokenizer of one letter a token."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(chr(0x100 + token) for token in tokens)


def requests_of(count: int, *, seed: int = 0, prefix: int = 0) -> list[Request]:
    rng = np.random.default_rng(seed)
    common = rng.integers(90, size=prefix).tolist()
    return [
        Request(
            tokens=common + rng.integers(90, size=int(rng.integers(1, 40))).tolist(),
            limit=int(rng.integers(1, 20)),
            sampling=SAMPLINGS[number % len(SAMPLINGS)],
            number=number,
            stop_ids=(int(rng.integers(90)), 99) if number % 2 else (),
        )
        for number in range(count)
    ]


def run(engine: Engine, requests: list[Request]) -> list[Completion]:
    found = list(engine.run(requests))
    assert sorted(each.request for each in found) == list(range(len(requests)))
    return sorted(found, key=lambda each: each.request)


@pytest.fixture(scope="module")
def model() -> Any:
    return decode_model(random_model(CONFIG))


@pytest.fixture(scope="module")
def alone(model: Any) -> list[Completion]:
    return [run(Engine(model, Letters(), rows=1), [request])[0] for request in requests_of(17)]


@pytest.mark.parametrize(("rows", "read_tokens"), [(4, 64), (8, 1024), (32, 16)])
def test_rows_are_refilled_and_every_request_is_answered_as_if_alone(
    model: Any, alone: list[Completion], rows: int, read_tokens: int
) -> None:
    requests = requests_of(17)
    progress: list[tuple[int, int]] = []
    engine = Engine(model, Letters(), rows=rows, read_tokens=read_tokens, log_probs=True)
    found = list(engine.run(requests, progress=lambda *counts: progress.append(counts)))
    for each in found:
        one = alone[each.request]
        assert (each.tokens, each.text, each.finish, each.stop) == (one.tokens, one.text, one.finish, one.stop)
        assert each.log_probs is not None and len(each.log_probs) == len(each.tokens)
        request = requests[each.request]
        assert each.finish == ("stop" if each.tokens[-1] in request.stop_ids else "length")
        assert len(each.tokens) == request.limit or each.finish == "stop"
    assert sum(read for read, _ in progress) == sum(len(request.tokens) for request in requests)
    assert sum(made for _, made in progress) == sum(len(each.tokens) for each in found)
    assert list(engine.run(requests)) == found  # the same bytes again, in the same order


def test_the_first_completion_is_the_argmax_of_whole_passes(alone: list[Completion]) -> None:
    model, request = random_model(CONFIG), requests_of(17)[0]
    tokens = list(request.tokens)
    for token in alone[0].tokens:
        assert int(log_probs(model, np.array([tokens]))[0, -1].argmax()) == token
        tokens.append(token)


def test_a_common_prefix_is_read_once(model: Any) -> None:
    requests = requests_of(9, prefix=30)
    read: list[int] = []
    engine = Engine(model, Letters(), rows=4)
    found = sorted(engine.run(requests, progress=lambda tokens, _: read.append(tokens)), key=lambda each: each.request)
    assert sum(read) == 30 + sum(len(request.tokens) - 30 for request in requests)
    for each, request in zip(found, requests, strict=True):
        assert each.tokens == run(Engine(model, Letters(), rows=1), [request])[0].tokens


def samples_of(prompts: int, *, penalty: float = 1.0) -> list[Request]:
    """Prompts with up to nine samples each, not side by side."""
    found = [
        Request(
            tokens=request.tokens,
            limit=request.limit + sample,
            sampling=Sampling(temperature=1.2, seed=3 + sample, repetition_penalty=penalty),
            number=number,
        )
        for number, request in enumerate(requests_of(prompts))
        for sample in range((1, 4, 9)[number % 3])
    ]
    return [found[place] for place in np.random.default_rng(0).permutation(len(found))]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_samples_of_a_prompt_read_it_once(monkeypatch: pytest.MonkeyPatch, model: Any, penalty: float) -> None:
    monkeypatch.setattr("jaxtool.decoding.engine.LONGEST_READ", 16)  # also in parts
    requests, capture = samples_of(6, penalty=penalty), Capture(blocks=(1, -1), generated=True)
    read: list[int] = []
    engine = Engine(model, Letters(), rows=32, read_tokens=64, log_probs=True, capture=capture)
    found = sorted(engine.run(requests, progress=lambda tokens, _: read.append(tokens)), key=lambda each: each.request)
    assert sum(read) == sum(map(len, {tuple(request.tokens) for request in requests}))
    single = Engine(model, Letters(), rows=1, log_probs=True, capture=capture)
    for each, request in zip(found, requests, strict=True):
        [one] = single.run([request])
        assert each.tokens == one.tokens
        np.testing.assert_allclose(each.log_probs, one.log_probs, atol=1e-4)
        np.testing.assert_allclose(each.captured, one.captured, atol=1e-4)
        np.testing.assert_allclose(each.captured_tokens, one.captured_tokens, atol=1e-4)
    few = run(Engine(model, Letters(), rows=4, read_tokens=64), requests)  # fewer rows than samples: read again
    assert [each.tokens for each in few] == [each.tokens for each in found]


def test_a_long_prefix_is_read_in_parts(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    monkeypatch.setattr("jaxtool.decoding.prefix.LONGEST_READ", 16)
    lengths: list[int] = []
    extend = type(model).extend

    def noting(self: Any, tokens_bs: Any, *rest: Any) -> Any:
        lengths.append(tokens_bs.shape[1])
        return extend(self, tokens_bs, *rest)

    monkeypatch.setattr(type(model), "extend", noting)
    requests = requests_of(9, prefix=45)
    found = run(Engine(model, Letters(), rows=4), requests)
    assert lengths == [16, 16, 13]  # traced: the first part, the second, the last
    for each, request in zip(found, requests, strict=True):
        assert each.tokens == run(Engine(model, Letters(), rows=1), [request])[0].tokens


def test_common_prefix() -> None:
    words = list(range(20))
    assert common_prefix([[*words, 1, 2], [*words, 1, 3, 4], [*words, 1]]) == tuple(words)
    assert common_prefix([words, words]) == tuple(words[:-1])  # a prompt's last token is its own
    assert common_prefix([words]) == () == common_prefix([[*words[:9], 1], [*words[:9], 2]])


def test_long_prompts_are_read_in_parts(monkeypatch: pytest.MonkeyPatch, model: Any, alone: list[Completion]) -> None:
    monkeypatch.setattr("jaxtool.decoding.engine.LONGEST_READ", 16)
    found = run(Engine(model, Letters(), rows=8), requests_of(17))
    assert [each.tokens for each in found] == [each.tokens for each in alone]


def test_stop_strings(model: Any) -> None:
    plain = Request(tokens=[5, 6, 7], limit=40)
    text = run(Engine(model, Letters(), rows=2), [plain])[0].text
    for length in (1, 2, 3):
        string = text[4 : 4 + length]
        place = text.find(string)
        wanted = dataclasses.replace(plain, stop=("never", string, "\u0100" * 50))
        found = run(Engine(model, Letters(), rows=2, log_probs=True), [wanted, plain, wanted])
        assert [each.text for each in found] == [text[:place], text, text[:place]]
        assert all(len(each.log_probs or ()) == len(each.tokens) for each in found)
        assert found[0].stop == string and found[0].finish == "stop"
        known = [token for token in found[0].tokens if token < CONFIG.vocab_size]  # tools have no text
        assert Letters().decode(known) == text[: place + length]
        assert found[0].tokens == found[1].tokens[: len(found[0].tokens)]


def test_the_stop_string_that_is_complete_first_ends_the_text(model: Any) -> None:
    """Not the one that begins first: what ends a text must not depend on when it is looked at."""
    plain = Request(tokens=[5, 6, 7], limit=40)
    text = run(Engine(model, Letters(), rows=2), [plain])[0].text
    long, short = text[2:12], text[6:8]
    assert text.find(short) > text.find(long)
    (found,) = run(Engine(model, Letters(), rows=2), [dataclasses.replace(plain, stop=(long, short))])
    assert (found.stop, found.text) == (short, text[: text.find(short)])


def test_what_cannot_be_answered() -> None:
    engine = Engine(decode_model(random_model(CONFIG)), rows=2)
    for request, message in (
        (Request(tokens=[], limit=1), "request 1: the prompt has no tokens"),
        (Request(tokens=[1], limit=0), "the limit is 0 tokens"),
        (Request(tokens=[109], limit=1), "the token 109, expected a whole number from 0 to 108"),
        (Request(tokens=[-1], limit=1), "the token -1"),
        (Request(tokens=[1], limit=CONFIG.max_position_embeddings), "positions"),
        (Request(tokens=[1], limit=1, stop=("a",)), "stop strings need a tokenizer"),
        (Request(tokens=[1.5], limit=1), "the token 1.5, expected a whole number"),  # type: ignore[list-item]
        (Request(tokens=[1], limit=1.5), "the limit is 1.5 tokens"),  # type: ignore[arg-type]
        (Request(tokens=[1], limit=1, number=2**31), "the number is 2147483648"),
        (Request(tokens=[1], limit=1, stop="ab"), "stop is 'ab', expected several texts"),  # type: ignore[arg-type]
        (Request(tokens=[1], limit=1, stop=("",)), "none of them empty"),
        (Request(tokens=[1], limit=1, stop_ids=(2**40,)), "expected token ids"),
    ):
        with pytest.raises(ValueError, match=message):
            list(engine.run([Request(tokens=[1], limit=1), request]))
    with pytest.raises(ValueError, match="expected a multiple"):
        Engine(engine.model, rows=0)
    with pytest.raises(ValueError, match="read_tokens is 0"):
        Engine(engine.model, read_tokens=0)
    assert list(engine.run([])) == []


def test_programs_are_compiled_for_buckets_not_for_lengths(model: Any) -> None:
    from jaxtool.decoding.generation import decode, read

    engine = Engine(model, Letters(), rows=4)
    run(engine, requests_of(12, seed=1))
    before = read._cache_size(), decode._cache_size()  # type: ignore[attr-defined]
    for seed in range(2, 8):
        run(engine, [dataclasses.replace(r, limit=20) for r in requests_of(12, seed=seed)])
    # Prompts of 1 to 39 tokens: 16, 32 or 64 are read at once. All of it fits the smallest cache.
    assert read._cache_size() - before[0] <= 2  # type: ignore[attr-defined]
    assert decode._cache_size() == before[1]  # type: ignore[attr-defined]


def test_sizes() -> None:
    assert [bucket(n, 16) for n in (1, 16, 17, 25, 33, 49, 65, 1000)] == [16, 16, 24, 32, 48, 64, 96, 1024]
    assert [power(n, 4) for n in (0, 4, 5, 8, 9, 512, 513)] == [4, 4, 8, 8, 16, 512, 1024]


def test_the_last_texts_are_decoded_in_fewer_rows(
    monkeypatch: pytest.MonkeyPatch, model: Any, alone: list[Completion]
) -> None:
    rows: list[int] = []

    def noting(model: Any, state: Any, row_p: Any) -> Any:
        rows.append(len(row_p))
        return keep_rows(model, state, row_p)

    monkeypatch.setattr("jaxtool.decoding.engine.keep_rows", noting)
    monkeypatch.setattr("jaxtool.decoding.engine._FEWEST_ROWS", 2)
    found = run(Engine(model, Letters(), rows=8), requests_of(17))
    assert [each.tokens for each in found] == [each.tokens for each in alone]
    assert rows == [4, 2]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (8, 1, 1)])
def test_eight_devices(sizes: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch, alone: list[Completion]) -> None:
    monkeypatch.setattr("jaxtool.decoding.engine._FEWEST_ROWS", 1)
    mesh = make_mesh(MeshConfig(data=sizes[0], fsdp=sizes[1], model=sizes[2]))
    with jax.set_mesh(mesh):
        engine = Engine(decode_model(random_model(CONFIG, mesh=mesh)), Letters(), rows=16, read_tokens=128)
        found = run(engine, requests_of(17))
        assert [each.tokens for each in found] == [each.tokens for each in alone]
        shared = run(engine, requests_of(9, prefix=30))
        samples = run(engine, samples_of(6))
        with pytest.raises(ValueError, match="expected a multiple of the"):
            Engine(engine.model, rows=3)
    expected = run(Engine(decode_model(random_model(CONFIG)), Letters(), rows=3), requests_of(9, prefix=30))
    assert [each.tokens for each in shared] == [each.tokens for each in expected]
    expected = run(Engine(decode_model(random_model(CONFIG)), Letters(), rows=3), samples_of(6))
    assert [each.tokens for each in samples] == [each.tokens for each in expected]


def test_capture_of_prompts_and_generated_tokens(model: Any) -> None:
    capture = Capture(blocks=(0, 1, -1), generated=True)
    requests = requests_of(7)
    plain = run(Engine(model, Letters(), rows=4, log_probs=True), requests)
    found = run(Engine(model, Letters(), rows=4, log_probs=True, capture=capture), requests)
    for each, other, request in zip(found, plain, requests, strict=True):
        assert (each.tokens, each.log_probs) == (other.tokens, other.log_probs)  # bit for bit
        whole = [*request.tokens, *each.tokens]
        states = states_alone(model, whole)  # [tokens, L+1, D]
        assert each.captured is not None and each.captured_tokens is not None
        np.testing.assert_allclose(each.captured, states[len(request.tokens) - 1, [0, 1, -1]], atol=1e-4)
        expected = states[len(request.tokens) :, [0, 1, -1]]
        np.testing.assert_allclose(each.captured_tokens[:-1], expected[:-1], atol=1e-4)
        assert np.isnan(each.captured_tokens[-1]).all()
