"""Hidden states of many prompts, read together and in parts, against each prompt alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.config import MeshConfig
from jaxtool.decoding import Capture, Rows, decode_model, prompt_states
from jaxtool.parallel import make_mesh
from tests.decoding.states import states_alone
from tests.tiny_models import CONFIGS, random_model

NAMES = ("gptj", "llama")


def prompts_of(count: int) -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(90, size=int(rng.integers(1, 45))).tolist() for _ in range(count)]


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest) -> Any:
    return random_model(dataclasses.replace(CONFIGS[request.param], num_tools=9, text_tokens=90))


@pytest.mark.parametrize("tokens", ["last", "mean"])
def test_prompts_together_in_parts_and_alone(model: Any, tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtool.decoding.activations.LONGEST_READ", 16)  # most prompts are read in parts
    made, prompts = decode_model(model), prompts_of(9)
    counts: list[tuple[int, int]] = []
    capture = Capture(blocks=(0, 1, -1), tokens=tokens)
    found = dict(
        prompt_states(made, prompts, capture, rows=4, read_tokens=64, progress=lambda *count: counts.append(count))
    )
    assert sorted(found) == list(range(9))
    assert sum(read for read, _ in counts) == sum(map(len, prompts))
    for number, prompt in enumerate(prompts):
        states = states_alone(made, prompt)[:, [0, 1, -1]]
        expected = states[-1] if tokens == "last" else states.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(found[number], expected, atol=1e-4)


@pytest.mark.parametrize("tokens", ["last", "mean"])
def test_a_common_prefix_is_read_once(model: Any, tokens: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtool.decoding.activations.LONGEST_READ", 16)
    made, common = decode_model(model), np.random.default_rng(1).integers(90, size=20).tolist()
    prompts = [common + prompt for prompt in prompts_of(9)]
    counts: list[int] = []
    capture = Capture(blocks=(0, 1, -1), tokens=tokens)
    found = dict(prompt_states(made, prompts, capture, rows=4, progress=lambda read, _: counts.append(read)))
    assert sum(counts) == sum(map(len, prompts)) - (8 * 20 if tokens == "last" else 0)
    for number, prompt in enumerate(prompts):
        states = states_alone(made, prompt)[:, [0, 1, -1]]
        expected = states[-1] if tokens == "last" else states.astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(found[number], expected, atol=1e-4)


def test_a_mean_is_rounded_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxtool.decoding.activations.LONGEST_READ", 16)
    made, prompts = decode_model(model), prompts_of(9)
    exact = dict(prompt_states(made, prompts, Capture(tokens="mean")))
    found = dict(prompt_states(made, prompts, Capture(tokens="mean", dtype="bfloat16")))
    for number in range(9):
        assert found[number].dtype == jnp.bfloat16
        np.testing.assert_array_equal(found[number], exact[number].astype(jnp.bfloat16))


def test_eight_devices(model: Any) -> None:
    prompts, capture = prompts_of(9), Capture()
    expected = dict(prompt_states(decode_model(model), prompts, capture))
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    with jax.set_mesh(mesh):
        made = decode_model(random_model(model.config, mesh=mesh))
        found = dict(prompt_states(made, prompts, capture, rows=8, read_tokens=256))
        shared = dict(prompt_states(made, [[*range(20), *prompt] for prompt in prompts], capture, rows=8))
    for number in range(9):
        np.testing.assert_allclose(found[number], expected[number], atol=1e-4)
        alone = states_alone(decode_model(model), [*range(20), *prompts[number]])
        np.testing.assert_allclose(shared[number], alone[-1], atol=1e-4)


def test_blocks() -> None:
    assert Capture().chosen(2) == (0, 1, 2)
    assert Capture(blocks=(0, -2, -1)).chosen(3) == (0, 2, 3)
    for blocks in ((3,), (-4,), (1, 0), (1, 1), (0, -3)):
        with pytest.raises(ValueError, match="blocks are"):
            Capture(blocks=blocks).chosen(2)
    with pytest.raises(ValueError, match="expected one of last, mean, all"):
        Capture(tokens="first")
    with pytest.raises(ValueError, match="dtype is 'int32', expected one of float32"):
        Capture(dtype="int32")
    made = decode_model(random_model(CONFIGS["llama"]))
    for prompt in ([], [100], [-1]):
        with pytest.raises(ValueError, match="prompt 1: the prompt has"):
            list(prompt_states(made, [[1], prompt], Capture(blocks=[1])))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected tokens 'last' or 'mean'"):
        Rows.empty(made, rows=1, slots=1, most=1, capture=Capture(tokens="all"))
