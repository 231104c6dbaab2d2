"""Says whether a run fits a machine, without the machine: compiles its programs for it and prints what they take.

    python train/plan.py --config configs/toolgen_llama3_8b_v5e64.yaml --topology v5e-64 --tools 46985
    python train/plan.py --config configs/quickstart.yaml --topology cpu:8

TPUs are named by accelerator type (v5litepod-64, also v5e-64) or shape (v5e:8x8); their compiler comes with
`pip install 'jax[tpu]'` and needs no TPU. Of the model only config.json is read (--model.source may be a folder with
nothing else), of the data nothing if --tools says how many tools there are. With --sweep, changes that need less memory
are compiled too. Of a stage with shorter_rows the longest rows are compiled, which need the most. With --decode_rows,
so many texts are decoded as well. The exit status is 3 if no program of a stage fits a machine, or decoding doesn't.
"""

import functools
import importlib.metadata
import json
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":  # the imports below take seconds, in which an interrupt shall be one line as well
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))
    # No accelerator is touched, and none is looked for; the compiler's own log is about machines that it isn't on.
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    os.environ |= {"TPU_WORKER_HOSTNAMES": "localhost", "TF_CPP_MIN_LOG_LEVEL": "3"}

import jax
from rich.console import Console

from jaxtool.config import MeshConfig, RunConfig, open_console, parse_run, run_parser, run_script
from jaxtool.data import load_retrieval_set, smollm2
from jaxtool.decoding.decode_plan import plan_decode
from jaxtool.parallel.targets import Target, find_target
from jaxtool.training.plan_report import advice, memory_table, record_of, transfer_table
from jaxtool.training.plan_variations import Variation, together, variations
from jaxtool.training.planner import StepPlan, plan_step
from jaxtool.training.starting_model import base_config
from jaxtool.weights import generation_source

STAGES = ("corpus", "memorization", "retrieval", "agent")
# A sample of memorization or retrieval has 32 tokens at least (a chat template alone takes half of them), of which two
# are supervised. In the other stages all may be.
TOKENS_PER_SUPERVISED = {"corpus": 1, "memorization": 16, "retrieval": 16, "agent": 1}
SHAPE = ("rows", "row_length", "accumulate", "loss_chunk", "z_loss")


