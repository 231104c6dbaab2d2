"""Continues the prompts of a file: JSON lines in, JSON lines out, on one process or many.

    python infer/generate.py --model smollm2 --input prompts.jsonl --output answers --sampling.max_new_tokens 64

A line has `prompt` (text), `messages` (a conversation) or `tokens` (ids), and may have `id`, `sampling` (settings that
are its own, such as {"temperature": 0.7, "stop": ["\\n\\n"]}) and other fields, which go into its result. The folder
gets a file for each part, and `results.jsonl` with all rows in the order of the input: `row`, the line's number from
0; its own fields; and `outputs`, for each sample `text`, `finish_reason` ("stop" or "length"), `stop` (the string or
token id that ended it, else null), `tokens` (ids) and, asked for, `log_probs`; or `error`, why there are none. The same
command resumes a run that was killed, with the same bytes as one that wasn't.
"""

import dataclasses
import functools
import os
import signal
import time
from typing import Any

if __name__ == "__main__":  # the imports below take seconds, in which an interrupt shall be one line as well
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import jax

from jaxtool.config import GenerateConfig, config_parser, open_console, parse_config, run_script
from jaxtool.data import PromptEncoder, read_prompt_lines
from jaxtool.decoding import Engine, OfflineJob, OfflineProgress, Request, Sampling, decode_model
from jaxtool.models import config_to_json
from jaxtool.parallel import end_process, make_mesh, start_processes
from jaxtool.training import load_trained


def main() -> None:
    """From the file of prompts to the folder of results."""
    # ================================================================================================================
    # Configuration, processes, and the rows: checked before the model is read
    # ================================================================================================================
    config, _ = parse_config(GenerateConfig, config_parser(GenerateConfig, "Continue the prompts of a file."))
    Sampling.of(config.sampling)  # checks it
    start_processes(
        config.processes.coordinator or None,
        config.processes.count or None,
        config.processes.index if config.processes.index >= 0 else None,
        timeout=config.processes.start_seconds,
    )
    console = open_console()
    say = functools.partial(console.print, highlight=False, markup=False, emoji=False)
    lines = read_prompt_lines(config.input)
    mesh = make_mesh(config.mesh, jax.local_devices())  # each process has a model of its own
    jax.set_mesh(mesh)

    # ================================================================================================================
    # The model, and the folder of results
    # ================================================================================================================
    started = time.monotonic()
    trained = load_trained(config.model, mesh, param_dtype=config.param_dtype, report=say)
    model_config = trained.model.config
    model = decode_model(trained.model, donate=True)
    engine = Engine(
        model,
        trained.tokenizer,
        rows=config.rows,
        read_tokens=config.read_tokens,
        log_probs=config.log_probs,
    )
    encoder = PromptEncoder(
        trained.tokenizer,
        vocabulary=model_config.text_tokens or model_config.vocab_size,
        end_ids=trained.eos_token_ids,
        defaults=config.sampling,
        tools=range(model_config.vocab_size, model_config.vocab_size + model_config.num_tools),
        tool_id=trained.tool_id if trained.tools else None,
        result=("outputs",),
    )
    job = OfflineJob(
        config.output,
        lines,
        {
            "model": config.model,
            "version": trained.version,
            "config": config_to_json(model_config),
            "sampling": dataclasses.asdict(config.sampling),
            "log_probs": config.log_probs,
            "batch": [config.rows, config.read_tokens],
            "devices": [jax.default_backend(), dict(mesh.shape)],
        },
        part_rows=config.part_rows,
        process=jax.process_index(),
        processes=jax.process_count(),
    )
    say(
        f"{config.model}: loaded in {time.monotonic() - started:.1f} s; {len(lines):,} rows in {len(job.parts):,} parts"
    )

    # ================================================================================================================
    # Part by part: prompts to requests, requests through the engine, records to a file
    # ================================================================================================================
    with OfflineProgress(job, console) as progress:
        for part in job.own_parts():
            records, requests, places = [], [], []
            for line in part.lines:
                record: dict[str, Any] = {"row": line.row}
                try:
                    row = encoder.encode(line, config.input)
                    record |= row.fields
                    settings = dataclasses.replace(config.sampling, **row.sampling)
                    stop_ids = trained.eos_token_ids if settings.stop_at_eos else ()
                    wanted = [
                        Request(
                            tokens=row.tokens,
                            limit=settings.max_new_tokens,
                            sampling=Sampling.of(settings, sample),
                            number=line.row,
                            stop_ids=stop_ids,
                            stop=settings.stop,
                        )
                        for sample in range(settings.samples)
                    ]
                    engine.check(wanted[0])
                except ValueError as error:
                    where = f"{config.input}:{line.line}"
                    record["error"] = str(error) if str(error).startswith(where) else f"{where}: {error}"
                else:
                    record["outputs"] = [None] * len(wanted)
                    places += [(record["outputs"], sample) for sample in range(len(wanted))]
                    requests += wanted
                records.append(record)
            for done in engine.run(requests, progress=progress.tokens):
                output = {
                    "text": done.text,
                    "finish_reason": done.finish,
                    "stop": done.stop,
                    "tokens": done.tokens,
                }
                outputs, sample = places[done.request]
                outputs[sample] = output | ({} if done.log_probs is None else {"log_probs": done.log_probs})
                if None not in outputs:
                    progress.row()
            job.write(part, records)
            progress.part(records)

    # ================================================================================================================
    # Summary
    # ================================================================================================================
    say(progress.summary())
    if job.finished:  # the process that ends last
        say(f"results: {job.merge()}")
    job.close()


if __name__ == "__main__":
    run_script(main, interrupted="; the same command resumes", end=end_process)
