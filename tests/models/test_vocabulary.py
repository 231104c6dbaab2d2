"""Growing and shrinking by tool rows, in the model and in the optimiser state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.models import (
    Llama,
    abstract_model,
    mean_rows,
    parameters,
    resized_optimizer_state,
    tools_config,
    with_name_rows,
    with_parameters,
    with_tool_rows,
    without_tool_rows,
)
from jaxtool.parallel import active_mesh_axes, make_mesh
from tests.tiny_models import CONFIG, logits, random_model

V, D = CONFIG.vocab_size, CONFIG.hidden_size
NAMES = [[7], [2, 3], [5, 5, 9], [99, 0, 41, 6]]


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def model(request: pytest.FixtureRequest) -> Llama:
    return random_model(dataclasses.replace(CONFIG, tie_word_embeddings=request.param))


def matrices(model: Llama) -> dict[str, np.ndarray]:
    """The matrices with a row for each token."""
    leaves = parameters(model)
    return {path: np.asarray(leaves[path]) for path in ("embedding_vd", "head_vd") if path in leaves}


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
        assert found[path].dtype == value.dtype


def test_name_rows_are_means(model: Llama) -> None:
    grown = with_name_rows(model, NAMES)
    assert grown.config == dataclasses.replace(model.config, num_tools=4, padded_vocab_size=128)
    before, after = matrices(model), matrices(grown)
    assert after.keys() == ({"embedding_vd"} if model.config.tie_word_embeddings else {"embedding_vd", "head_vd"})
    for path, table in after.items():
        assert table.shape == (128, D)
        np.testing.assert_array_equal(table[:V], before[path])
        for tool, ids in enumerate(NAMES):
            mean = sum(before[path][i].astype(np.float64) for i in ids) / len(ids)
            np.testing.assert_allclose(table[V + tool], mean, rtol=1e-6, atol=1e-7)
        assert (table[V + len(NAMES) :] == 0).all()
    rest = parameters(grown).keys() - after.keys()
    assert_same({path: parameters(grown)[path] for path in rest}, {path: parameters(model)[path] for path in rest})


def test_shrinking_gives_the_original_back(model: Llama) -> None:
    shrunk = without_tool_rows(with_name_rows(model, NAMES))
    assert shrunk.config == model.config
    assert_same(parameters(shrunk), parameters(model))
    assert jax.tree.structure(shrunk) == jax.tree.structure(model)


def test_growing_leaves_text_logits_alone(model: Llama) -> None:
    tokens = np.random.default_rng(0).integers(V, size=(2, 9))
    grown = with_name_rows(model, NAMES)
    before, after = logits(model, tokens), logits(grown, tokens)
    np.testing.assert_allclose(after[..., :V], before, rtol=0, atol=1e-5)
    # The head is linear: a mean of rows has the mean of the logits.
    for tool, ids in enumerate(NAMES):
        np.testing.assert_allclose(after[..., V + tool], before[..., ids].mean(axis=-1), atol=1e-4)


def test_growing_again_replaces_the_tools(model: Llama) -> None:
    once = with_name_rows(with_name_rows(model, NAMES[:2]), NAMES[2:])
    assert_same(parameters(once), parameters(with_name_rows(model, NAMES[2:])))


def test_rows_of_padding_make_no_difference(model: Llama) -> None:
    config = dataclasses.replace(model.config, padded_vocab_size=256)
    values = parameters(model)
    values |= {path: jnp.pad(values[path], ((0, 256 - V), (0, 0))) for path in matrices(model)}
    padded = with_parameters(abstract_model(lambda: Llama(config, rngs=nnx.Rngs(0))), values)
    assert_same(parameters(with_name_rows(padded, NAMES)), parameters(with_name_rows(model, NAMES)))
    with pytest.raises(ValueError, match=f"outside the {V} rows"):
        with_name_rows(padded, [[V]])


def test_parameters_in_bfloat16() -> None:
    model = random_model(dataclasses.replace(CONFIG, param_dtype="bfloat16"))
    grown = with_name_rows(model, NAMES)
    for path, table in matrices(grown).items():
        assert table.dtype == jnp.bfloat16
        mean = matrices(model)[path][[2, 3]].astype(np.float64).mean(axis=0)
        np.testing.assert_allclose(table[V + 1].astype(np.float64), mean, rtol=2.0**-8)
    assert_same(parameters(without_tool_rows(grown)), parameters(model))


@pytest.mark.parametrize(("parts", "rows"), [(1, 128), (2, 256), (4, 512)])
def test_rows_are_padded_for_the_model_axis(parts: int, rows: int) -> None:
    assert tools_config(CONFIG, 4).padded_vocab_size == 128
    with jax.set_mesh(make_mesh(MeshConfig(model=parts))):
        assert tools_config(CONFIG, 4).padded_vocab_size == rows
        assert tools_config(CONFIG, 0) == CONFIG


def test_on_a_mesh() -> None:
    mesh = make_mesh(MeshConfig(fsdp=2, model=2))
    plain, sharded = random_model(), random_model(mesh=mesh)
    plain_tables = matrices(with_name_rows(plain, NAMES))
    with jax.set_mesh(mesh):
        grown = with_name_rows(sharded, NAMES)
        for path, leaf in parameters(grown).items():
            if path in ("embedding_vd", "head_vd"):
                wanted = NamedSharding(mesh, PartitionSpec("model", "fsdp"))
                assert leaf.shape == (256, D) and leaf.sharding.is_equivalent_to(wanted, 2)
                table = np.asarray(leaf)
                np.testing.assert_array_equal(table[:128], plain_tables[path])
                assert not table[128:].any()
        shrunk = without_tool_rows(grown)
        _, before = trained_state(sharded)
        after = resized_optimizer_state(before, sharded.config, grown)
        back = resized_optimizer_state(after, grown.config, sharded)
    assert_same(parameters(shrunk), parameters(plain))
    for path, leaf in parameters(shrunk).items():
        assert leaf.sharding.is_equivalent_to(parameters(sharded)[path].sharding, leaf.ndim), path
    for moment in moments(after):
        for path, leaf in parameters(moment).items():
            assert leaf.shape == parameters(grown)[path].shape
            assert leaf.sharding.is_equivalent_to(parameters(grown)[path].sharding, leaf.ndim), path
    for found, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(found, wanted)


def trained_state(model: Llama, seed: int = 3) -> tuple[optax.GradientTransformation, Any]:
    """An AdamW state with moments in every row."""
    optimizer = optax.adamw(1e-3)
    mesh = model.embedding_vd[...].sharding.mesh if active_mesh_axes() else None
    gradients = random_model(model.config, mesh=mesh, seed=seed)
    return optimizer, optimizer.update(gradients, optimizer.init(model), model)[1]


def moments(state: Any) -> list[Llama]:
    found = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_model) if is_model(leaf)]
    assert len(found) == 2  # first and second
    return found


def is_model(node: Any) -> bool:
    return isinstance(node, Llama)


def test_optimizer_state_follows(model: Llama) -> None:
    optimizer, before = trained_state(model)
    grown = with_name_rows(model, NAMES)
    after = resized_optimizer_state(before, model.config, grown)
    assert jax.tree.structure(after) == jax.tree.structure(optimizer.init(grown))
    assert after[0].count == before[0].count == 1
    for old, new in zip(moments(before), moments(after), strict=True):
        assert parameters(old).keys() == parameters(new).keys()
        for path, leaf in parameters(new).items():
            kept = parameters(old)[path]
            if path in matrices(model):
                assert leaf.shape == (128, D)
                np.testing.assert_array_equal(leaf[:V], kept)
                assert np.abs(kept).max() > 0 and not np.asarray(leaf[V:]).any()
            else:
                np.testing.assert_array_equal(leaf, kept, err_msg=path)
    back = resized_optimizer_state(after, grown.config, model)
    assert jax.tree.structure(back) == jax.tree.structure(before)
    for found, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("tools", [2, 6])
def test_moments_of_surviving_tools_are_kept(model: Llama, tools: int) -> None:
    grown = with_name_rows(model, NAMES)
    _, before = trained_state(grown)
    resized = with_name_rows(model, [[1]] * tools)
    after = resized_optimizer_state(before, grown.config, resized)
    for old, new in zip(moments(before), moments(after), strict=True):
        for path, table in matrices(new).items():
            kept = V + min(tools, 4)
            np.testing.assert_array_equal(table[:kept], matrices(old)[path][:kept])
            assert np.abs(table[kept - 1]).max() > 0 and not table[kept:].any()


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[1], []], "tool 1: its name has no token"),
        ([[1, V]], rf"tool 0: token ids 1 to {V} are outside the {V} rows"),
        ([[1], [2], [3, -1]], rf"tool 2: token ids -1 to 3 are outside the {V} rows"),
    ],
)
def test_names_without_rows(model: Llama, ids: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mean_rows(model.embedding_vd[...], ids)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ({"embedding_vd": (4, D)}, r"tool rows given for \['embedding_vd'\], the model has"),
        ({"embedding_vd": (4, D), "head_vd": (4, D), "other": (4, D)}, "tool rows given for"),
        ({"embedding_vd": (4, D), "head_vd": (3, D)}, rf"have shapes .*, expected one \[T, {D}\]"),
        ({"embedding_vd": (4, D - 1), "head_vd": (4, D - 1)}, rf"expected one \[T, {D}\]"),
        ({"embedding_vd": (D,), "head_vd": (D,)}, rf"expected one \[T, {D}\]"),
    ],
)
def test_rows_that_do_not_fit(rows: dict[str, tuple[int, ...]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        with_tool_rows(random_model(), {path: np.zeros(shape, np.float32) for path, shape in rows.items()})


def test_a_tied_model_takes_no_head_rows() -> None:
    tied = random_model(dataclasses.replace(CONFIG, tie_word_embeddings=True))
    with pytest.raises(ValueError, match=r"given for \['embedding_vd', 'head_vd'\], the model has \['embedding_vd'\]"):
        with_tool_rows(tied, {"embedding_vd": np.zeros((1, D)), "head_vd": np.zeros((1, D))})