def main() -> None:
    """From the configuration to the tables."""
    # ================================================================================================================
    # Configuration
    # ================================================================================================================
    parser = run_parser("Say whether a run fits a machine, by compiling its programs for it.")
    parser.add_argument("--topology", type=str, nargs="+", required=True, help="machines: v5litepod-64, v5e:8x8, cpu:8")
    parser.add_argument("--tools", type=int, help="size of the catalogue (default: that of data.source)")
    parser.add_argument(
        "--supervised",
        type=int,
        help="supervised positions of a row, at most (default: all, in memorization and retrieval a 16th)",
    )
    parser.add_argument("--targets", type=int, default=8, help="right tools of a query, at most")
    parser.add_argument("--mfu", type=float, default=0.4, help="share of the peak that step times are stated for")
    parser.add_argument("--decode_rows", type=int, default=0, help="plan decoding too, of so many texts at a time")
    parser.add_argument("--decode_length", type=int, default=2048, help="their tokens, prompt and continuation")
    parser.add_argument("--sweep", action="store_true", help="compile changes that need less memory too")
    parser.add_argument("--json", action="store_true", help="print records as JSON; everything else goes to stderr")
    config, options = parse_run(parser)
    console = Console(stderr=True, width=160) if options.json else open_console()
    say = functools.partial(console.print, highlight=False, markup=False, emoji=False)
    if not 0 < options.mfu <= 1:
        raise ValueError(f"mfu is {options.mfu}, expected a share above 0, up to 1")
    for name, least in (("tools", 0), ("supervised", 1), ("targets", 1), ("decode_rows", 0), ("decode_length", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"{name} is {value}, expected {least} or more")
    targets = [find_target(name) for name in options.topology]
    versions = {found.name: found.version for found in importlib.metadata.distributions()}
    say(f"jax {jax.__version__}, libtpu {versions.get('libtpu', 'not installed')}")

    # ================================================================================================================
    # Model and catalogue: their sizes
    # ================================================================================================================
    source = smollm2() if config.model.source == "smollm2" else Path(config.model.source).expanduser()
    folder = source if source.exists() else generation_source(config.model.source)
    if folder is None or not (folder.is_file() or (folder / "config.json").is_file()):
        raise FileNotFoundError(
            f"{config.model.source}: no config.json, neither here nor on the hub. Planning reads nothing else of a "
            "model, so --model.source may be a folder with that file alone"
        )
    tools = options.tools
    if tools is None and not config.data.source:
        tools = 0
    if tools is None:
        queries = {"train_queries": config.data.train_queries, "test_queries": config.data.test_queries}
        tools = len(load_retrieval_set(config.data.source, seed=config.data.seed, **queries).catalog)
    base = base_config(folder, None, config.model)
    say(f"model: {folder}, {base.num_hidden_layers} layers of {base.hidden_size:,}, {tools:,} tools")

    # ================================================================================================================
    # Programs: of each machine those of the stages that differ in shape, and with --sweep their variations
    # ================================================================================================================
    stages: dict[tuple[object, ...], list[str]] = {}  # shape -> stages
    for name in STAGES:
        stage = getattr(config, name)
        if stage.epochs:
            shape = [getattr(stage, field) for field in SHAPE]
            stages.setdefault((*shape, stage.optimizer.kind, TOKENS_PER_SUPERVISED[name]), []).append(name)
    if not stages and not options.decode_rows:
        raise ValueError(f"{', '.join(f'{name}.epochs' for name in STAGES)} and decode_rows are all 0: nothing to plan")

    plan = functools.partial(
        plan_stage,
        folder=folder,
        tools=tools,
        supervised=options.supervised,
        right=options.targets,
        same_mesh=len(targets) == 1,
    )
    records, refused = [], []
    for target in targets:
        for name, *others in stages.values():
            names = ", ".join([name, *others])
            say(f"{target.name}, {names}: compiling ...")
            tried: list[tuple[Variation | None, StepPlan]] = [(None, plan(config, name, target))]
            found = tried[0][1]
            for note in found.notes:
                say(f"{target.name}: {note}")
            ways = variations(config, name, found.mesh, kv_heads=base.kv_heads)
            for way in (*ways, together(ways)) if options.sweep else ():
                if way is not None:
                    say(f"{target.name}, {way.options}: compiling ...")
                    tried.append((way, plan(way.of(config), name, target)))
            if not options.sweep:
                for line in advice(found, ways):
                    say(f"{target.name}, {names}: {line}")
            for way, each in tried:
                stage = getattr(way.of(config) if way else config, name)
                settings = {field: getattr(stage, field) for field in SHAPE}
                records.append(record_of(each, stages=names, settings=settings, variation=way, utilisation=options.mfu))
            if not any(each.program.fits for _, each in tried):
                refused.append(f"{names} on {target.name}")

        if options.decode_rows:
            say(f"{target.name}, decoding: compiling ...")
            decode = plan_decode(
                base,
                target,
                mesh=mesh_for(config, target, same_mesh=len(targets) == 1),
                tools=tools,
                rows=options.decode_rows,
                length=options.decode_length,
            )
            for note in decode.notes:
                say(f"{target.name}, decoding: {note}")
            records += decode.records()
            if not decode.fits:
                refused.append(f"decoding on {target.name}")
                say(
                    f"{target.name}, decoding: the layers are in {decode.mesh['model']} parts, mesh.model, and whole "
                    "along the other axes; try more of mesh.model, fewer rows, or shorter texts"
                )

    # ================================================================================================================
    # Tables
    # ================================================================================================================
    console.print(memory_table(records, options.mfu))
    console.print(transfer_table(records))
    if options.json:
        print(json.dumps(records, indent=1))
    if refused:
        print(f"does not fit: {'; '.join(refused)}", file=sys.stderr)
        sys.exit(3)


def plan_stage(
    config: RunConfig,
    name: str,
    target: Target,
    *,
    folder: Path,
    tools: int,
    supervised: int | None,
    right: int,
    same_mesh: bool,
) -> StepPlan:
    """The plan of a stage, on the mesh of `mesh_for`."""
    stage = getattr(config, name)
    try:
        return plan_step(
            base_config(folder, None, config.model),
            stage,
            target,
            mesh=mesh_for(config, target, same_mesh=same_mesh),
            trainable=config.trainable,
            tools=tools,
            attention=config.model.attention,
            supervised=supervised or max(stage.row_length // TOKENS_PER_SUPERVISED[name], 2),
            targets=right if TOKENS_PER_SUPERVISED[name] > 1 else 1,
        )
    except ValueError as error:
        raise ValueError(f"{name} on {target.name}: {error}") from error


def mesh_for(config: RunConfig, target: Target, *, same_mesh: bool) -> MeshConfig:
    """The run's mesh; unless `same_mesh`, devices that it doesn't divide all go to fsdp."""
    mesh = config.mesh
    if same_mesh or len(target.devices) % (mesh.fsdp * mesh.model) == 0:
        return mesh
    return MeshConfig(data=1, fsdp=len(target.devices) // mesh.model, model=mesh.model)


if __name__ == "__main__":
    run_script(main)
