"""Retrieves tools with a model that `train/finetune.py` trained: scores held-out queries, or answers a file of queries.

    python infer/retrieve.py --config configs/quickstart.yaml
    python infer/retrieve.py --config configs/quickstart.yaml --queries queries.txt --output ranked.jsonl

The first form prints a table and writes `report/` (HTML, PNG, JSON) into the run directory; the second writes one JSON
object a query.
"""

import functools
import importlib.metadata
import json
import os
import platform
import signal
import time
from pathlib import Path

if __name__ == "__main__":  # the imports below take seconds, in which an interrupt shall be one line as well
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import jax
import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from jaxtool.config import open_console, parse_run, run_parser, run_script, to_yaml
from jaxtool.data import ChatPrompts, load_retrieval_set, read_queries
from jaxtool.evaluation import (
    BM25Ranker,
    Example,
    Report,
    SystemResult,
    evaluate_rankings,
    print_results,
    printable,
    write_report,
)
from jaxtool.models import without_lora
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.toolgen import ToolRetriever
from jaxtool.training import RunDirectory


def main() -> None:
    """The run, from the checkpoint to the report."""
    # ================================================================================================================
    # Configuration
    # ================================================================================================================
    parser = run_parser("Rank tools for held-out queries (a report), or for the queries of a file (JSON lines).")
    parser.add_argument("--queries", type=str, help="text file with a query a line, or JSONL with a field `text`")
    parser.add_argument("--output", type=str, default="ranked.jsonl", help="file for the answers to --queries")
    config, options = parse_run(parser)
    console = open_console()
    say = functools.partial(console.print, highlight=False, markup=False, emoji=False)
    output = Path(options.output)
    if options.queries and (output.is_dir() or not output.parent.is_dir()):
        raise ValueError(f"--output {output}: expected a file in a folder that exists")

    # ================================================================================================================
    # The trained model
    # ================================================================================================================
    run = RunDirectory(config.run_dir)
    model_config, catalog = run.model_config(), run.catalog()
    step = run.last_step()
    if step is None:
        raise ValueError(f"{run.path}: no complete checkpoint yet, run train/finetune.py with this config first")
    if model_config.max_position_embeddings < config.data.max_query_tokens:
        raise ValueError(
            f"data.max_query_tokens {config.data.max_query_tokens} is beyond "
            f"the model's {model_config.max_position_embeddings} positions"
        )
    notes = []
    trained_prompt = run.settings().get("data", {}).get("system_prompt", config.data.system_prompt)
    if trained_prompt != config.data.system_prompt:
        notes.append(
            f"data.system_prompt is {config.data.system_prompt!r}, but the model was trained with {trained_prompt!r}"
        )
        say(f"note: {notes[-1]}")
    mesh = make_mesh(config.mesh)
    jax.set_mesh(mesh)
    rules, dropped = AxisRules().fit(dict(mesh.shape), model_config.axis_sizes)
    for line in dropped:
        say(f"mesh: {line}")
    started = time.monotonic()
    model = without_lora(run.restore_model(step, rules, mesh))
    prompts = ChatPrompts(
        run.tokenizer(), system_prompt=config.data.system_prompt, max_length=config.data.max_query_tokens
    )
    retriever = ToolRetriever(model, prompts, mesh, batch_size=config.evaluation.batch_size)
    say(f"{run.path}: checkpoint {step:,}, {len(catalog):,} tools, restored in {time.monotonic() - started:.1f} s")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(compact=True),
    )
    k = min(config.evaluation.k, max(5, len(catalog)))  # places behind the last tool would stay empty

    # ================================================================================================================
    # A file of queries: one JSON object a line, in the order of the file
    # ================================================================================================================
    if options.queries:
        texts = read_queries(options.queries)
        with Progress(*columns, console=console) as progress:
            task = progress.add_task("queries", total=len(texts))
            found = retriever.retrieve(texts, k, progress=functools.partial(progress.advance, task))
        temporary = output.with_name(f".{output.name}.{os.getpid()}")
        with temporary.open("w", encoding="utf-8") as file:
            for row, text in enumerate(texts):
                tools = [
                    {"tool": catalog[tool].name, "id": int(tool), "probability": float(np.exp(log_prob))}
                    for tool, log_prob, valid in zip(
                        found.tools_qk[row], found.log_probs_qk[row], found.valid_qk[row], strict=True
                    )
                    if valid
                ]
                file.write(json.dumps({"query": text, "tools": tools}, ensure_ascii=False) + "\n")
        os.replace(temporary, output)
        say(f"{len(texts):,} queries answered in {output}; {found.cut:,} were longer than the prompt and cut")
        return

    # ================================================================================================================
    # Held-out queries: the model and BM25 on the same candidates (all tools)
    # ================================================================================================================
    data = load_retrieval_set(config.data.source, seed=config.data.seed)
    if data.catalog.fingerprint != catalog.fingerprint:
        raise ValueError(f"data.source {config.data.source}: its tools are not those that {run.path} was trained on")
    parts = [("trained tools" if data.test_unseen else "test queries", data.test)]
    if data.test_unseen:
        parts.append(("tools without training queries", data.test_unseen))
    bm25 = BM25Ranker(catalog)
    notes += data.notes
    results, examples, timings, rows = [], [], {}, []
    for group, queries in parts:
        if not queries:
            raise ValueError(f"data.source {config.data.source}: no {group} to score, expected at least one")
        if 0 < config.evaluation.max_queries < len(queries):
            notes.append(f"{group}: the first {config.evaluation.max_queries} of {len(queries)} queries are scored")
            queries = queries[: config.evaluation.max_queries]
        texts, gold = [query.text for query in queries], [query.tools for query in queries]
        started = time.monotonic()
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(group, total=len(texts))
            found = retriever.retrieve(texts, k, progress=functools.partial(progress.advance, task))
        timings[f"jaxtool, {group}: {len(texts)} queries"] = time.monotonic() - started
        started = time.monotonic()
        bm25_tools, bm25_scores = bm25.rank(texts, k)
        timings[f"BM25, {group}: {len(texts)} queries"] = time.monotonic() - started
        notes.append(
            f"{group}: {found.cut} of {len(texts)} prompts were longer than "
            f"{config.data.max_query_tokens} tokens and cut"
        )
        for system, ranked_qk, valid_qk in (
            ("jaxtool", found.tools_qk, found.valid_qk),
            ("BM25", bm25_tools, bm25_scores > 0),
        ):
            scores = evaluate_rankings(ranked_qk, valid_qk, gold, returned=5)
            results.append(SystemResult(system=system, group=group, scores=scores))
            rows.append(
                {
                    "system": system,
                    "group": group,
                    "queries": len(texts),
                    **{name: scores.mean(name) for name in scores.per_query},
                }
            )
        # Examples are drawn, not chosen: failures are shown as they fall.
        drawn = np.random.default_rng(config.seed).permutation(len(texts))[: config.evaluation.examples]
        for row in sorted(drawn.tolist()):
            top = [
                (catalog[int(tool)].name, float(np.exp(log_prob)), int(tool) in gold[row])
                for tool, log_prob in zip(found.tools_qk[row, :5], found.log_probs_qk[row, :5], strict=True)
                if tool >= 0
            ]
            examples.append(Example(query=texts[row], gold=[catalog[tool].name for tool in gold[row]], top=top))

    # ================================================================================================================
    # Report
    # ================================================================================================================
    print_results(results, console=console)
    table = Table("query (drawn at random)", "gold tools", "top 5 with probability", title="Examples", show_lines=True)
    for example in examples:
        ranked = "\n".join(f"{'*' if hit else ' '} {probability:6.1%} {name}" for name, probability, hit in example.top)
        table.add_row(*(Text(printable(text)) for text in (example.query[:300], "\n".join(example.gold), ranked)))
    console.print(table)
    versions = {name: importlib.metadata.version(name) for name in ("jaxtool", "jax", "flax", "transformers")}
    environment = {
        **versions,
        "python": platform.python_version(),
        "devices": str(jax.devices()),
        "cores": str(os.cpu_count()),
    }
    report = Report(
        title=f"Tool retrieval: {Path(config.run_dir).name}, checkpoint {step}",
        configuration=to_yaml(config),
        notes=notes,
        results=results,
        examples=examples,
        environment=environment,
        timings=timings,
        metrics=run.metrics(),
    )
    page = write_report(report, run.path / "report")
    (page.parent / "results.json").write_text(json.dumps({"results": rows, "timings": timings}, indent=1))
    say(f"report: {page}")


if __name__ == "__main__":
    run_script(main)
