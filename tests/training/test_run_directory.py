"""Run directories: what is saved comes back bit for bit on any mesh, and damage is said."""

import dataclasses
import json
import resource
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx

from jaxtool.config import MeshConfig, OptimizerConfig, RunConfig, StageConfig, TrainableConfig
from jaxtool.data import DRAWN, PackedBatches, Sample
from jaxtool.models import (
    Llama,
    LlamaConfig,
    abstract_model,
    build_model,
    initialise,
    lora_config,
    parameters,
    with_parameters,
)
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.tools import Tool, ToolCatalog
from jaxtool.training import (
    RunDirectory,
    TrainState,
    abstract_state,
    initial_state,
    make_optimizer,
    make_train_step,
    on_mesh,
)

CONFIG = LlamaConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    num_tools=3,
    padded_vocab_size=256,
)
CATALOG = ToolCatalog([Tool(name=name) for name in ("a", "b", "c")])
OPTIMIZER = make_optimizer(OptimizerConfig(), 10)


class Tokenizer:
    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)


def build() -> Llama:
    return Llama(CONFIG, AxisRules(), rngs=nnx.Rngs(1))


def mesh(data: int, fsdp: int, model: int) -> jax.sharding.Mesh:
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, model=model), jax.devices()[: data * fsdp * model])


def flat(tree: object) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def trained_state(model: Llama) -> TrainState:
    """A state whose moments are not zero."""
    state = initial_state(model, OPTIMIZER)
    gradients = jax.tree.map(lambda x: x * 0.1, model)
    _, moments = jax.jit(OPTIMIZER.update)(gradients, state.optimizer_state, model)
    return dataclasses.replace(state, optimizer_state=moments)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 2, 2), (1, 4, 2), (8, 1, 1)])
def test_saved_on_one_mesh_restored_on_another(tmp_path: Path, sizes: tuple[int, int, int]) -> None:
    saved_on = mesh(2, 2, 1)
    with jax.set_mesh(saved_on):
        state = trained_state(initialise(build, saved_on))
        run = RunDirectory(tmp_path)
        run.save(7, state)
        run.close()
    target = mesh(*sizes)
    with jax.set_mesh(target):
        shape = abstract_model(build, target)
        abstract = TrainState(model=shape, optimizer_state=jax.eval_shape(OPTIMIZER.init, shape), step=jnp.int32(7))
        run = RunDirectory(tmp_path)
        assert run.last_step() == 7
        back = run.restore(7, abstract)
        model = run.restore_model(7, AxisRules(), target, CONFIG)
        run.close()
    expected = flat((state.model, state.optimizer_state))
    assert any(np.any(value) for name, value in expected.items() if "mu" in name)
    found = flat((back.model, back.optimizer_state))
    assert expected.keys() == found.keys()
    assert all(np.array_equal(value, found[name]) for name, value in expected.items())
    assert all(np.array_equal(a, b) for a, b in zip(flat(model).values(), flat(state.model).values(), strict=True))
    for path, leaf in parameters(back.model).items():
        assert leaf.sharding == parameters(shape)[path].sharding, path


def batches() -> PackedBatches:
    samples = [
        Sample(tokens=(*range(first, first + 6), DRAWN), positions=(5, 6), targets=((128 + first % 3,), (2,)))
        for first in range(48)
    ]
    return PackedBatches(samples, rows=8, row_length=16, epochs=1, seed=0)


LORA_CONFIG = lora_config(CONFIG, rank=4, alpha=8.0, projections=("query", "up"))
BLOCK = 128 * CONFIG.hidden_size  # 3 tool rows, padded
FACTORS = 2 * 4 * (32 + 4 * 8 + 32 + 64)  # 2 layers of rank 4


