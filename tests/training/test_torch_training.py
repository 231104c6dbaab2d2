"""Twenty steps of our training next to a plain torch loop: the same weights, samples, rate, clipping and decay."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxtool.config import MeshConfig, OptimizerConfig
from jaxtool.data import Batch, PackedBatches, Sample
from jaxtool.models import abstract_model, build_model, parameters, with_parameters
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training import initial_state, make_optimizer, make_train_step, on_mesh
from jaxtool.weights import read_config, read_weights
from tests.models.torch_models import TEXT_TOKENS, one_thread, reference_of, torch

pytestmark = pytest.mark.torch

STEPS = 20
OPTIMIZER = OptimizerConfig(
    learning_rate=3e-3,
    warmup_share=0.2,
    schedule="cosine",
    final_share=0.1,
    beta1=0.9,
    beta2=0.95,
    epsilon=1e-8,
    weight_decay=0.1,
    clip_norm=1.0,
)


def documents(tokens: int) -> PackedBatches:
    """Texts of 6 to 40 tokens from one small Markov chain, so that there is something to learn; each is supervised
    from a place of its own on."""
    rng = np.random.default_rng(5)
    tokens //= 5  # of the vocabulary the chain visits a part: that is learnt first
    after = rng.integers(tokens, size=(tokens, 2))
    samples = []
    for _ in range(600):
        text = [int(rng.integers(tokens))]
        for _ in range(int(rng.integers(6, 41))):
            text.append(int(after[text[-1], rng.integers(2)]))
        first = int(rng.integers(len(text) // 2))
        samples.append(
            Sample(
                tokens=tuple(text[:-1]),
                positions=tuple(range(first, len(text) - 1)),
                targets=tuple((token,) for token in text[first + 1 :]),
            )
        )
    return PackedBatches(samples, rows=8, row_length=64, epochs=1, seed=0)


def alone(batch: Batch) -> list[tuple[list[int], list[int], list[int]]]:
    """Tokens, supervised positions and targets of every sample of packed rows."""
    found = []
    for row, segments in enumerate(np.asarray(batch.segment_ids_bs)):
        weights = np.asarray(batch.weights_bpa)[row, :, 0]
        places, targets = np.asarray(batch.supervised_bp)[row], np.asarray(batch.targets_bpa)[row, :, 0]
        for segment in range(1, segments.max() + 1):
            (inside,) = np.nonzero(segments == segment)
            mine = (weights > 0) & np.isin(places, inside)
            tokens = np.asarray(batch.tokens_bs)[row, inside]
            found.append((tokens.tolist(), (places[mine] - inside[0]).tolist(), targets[mine].tolist()))
    return found


def rate(step: int) -> float:
    warmup = round(OPTIMIZER.warmup_share * STEPS)
    if step < warmup:
        return OPTIMIZER.learning_rate * (step + 1) / (warmup + 1)
    cosine = (1 + math.cos(math.pi * (step - warmup) / (STEPS - warmup))) / 2
    return OPTIMIZER.learning_rate * (OPTIMIZER.final_share + (1 - OPTIMIZER.final_share) * cosine)


def torch_losses(model: Any, batches: PackedBatches, text: int | None) -> list[tuple[float, float]]:
    """Losses and gradient norms; every sample of a batch is computed alone, in eager mode and without padding."""
    decayed, plain = [], []
    for name, parameter in model.named_parameters():
        (plain if "norm" in name or "ln_" in name or "bias" in name else decayed).append(parameter)
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": OPTIMIZER.weight_decay}, {"params": plain, "weight_decay": 0.0}],
        betas=(OPTIMIZER.beta1, OPTIMIZER.beta2),
        eps=OPTIMIZER.epsilon,
    )
    found = []
    for number in range(STEPS):
        samples = alone(batches.batch(number))
        count = sum(len(places) for _, places, _ in samples)
        optimizer.zero_grad()
        total = 0.0
        for tokens, places, targets in samples:
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, places, :text]
            loss = torch.nn.functional.cross_entropy(logits, torch.tensor(targets), reduction="sum") / count
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_norm)
        for group in optimizer.param_groups:
            group["lr"] = rate(number)
        optimizer.step()
        found.append((total, norm.item()))
    return found


@pytest.mark.parametrize(
    ("name", "sizes", "accumulate"),
    [("llama-3.2", (1, 1, 1), 1), ("qwen3", (2, 2, 2), 2), ("gptj", (1, 1, 1), 2)],
    ids=["llama", "qwen3 on 8 devices in 2 parts", "gptj in 2 parts"],
)
def test_twenty_steps(name: str, sizes: tuple[int, int, int], accumulate: int, tmp_path: Path) -> None:
    text = TEXT_TOKENS.get(name)
    reference = reference_of(name, tmp_path)
    config = read_config(tmp_path)
    if text is not None:
        config = dataclasses.replace(config, text_tokens=text)
    batches = documents(text or config.vocab_size)
    assert batches.steps >= STEPS

    mesh = make_mesh(
        MeshConfig(**dict(zip(("data", "fsdp", "model"), sizes, strict=True))), jax.devices()[: math.prod(sizes)]
    )
    rules, _ = AxisRules().fit(dict(mesh.shape), config.axis_sizes)
    abstract = abstract_model(lambda: build_model(config, rules), mesh)
    optimizer = make_optimizer(OPTIMIZER, STEPS)
    ours = []
    with jax.set_mesh(mesh):
        model = with_parameters(abstract, read_weights(tmp_path, parameters(abstract)))
        state = initial_state(model, optimizer)
        step = make_train_step(optimizer, accumulate=accumulate)
        for number in range(STEPS):
            state, metrics = step(state, on_mesh(batches.batch(number), mesh, rules))
            ours.append((float(metrics["loss"]), float(metrics["grad_norm"])))

    with one_thread():
        theirs = torch_losses(reference, batches, text)
    assert theirs[-1][0] < 0.9 * theirs[0][0]  # it learns: equal losses of weights that stand still would say little
    assert any(norm > OPTIMIZER.clip_norm for _, norm in theirs)
    for number, (found, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert found[0] == pytest.approx(expected[0], rel=1e-4), f"loss of step {number}"
        assert found[1] == pytest.approx(expected[1], rel=1e-2), f"gradient norm of step {number}"
