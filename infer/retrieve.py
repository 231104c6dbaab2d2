"""Ranks tools for the queries of a file: lines in, JSON lines out, on one process or many.

    python infer/retrieve.py --model runs/quickstart --input queries.jsonl --output ranked
    python infer/retrieve.py --model smollm2 --tools tools.json --input queries.txt --output ranked

The model is a run of train/finetune.py, whose tool tokens are ranked; or any model, with the tools of a file, whose
names are searched for token by token. A line has `query` (text, rendered as in training), or a prompt as
`infer/generate.py` takes it; `allowed` (names: only these may be ranked) and other fields, which go into its result.
The folder gets a file for each part, and `results.jsonl` with all rows in the order of the input: `row`, the line's
number from 0; its own fields; `ranked`, best first: `tool` (the name; null for none of the tools), `id` (its place in
the catalogue, from 0) and `probability` among the allowed tools or, of names, `score`; `cut`, the tokens of the query
that were left out, where there were any; or `error`, why there are none. The same command resumes a run that was
killed, with the same bytes as one that wasn't.
"""

import functools
import hashlib
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

if __name__ == "__main__":  # the imports below take seconds, in which an interrupt shall be one line as well
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import jax
import numpy as np

from jaxtool.config import RetrieveConfig, config_parser, open_console, parse_config, run_script
from jaxtool.data import ChatPrompts, PromptEncoder, read_query_lines
from jaxtool.decoding import BeamSearch, OfflineJob, OfflineProgress, check_prompt
from jaxtool.models import config_to_json
from jaxtool.parallel import end_process, make_mesh, start_processes
from jaxtool.toolgen import NameRetriever, ToolRetriever
from jaxtool.tools import read_tool_names
from jaxtool.tools.json_records import counted
from jaxtool.training import load_trained

QUERIES, FIELDS, NOUNS = ("query", "text"), ("ranked", "cut"), ("query", "queries")


def allowed_tools(names: Any, place: dict[str, int], where: str) -> np.ndarray:
    """A mask [T] of the tools with these names.

    Raises:
        ValueError: no list of names, an empty one, or an unknown name.
    """
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"{where}, field allowed: expected a list of at least one name of a tool")
    unknown = next((name for name in names if name not in place), None)
    if unknown is not None:
        raise ValueError(f"{where}, field allowed: there is no tool {unknown!r} among the {len(place):,}")
    mask_t = np.zeros(len(place), bool)
    mask_t[[place[name] for name in names]] = True
    return mask_t