@pytest.mark.parametrize(
    ("trained", "config", "moments"),
    [("full", CONFIG, None), ("lora", LORA_CONFIG, 2 * BLOCK + FACTORS), ("tool_rows", CONFIG, 2 * BLOCK)],
    ids=["full", "lora", "tool rows"],
)
def test_a_resumed_run_is_the_same_run(tmp_path: Path, trained: str, config: LlamaConfig, moments: int | None) -> None:
    """Three steps at once against two, a restart from the disk and one; then the model alone on another mesh."""
    here, rules = mesh(2, 2, 2), AxisRules()

    def build_it() -> Llama:
        return build_model(config, rules)  # type: ignore[return-value]

    def fresh() -> TrainState:
        model = initialise(build_it, here)
        # As if trained for a while: no factor is zero.
        values = {path: leaf + 0.01 * (path.count("lora")) for path, leaf in parameters(model).items()}
        return initial_state(with_parameters(model, values), OPTIMIZER, trained)

    with jax.set_mesh(here):
        step, rows = make_train_step(OPTIMIZER), [on_mesh(batches().batch(n), here, rules) for n in range(3)]
        whole = fresh()
        began = {path: np.asarray(leaf) for path, leaf in parameters(whole.model).items()}
        for batch in rows:
            whole, _ = step(whole, batch)
        state, run = fresh(), RunDirectory(tmp_path)
        for number in (0, 1):
            state, _ = step(state, rows[number])
            run.save(number + 1, state)
        run.close()
        del state
        run = RunDirectory(tmp_path)
        state = run.restore(2, abstract_state(abstract_model(build_it, here), OPTIMIZER, trained, step=2))
        state, _ = step(state, rows[2])
        run.save(3, state)
    expected, found = flat(whole), flat(state)
    assert expected.keys() == found.keys()
    assert all(np.array_equal(value, found[name]) for name, value in expected.items())
    other = mesh(1, 4, 2)
    with jax.set_mesh(other):
        model = run.restore_model(3, rules, other, config)
    run.close()
    changed = set()
    for path, leaf in parameters(model).items():
        np.testing.assert_array_equal(leaf, parameters(whole.model)[path], err_msg=path)
        assert leaf.sharding == parameters(abstract_model(build_it, other))[path].sharding
        changed |= {path} if (np.asarray(leaf) != began[path]).any() else set()
    checkpoint = tmp_path / "checkpoints/3"
    items = {folder.name for folder in checkpoint.iterdir() if folder.is_dir()}
    if moments is None:
        assert changed == began.keys() and items >= {"parameters", "optimizer"}
        assert not (tmp_path / "frozen").exists()
    else:
        assert changed == {"embedding_vd", "head_vd"} | {path for path in began if "lora" in path}
        assert "trained" in items and "parameters" not in items
        held = sum(leaf.size for name, leaf in flat(state.optimizer_state).items() if leaf.ndim)
        assert held == 2 * moments
        # The frozen weights are on the disk once; a checkpoint is far smaller than they are.
        frozen = sum(file.stat().st_size for file in (tmp_path / "frozen").rglob("*") if file.is_file())
        assert frozen > 2 * 256 * 32 * 4


def test_frozen_weights_belong_to_their_run(tmp_path: Path) -> None:
    config = dataclasses.replace(RunConfig(), trainable=TrainableConfig(parameters="tool_rows"))
    here = mesh(1, 1, 1)

    def saved(run: RunDirectory, seed: int, step: int) -> dict[str, np.ndarray]:
        model = initialise(lambda: build_model(CONFIG, seed=seed), here)
        run.save(step, initial_state(model, OPTIMIZER, "tool_rows"))
        return flat(model)

    with jax.set_mesh(here):
        run = RunDirectory(tmp_path)
        run.start(config, CONFIG, CATALOG, Tokenizer())
        saved(run, 1, 5)
        run.close()
        # Without its checkpoint the run begins anew, with whatever weights it then has.
        shutil.rmtree(tmp_path / "checkpoints/5")
        run = RunDirectory(tmp_path)
        run.start(config, CONFIG, CATALOG, Tokenizer())
        expected = saved(run, 2, 1)
        found = flat(run.restore_model(1, AxisRules(), here))
        assert all(np.array_equal(value, found[name]) for name, value in expected.items())
        for trainable in (TrainableConfig(), TrainableConfig(parameters="lora")):
            with pytest.raises(ValueError, match=r"trainable\.parameters was 'tool_rows', is '(full|lora)'"):
                run.start(dataclasses.replace(config, trainable=trainable), CONFIG, CATALOG, Tokenizer())
        run.start(config, CONFIG, CATALOG, Tokenizer())
        run.close()
        largest = max((tmp_path / "frozen").rglob("*"), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:100])
        with pytest.raises(
            ValueError, match=r"frozen: the weights that were not trained can't be read .* has 100 bytes"
        ):
            RunDirectory(tmp_path).restore_model(1, AxisRules(), here)
        shutil.rmtree(tmp_path / "frozen")
        with pytest.raises(FileNotFoundError, match=r"frozen is missing: .* put it back"):
            RunDirectory(tmp_path).restore_model(1, AxisRules(), here)


def test_runs_from_before_the_setting_resume(tmp_path: Path) -> None:
    run, config = RunDirectory(tmp_path), RunConfig()
    run.start(config, CONFIG, CATALOG, Tokenizer())
    with jax.set_mesh(mesh(1, 1, 1)):
        run.save(1, trained_state(initialise(build, mesh(1, 1, 1))))
    settings = yaml.safe_load((tmp_path / "config.yaml").read_text())
    del settings["trainable"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError, match=r"trainable\.parameters was 'full', is 'lora'"):
        run.start(
            dataclasses.replace(config, trainable=TrainableConfig(parameters="lora")), CONFIG, CATALOG, Tokenizer()
        )
    run.start(config, CONFIG, CATALOG, Tokenizer())
    run.close()


