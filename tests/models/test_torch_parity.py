"""Random models made, saved and run by transformers against the same checkpoint in our ports."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxtool.data import Batch
from jaxtool.models import parameters
from jaxtool.training import supervised_loss
from jaxtool.weights import read_weights
from tests.models.torch_models import (
    MODELS,
    TEXT_TOKENS,
    one_thread,
    reference_log_probs,
    reference_logits,
    reference_of,
    torch,
)
from tests.tiny_models import few_optimizations, load_model, log_probs

pytestmark = pytest.mark.torch

S = 512
# Relative positions hide errors in the angles: so the later rows see tokens at 0 and far out at once.
POSITIONS = np.stack(
    [
        np.concatenate([start + np.arange(S // len(starts)) for start in starts])
        for starts in ([0], [0, 9_000], [0, 130_000], [0, 9_000, 65_000, 130_900])
    ]
)


@dataclass(frozen=True)
class Pair:
    """A checkpoint in both libraries.

    Attributes:
        reference: the torch model.
        folder: where it saved itself.
        model: ours, read from there.
        text: ids that may be predicted.
    """

    reference: Any
    folder: Path
    model: Any
    text: int


@pytest.fixture(autouse=True)
def quick_compilation() -> None:
    """Not here: what is compared with torch is compiled as users run it (except gradients, which compile slowly)."""


@pytest.fixture(scope="module", params=list(MODELS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder = tmp_path_factory.mktemp(request.param)
    with one_thread():
        reference = reference_of(request.param, folder)
        text = TEXT_TOKENS.get(request.param, 0)
        model = load_model(folder, text_tokens=text)
        yield Pair(reference=reference, folder=folder, model=model, text=text or model.config.vocab_size)


def random_tokens(pair: Pair, *shape: int) -> np.ndarray:
    return np.random.default_rng(2).integers(pair.text, size=shape)


def test_log_probs_near_and_far(pair: Pair) -> None:
    tokens = random_tokens(pair, *POSITIONS.shape)
    found = log_probs(pair.model, tokens, positions_bs=POSITIONS)
    expected = reference_log_probs(pair.reference, tokens, POSITIONS, text_tokens=pair.text)
    errors = np.abs(found[..., : pair.text] - expected).max(axis=(1, 2))
    assert (errors <= 1e-4).all(), errors
    assert np.isneginf(found[..., pair.text :]).all()
    # Far positions matter: without them the rows would be far from the truth.
    near = log_probs(pair.model, tokens)[1:, :, : pair.text]
    assert (np.abs(near - expected[1:]).max(axis=(1, 2)) > 0.1).all()


def test_padded_and_packed_rows_equal_samples_alone(pair: Pair) -> None:
    """Rows of (padding before, lengths of samples, padding behind); torch runs each sample alone and unpadded."""
    rows = [(200, [312], 0), (0, [300], 212), (0, [100, 213, 199], 0), (31, [5, 400, 1], 75)]
    tokens, segments = random_tokens(pair, len(rows), S), np.zeros((len(rows), S), int)
    places = []
    for row, (start, lengths, behind) in enumerate(rows):
        for number, length in enumerate(lengths):
            segments[row, start : start + length] = number + 1
            places.append((row, slice(start, start + length)))
            start += length
        assert start + behind == S
    found = log_probs(pair.model, tokens, segments)
    assert np.isfinite(found[..., : pair.text]).all()  # a NaN in padding would reach every gradient
    for row, place in places:
        expected = reference_log_probs(pair.reference, tokens[row : row + 1, place], text_tokens=pair.text)[0]
        assert np.abs(found[row, place, : pair.text] - expected).max() <= 1e-4, (row, place)


def test_gradients_of_next_token_loss(pair: Pair, tmp_path: Path) -> None:
    """torch's gradients, saved as if they were a checkpoint, read back under our parameters' names."""
    columns = np.r_[0:24, S - 24 : S]
    positions, tokens = POSITIONS[[0, 3]][:, columns], random_tokens(pair, 2, len(columns))
    logits = reference_logits(pair.reference, tokens, positions)[:, :-1, : pair.text]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.tensor(tokens[:, 1:]).flatten())
    pair.reference.zero_grad()
    loss.backward()
    shutil.copy(pair.folder / "config.json", tmp_path)
    save_file(
        {name: parameter.grad.numpy() for name, parameter in pair.reference.named_parameters()},
        tmp_path / "model.safetensors",
    )
    expected = read_weights(tmp_path, parameters(pair.model))

    supervised = np.broadcast_to(np.arange(len(columns) - 1), (2, len(columns) - 1))
    batch = Batch(
        tokens_bs=jnp.asarray(tokens, jnp.int32),
        positions_bs=jnp.asarray(positions, jnp.int32),
        segment_ids_bs=jnp.ones(tokens.shape, jnp.int32),
        supervised_bp=jnp.asarray(supervised, jnp.int32),
        targets_bpa=jnp.asarray(tokens[:, 1:, None], jnp.int32),
        weights_bpa=jnp.ones((*supervised.shape, 1), jnp.float32),
    )
    with few_optimizations():
        (our_loss, _), gradient = jax.jit(jax.value_and_grad(supervised_loss, has_aux=True))(pair.model, batch)
    assert float(our_loss) == pytest.approx(loss.item(), rel=1e-5)
    ours = parameters(gradient)
    assert ours.keys() == expected.keys()
    for path, value in expected.items():
        # By layer, so that no layer hides behind another.
        layers = zip(ours[path], value, strict=True) if path.startswith("blocks.") else [(ours[path], value)]
        for layer, (found, wanted) in enumerate(layers):
            error = np.linalg.norm(np.asarray(found) - np.asarray(wanted)) / np.linalg.norm(wanted)
            assert error <= 1e-4, f"{path} {layer}: {error:.1e}"
