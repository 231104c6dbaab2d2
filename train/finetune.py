"""Fine-tunes a pretrained model: plain text, ToolGen's memorization and retrieval, conversations of an agent.

    python train/finetune.py --config configs/quickstart.yaml

The same command resumes a run that was stopped, on any number of devices and processes. SIGTERM and Ctrl-C end it with
a checkpoint. `infer/evaluate.py` takes the same config afterwards.
"""

import dataclasses
import functools
import itertools
import os
import signal
import sys
import time

if __name__ == "__main__":  # the imports below take seconds, in which an interrupt shall be one line as well
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import jax
import numpy as np
import yaml

from jaxtool.config import open_console, parse_run, run_parser, run_script, to_yaml
from jaxtool.data import RetrievalSet, load_retrieval_set, smollm2
from jaxtool.models import LanguageModel, abstract_model, build_model, parameters, resolve_attention
from jaxtool.models.flops import Work
from jaxtool.parallel import AxisRules, end_process, make_mesh, start_processes
from jaxtool.toolgen import training_stages
from jaxtool.tools import ToolCatalog
from jaxtool.training import (
    RunDirectory,
    RunningStep,
    StageProgress,
    StopRequest,
    TrainState,
    abstract_state,
    base_config,
    goodput,
    initial_state,
    make_held_out,
    make_optimizer,
    make_train_step,
    on_mesh,
    open_sinks,
    run_config_of,
    starting_model,
    trained_count,
)
from jaxtool.weights import load_tokenizer, read_tool_ids, resolve_model

PROFILED = range(3, 6)  # steps of a stage that --profile traces: behind compilation


