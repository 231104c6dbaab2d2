"""Exports the model of a run as a Hugging Face folder, which transformers (and what builds on it) loads.

    python infer/export.py --config configs/quickstart.yaml --output exported

Tools are rows behind the text rows: `tool_ids.jsonl` in the folder says which row is which tool. In transformers:

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    tools = {row["id"]: row["name"] for row in map(json.loads, open(f"{folder}/tool_ids.jsonl"))}
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**prompt, max_new_tokens=1, prefix_allowed_tokens_fn=lambda batch, ids: list(tools))
    print(tools[answer[0, -1].item()])

With --tool_tokens the tokenizer knows tool i as the special token `<|tool NAME|>` too: then `tokenizer.decode` shows it
and text that spells it encodes to it. Rows that the tokenizer has no token for become `<|unused_0|>` and so on.
"""

import functools
import os
import signal
import sys
import time

if __name__ == "__main__":  # the imports below take seconds, in which an interrupt shall be one line as well
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import jax

from jaxtool.config import open_console, parse_run, run_parser, run_script
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training import RunDirectory
from jaxtool.weights import export_model, generation_source


def main() -> None:
    """From the run's last checkpoint to the folder."""
    # ================================================================================================================
    # Configuration
    # ================================================================================================================
    parser = run_parser("Export a trained model as a Hugging Face folder.")
    parser.add_argument("--output", type=str, required=True, help="folder to write, new or empty")
    parser.add_argument("--tool_tokens", action="store_true", help="add a token for each tool to the saved tokenizer")
    parser.add_argument(
        "--dtype", type=str, default=None, help="of the tensors: float32, bfloat16 or float16 (default: as trained)"
    )
    config, options = parse_run(parser)
    console = open_console()
    say = functools.partial(console.print, highlight=False, markup=False, emoji=False)

    # ================================================================================================================
    # The trained model
    # ================================================================================================================
    run = RunDirectory(config.run_dir)
    model_config, catalog = run.model_config(), run.catalog()
    step = run.last_step()
    if step is None:
        raise ValueError(f"{run.path}: no complete checkpoint yet, run train/finetune.py with this config first")
    unfinished = run.unfinished(step)
    if unfinished is not None:
        print(f"warning: {unfinished}; train/finetune.py with the same options goes on from there", file=sys.stderr)
    mesh = make_mesh(config.mesh)
    jax.set_mesh(mesh)
    rules, dropped = AxisRules().fit(dict(mesh.shape), model_config.axis_sizes)
    for line in dropped:
        say(f"mesh: {line}")
    started = time.monotonic()
    model = run.restore_model(step, rules, mesh)
    say(f"{run.path}: checkpoint {step:,}, {len(catalog):,} tools, restored in {time.monotonic() - started:.1f} s")

    # ================================================================================================================
    # The folder
    # ================================================================================================================
    pretrained = run.settings().get("model", {}).get("source", config.model.source)
    source = generation_source(pretrained)
    if source is None:
        say(f"note: {pretrained} has no special ids here: the tokenizer's special ids are exported")
    started = time.monotonic()
    folder = export_model(
        model,
        options.output,
        tokenizer=run.tokenizer(),
        source=source,
        tools=[tool.name for tool in catalog],
        tool_tokens=options.tool_tokens,
        dtype=options.dtype,
    )
    size = sum(file.stat().st_size for file in folder.iterdir())
    say(f"{folder}: {size / 1e6:,.1f} MB written in {time.monotonic() - started:.1f} s")


if __name__ == "__main__":
    run_script(main)
