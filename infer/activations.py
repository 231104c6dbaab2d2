"""Writes hidden states of the prompts of a file: the features that probes are trained on.

    python infer/activations.py --model smollm2 --input prompts.jsonl --output states --blocks [15,-1]

The prompts are those of `infer/generate.py`. The folder gets for each part a safetensors file with `states`
[rows, blocks, width] and `row` [rows] (which line each is of, from 0), and records in JSON lines; `results.jsonl` has
the records in the order of the input: `row`, the line's own fields, `tokens` (length of the prompt), and `file` and
`index`, where its states are; or `error`. Blocks are counted as `output_hidden_states` of transformers does: 0 is the
embedding, the last one is taken behind the final norm. The same command resumes a run that was killed.
"""

import functools
import os
import signal
import time
from typing import Any

if __name__ == "__main__":  # the imports below take seconds, in which an interrupt shall be one line as well
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import jax
import jax.numpy as jnp
import numpy as np

from jaxtool.config import ActivationsConfig, SamplingConfig, config_parser, open_console, parse_config, run_script
from jaxtool.data import PromptEncoder, read_prompt_lines
from jaxtool.decoding import (
    Capture,
    OfflineJob,
    OfflineProgress,
    check_prompt,
    decode_model,
    prompt_states,
    write_arrays,
)
from jaxtool.models import config_to_json
from jaxtool.parallel import end_process, make_mesh, start_processes
from jaxtool.training import load_trained


def main() -> None:
    """From the file of prompts to the folder of states."""
    # ================================================================================================================
    # Configuration, processes, and the rows: checked before the model is read
    # ================================================================================================================
    config, _ = parse_config(ActivationsConfig, config_parser(ActivationsConfig, "Write hidden states of prompts."))
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
    capture = Capture(blocks=config.blocks, tokens=config.tokens, dtype=config.dtype)
    blocks = capture.chosen(model_config.num_hidden_layers)
    model = decode_model(trained.model, donate=True)
    encoder = PromptEncoder(
        trained.tokenizer,
        vocabulary=model_config.text_tokens or model_config.vocab_size,
        end_ids=trained.eos_token_ids,
        defaults=SamplingConfig(),  # lines may have settings for generation, which change nothing here
        tools=range(model_config.vocab_size, model_config.vocab_size + model_config.num_tools),
        tool_id=trained.tool_id if trained.tools else None,
        result=("file", "index"),
    )
    described = {
        "model": config.model,
        "version": trained.version,
        "blocks": blocks,
        "tokens": config.tokens,
        "dtype": config.dtype,
        "compute_dtype": model_config.compute_dtype,
        "embedding": "block 0",
        "final_norm": f"applied in block {model_config.num_hidden_layers}, the last",
    }
    job = OfflineJob(
        config.output,
        lines,
        {
            **described,
            "config": config_to_json(model_config),
            "batch": [config.rows, config.read_tokens],
            "devices": [jax.default_backend(), dict(mesh.shape)],
        },
        part_rows=config.part_rows,
        arrays=True,
        process=jax.process_index(),
        processes=jax.process_count(),
    )
    seconds = time.monotonic() - started
    say(f"{config.model}: loaded in {seconds:.1f} s; {len(lines):,} rows in {len(job.parts):,} parts")

    # ================================================================================================================
    # Part by part: prompts to tokens, tokens to states, states to a file and then records to another
    # ================================================================================================================
    with OfflineProgress(job, console) as progress:
        for part in job.own_parts():
            records, used = [], []
            prompts: list[list[int]] = []
            for line in part.lines:
                record: dict[str, Any] = {"row": line.row}
                try:
                    row = encoder.encode(line, config.input)
                    record |= row.fields
                    check_prompt(model_config, row.tokens)
                except ValueError as error:
                    where = f"{config.input}:{line.line}"
                    record["error"] = str(error) if str(error).startswith(where) else f"{where}: {error}"
                else:
                    record |= {"tokens": len(row.tokens), "file": part.arrays.name, "index": len(prompts)}
                    prompts.append(row.tokens)
                    used.append(line.row)
                records.append(record)
            states = np.zeros((len(prompts), len(blocks), model_config.hidden_size), jnp.dtype(config.dtype))
            for place, found in prompt_states(
                model,
                prompts,
                capture,
                rows=config.rows,
                read_tokens=config.read_tokens,
                progress=progress.tokens,
            ):
                states[place] = found
                progress.row()
            write_arrays(part.arrays, {"states": states, "row": np.array(used, np.int64)}, described)
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
