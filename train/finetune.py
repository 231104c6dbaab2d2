"""Fine-tunes a pretrained model so that every tool is a token: ToolGen's memorization and retrieval stages.

    python train/finetune.py --config configs/quickstart.yaml

The same command resumes a run that was stopped. `infer/retrieve.py` takes the same config afterwards.
"""

import dataclasses
import functools
import os
import signal
import time

if __name__ == "__main__":  # the imports below take seconds, in which an interrupt shall be one line as well
    signal.signal(signal.SIGINT, lambda *_: (os.write(2, b"interrupted\n"), os._exit(130)))

import jax
import numpy as np
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jaxtool.config import open_console, parse_run, run_parser, run_script, to_yaml
from jaxtool.data import ChatPrompts, PackedBatches, load_retrieval_set, smollm2
from jaxtool.models import (
    LanguageModel,
    TokenMean,
    abstract_model,
    build_model,
    catalog_change,
    lora_config,
    parameters,
    tools_config,
    with_catalog,
    with_lora,
    with_parameters,
)
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.toolgen import memorization_samples, retrieval_samples
from jaxtool.tools import ToolCatalog
from jaxtool.training import (
    RunDirectory,
    abstract_state,
    initial_state,
    make_optimizer,
    make_train_step,
    on_mesh,
    trained_count,
)
from jaxtool.weights import (
    check_tokenizer_fits,
    load_tokenizer,
    read_config,
    read_tool_ids,
    read_weights,
    resolve_model,
)


