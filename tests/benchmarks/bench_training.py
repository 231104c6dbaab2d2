"""Training speed and memory next to torch transformers: SmolLM2-135M, 46,985 tool rows, ToolLens queries, float32.

    python tests/benchmarks/bench_training.py --json --data path/to/toollens

Each system runs in a process of its own (so that peak memory is its own) and takes turns on the same samples: some
steps of one, the same samples with the next. The first step of a turn isn't counted: it pays for what the others' turns
have taken of caches and of memory. `--systems jaxtool,torch` needs 13 GiB, all four 27.

Full fine-tuning with AdamW, 16 queries a step. The peers are
transformers' `LlamaForCausalLM` with fused AdamW and scaled-dot-product attention: `torch` computes the loss from
`labels` on batches padded to their longest query; `torch_grouped` has queries of like length in a batch
(`group_by_length`); `torch_sliced` computes, besides, logits at the supervised positions only (`logits_to_keep`).
`ratio` is to `torch`, `ratio_best` to the fastest of the three. Weights are random: speed doesn't depend on them.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from smollm2_shape import SHAPE  # beside this script

ROOT = Path(__file__).parents[2]
BATCH = 16
TOOL_ROWS = 46_985
# Memory in large pages, for all systems: faulting in gigabytes of small ones takes a quarter of a step.
LARGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
PEERS = ("torch", "torch_grouped", "torch_sliced")


def samples(folder: str, count: int) -> list[Any]:
    """Retrieval samples of the first `count` training queries; tool ids spread over all rows."""
    from jaxtool.data import ChatPrompts, load_retrieval_set, smollm2
    from jaxtool.toolgen import retrieval_samples
    from jaxtool.weights import load_tokenizer

    data = load_retrieval_set(folder, seed=0)
    prompts = ChatPrompts(load_tokenizer(smollm2()), system_prompt="", max_length=120)
    chosen = np.random.default_rng(0).permutation(len(data.train))[:count]
    return list(retrieval_samples([data.train[i] for i in chosen], prompts, SHAPE["vocab_size"]).samples)


def jaxtool_worker(chosen: list[Any], rows: int, row_length: int) -> Iterator[dict[str, Any]]:
    """Yields what is known after the set-up, then after each step."""
    import jax

    from jaxtool.config import MeshConfig, OptimizerConfig
    from jaxtool.data import PackedBatches
    from jaxtool.models import Llama, LlamaConfig
    from jaxtool.parallel import AxisRules, make_mesh
    from jaxtool.training import initial_state, make_optimizer, make_train_step, on_mesh

    from flax import nnx  # isort: skip

    mesh = make_mesh(MeshConfig())
    config = LlamaConfig(**SHAPE, num_tools=TOOL_ROWS)
    batches = PackedBatches(chosen, rows=rows, row_length=row_length, epochs=1, seed=0)
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-4), batches.steps)
    with jax.set_mesh(mesh):
        rules, _ = AxisRules().fit(dict(mesh.shape), config.axis_sizes)
        model = jax.jit(lambda: Llama(config, rules, rngs=nnx.Rngs(0)))()
        state = initial_state(model, optimizer)
        del model
        step = make_train_step(optimizer)
        yield {"steps": batches.steps, "filled": batches.filled}
        for number in range(batches.steps):
            batch = batches.batch(number)
            state, metrics = step(state, on_mesh(batch, mesh, rules))
            loss = float(metrics["loss"])
            count = int(np.count_nonzero(batch.weights_bpa.any(-1))) // 2  # two supervised positions a sample
            yield {"samples": count, "loss": loss}


def torch_worker(chosen: list[Any], name: str) -> Iterator[dict[str, Any]]:
    """The same for a peer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_num_threads(os.cpu_count() or 1)
    shape = SHAPE | {"vocab_size": SHAPE["vocab_size"] + TOOL_ROWS}
    model = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa")).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.0, fused=True)
    order = list(range(len(chosen)))
    if name != "torch":
        order.sort(key=lambda i: len(chosen[i].tokens))
    groups = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]
    groups = [groups[i] for i in np.random.default_rng(1).permutation(len(groups))]
    yield {"steps": len(groups), "filled": 1.0}
    for group in groups:
        length = max(len(chosen[i].tokens) for i in group) + 1
        ids, mask, labels = (torch.zeros(len(group), length, dtype=torch.long) for _ in range(3))
        labels -= 100
        for row, index in enumerate(group):
            sample = chosen[index]
            tool, end = sample.targets[0][0], sample.targets[1][0]
            tokens = [*sample.tokens[:-1], tool, end]
            begin = length - len(tokens)  # padded on the left: supervised positions are the last of every row
            ids[row, begin:] = torch.tensor(tokens)
            mask[row, begin:] = 1
            labels[row, -2:] = ids[row, -2:]
        optimizer.zero_grad(set_to_none=True)
        if name == "torch_sliced":
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False, logits_to_keep=3).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels[:, -2:].flatten())
        else:
            loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield {"samples": len(group), "loss": float(loss.detach())}


def work(name: str, options: argparse.Namespace) -> None:
    """A worker: takes a step for each line on its input, and says what it did."""
    chosen = samples(options.data, options.samples)
    if name == "jaxtool":
        steps = jaxtool_worker(chosen, options.rows, options.row_length)
    else:
        steps = torch_worker(chosen, name)
    print(json.dumps(next(steps)), flush=True)
    for line in sys.stdin:
        if line.strip() == "stop":
            break
        started = time.perf_counter()
        done = next(steps, None)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": time.perf_counter() - started, "peak": peak, "done": done}), flush=True)


