"""Decoding next to torch transformers and llama.cpp, in one run: retrieval, constrained search, generation, capture.

    python tests/benchmarks/bench_decode.py --json

All systems in one process, in turns, float32; speeds are medians, compilation is not counted. `--only` names sections:

- `retrieve`: tools of one token, 46,985 of them, the shape of SmolLM2-135M. The peer is transformers' `generate` with
  5 beams and `prefix_allowed_tokens_fn`. `retrieve_limit_fraction` is the time that the operations of reading the
  prompts would take at the speed of a large matrix product (the faster of XLA's and torch's, in turns with the rest),
  over the time that it took; the template's beginning, which is read once, is not counted.
- `slice`: tool rows of the head and `top_k`, against all rows, log_softmax, mask and `top_k`, for 16 hidden states and
  for one; and the same with the text rows of Llama 3, width 1,024.
- `beam`: ids of three tokens (256 x 256 x place) inside a vocabulary of 128,896, width 64, 10 beams; scores relative to
  the ids' tokens ("slice") and to the children ("allowed") against scores relative to all ("full").
- `generate`: chat prompts of BFCL through the engine, greedy, up to 256 tokens, against `generate` in batches of 16.
  Rows lie on all devices: JAX_NUM_CPU_DEVICES=2 makes two of a CPU, each with a copy of the weights; the other sections
  take one. `--rows` is the engine's.
- `uniform`: 16 prompts of 64 tokens, 128 more each; `single`: one of them. `bandwidth_fraction`: bytes of weights and
  cache that a step at batch 1 reads, over those that a plain matrix-vector product of that size reads in the same time.
  Both in llama.cpp too, on the same weights in float32, where LLAMA_CPP_PYTHON names an interpreter that has
  llama-cpp-python.
- `capture`: states of all layers for the last token of 16 prompts, against reading them without; `capture_noise` is the
  same for reading without, twice.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from decode_peers import LlamaCpp, TorchGenerator, TorchRetriever  # beside this script
from flax import nnx
from smollm2_shape import SHAPE  # beside this script

import jaxtool
from jaxtool.config import MeshConfig
from jaxtool.data import ChatPrompts, load_retrieval_set, smollm2
from jaxtool.decoding import (
    BeamSearch,
    Capture,
    DecodeModel,
    Engine,
    Request,
    Rows,
    RowSampling,
    Sampling,
    ToolTrie,
    TrieHead,
    decode,
    decode_model,
    padded,
    prefill,
    rank_tools,
    read,
)
from jaxtool.models import Llama, LlamaConfig, parameters
from jaxtool.parallel import make_mesh
from jaxtool.toolgen import ToolRetriever
from jaxtool.weights import export_model

TOOLS = 46_985
Run = Callable[[], Any]


def timed(
    systems: Mapping[str, Run], rounds: int, *, warm: Sequence[str] | None = None
) -> tuple[dict[str, float], dict[str, Any]]:
    """Median seconds of each, run in turns behind a first turn that isn't counted; and what the last turn returned.

    The first turn is that of the systems `warm` alone (None: of all).
    """
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    results = {}
    for name in systems if warm is None else warm:
        systems[name]()
    for _ in range(rounds):
        for name, run in systems.items():
            started = time.perf_counter()
            results[name] = run()
            seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}, results


def texts_of(count: int) -> list[str]:
    """Real requests of mixed lengths."""
    data = load_retrieval_set("bfcl", seed=0)
    return [query.text for query in (*data.test, *data.test_unseen)][:count]


def matrix_products() -> tuple[int, dict[str, Run]]:
    """Operations of some large float32 matrix products, and what runs them by XLA and by torch."""
    import torch

    size, times = 2048, 8
    x, y = jnp.ones((size, size)), torch.ones(size, size)
    multiply = jax.jit(lambda x: x @ x)
    return 2 * size**3 * times, {
        "product_xla": lambda: [multiply(x).block_until_ready() for _ in range(times)],
        "product_torch": lambda: [y @ y for _ in range(times)],
    }


def matrix_vector_bandwidth(size: int) -> float:
    """Bytes per second that a float32 matrix-vector product with a matrix of so many bytes reads."""
    matrix, vector = jnp.ones((size // 4 // 576, 576), jnp.float32), jnp.ones(576, jnp.float32)
    multiply = jax.jit(lambda matrix, vector: matrix @ vector)
    return float(matrix.nbytes / timed({"": lambda: multiply(matrix, vector).block_until_ready()}, 8)[0][""])


def retrieve(rounds: int) -> dict[str, Any]:
    """Tools of one token."""
    config = LlamaConfig(**SHAPE, num_tools=TOOLS)
    tokenizer = jaxtool.weights.load_tokenizer(smollm2())
    prompts = ChatPrompts(tokenizer, max_length=256)
    texts = texts_of(32)
    lengths = [len(prompts.prompt(text).ids) for text in texts]
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        model = jax.jit(lambda: Llama(config, rngs=nnx.Rngs(0)))()
    many = ToolRetriever(model, prompts, mesh, batch_size=16)
    one = ToolRetriever(model, prompts, mesh, batch_size=1)
    peer = TorchRetriever(SHAPE, config.rows, range(config.vocab_size, config.vocab_size + TOOLS), prompts)
    few = texts[:8]
    product_operations, products = matrix_products()
    seconds, _ = timed(
        {
            **products,
            "": lambda: many.retrieve(texts, 5),
            "torch": lambda: peer.retrieve(texts, 16),
            "single": lambda: [one.retrieve([text], 5) for text in few],
            "single_torch": lambda: peer.retrieve(few, 1),
        },
        rounds,
    )
    blocks = sum(leaf.size for path, leaf in parameters(model).items() if path.startswith("blocks."))
    own = sum(lengths) - len(prompts.beginning) * len(texts)  # tokens that aren't shared
    operations = 2 * blocks * own + 2 * len(texts) * TOOLS * config.hidden_size
    fastest = product_operations / min(seconds[name] for name in products)
    return {
        "retrieve_queries_per_second": len(texts) / seconds[""],
        "retrieve_torch_queries_per_second": len(texts) / seconds["torch"],
        "retrieve_ratio": seconds["torch"] / seconds[""],
        "retrieve_single_queries_per_second": len(few) / seconds["single"],
        "retrieve_single_torch_queries_per_second": len(few) / seconds["single_torch"],
        "retrieve_single_ratio": seconds["single_torch"] / seconds["single"],
        "retrieve_limit_fraction": operations / fastest / seconds[""],
        "matrix_product_gflops": fastest / 1e9,
        "retrieve_prompt_tokens": sum(lengths) / len(lengths),
    }


def slice_head(rounds: int) -> dict[str, Any]:
    """The head of the tools against the whole head, for 16 hidden states and for one."""
    found = {}
    for name, text_rows, width in (
        ("slice", SHAPE["vocab_size"], SHAPE["hidden_size"]),
        ("slice_llama_3", 128_256, 1_024),
    ):
        head_vd = jax.random.normal(jax.random.key(0), (text_rows + TOOLS, width))
        tools_td = jnp.array(head_vd[text_rows:])
        for which, batch in (("ratio", 16), ("single_ratio", 1)):
            hidden_bd = jax.random.normal(jax.random.key(1), (batch, width))
            seconds, results = timed(
                {
                    "whole": functools.partial(_whole_head, hidden_bd, head_vd, text_rows),
                    "sliced": functools.partial(_tool_head, hidden_bd, tools_td),
                },
                4 * rounds,
            )
            assert np.array_equal(results["whole"] - text_rows, results["sliced"])
            found[f"{name}_{which}"] = seconds["whole"] / seconds["sliced"]
    return found


def _whole_head(hidden_bd: jax.Array, head_vd: jax.Array, text_rows: int) -> np.ndarray:
    return np.asarray(_best_of_all(hidden_bd, head_vd, text_rows)[1])


def _tool_head(hidden_bd: jax.Array, tools_td: jax.Array) -> np.ndarray:
    return np.asarray(_best_tools(hidden_bd, tools_td)[1])


@functools.partial(jax.jit, static_argnums=2)
def _best_of_all(hidden_bd: jax.Array, head_vd: jax.Array, text_rows: int) -> Any:
    log_probs_bv = jax.nn.log_softmax(jnp.einsum("bd,vd->bv", hidden_bd, head_vd), axis=-1)
    return jax.lax.top_k(jnp.where(jnp.arange(len(head_vd)) >= text_rows, log_probs_bv, -jnp.inf), 5)


@jax.jit
def _best_tools(hidden_bd: jax.Array, tools_td: jax.Array) -> Any:
    logits_bt = jnp.einsum("bd,td->bt", hidden_bd, tools_td)
    scores_bk, tools_bk = jax.lax.top_k(logits_bt, 5)
    return scores_bk - jax.nn.logsumexp(logits_bt, axis=-1, keepdims=True), tools_bk


def beam(rounds: int) -> dict[str, Any]:
    """Ids of three tokens inside a large vocabulary."""
    config = LlamaConfig(
        **{**SHAPE, "vocab_size": 128_896, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1},
    )
    config = dataclasses.replace(config, num_attention_heads=1, num_key_value_heads=1)
    rng = np.random.default_rng(0)
    pairs = rng.integers(256, size=(TOOLS, 2))
    places: dict[tuple[int, int], int] = {}
    ids = []
    for first, second in pairs.tolist():
        place = places.get((first, second), 0)
        places[first, second] = place + 1
        ids.append([1000 + first, 2000 + second, 3000 + place])
    trie = jax.device_put(ToolTrie.build(ids, end_token=None, vocab_rows=config.vocab_size))
    model = decode_model(jax.jit(lambda: Llama(config, rngs=nnx.Rngs(0)))())
    hidden, cache = prefill(model, *padded(rng.integers(1000, size=(16, 32)).tolist()))
    systems: dict[str, Run] = {}
    for normalize in ("full", "slice", "allowed"):
        search = BeamSearch(beams=10, keep=10, normalize=normalize)
        head = TrieHead.build(model, trie, normalize)
        systems[normalize] = lambda search=search, head=head: jax.block_until_ready(
            rank_tools(model, trie, cache, hidden, search, head=head)
        )
    seconds, _ = timed(systems, 2 * rounds)
    return {
        **{f"beam_{name}_ms": 1000 * value for name, value in seconds.items()},
        "beam_ratio": seconds["full"] / seconds["slice"],
        "beam_allowed_ratio": seconds["full"] / seconds["allowed"],
    }


def generate(folder: Path, count: int, rows: int, rounds: int) -> dict[str, Any]:
    """Real prompts of mixed lengths that end where the model ends them."""
    mesh = make_mesh(MeshConfig())
    loaded = jaxtool.load(smollm2(), mesh=mesh)
    prompts = ChatPrompts(loaded.tokenizer, max_length=1024)
    ids = [prompts.prompt(text).ids for text in texts_of(count)]
    requests = [
        Request(tokens=each, limit=256, stop_ids=loaded.eos_token_ids, number=number) for number, each in enumerate(ids)
    ]
    peer = TorchGenerator(folder)
    with jax.set_mesh(mesh):
        engine = Engine(decode_model(loaded.model, donate=True), loaded.tokenizer, rows=rows)
        seconds, results = timed(
            {
                "": lambda: {done.request: done.tokens for done in engine.run(requests)},
                "torch": lambda: peer.generate(ids, 256, loaded.eos_token_ids, 16),
            },
            rounds,
            warm=("",),  # minutes, in which the peer compiles nothing
        )
    ours, theirs = results[""], results["torch"]
    tokens = sum(map(len, ours.values()))
    return {
        "generate_prompts": len(ids),
        "generate_devices": len(jax.devices()),
        "generate_rows": rows,
        "generate_tokens": tokens,
        "generate_tokens_per_second": tokens / seconds[""],
        "generate_torch_tokens_per_second": sum(map(len, theirs.values())) / seconds["torch"],
        "generate_ratio": seconds["torch"] / seconds[""],
        "generate_equal_texts": sum(ours[number] == theirs[number] for number in ours) / len(ids),
    }


def uniform_run(model: DecodeModel, prompts_bs: np.ndarray, new: int) -> Run:
    """Prompts of one length, with as many new tokens each."""
    rows, length = prompts_bs.shape
    settings = RowSampling.of([Sampling()] * rows, range(rows))
    count_b, limit_b = np.full(rows, length, np.int32), np.full(rows, new, np.int32)
    stop_ids = np.full(1, -1, np.int32)

    def run() -> np.ndarray:
        state = Rows.empty(model, rows=rows, slots=length + new, most=new, log_probs=False)
        state = read(model, state, prompts_bs, count_b, settings, limit_b, stop_ids, draws=False)
        state = decode(model, state, settings, limit_b, stop_ids, new, draws=False)
        return np.asarray(state.tokens_bn)

    return run


def uniform(model: DecodeModel, folder: Path, rows: int, name: str, rounds: int) -> dict[str, Any]:
    """Prompts of one length, next to transformers and llama.cpp."""
    prompt, new = 64, 128
    prompts_bs = np.random.default_rng(0).integers(1000, 40_000, size=(rows, prompt)).astype(np.int32)
    peer = TorchGenerator(folder)
    systems: dict[str, Run] = {
        "": uniform_run(model, prompts_bs, new),
        "torch": lambda: peer.uniform(prompts_bs, new),
    }
    llama_cpp = LlamaCpp.start(folder, rows=rows, slots=prompt + new)
    if llama_cpp is not None:
        systems["llama_cpp"] = lambda: llama_cpp.generate(prompts_bs, new)
    seconds, results = timed(systems, rounds)
    found = {
        f"{name}_{which}tokens_per_second".replace("__", "_"): rows * new / value
        for which, value in ((f"{each}_" if each else "", value) for each, value in seconds.items())
    }
    found[f"{name}_ratio"] = seconds["torch"] / seconds[""]
    found[f"{name}_equal_texts"] = float(
        np.mean([a.tolist() == b for a, b in zip(results[""], results["torch"], strict=True)])
    )
    if llama_cpp is not None:
        llama_cpp.stop()
        found[f"{name}_llama_cpp_ratio"] = seconds["llama_cpp"] / seconds[""]
    if rows == 1:
        config = model.config
        weights = sum(leaf.nbytes for leaf in jax.tree.leaves(model))
        cache = 2 * 4 * config.num_hidden_layers * config.kv_heads * config.head_dim * (prompt + new)
        bandwidth = matrix_vector_bandwidth(weights)
        found["matrix_vector_gb_per_second"] = bandwidth / 1e9
        found["bandwidth_fraction"] = (weights + cache) * new / seconds[""] / bandwidth
    return found


def capture(model: DecodeModel, rounds: int) -> dict[str, Any]:
    """States of all layers at the last token of prompts."""
    rows, length = 16, 64
    prompts_bs = np.random.default_rng(0).integers(1000, 40_000, size=(rows, length)).astype(np.int32)
    settings, ones = RowSampling.of([Sampling()] * rows, range(rows)), np.ones(rows, np.int32)
    lengths, stop_ids = np.full(rows, length, np.int32), np.full(1, -1, np.int32)

    def run(wanted: Capture | None) -> Any:
        state = Rows.empty(model, rows=rows, slots=length, most=1, capture=wanted)
        state = read(
            model, state, prompts_bs, lengths, settings, ones, stop_ids, draws=False, capture=wanted
        )  # fmt: skip
        return np.asarray(state.tokens_bn), np.asarray(state.log_probs_bn), np.asarray(state.captured_bld)

    seconds, results = timed(
        {"plain": lambda: run(None), "captured": lambda: run(Capture()), "again": lambda: run(None)}, 6 * rounds
    )
    assert all(np.array_equal(a, b) for a, b in zip(results["plain"][:2], results["captured"][:2], strict=True))
    return {
        "capture_overhead": seconds["captured"] / seconds["plain"] - 1,
        "capture_noise": abs(seconds["again"] / seconds["plain"] - 1),
    }


def main() -> None:
    """Prints the figures, one a line, or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=3, help="timed turns of each system")
    parser.add_argument("--prompts", type=int, default=200, help="chat prompts of `generate`")
    parser.add_argument("--rows", type=int, default=64, help="rows of the engine in `generate`")
    sections = ("retrieve", "slice", "beam", "generate", "uniform", "single", "capture")
    parser.add_argument("--only", nargs="+", choices=sections, default=sections, help="what to measure")
    options = parser.parse_args()
    rounds, only = options.rounds, set(options.only)
    figures: dict[str, Any] = {"jax": jax.__version__, "cores": os.cpu_count()}
    if "retrieve" in only:
        figures |= retrieve(rounds)
    if "slice" in only:
        figures |= slice_head(rounds)
    if "beam" in only:
        figures |= beam(rounds)
    if only & {"generate", "uniform", "single", "capture"}:
        loaded = jaxtool.load(smollm2())
        with tempfile.TemporaryDirectory() as folder:
            export_model(loaded.model, Path(folder) / "model", tokenizer=loaded.tokenizer)
            model = decode_model(loaded.model, donate=True)
            path = Path(folder) / "model"
            if "uniform" in only:
                figures |= uniform(model, path, 16, "generate_uniform", rounds)
            if "single" in only:
                figures |= uniform(model, path, 1, "single", rounds)
            if "generate" in only:
                figures |= generate(path, options.prompts, options.rows, max(rounds // 3, 1))
            if "capture" in only:
                figures |= capture(model, rounds)
    figures = {name: float(f"{x:.4g}") if isinstance(x, float) else x for name, x in figures.items()}
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
