"""Operations by formula against counts by hand, against the matrix products of traced programs, and published ones."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.models import GPTJConfig, LanguageModel, LanguageModelConfig, LlamaConfig, build_model, lora_config
from jaxtool.models.flops import Flops, Work, forward_flops, training_flops
from jaxtool.models.language_model import KEPT_ACTIVATIONS

LLAMA = LlamaConfig(
    vocab_size=96,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
GPTJ = GPTJConfig(
    vocab_size=96,
    hidden_size=16,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    head_dim=8,
    rotary_dim=4,
)
LLAMA_3_8B = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
)
ROWS, LENGTH = 2, 5


def products(jaxpr: Any) -> Iterator[int]:
    """Operations of every dot_general of a program, as often as scans run it."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            yield 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from (times * count for count in products(inner))


def logits(model: LanguageModel) -> jax.Array:
    ids = jnp.ones((ROWS, LENGTH), jnp.int32)
    return model.logits(model(ids, jnp.broadcast_to(jnp.arange(LENGTH), ids.shape), ids)[:, :3])


@pytest.mark.parametrize("config", [LLAMA, GPTJ], ids=["llama", "gptj"])
def test_formulas_count_the_products_of_the_traced_programs(
    config: LanguageModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What remat computes again doesn't count.
    monkeypatch.setitem(KEPT_ACTIVATIONS, "elementwise", jax.checkpoint_policies.everything_saveable)
    work = Work.of_full_rows(ROWS, LENGTH, positions=ROWS * 3)
    model = jax.eval_shape(lambda: build_model(config))
    forward = jax.make_jaxpr(logits)(model)
    assert sum(products(forward.jaxpr)) == forward_flops(config, work).full
    backward = jax.make_jaxpr(jax.grad(lambda model: logits(model).sum()))(model)
    assert sum(products(backward.jaxpr)) == training_flops(config, work).full


def test_low_rank_factors_are_products_too() -> None:
    config = lora_config(LLAMA, rank=4, alpha=8.0, projections=("query", "down"))
    forward = jax.make_jaxpr(logits)(jax.eval_shape(lambda: build_model(config)))
    work = Work.of_full_rows(ROWS, LENGTH, positions=ROWS * 3)
    assert sum(products(forward.jaxpr)) == forward_flops(config, work).full


def test_count_by_hand() -> None:
    # A layer: query 16 x 32, key and value 16 x 16 each, output 32 x 16, gate, up and down 16 x 24 each: 2,688 weights.
    # Three layers, 7 tokens, two operations: 112,896. Texts of 4 and 3 tokens have 25 pairs; a pair costs 32 products
    # of a score and 32 of a sum, so 25 x 3 x 128 = 9,600. Two positions of the head: 2 x 2 x 96 x 16.
    flops = forward_flops(LLAMA, Work(tokens=7, pairs=25, positions=2))
    assert flops == Flops(projections=112_896, attention=9_600, head=6_144)
    assert (flops.full, flops.causal) == (128_640, 123_840)
    assert flops.by_definition() == {"full": 128_640.0, "causal": 123_840.0}


def test_published_operations_of_a_token() -> None:
    """Llama-3.1-8B at sequence 8,192: 417.4 TFLOP/s at 7,207 tokens/s (57.9 GFLOP a token), halved 51.5."""
    flops = training_flops(LLAMA_3_8B, Work.of_full_rows(1, 8192))
    assert flops.full / 8192 / 1e9 == pytest.approx(57.9, abs=0.05)
    assert flops.causal / 8192 / 1e9 == pytest.approx(51.5, abs=0.05)
    assert flops.full / 8192 == pytest.approx(417.4e12 / 7207, rel=1e-3)


def test_frozen_weights_need_no_gradient() -> None:
    config = dataclasses.replace(LLAMA, num_tools=32)
    work = Work.of_full_rows(ROWS, LENGTH)
    once, rows = forward_flops(config, work), training_flops(config, work, "tool_rows")
    assert rows.projections == 2 * once.projections
    assert rows.attention == 3 * once.attention
    # 96 text rows and 32 of tools: the gradient of the latter alone.
    assert rows.head == 2 * once.head + once.head // 4
    low_rank = lora_config(config, rank=4, alpha=8.0, projections=("query",))
    factors = 2 * work.tokens * 3 * (16 * 4 + 4 * 32)
    assert training_flops(low_rank, work, "lora").projections == 2 * once.projections + 3 * factors
    with pytest.raises(ValueError, match="trained part is 'head', expected one of full, lora, tool_rows"):
        training_flops(config, work, "head")


def test_padding_counts_only_if_asked_for() -> None:
    segments = np.array([[1, 1, 1, 2, 2, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
    assert Work.of_rows(segments, 3) == Work(tokens=6, pairs=9 + 4 + 1, positions=3)
    assert Work.of_full_rows(2, 8) == Work(tokens=16, pairs=2 * 64, positions=16)
    assert Work.of_full_rows(2, 8, positions=3) == Work(tokens=16, pairs=2 * 64, positions=3)