def main() -> None:
    """From the file of queries to the folder of results."""
    # ================================================================================================================
    # Configuration, processes, and the rows: checked before the model is read
    # ================================================================================================================
    config, _ = parse_config(RetrieveConfig, config_parser(RetrieveConfig, "Rank tools for the queries of a file."))
    search = None
    if config.tools:
        search = BeamSearch(
            beams=config.beams,
            keep=config.keep,
            normalize=config.normalize,
            score_end=config.score_end,
            length_exponent=config.length_exponent,
            # At few rows passes take the time, at many positions.
            chunk=config.chunk or (4 if config.rows * config.beams <= 64 else 1),
        )
    start_processes(
        config.processes.coordinator or None,
        config.processes.count or None,
        config.processes.index if config.processes.index >= 0 else None,
        timeout=config.processes.start_seconds,
    )
    console = open_console()
    say = functools.partial(console.print, highlight=False, markup=False, emoji=False)
    lines = read_query_lines(config.input)
    tools: Sequence[str] = read_tool_names(config.tools) if config.tools else ()
    mesh = make_mesh(config.mesh, jax.local_devices())  # each process has a model of its own
    jax.set_mesh(mesh)

    # ================================================================================================================
    # The model, its prompts, and the folder of results
    # ================================================================================================================
    started = time.monotonic()
    trained = load_trained(config.model, mesh, param_dtype=config.param_dtype, report=say)
    model_config = trained.model.config
    if not config.tools and not trained.tools:
        raise ValueError(f"{config.model}: the model has no tool tokens; --tools names a file of tools, by their names")
    tools = tools or trained.tools
    place = {name: number for number, name in enumerate(tools)}
    if trained.tokenizer.eos_token_id is None:
        raise ValueError(f"{config.model}: the tokenizer has no EOS token, which ends turns and names")
    by_name = None
    if search is not None:
        try:
            by_name = NameRetriever(
                trained.model,
                trained.tokenizer,
                tools,
                mesh,
                end_token=trained.tokenizer.eos_token_id,
                search=search,
                no_tool=config.no_tool or None,
                batch_size=config.rows,
                read_tokens=config.read_tokens,
                donate=True,
            )
        except ValueError as error:
            raise ValueError(f"{config.tools}: {error}") from error
    name_tokens = by_name.longest if by_name else 0  # positions that must be left behind a prompt
    room = model_config.max_position_embeddings - name_tokens
    if config.max_query_tokens > room:
        behind = f", of which names take up to {name_tokens}" if name_tokens else ""
        raise ValueError(
            f"max_query_tokens is {config.max_query_tokens}, the model has {model_config.max_position_embeddings} "
            f"positions{behind}; expected at most {room}"
        )
    data = trained.settings.get("data", {})
    system_prompt = data.get("system_prompt") if config.system_prompt is None else config.system_prompt
    if system_prompt != data.get("system_prompt", system_prompt):
        say(f"system_prompt is {system_prompt!r}, but {data['system_prompt']!r} in training: it may rank worse")
    longest = min(config.max_query_tokens or data.get("max_query_tokens", 256), room)
    try:
        prompts = ChatPrompts(trained.tokenizer, system_prompt=system_prompt, max_length=longest)
    except ValueError as error:
        raise ValueError(f"{config.model} with max_query_tokens {longest}: {error}") from error
    encoder = PromptEncoder(
        trained.tokenizer,
        vocabulary=model_config.text_tokens or model_config.vocab_size,
        end_ids=trained.eos_token_ids,
        tools=range(model_config.vocab_size, model_config.vocab_size + model_config.num_tools),
        tool_id=trained.tool_id if trained.tools else None,
        result=FIELDS,
        queries=prompts,
    )
    retriever = by_name or ToolRetriever(trained.model, prompts, mesh, batch_size=config.rows, donate=True)
    score, kept = ("probability", min(config.keep, len(tools))) if search is None else ("score", config.keep)
    job = OfflineJob(
        config.output,
        lines,
        {
            "model": config.model,
            "version": trained.version,
            "config": config_to_json(model_config),
            # The names themselves: in a file of the same path others may stand when the run is resumed.
            "tools": [len(tools), "by name" if config.tools else "by token"],
            "tools_sha256": hashlib.sha256(json.dumps(list(tools)).encode()).hexdigest(),
            "keep": config.keep,
            "search": None if search is None else [str(search), config.no_tool],
            "prompt": [system_prompt, longest],
            "batch": [config.rows, config.read_tokens],
            "devices": [jax.default_backend(), dict(mesh.shape)],
        },
        part_rows=config.part_rows,
        process=jax.process_index(),
        processes=jax.process_count(),
    )
    say(
        f"{config.model}: {len(tools):,} tools, loaded in {time.monotonic() - started:.1f} s; {len(lines):,} rows in "
        f"{len(job.parts):,} parts"
    )

    # ================================================================================================================
    # Part by part: queries to prompts, prompts to tools, records to a file
    # ================================================================================================================
    cut, lost = 0, Counter[str]()
    with OfflineProgress(job, console) as progress:
        for part in job.own_parts():
            records: list[dict[str, Any]] = []
            answered, ids, masks, texts = [], [], [], []
            for line in part.lines:
                record: dict[str, Any] = {"row": line.row}
                where = f"{config.input}:{line.line}"
                try:
                    row = encoder.encode(line, config.input)
                    record |= row.fields
                    check_prompt(model_config, row.tokens, name_tokens)
                    mask_t = None
                    if "allowed" in row.fields:
                        mask_t = allowed_tools(row.fields["allowed"], place, where)
                except ValueError as error:
                    record["error"] = str(error) if str(error).startswith(where) else f"{where}: {error}"
                else:
                    if row.cut:
                        record["cut"] = row.cut
                    answered.append(record)
                    ids.append(row.tokens)
                    masks.append(mask_t)
                    texts += [row.fields[name] for name in QUERIES if name in row.fields]
                records.append(record)
            lost.update(prompts.without_token(texts))
            allowed_qt = None
            if any(mask_t is not None for mask_t in masks):
                allowed_qt = np.stack([np.ones(len(tools), bool) if mask_t is None else mask_t for mask_t in masks])
            found = retriever.rank(ids, kept, allowed_qt=allowed_qt, progress=progress.row)
            progress.tokens(sum(map(len, ids)), 0)
            for record, numbers, scores, valid in zip(
                answered, found.tools_qk, found.log_probs_qk, found.valid_qk, strict=True
            ):
                record["ranked"] = [
                    {
                        "tool": tools[tool] if tool < len(tools) else None,
                        "id": int(tool) if tool < len(tools) else None,
                        score: float(np.exp(log_prob)) if search is None else float(log_prob),
                    }
                    for tool, log_prob in zip(numbers[valid], scores[valid], strict=True)
                ]
            job.write(part, records)
            cut += sum("cut" in record for record in records)
            progress.part(records)

    # ================================================================================================================
    # Summary
    # ================================================================================================================
    for character, count in sorted(lost.items()):
        say(f"the tokenizer has no token for {character!r}: the model read {counted(count, *NOUNS)} without it")
    if cut:
        say(f"{counted(cut, *NOUNS)} cut to {longest} tokens at the end")
    say(progress.summary())
    if job.finished:  # the process that ends last
        say(f"results: {job.merge()}")
    job.close()


if __name__ == "__main__":
    run_script(main, interrupted="; the same command resumes", end=end_process)