def main() -> None:
    """The run, from the configuration to the last checkpoint."""
    # ================================================================================================================
    # Configuration
    # ================================================================================================================
    config, _ = parse_run(run_parser("Fine-tune a model on a tool catalogue (memorization, then retrieval training)."))
    console = open_console()
    say = functools.partial(console.print, highlight=False, markup=False, emoji=False)
    say(to_yaml(config))

    # ================================================================================================================
    # Tools, queries, tokenizer
    # ================================================================================================================
    data = load_retrieval_set(config.data.source, seed=config.data.seed)
    for note in data.notes:
        say(f"data: {note}")
    say(
        f"data: {len(data.catalog):,} tools, {len(data.train):,} training queries, {len(data.test):,} held out "
        f"and {len(data.test_unseen):,} held out with all queries of their tools",
    )
    source = smollm2() if config.model.source == "smollm2" else resolve_model(config.model.source)
    tokenizer = load_tokenizer(source)

    def prompts(max_length: int) -> ChatPrompts:
        return ChatPrompts(tokenizer, system_prompt=config.data.system_prompt, max_length=max_length)

    # ================================================================================================================
    # Model: pretrained rows, then one row per tool from the words of its name
    # ================================================================================================================
    mesh = make_mesh(config.mesh)
    jax.set_mesh(mesh)
    base = read_config(source)
    known = check_tokenizer_fits(tokenizer, base, source)
    base = dataclasses.replace(
        base,
        text_tokens=0 if known == base.vocab_size else known,  # rows of no token are never predicted
        param_dtype=config.model.param_dtype,
        compute_dtype=config.model.compute_dtype,
        remat=config.model.remat,
    )
    for field, stage in (("max_query_tokens", config.retrieval), ("max_document_tokens", config.memorization)):
        longest = getattr(config.data, field)
        if stage.epochs and base.max_position_embeddings < longest:
            raise ValueError(f"data.{field} {longest} is beyond the model's {base.max_position_embeddings} positions")
    run = RunDirectory(config.run_dir, keep=config.checkpoints.keep)
    sized, trainable = tools_config(base, len(data.catalog)), config.trainable
    if trainable.parameters == "lora":
        sized = lora_config(
            sized, rank=trainable.lora_rank, alpha=trainable.lora_alpha, projections=trainable.lora_projections
        )
    sized = run.start(config, sized, data.catalog, tokenizer)
    rules, dropped = AxisRules().fit(dict(mesh.shape), sized.axis_sizes)
    for line in dropped:
        say(f"mesh: {line}")

    resumed_from = run.last_step()
    abstract = abstract_model(lambda: build_model(sized, rules), mesh)
    model: LanguageModel | None = None
    if resumed_from is None:
        started = time.monotonic()
        divided = base.rows % mesh.shape["model"] == 0
        plain_config = base if divided else dataclasses.replace(base, padded_vocab_size=sized.rows)
        plain = abstract_model(lambda: build_model(plain_config, rules), mesh)
        model = with_parameters(plain, read_weights(source, parameters(plain)))
        # Tools that the model has learned before (an exported run) keep their rows.
        learned = read_tool_ids(source) if source.is_dir() else {}
        change = catalog_change(list(learned), [tool.name for tool in data.catalog])
        if learned:
            say(f"tools of {source}: {change}")
        names = [
            tokenizer(" " + tool.name_text(), add_special_tokens=False, split_special_tokens=True)["input_ids"]
            for tool in data.catalog
        ]
        model = with_catalog(model, change, TokenMean(token_ids=names))
        if trainable.parameters == "lora":
            rank, alpha = sized.lora_rank, sized.lora_alpha
            model = with_lora(model, rank=rank, alpha=alpha, projections=sized.lora_projections, seed=config.seed)
        count = sum(leaf.size for leaf in parameters(model).values())
        say(
            f"model: {count:,} parameters, {sized.num_tools:,} of {sized.rows:,} rows are tools, "
            f"loaded in {time.monotonic() - started:.1f} s"
        )

    # ================================================================================================================
    # Stages: samples, packed batches, steps. A checkpoint's number counts the steps of all stages.
    # ================================================================================================================
    catalog = data.catalog
    if config.data.max_documents:
        kept = config.data.max_documents - 1
        catalog = ToolCatalog([dataclasses.replace(tool, documents=tool.documents[:kept]) for tool in catalog])
        left_out = sum(len(tool.documents) for tool in data.catalog) - sum(len(tool.documents) for tool in catalog)
        say(f"memorization: {left_out:,} further documents of tools left out (data.max_documents)")
    stages = []
    for name, stage in (("memorization", config.memorization), ("retrieval", config.retrieval)):
        if stage.epochs == 0:
            say(f"{name}: skipped (epochs 0)")
            continue
        if name == "memorization":
            sample_set = memorization_samples(catalog, prompts(config.data.max_document_tokens), base.vocab_size)
        else:
            sample_set = retrieval_samples(data.train, prompts(config.data.max_query_tokens), base.vocab_size)
        available = len(sample_set.samples)
        if 0 < stage.max_samples < available:
            chosen = np.random.default_rng(config.seed).permutation(available)[: stage.max_samples]
            sample_set = sample_set.subset(sorted(chosen.tolist()))
        try:
            batches = PackedBatches(
                sample_set.samples, rows=stage.rows, row_length=stage.row_length, epochs=stage.epochs, seed=config.seed
            )
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        if stage.loss_chunk and batches.max_supervised % stage.loss_chunk:
            raise ValueError(
                f"{name}.loss_chunk {stage.loss_chunk} does not divide the {batches.max_supervised} supervised "
                "positions of a row; 1 and 0 always do"
            )
        stages.append((name, stage, batches))
        say(
            f"{name}: {len(sample_set.samples):,} of {available:,} samples x {stage.epochs} epochs, "
            f"{batches.tokens:,} tokens in {batches.steps:,} steps, rows {batches.filled:.0%} full; "
            f"{sample_set.cut_samples:,} texts cut by {sample_set.cut_tokens:,} tokens"
        )
    if not stages:
        raise ValueError("memorization.epochs and retrieval.epochs are both 0: nothing to train")
    run.check_samples({name: batches.fingerprint for name, _, batches in stages})
    total_steps = sum(batches.steps for _, _, batches in stages)
    if resumed_from is not None and resumed_from > total_steps:
        raise ValueError(f"{run.path}: checkpoint {resumed_from} lies behind the run's last step {total_steps}")
    if resumed_from == total_steps:
        say(f"{run.path} is finished: checkpoint {total_steps:,} is the last one")
        return
    if resumed_from is not None:
        say(f"resuming {run.path} at step {resumed_from:,} of {total_steps:,}")

    # ================================================================================================================
    # Training
    # ================================================================================================================
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(elapsed_when_finished=False, compact=True),
    )
    first = 0  # global step at which the stage begins
    for name, stage, batches in stages:
        begin, end = first, first + batches.steps
        first = end
        at = max(begin, resumed_from or 0)
        if at >= end:
            continue
        optimizer = make_optimizer(stage.optimizer, batches.steps)
        if model is None and at > begin:
            state = run.restore(at, abstract_state(abstract, optimizer, trainable.parameters, step=at - begin))
        else:
            model = model if model is not None else run.restore_model(at, rules, mesh)
            state = initial_state(model, optimizer, trainable.parameters)
        count, trained = (trained_count(state.model, part) for part in ("full", trainable.parameters))
        moments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.optimizer_state))
        say(f"{name}: {trained:,} of {count:,} parameters are trained, {moments:,} bytes of optimiser state")
        model = None  # the step takes the state over
        step_function = make_train_step(optimizer, loss_chunk=stage.loss_chunk)
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(name, total=batches.steps, completed=at - begin, loss=float("nan"), speed=0.0)
            clock = time.monotonic()
            # The step whose metrics have not been read: reading them would wait for it.
            running: tuple[int, int, dict[str, jax.Array]] | None = None
            every = config.checkpoints.every_steps
            for step in range(at - begin, batches.steps + 1):
                ready = [] if running is None else [running]
                running, save = None, False
                if step < batches.steps:
                    batch = batches.batch(step)
                    state, metrics = step_function(state, on_mesh(batch, mesh, rules))
                    running = (begin + step + 1, int(np.count_nonzero(batch.segment_ids_bs)), metrics)
                    save = running[0] == end or (every > 0 and running[0] % every == 0)
                    if save:  # what a checkpoint contains has been logged, so a kill loses no record
                        ready.append(running)
                        running = None
                for done, tokens, metrics in ready:
                    values = {key: float(value) for key, value in metrics.items()}
                    seconds, clock = time.monotonic() - clock, time.monotonic()
                    for key in ("loss", "grad_norm"):  # checked before the step's checkpoint replaces a sound one
                        if not np.isfinite(values[key]):
                            raise ValueError(
                                f"{name}: the {key} of step {done} is {values[key]}, try a lower learning_rate"
                            )
                    run.log({"step": done, "stage": name, **values, "tokens": tokens, "seconds": round(seconds, 4)})
                    progress.update(task, completed=done - begin, loss=values["loss"], speed=tokens / seconds)
                if save:
                    run.save(begin + step + 1, state)
                    clock = time.monotonic()  # saving is not the step's time
        model = state.model
        del state
    run.close()
    say(f"finished: {run.path} at step {total_steps:,}")


if __name__ == "__main__":
    run_script(main, interrupted="; the same command resumes from the last checkpoint")
