"""The train step: its parts put together by hand, one device against eight, and batches put on a mesh."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig, OptimizerConfig
from jaxtool.data import DRAWN, PackedBatches, Sample
from jaxtool.models import LanguageModelConfig, lora_config, parameters
from jaxtool.parallel import AxisRules, make_mesh
from jaxtool.training import initial_state, make_optimizer, make_train_step, on_mesh, supervised_loss, trained_part
from tests.tiny_models import CONFIG, GPTJ_CONFIG, random_model

UNTIED = dataclasses.replace(CONFIG, num_tools=9)
TIED = dataclasses.replace(UNTIED, tie_word_embeddings=True)
LORA = lora_config(UNTIED, rank=4, alpha=8.0, projections=tuple(UNTIED.projections))
BIASED = dataclasses.replace(GPTJ_CONFIG, num_tools=9)


def packed(rows: int = 8) -> PackedBatches:
    """Two samples of 8 tokens fill a row of 16; 4 supervised positions."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(48):
        tools = tuple(int(100 + tool) for tool in rng.permutation(9)[: rng.integers(1, 4)])
        text = rng.integers(100, size=7).tolist()
        samples.append(Sample(tokens=(*text, DRAWN), positions=(6, 7), targets=(tools, (2,))))
    return PackedBatches(samples, rows=rows, row_length=16, epochs=1, seed=0)


def mesh_of(data: int, fsdp: int, model: int) -> Mesh:
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, model=model), jax.devices()[: data * fsdp * model])


def relative_errors(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    assert found.keys() == expected.keys()
    return {
        path: float(np.linalg.norm(np.asarray(found[path]) - value) / np.linalg.norm(value))
        for path, value in expected.items()
    }


@pytest.mark.parametrize(
    ("config", "trained"),
    [(UNTIED, "full"), (TIED, "full"), (LORA, "lora"), (TIED, "tool_rows"), (BIASED, "tool_rows")],
    ids=["untied", "tied", "lora", "tied rows", "biased rows"],
)
def test_three_steps_on_eight_devices(config: LanguageModelConfig, trained: str) -> None:
    batches = packed()
    assert batches.steps == 3
    optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2, weight_decay=0.1, clip_norm=0.5), steps=3)

    def train(mesh: Mesh) -> tuple[dict[str, np.ndarray], list[float]]:
        with jax.set_mesh(mesh):
            model = random_model(config, mesh=mesh)
            layout = {path: leaf.sharding for path, leaf in parameters(model).items()}
            state = initial_state(model, optimizer, trained)
            step = make_train_step(optimizer, loss_chunk=2)
            losses = []
            for number in range(3):
                state, metrics = step(state, on_mesh(batches.batch(number), mesh, AxisRules()))
                losses.append(float(metrics["loss"]))
            part = trained_part(state.model, trained)
        assert int(state.step) == 3
        for path, leaf in parameters(state.model).items():
            assert leaf.sharding.is_equivalent_to(layout[path], leaf.ndim), path
        for _, moments in optax.tree.get_all_with_path(state.optimizer_state, "mu"):
            for path, leaf in parameters(moments).items():
                assert leaf.sharding.is_equivalent_to(parameters(part)[path].sharding, leaf.ndim), path
        return {path: np.asarray(leaf) for path, leaf in parameters(state.model).items()}, losses

    one, one_losses = train(mesh_of(1, 1, 1))
    eight, eight_losses = train(mesh_of(2, 2, 2))
    assert eight_losses == pytest.approx(one_losses, rel=1e-5)
    errors = relative_errors(eight, one)
    assert max(errors.values()) <= 1e-5, errors
    # The steps were no small ones.
    before = {path: np.asarray(leaf) for path, leaf in parameters(random_model(config)).items()}
    changes = relative_errors(one, before)
    assert min(change for path, change in changes.items() if trained == "full" or change) > 1e-3
    factors = 2 * len(config.lora_projections)
    changed = {"full": len(before), "lora": factors + 2, "tool_rows": 1 if config is TIED else 3}[trained]
    assert len([path for path, change in changes.items() if change]) == changed


def test_a_step_is_gradient_and_update() -> None:
    """Plain gradient descent, with the gradient taken apart from the step."""
    model, batch = random_model(TIED), packed().batch(0)
    (loss, metrics), gradient = jax.jit(jax.value_and_grad(supervised_loss, has_aux=True))(model, batch)
    before = {path: np.asarray(leaf) for path, leaf in parameters(model).items()}
    slopes = {path: np.asarray(leaf) for path, leaf in parameters(gradient).items()}

    descent = optax.sgd(0.5)
    step = make_train_step(descent)
    state, found = step(initial_state(model, descent), batch)
    assert int(state.step) == 1
    assert found.keys() == {"loss", "supervised", "correct", "grad_norm"}
    assert float(found["loss"]) == pytest.approx(float(loss), rel=1e-6)
    assert float(found["supervised"]) == pytest.approx(32, rel=1e-6)
    assert float(found["correct"]) == pytest.approx(float(metrics["correct"]), rel=1e-6)
    norm = np.sqrt(sum((slope.astype(np.float64) ** 2).sum() for slope in slopes.values()))
    assert float(found["grad_norm"]) == pytest.approx(norm, rel=1e-5)
    for path, leaf in parameters(state.model).items():
        np.testing.assert_allclose(leaf, before[path] - 0.5 * slopes[path], rtol=1e-5, atol=1e-6, err_msg=path)
    # The same batch again costs less, and the old state is gone.
    assert float(step(state, batch)[1]["loss"]) < float(loss)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(state.model.final_norm_d[...])


def test_batches_are_cut_by_rows() -> None:
    mesh, batch = mesh_of(2, 2, 2), packed().batch(0)
    placed = on_mesh(batch, mesh, AxisRules())
    for field in dataclasses.fields(batch):
        value, source = getattr(placed, field.name), getattr(batch, field.name)
        wanted = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        assert value.sharding.is_equivalent_to(wanted, value.ndim)
        assert {shard.data.shape for shard in value.addressable_shards} == {(2, *source.shape[1:])}
        np.testing.assert_array_equal(value, source)
        assert value.dtype == source.dtype


@pytest.mark.parametrize("rows", [1, 6, 9])
def test_rows_that_do_not_divide(rows: int) -> None:
    with pytest.raises(ValueError, match=rf"{rows} rows of a batch don't divide by mesh axes \('data', 'fsdp'\)"):
        on_mesh(packed(rows).batch(0), mesh_of(2, 2, 2), AxisRules())