class Worker:
    """A process that takes steps on demand."""

    def __init__(self, name: str, arguments: list[str]) -> None:
        command = [sys.executable, __file__, "--worker", name, *arguments]
        environment = LARGE_PAGES | os.environ
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.about = self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with status {self._process.wait()}")
        return json.loads(line)

    def ask(self, line: str) -> dict[str, Any]:
        """Sends a line and waits for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.write("stop\n")
        self._process.stdin.close()
        self._process.wait()


def matmul_peak(seconds: float = 3.0) -> float:
    """float32 FLOP/s of the best of some large matrix products, in XLA and (where installed) torch."""
    import jax
    import jax.numpy as jnp

    products: list[Callable[[], object]] = []
    for m, k, n in ((2048, 2048, 2048), (896, 576, 1536), (4096, 1024, 4096)):
        x, y = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
        a, b, multiply = jnp.asarray(x), jnp.asarray(y), jax.jit(jnp.dot)
        products.append(lambda a=a, b=b, f=multiply: f(a, b).block_until_ready())  # type: ignore[misc]
        try:
            import torch

            c, d = torch.from_numpy(x), torch.from_numpy(y)
            products.append(lambda c=c, d=d: c @ d)  # type: ignore[misc]
        except ImportError:
            products.append(lambda: None)
    best = 0.0
    shapes = [flops for flops in (2 * 2048**3, 2 * 896 * 576 * 1536, 2 * 4096 * 1024 * 4096) for _ in range(2)]
    for flops, product in zip(shapes, products, strict=True):
        if product() is None:
            continue
        until = time.perf_counter() + seconds / len(products)
        while time.perf_counter() < until:
            started = time.perf_counter()
            product()
            best = max(best, flops / (time.perf_counter() - started))
    return best


def model_flops(chosen: list[Any]) -> float:
    """FLOPs of a training step per sample: matrices, causal attention, head at the two supervised positions."""
    d, f, layers = SHAPE["hidden_size"], SHAPE["intermediate_size"], SHAPE["num_hidden_layers"]
    heads, kv, h = SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"]
    per_token = 2 * layers * (d * h * (2 * heads + 2 * kv) + 3 * d * f)
    lengths = np.array([len(sample.tokens) for sample in chosen], np.float64)
    attention = 4 * layers * heads * h * (lengths * (lengths + 1) / 2)
    head = 2 * d * (SHAPE["vocab_size"] + TOOL_ROWS) * 2
    return float(3 * (per_token * lengths + attention + head).mean())


def main() -> None:
    """Prints the figures, one a line, or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--data", default="data/toollens", help="folder of ToolLens in BEIR format")
    parser.add_argument("--samples", type=int, default=256, help="queries of the whole run")
    parser.add_argument("--turns", type=int, default=3, help="turns of each system, after a step to warm up")
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a turn, after one that isn't")
    parser.add_argument("--rows", type=int, default=4, help="packed rows of jaxtool's batches")
    parser.add_argument("--row_length", type=int, default=224, help="tokens of such a row: 16 queries fill four")
    parser.add_argument("--systems", default="jaxtool," + ",".join(PEERS), help="which to run")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.worker, options)
        return
    passed = [f"--{name}={getattr(options, name)}" for name in ("data", "samples", "rows", "row_length")]
    names = [name for name in options.systems.split(",") if name]
    workers = {name: Worker(name, passed) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    counts: dict[str, list[int]] = {name: [] for name in names}
    peaks: dict[str, int] = {}
    for turn in range(options.turns + 1):
        for name, worker in workers.items():
            for step in range(1 + options.steps if turn else 1):
                answer = worker.ask("step")
                if answer["done"] is None:
                    raise SystemExit(
                        f"{name} has no samples left in turn {turn}: more --samples, or fewer turns or steps"
                    )
                peaks[name] = answer["peak"]
                if step > 0:
                    seconds[name].append(answer["seconds"])
                    counts[name].append(answer["done"]["samples"])
    for worker in workers.values():
        worker.stop()
    # Steps differ in length: all samples over all seconds. Medians would favour whoever has the more even batches.
    speed = {name: sum(counts[name]) / sum(seconds[name]) for name in names}
    figures: dict[str, Any] = {}
    for name in names:
        prefix = "" if name == "jaxtool" else f"{name}_"
        figures[f"{prefix}samples_per_second"] = round(speed[name], 3)
        figures[f"{prefix}median_step_seconds"] = round(statistics.median(seconds[name]), 2)
        figures[f"{prefix}peak_rss_gib"] = round(peaks[name] / 2**30, 2)
    peers = [name for name in names if name != "jaxtool"]
    if "jaxtool" in names:
        if "torch" in names:
            figures["ratio"] = round(speed["jaxtool"] / speed["torch"], 2)
            figures["peak_rss_ratio"] = round(peaks["jaxtool"] / peaks["torch"], 2)
        if peers:
            figures["ratio_best"] = round(speed["jaxtool"] / max(speed[name] for name in peers), 2)
        peak = matmul_peak()
        flops = model_flops(samples(options.data, options.samples))
        figures["matmul_peak_gflops"] = round(peak / 1e9, 1)
        figures["gflop_per_sample"] = round(flops / 1e9, 2)
        figures["flop_fraction"] = round(flops * speed["jaxtool"] / peak, 3)
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
