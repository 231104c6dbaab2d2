"""Generation with a cache next to torch transformers' `generate`: SmolLM2-135M's shape, float32, greedy.

    python tests/benchmarks/bench_generate.py --json

16 prompts of 64 tokens with 128 new tokens each, and a single one, both systems in one process and in turns; medians.
`bandwidth_fraction`: bytes of weights and cache that a step at batch 1 reads, over the bytes per second of a plain
float32 matrix-vector product with a matrix of that size (XLA). Weights are random; tokens per second don't depend on
them. Compilation is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from smollm2_shape import SHAPE  # beside this script

from jaxtool.decoding import DecodeModel, Rows, RowSampling, Sampling, decode, decode_model, read
from jaxtool.models import Llama, LlamaConfig


def ours(model: DecodeModel, prompts_bs: np.ndarray, new: int) -> Callable[[], np.ndarray]:
    """A function that generates and returns the tokens."""
    rows, length = prompts_bs.shape
    settings = RowSampling.of([Sampling()] * rows, range(rows))
    count_b, limit_b = np.full(rows, length, np.int32), np.full(rows, new, np.int32)
    stop_ids = np.full(1, -1, np.int32)

    def run() -> np.ndarray:
        state = Rows.empty(model, rows=rows, slots=length + new, most=new)
        state = read(model, state, prompts_bs, count_b, settings, limit_b, stop_ids, draws=False)
        state = decode(model, state, settings, limit_b, stop_ids, new, draws=False)
        return np.asarray(state.tokens_bn)

    return run


def theirs(prompts_bs: np.ndarray, new: int) -> Callable[[], np.ndarray]:
    """The same for transformers."""
    import torch
    import transformers

    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    config = transformers.LlamaConfig(**SHAPE, attn_implementation="sdpa", bos_token_id=None, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.tensor(prompts_bs, dtype=torch.long)

    def run() -> np.ndarray:
        with torch.no_grad():
            found = model.generate(
                tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=new, do_sample=False, pad_token_id=0
            )
        return found[:, prompts_bs.shape[1] :].numpy()

    return run


def matrix_vector_bandwidth(size: int) -> float:
    """Bytes per second that a float32 matrix-vector product with a matrix of so many bytes reads."""
    matrix = jnp.ones((size // 4 // 576, 576), jnp.float32)
    multiply = jax.jit(lambda matrix, vector: matrix @ vector)
    vector, best = jnp.ones(576, jnp.float32), np.inf
    for _ in range(6):
        started = time.perf_counter()
        multiply(matrix, vector).block_until_ready()
        best = min(best, time.perf_counter() - started)
    return matrix.nbytes / best


def main() -> None:
    """Prints the figures, one a line, or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=3, help="timed runs of each system")
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="generated tokens of a row")
    options = parser.parse_args()

    config = LlamaConfig(**SHAPE)
    model = decode_model(jax.jit(lambda: Llama(config, rngs=nnx.Rngs(0)))(), donate=True)
    rng = np.random.default_rng(0)
    figures: dict[str, Any] = {"jax": jax.__version__}
    for rows, name in ((16, "generate_uniform"), (1, "single")):
        prompts_bs = rng.integers(SHAPE["vocab_size"], size=(rows, options.prompt)).astype(np.int32)
        systems = {"": ours(model, prompts_bs, options.new), "torch_": theirs(prompts_bs, options.new)}
        seconds: dict[str, list[float]] = {which: [] for which in systems}
        for turn in range(options.rounds + 1):
            for which, run in systems.items():
                started = time.perf_counter()
                assert run().shape == (rows, options.new)
                if turn:
                    seconds[which].append(time.perf_counter() - started)
        speed = {which: rows * options.new / statistics.median(found) for which, found in seconds.items()}
        figures |= {f"{name}_{which}tokens_per_second": round(value, 1) for which, value in speed.items()}
        figures[f"{name}_ratio"] = round(speed[""] / speed["torch_"], 2)
    cache = 2 * 4 * SHAPE["num_hidden_layers"] * SHAPE["num_key_value_heads"] * SHAPE["head_dim"]
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
    read_bytes = weights + cache * (options.prompt + options.new)
    bandwidth = matrix_vector_bandwidth(weights)
    figures["matrix_vector_gb_per_second"] = round(bandwidth / 1e9, 2)
    figures["bandwidth_fraction"] = round(read_bytes * figures["single_tokens_per_second"] / bandwidth, 3)
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
