"""Scores a model that `train/finetune.py` trained on held-out queries, next to BM25.

    python infer/evaluate.py --config configs/quickstart.yaml

It prints a table and writes `report/` (HTML, PNG, JSON) into the run directory. `infer/retrieve.py` ranks tools for
queries without labels.
"""

import functools
import importlib.metadata
import json
import os
import platform
import signal
import sys
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
from jaxtool.data import ChatPrompts, Query, check_readable, load_retrieval_set
from jaxtool.evaluation import (
    BM25Ranker,
    Example,
    Report,
    SystemResult,
    evaluate_rankings,
    make_report_folder,
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
    parser = run_parser("Rank tools for held-out queries, and report how well.")
    config, _ = parse_run(parser)
    console = open_console()
    say = functools.partial(console.print, highlight=False, markup=False, emoji=False)
    notes = []

    def warn(line: str) -> None:
        notes.append(line)
        print(f"warning: {line}", file=sys.stderr)

    # ================================================================================================================
    # What is asked for, and whether the run can answer it: checked before the checkpoint is read
    # ================================================================================================================
    run = RunDirectory(config.run_dir)
    model_config, catalog, settings = run.model_config(), run.catalog(), run.settings()
    step = run.last_step()
    if step is None:
        raise ValueError(f"{run.path}: no complete checkpoint yet, run train/finetune.py with this config first")
    unfinished = run.unfinished(step)
    if unfinished is not None:
        warn(f"{unfinished}; train/finetune.py with the same options goes on from there")
    if model_config.max_position_embeddings < config.data.max_query_tokens:
        raise ValueError(
            f"data.max_query_tokens {config.data.max_query_tokens} is beyond "
            f"the model's {model_config.max_position_embeddings} positions, lower it to that or less"
        )
    trained_data = settings.get("data", {})
    trained_prompt = trained_data.get("system_prompt", config.data.system_prompt)
    if trained_prompt != config.data.system_prompt:
        warn(
            f"data.system_prompt is {config.data.system_prompt!r}, but the model was trained with {trained_prompt!r}; "
            "with another one it ranks worse"
        )
    mesh = make_mesh(config.mesh)
    jax.set_mesh(mesh)
    shares = mesh.shape["data"] * mesh.shape["fsdp"]
    if config.evaluation.batch_size % shares:
        raise ValueError(
            f"evaluation.batch_size {config.evaluation.batch_size} is not a multiple of the {shares} devices that "
            f"share a batch (mesh.data {mesh.shape['data']} x mesh.fsdp {mesh.shape['fsdp']})"
        )
    rules, dropped = AxisRules().fit(dict(mesh.shape), model_config.axis_sizes)
    for line in dropped:
        say(f"mesh: {line} (each of them holds all of it, which costs memory and time)")
    longest = config.data.max_query_tokens
    try:
        prompts = ChatPrompts(run.tokenizer(), system_prompt=config.data.system_prompt, max_length=longest)
    except ValueError as error:
        raise ValueError(f"{run.path} with data.max_query_tokens {longest}: {error}") from error
    parts = []
    make_report_folder(run.path / "report")
    data = load_retrieval_set(
        config.data.source,
        seed=config.data.seed,
        train_queries=config.data.train_queries,
        test_queries=config.data.test_queries,
    )
    if data.catalog.fingerprint != catalog.fingerprint:
        raise ValueError(
            f"data.source {config.data.source}: its {len(data.catalog):,} tools are not the {len(catalog):,} that "
            f"{run.path} was trained on; its data.source was {trained_data.get('source', 'another one')}"
        )
    if not data.test and not data.test_unseen:
        raise ValueError(
            f"data.source {config.data.source}: no test queries to score, expected at least one; "
            "infer/retrieve.py ranks tools for queries without labels"
        )
    if trained_data.get("seed", config.data.seed) != config.data.seed:
        warn(
            f"data.seed is {config.data.seed}, but was {trained_data['seed']} in training: where it decides the "
            "split, queries that were trained on are scored"
        )
    notes += data.notes
    if data.test:
        parts.append(("trained tools" if data.test_unseen else "test queries", data.test))
    if data.test_unseen:
        parts.append(("tools without training queries", data.test_unseen))
    queries = [Query.of(query) for _, part in parts for query in part]
    for line in check_readable(queries, prompts):
        warn(line)

    # ================================================================================================================
    # The trained model
    # ================================================================================================================
    started = time.monotonic()
    model = without_lora(run.restore_model(step, rules, mesh))
    retriever = ToolRetriever(model, prompts, mesh, batch_size=config.evaluation.batch_size, donate=True)
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
    # Held-out queries: the model and BM25 on the same candidates (all tools)
    # ================================================================================================================
    bm25 = BM25Ranker(catalog)
    results, examples, timings, rows = [], [], {}, []
    for group, labelled in parts:
        if 0 < config.evaluation.max_queries < len(labelled):
            notes.append(f"{group}: the first {config.evaluation.max_queries} of {len(labelled)} queries are scored")
            labelled = labelled[: config.evaluation.max_queries]
        texts, gold = [query.text for query in labelled], [query.tools for query in labelled]
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