def test_only_the_newest_are_kept_and_half_saves_ignored(tmp_path: Path) -> None:
    with jax.set_mesh(mesh(1, 1, 1)):
        state = trained_state(initialise(build, mesh(1, 1, 1)))
        run = RunDirectory(tmp_path, keep=2)
        assert run.last_step() is None
        for step in (1, 2, 3):
            run.save(step, state)
        run.close()
    assert sorted(folder.name for folder in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
    for half in ("4.orbax-checkpoint-tmp", ".5.saving"):
        (tmp_path / "checkpoints" / half).mkdir()
        (tmp_path / "checkpoints" / half / "half").write_text("")
    assert RunDirectory(tmp_path).last_step() == 3


def test_a_damaged_checkpoint_names_itself_and_the_one_before(tmp_path: Path) -> None:
    here = mesh(1, 1, 1)
    with jax.set_mesh(here):
        state = trained_state(initialise(build, here))
        run = RunDirectory(tmp_path, keep=2)
        for step in (5, 6):
            run.save(step, state)
        run.close()
        warnings: list[str] = []
        run = RunDirectory(tmp_path, warn=warnings.append)
        largest = max((tmp_path / "checkpoints/6/parameters").rglob("*"), key=lambda path: path.stat().st_size)
        damaged = bytearray(largest.read_bytes())
        damaged[1000] ^= 1
        largest.write_bytes(damaged)
        assert run.last_step() == 6  # its files have the right sizes
        with pytest.raises(
            ValueError, match=r"6: the checkpoint is damaged: .*; delete this folder to use checkpoint 5"
        ):
            run.restore_model(6, AxisRules(), here, CONFIG)
        asked: list[int] = []

        def wanted(step: int) -> TrainState:
            asked.append(step)
            return abstract_state(abstract_model(build, here), OPTIMIZER, step=step)

        step, back = RunDirectory(tmp_path, warn=warnings.append).restore_newest(wanted)
        assert (step, asked) == (5, [6, 5])
        assert isinstance(back, TrainState)
        saved = flat(dataclasses.replace(state, step=step))
        assert all(np.array_equal(x, y) for x, y in zip(flat(back).values(), saved.values(), strict=True))
        assert len(warnings) == 2 and all("checkpoint 5 is used" in warning for warning in warnings)
        # Cut short, the newest doesn't count at all; without any that is whole, nothing is started anew in its place.
        largest.write_bytes(damaged[:100])
        run = RunDirectory(tmp_path, warn=warnings.append)
        assert run.last_step() == 5
        with pytest.raises(FileNotFoundError, match="7: there is no such checkpoint"):
            run.restore_model(7, AxisRules(), here, CONFIG)
        shutil.rmtree(tmp_path / "checkpoints/5/optimizer")
        with pytest.raises(ValueError, match="all checkpoints are damaged"):
            RunDirectory(tmp_path).start(RunConfig(), CONFIG, CATALOG, Tokenizer())


def test_the_best_checkpoint_is_kept(tmp_path: Path) -> None:
    here = mesh(1, 1, 1)
    with jax.set_mesh(here):
        model = initialise(build, here)
        run = RunDirectory(tmp_path, metric="held_out_loss")
        for step, value in ((1, 3.0), (2, 1.5), (3, 2.0), (4, None)):
            state = initial_state(jax.tree.map(lambda x, n=step: x * n, model), OPTIMIZER)
            run.save(step, state, value=value)
        run.close()
        report = run.finished_save()
        assert report is not None and report.step == 4
        assert (run.best_step(), run.last_step()) == (2, 4)
        assert (RunDirectory(tmp_path).best_step(), RunDirectory(tmp_path).last_step()) == (2, 4)
        for step in (2, 4):
            found = flat(run.restore_model(step, AxisRules(), here, CONFIG))
            for name, value in flat(model).items():
                np.testing.assert_array_equal(found[name], value * step, err_msg=name)
        only_model = run.restore_newest(lambda _: abstract_model(build, here))
        assert only_model[0] == 4 and isinstance(only_model[1], Llama)


def test_description_comes_back_and_must_stay_the_same(tmp_path: Path) -> None:
    run, config = RunDirectory(tmp_path / "run"), RunConfig()
    with pytest.raises(FileNotFoundError, match="train first"):
        run.catalog()
    assert run.start(dataclasses.replace(config, seed=9), CONFIG, CATALOG, Tokenizer()) == CONFIG
    run.log({"step": 1, "loss": 1.0})
    # Nothing was learned yet, so other settings may take the folder over.
    run.start(config, CONFIG, CATALOG, Tokenizer())
    assert run.metrics() == []
    with jax.set_mesh(mesh(1, 1, 1)):
        run.save(1, trained_state(initialise(build, mesh(1, 1, 1))))
    assert (run.model_config(), run.catalog()) == (CONFIG, CATALOG)
    # What decides nothing that is learned may change.
    run.start(dataclasses.replace(config, mesh=MeshConfig(fsdp=2), run_dir="x"), CONFIG, CATALOG, Tokenizer())
    with pytest.raises(ValueError, match=r"retrieval\.epochs was 1, is 2"):
        run.start(dataclasses.replace(config, retrieval=StageConfig(epochs=2)), CONFIG, CATALOG, Tokenizer())
    with pytest.raises(ValueError, match="other tools"):
        run.start(config, CONFIG, ToolCatalog([Tool(name="a"), Tool(name="c"), Tool(name="b")]), Tokenizer())
    with pytest.raises(ValueError, match="another shape"):
        run.start(config, dataclasses.replace(CONFIG, rope_theta=1e4), CATALOG, Tokenizer())
    # Rows padded for another mesh are the same model, in the shape that the checkpoint has.
    assert run.start(config, dataclasses.replace(CONFIG, padded_vocab_size=512), CATALOG, Tokenizer()) == CONFIG
    assert run.model_config() == CONFIG
    for content in (b"", b"- 1\n", b"\tx: [", b"\xff"):
        (run.path / "config.yaml").write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.yaml: .*put it back"):
            run.start(config, CONFIG, CATALOG, Tokenizer())
    (run.path / "config.yaml").unlink()
    with pytest.raises(ValueError, match=r"no config\.yaml"):
        run.start(config, CONFIG, CATALOG, Tokenizer())
    for content in ("", "[]", '{"a": 1}', '{"vocab_size": "x"}'):
        (run.path / "model.json").write_text(content)
        with pytest.raises(ValueError, match=r"model\.json"):
            run.model_config()
    run.close()


def test_one_process_trains_in_a_folder_and_readers_leave_its_saves_alone(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.start(RunConfig(), CONFIG, CATALOG, Tokenizer())
    with pytest.raises(ValueError, match="another process is training"):
        RunDirectory(tmp_path).start(RunConfig(), CONFIG, CATALOG, Tokenizer())
    saving = tmp_path / "checkpoints/.4.saving"
    saving.mkdir(parents=True)
    reader = RunDirectory(tmp_path)
    assert reader.last_step() is None
    reader.close()
    assert saving.is_dir()
    run.close()
    again = RunDirectory(tmp_path)
    again.start(RunConfig(), CONFIG, CATALOG, Tokenizer())
    assert not saving.exists()  # left over by a run that was killed
    again.close()


def test_other_samples_are_refused(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.check_samples({"memorization": "a", "retrieval": "b"})
    run.check_samples({"memorization": "a", "retrieval": "b"})
    with pytest.raises(ValueError, match="the samples of retrieval are not those"):
        run.check_samples({"memorization": "a", "retrieval": "c"})


@pytest.mark.parametrize("path", ["file", "file/below"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="expected a folder that can be written"):
        RunDirectory(tmp_path / path).start(RunConfig(), CONFIG, CATALOG, Tokenizer())


def test_metrics_survive_a_kill(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.metrics() == []
    for record in ({"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}):
        run.log(record)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('[1]\n3\n{"step": 3, "lo')
    assert [record["loss"] for record in run.metrics()] == [3.0, 2.0]
    run.log({"step": 2, "loss": 1.5})
    run.log({"step": 3, "loss": 1.0})
    assert [record["loss"] for record in run.metrics()] == [3.0, 1.5, 1.0]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["step"] == 1


def test_a_full_disk_is_named_with_its_file(tmp_path: Path) -> None:
    class Full:
        def save_pretrained(self, folder: Path) -> None:
            raise Exception("No space left on device (os error 28)")  # as tokenizers does

    with pytest.raises(ValueError, match=r"tokenizer: can't be written \(No space left on device"):
        RunDirectory(tmp_path / "new").start(RunConfig(), CONFIG, CATALOG, Full())
    run = RunDirectory(tmp_path)
    run.log({"step": 1, "loss": 1.0})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(ValueError, match=r"metrics.jsonl: can't be written \(File too large.*the same command"):
            for step in range(2, 100):
                run.log({"step": step, "loss": 1.0})
        with pytest.raises(ValueError, match=r"samples.json: can't be written"):
            run.check_samples({"retrieval": "a" * 2000})
        with pytest.raises(ValueError, match=r"stages.json: can't be written"):
            run.record_stages({"a" * 2000: 1})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert run.metrics()[0] == {"step": 1, "loss": 1.0} and not (tmp_path / "samples.json").exists()