def main() -> None:
    """The run, from the configuration to the last checkpoint."""
    # ================================================================================================================
    # Configuration and processes
    # ================================================================================================================
    parser = run_parser("Fine-tune a model: plain text, memorization and retrieval of tools, conversations.")
    parser.add_argument("--profile", action="store_true", help="write a trace of three steps to run_dir/profile")
    config, options = parse_run(parser)
    start_processes(
        config.processes.coordinator or None,
        config.processes.count or None,
        config.processes.index if config.processes.index >= 0 else None,
        timeout=config.processes.start_seconds,
    )
    console = open_console()
    console.quiet = jax.process_index() > 0
    say = functools.partial(console.print, highlight=False, markup=False, emoji=False)
    say(to_yaml(config))

    # ================================================================================================================
    # Tools, queries, tokenizer
    # ================================================================================================================
    data = RetrievalSet(catalog=ToolCatalog([]), train=(), test=())
    if config.data.source:
        data = load_retrieval_set(
            config.data.source,
            seed=config.data.seed,
            train_queries=config.data.train_queries,
            test_queries=config.data.test_queries,
        )
    for note in data.notes:
        say(f"data: {note}")
    unseen = f", and {len(data.test_unseen):,} of tools that no training query asks for" if data.test_unseen else ""
    say(
        f"data: {len(data.catalog):,} tools, {len(data.train):,} training queries; held out for evaluation "
        f"{len(data.test):,} queries{unseen}"
    )
    source = smollm2() if config.model.source == "smollm2" else resolve_model(config.model.source)
    tokenizer = load_tokenizer(source)

    # ================================================================================================================
    # Stages: samples, packed batches, steps. A checkpoint's number counts the steps of all stages.
    # ================================================================================================================
    mesh = make_mesh(config.mesh)
    jax.set_mesh(mesh)
    trained = config.trainable.parameters
    base = base_config(source, tokenizer, config.model)
    attention, why = resolve_attention(
        config.model.attention, compute_dtype=base.compute_dtype, head_size=base.head_dim, device=mesh.devices.flat[0]
    )
    say(why)
    base = dataclasses.replace(base, attention=attention)
    sized = run_config_of(base, len(data.catalog), config.trainable)
    shares = mesh.shape["data"] * mesh.shape["fsdp"]
    stages = training_stages(config, data, tokenizer, base, shares, say)
    begins = list(itertools.accumulate((stage.batches.steps for stage in stages), initial=0))
    total = begins[-1]

    # ================================================================================================================
    # Run directory, and how far it has come
    # ================================================================================================================
    metric = f"{stages[-1].name} loss" if stages[-1].held_out is not None else None
    run = RunDirectory(config.run_dir, keep=config.checkpoints.keep, metric=metric)
    sized = run.start(config, sized, data.catalog, tokenizer)
    run.check_samples({stage.name: stage.batches.fingerprint for stage in stages})
    run.record_stages({stage.name: stage.batches.steps for stage in stages})
    rules, dropped = AxisRules().fit(dict(mesh.shape), sized.axis_sizes)
    for line in dropped:
        say(f"mesh: {line} (each of them holds all of it, which costs memory and time)")
    last = run.last_step()
    if last is not None and last > total:
        raise ValueError(
            f"{run.path}: checkpoint {last} lies behind the run's last step {total}, another run wrote it; delete "
            f"{run.path / 'checkpoints' / str(last)}, or choose another run_dir"
        )
    if last == total:
        say(f"{run.path} is finished: checkpoint {total:,} is its last; to train anew choose another run_dir")
        run.close()
        return

    # ================================================================================================================
    # Model: pretrained, with a row for each tool; or what the newest checkpoint has
    # ================================================================================================================
    optimizers = [make_optimizer(stage.settings.optimizer, stage.batches.steps) for stage in stages]
    abstract = abstract_model(lambda: build_model(sized, rules), mesh)

    def wanted(step: int) -> TrainState | LanguageModel:
        """What checkpoint `step` is to give: between two stages the model alone, since optimisers start afresh."""
        place = next(i for i in range(len(stages)) if step < begins[i + 1] or i == len(stages) - 1)
        if step == begins[place]:
            return abstract
        return abstract_state(abstract, optimizers[place], trained, step=step - begins[place])

    found: TrainState | LanguageModel
    if last is None:
        started, at = time.monotonic(), 0
        found, change = starting_model(source, base, sized, data.catalog, tokenizer, rules, mesh, seed=config.seed)
        if source.is_dir() and read_tool_ids(source):
            say(f"tools that {source} has learned: {change}; those kept begin with their learned rows")
        count = sum(leaf.size for leaf in parameters(found).values())
        say(
            f"model: {count:,} parameters; its vocabulary has {sized.vocab_size:,} tokens "
            f"of text and {sized.num_tools:,} of tools; loaded in {time.monotonic() - started:.1f} s"
        )
    else:
        at, found = run.restore_newest(wanted)
        say(f"resuming {run.path} at step {at:,} of {total:,}")

    # ================================================================================================================
    # Training
    # ================================================================================================================
    run.log({"started": time.time(), "at": at, "processes": jax.process_count(), "devices": jax.device_count()})
    sinks = open_sinks(config.metrics, run.path, yaml.safe_load(to_yaml(config)))
    with StopRequest(limit_seconds=config.processes.stop_seconds) as stop:
        for stage, optimizer, begin, end in zip(stages, optimizers, begins[:-1], begins[1:], strict=True):
            if at >= end:
                continue
            settings, batches = stage.settings, stage.batches
            state = found if isinstance(found, TrainState) else initial_state(found, optimizer, trained)
            found = state.model  # the step takes the state over
            counts = [trained_count(found, part) for part in ("full", trained)]
            moments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.optimizer_state))
            say(
                f"{stage.name}: {counts[1]:,} of {counts[0]:,} parameters are trained, with {moments / 1e6:,.1f} MB of "
                "optimiser state"
            )
            if options.profile and batches.steps <= PROFILED.start:
                say(f"{stage.name}: no trace, it has {batches.steps} steps and the first {PROFILED.start} are left out")
            step_function = make_train_step(
                optimizer, loss_chunk=settings.loss_chunk, z_loss=settings.z_loss, accumulate=settings.accumulate
            )
            held_out = None
            if stage.held_out is not None:
                held_out = make_held_out(stage.held_out, mesh, rules, loss_chunk=settings.loss_chunk)
            progress = StageProgress(
                stage.name,
                begin=begin,
                at=at - begin,
                total=batches.steps,
                run=run,
                sinks=sinks,
                config=sized,
                trained=trained,
                console=console,
            )
            with progress:
                clock = progress.clock
                shapes: set[tuple[int, ...]] = set()  # of batches: each is compiled once
                tracing = False
                running: RunningStep | None = None  # the step whose numbers have not been fetched, which would wait

                def finish(running: RunningStep, name: str = stage.name, progress: StageProgress = progress) -> None:
                    values = progress.finish(running)
                    for key in ("loss", "grad_norm"):  # checked before a checkpoint replaces a sound one
                        if not np.isfinite(values[key]):
                            raise ValueError(
                                f"{name}: the {key} of step {running.step} is {values[key]}; start anew, in another "
                                f"run_dir and with a lower {name}.optimizer.learning_rate"
                            )

                while at < end:
                    if options.profile and at - begin == PROFILED.start:
                        jax.profiler.start_trace(run.path / "profile")
                        tracing = True
                    with clock.part("data"):
                        batch = batches.batch(at - begin)
                        work = Work.of_rows(batch.segment_ids_bs, int(np.count_nonzero(batch.weights_bpa.any(axis=-1))))
                        placed = on_mesh(batch, mesh, rules)
                    new = batch.tokens_bs.shape not in shapes
                    shapes.add(batch.tokens_bs.shape)
                    with clock.part("compilation" if new else "dispatch"):
                        state, metrics = step_function(state, placed)
                    at += 1
                    if running is not None:
                        finish(running)
                    running = RunningStep(step=at, work=work, metrics=metrics)
                    stopping = stop.at(at)
                    every, evaluate = config.checkpoints.every_steps, settings.evaluate_every
                    save = stopping or at == end or (every > 0 and at % every == 0)
                    measure = held_out is not None and (at == end or (at - begin) % evaluate == 0)
                    if save or measure:  # what a checkpoint contains has been logged, so a kill loses no record
                        finish(running)
                        running = None
                    value = None
                    if measure and held_out is not None:
                        with clock.part("evaluation"):
                            measured = held_out(state.model)
                        progress.measured(at, measured)
                        value = measured["loss"] if stage is stages[-1] else None
                    if save or value is not None:
                        with clock.part("checkpoint"):
                            run.save(at, state, value=value)
                    if tracing and (at - begin == PROFILED.stop or at == end or stopping):
                        jax.block_until_ready(state.step)
                        jax.profiler.stop_trace()
                        tracing = False
                    if stopping:
                        break
            found = state.model
            del state
            if at < end:
                break
        run.close()
    for sink in sinks:
        sink.close()
    used = goodput(run.records(), time.time())
    share = "" if used is None else f"; {used:.0%} of the time since its start went into steps (goodput)"
    if at < total:
        say(f"stopped by {stop.reason}: {run.path} is saved at step {at:,} of {total:,}{share}")
        say("the same command goes on")
        sys.exit(130 if stop.interrupted else 0)
    say(f"finished: {run.path} at step {total:,}{share}; infer/evaluate.py with the same options scores it")


if __name__ == "__main__":
    run_script(main, interrupted="; the same command resumes from the last checkpoint", end=end_process)
