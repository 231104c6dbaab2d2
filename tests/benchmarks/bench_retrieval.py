"""Retrieval quality and speed of the quickstart run, next to BM25 and to torch transformers on the same shapes.

    python tests/benchmarks/bench_retrieval.py --json

Trains the quickstart first when its run directory holds no finished run. Quality is standard NDCG on the held-out
queries of trained tools. Speed is measured interleaved: one pass of jaxtool, one of the peer, and so on; the ratio of
the medians is what to compare between machines. The peer is a randomly initialised torch model of the same shape
(speed does not depend on the weights) that does the same work: one batched prefill, tool rows, top 5.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxtool.config import MeshConfig, parse_run, run_parser
from jaxtool.data import ChatPrompts, load_retrieval_set
from jaxtool.evaluation import BM25Ranker, evaluate_rankings
from jaxtool.models import LlamaConfig
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.toolgen import ToolRetriever
from jaxtool.training import RunDirectory

ROOT = Path(__file__).parents[2]


def torch_peer(
    config: LlamaConfig, prompts: ChatPrompts, texts: list[str], batch_size: int
) -> Callable[[], object] | None:
    """A function that ranks `texts` with torch transformers; None where torch isn't installed."""
    try:
        import torch
        from transformers import LlamaConfig as TorchConfig
        from transformers import LlamaForCausalLM
    except ImportError:
        return None
    model = LlamaForCausalLM(
        TorchConfig(
            vocab_size=config.rows,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            tie_word_embeddings=config.tie_word_embeddings,
        )
    ).eval()
    rows = model.lm_head.weight[config.vocab_size : config.vocab_size + config.num_tools]

    def run() -> None:
        encoded = sorted((prompts.prompt(text).ids for text in texts), key=len)
        with torch.inference_mode():
            for start in range(0, len(encoded), batch_size):
                batch = encoded[start : start + batch_size]
                length = max(map(len, batch))
                ids = torch.tensor([[0] * (length - len(row)) + row for row in batch])
                mask = torch.tensor([[0] * (length - len(row)) + [1] * len(row) for row in batch])
                hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, -1]
                torch.log_softmax(hidden @ rows.T, dim=-1).topk(5)

    return run


def measure(config_file: str, rounds: int, timed_queries: int, batch_size: int) -> dict[str, Any]:
    """All figures as one JSON object."""
    config, _ = parse_run(run_parser("benchmark"), ["--config", config_file])
    subprocess.run([sys.executable, ROOT / "train/finetune.py", "--config", config_file], check=True, stdout=sys.stderr)
    run = RunDirectory(config.run_dir)
    step = run.last_step()
    assert step is not None
    mesh = make_mesh(MeshConfig())
    jax.set_mesh(mesh)
    rules, _ = AxisRules().fit(dict(mesh.shape), run.model_config().axis_sizes)
    model = run.restore_model(step, rules, mesh)
    prompts = ChatPrompts(
        run.tokenizer(), system_prompt=config.data.system_prompt, max_length=config.data.max_query_tokens
    )
    retriever = ToolRetriever(model, prompts, mesh, batch_size=batch_size)
    data = load_retrieval_set(config.data.source, seed=config.data.seed)
    bm25 = BM25Ranker(data.catalog)

    figures: dict[str, Any] = {"checkpoint": step, "tools": len(data.catalog)}
    for part, queries in (("", data.test), ("_without_training", data.test_unseen)):
        texts, gold = [query.text for query in queries], [query.tools for query in queries]
        if not texts:
            continue
        found = retriever.retrieve(texts, 5)
        ranked, scores = bm25.rank(texts, 5)
        ours = evaluate_rankings(found.tools_qk, found.valid_qk, gold, returned=5)
        theirs = evaluate_rankings(ranked, scores > 0, gold, returned=5)
        figures[f"queries{part}"] = len(texts)
        for k in (1, 3, 5):
            figures[f"quickstart_ndcg{k}{part}"] = round(100 * ours.mean(f"ndcg@{k}"), 2)
            figures[f"bm25_ndcg{k}{part}"] = round(100 * theirs.mean(f"ndcg@{k}"), 2)

    texts = [query.text for query in data.test][:timed_queries]
    timed: dict[str, Callable[[], object]] = {"jaxtool": lambda: retriever.retrieve(texts, 5)}
    peer = torch_peer(run.model_config(), prompts, texts, batch_size)
    if peer is not None:
        timed["torch"] = peer
    seconds: dict[str, list[float]] = {name: [] for name in timed}
    for turn in range(rounds + 1):  # the first turn compiles and warms up
        for name, function in timed.items():
            started = time.perf_counter()
            function()
            if turn:
                seconds[name].append(time.perf_counter() - started)
    speed = {name: len(texts) / statistics.median(values) for name, values in seconds.items()}
    figures["queries_per_second"] = round(speed["jaxtool"], 2)
    figures["torch_queries_per_second"] = round(speed["torch"], 2) if peer else None
    figures["speed_over_torch"] = round(speed["jaxtool"] / speed["torch"], 2) if peer else None
    figures["training_tokens_per_second"] = round(
        float(np.median([record["tokens"] / record["seconds"] for record in run.metrics()])), 1
    )
    return figures


def main() -> None:
    """Prints the figures, one a line, or as one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--config", default=str(ROOT / "configs/quickstart.yaml"), help="the run to measure")
    parser.add_argument("--rounds", type=int, default=5, help="timed passes of each system")
    parser.add_argument("--queries", type=int, default=96, help="queries of a timed pass")
    parser.add_argument("--batch_size", type=int, default=16, help="queries of a prefill")
    options = parser.parse_args()
    figures = measure(options.config, options.rounds, options.queries, options.batch_size)
    print(json.dumps(figures) if options.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
