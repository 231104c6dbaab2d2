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
from jax.sharding import NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.models import (
    LanguageModel,
    LanguageModelConfig,
    TokenMean,
    abstract_model,
    build_model,
    catalog_change,
    mean_rows,
    parameters,
    resized_optimizer_state,
    tools_config,
    with_catalog,
    with_name_rows,
    with_parameters,
    with_tool_rows,
    without_tool_rows,
)
from jaxtool.parallel import active_mesh_axes, make_mesh
from tests.tiny_models import CONFIG, GPTJ_CONFIG, logits, random_model

V, D = CONFIG.vocab_size, CONFIG.hidden_size
NAMES = [[7], [2, 3], [5, 5, 9], [89, 0, 41, 6]]
CONFIGS = {
    "untied": CONFIG,
    "tied": dataclasses.replace(CONFIG, tie_word_embeddings=True),
    # Text rows that no token has, a head with bias.
    "gptj": dataclasses.replace(GPTJ_CONFIG, text_tokens=90),
}
ROWS = {
    "untied": {"embedding_vd", "head_vd"},
    "tied": {"embedding_vd"},
    "gptj": {"embedding_vd", "head_vd", "head_bias_v"},
}


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest) -> LanguageModel:
    return random_model(CONFIGS[request.param])


def matrices(model: LanguageModel) -> dict[str, np.ndarray]:
    """The parameters with a row for each token."""
    return {path: np.asarray(leaf) for path, leaf in parameters(model).items() if path in ROWS["gptj"]}


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)
        assert found[path].dtype == value.dtype


@pytest.mark.parametrize("name", CONFIGS)
def test_name_rows_are_means(name: str) -> None:
    model = random_model(CONFIGS[name])
    grown = with_name_rows(model, NAMES)
    assert grown.config == dataclasses.replace(model.config, num_tools=4, padded_vocab_size=128)
    before, after = matrices(model), matrices(grown)
    assert after.keys() == ROWS[name]
    for path, table in after.items():
        assert table.shape == (128, *before[path].shape[1:])
        np.testing.assert_array_equal(table[:V], before[path])
        for tool, ids in enumerate(NAMES):
            mean = sum(before[path][i].astype(np.float64) for i in ids) / len(ids)
            np.testing.assert_allclose(table[V + tool], mean, rtol=1e-6, atol=1e-7)
        assert (table[V + len(NAMES) :] == 0).all()
    rest = parameters(grown).keys() - after.keys()
    assert_same({path: parameters(grown)[path] for path in rest}, {path: parameters(model)[path] for path in rest})


def test_shrinking_gives_the_original_back(model: LanguageModel) -> None:
    shrunk = without_tool_rows(with_name_rows(model, NAMES))
    assert shrunk.config == model.config
    assert_same(parameters(shrunk), parameters(model))
    assert jax.tree.structure(shrunk) == jax.tree.structure(model)


def test_growing_leaves_text_logits_alone(model: LanguageModel) -> None:
    tokens = np.random.default_rng(0).integers(V, size=(2, 9))
    grown = with_name_rows(model, NAMES)
    before, after = logits(model, tokens), logits(grown, tokens)
    known = model.config.text_tokens or V
    impossible = np.isneginf(after)
    assert impossible[..., known:V].all() and impossible[..., V + len(NAMES) :].all()
    assert not impossible[..., :known].any() and not impossible[..., V : V + len(NAMES)].any()
    np.testing.assert_allclose(after[..., :V], before, rtol=0, atol=1e-5)
    # The head is linear: a mean of rows (and biases) has the mean of the logits.
    for tool, ids in enumerate(NAMES):
        np.testing.assert_allclose(after[..., V + tool], before[..., ids].mean(axis=-1), atol=1e-4)


def test_growing_again_replaces_the_tools(model: LanguageModel) -> None:
    once = with_name_rows(with_name_rows(model, NAMES[:2]), NAMES[2:])
    assert_same(parameters(once), parameters(with_name_rows(model, NAMES[2:])))


def test_rows_of_padding_make_no_difference(model: LanguageModel) -> None:
    config = dataclasses.replace(model.config, padded_vocab_size=256)
    values = parameters(model)
    for path in matrices(model):
        values[path] = jnp.pad(values[path], ((0, 256 - V), *[(0, 0)] * (values[path].ndim - 1)))
    padded = with_parameters(abstract_model(lambda: build_model(config)), values)
    assert_same(parameters(with_name_rows(padded, NAMES)), parameters(with_name_rows(model, NAMES)))
    known = model.config.text_tokens or V
    with pytest.raises(ValueError, match=f"outside the {known} rows of tokens"):
        with_name_rows(padded, [[known]])


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


@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_mesh(name: str) -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    layouts = {
        path: NamedSharding(mesh, PartitionSpec(*(("model",) if path == "head_bias_v" else ("model", "fsdp"))))
        for path in ROWS[name]
    }
    plain, sharded = random_model(CONFIGS[name]), random_model(CONFIGS[name], mesh=mesh)
    plain_tables = matrices(with_name_rows(plain, NAMES))
    with jax.set_mesh(mesh):
        grown = with_name_rows(sharded, NAMES)
        assert grown.config.rows == 256
        for path, layout in layouts.items():
            leaf = parameters(grown)[path]
            assert leaf.sharding.is_equivalent_to(layout, leaf.ndim)
            table = np.asarray(leaf)
            np.testing.assert_array_equal(table[:128], plain_tables[path])
            assert len(table) == 256 and not table[128:].any()
        impossible = np.isneginf(logits(grown, [[1, 2, V + 3]] * 4))
        assert (impossible == np.isin(np.arange(256), forbidden(grown.config))).all()
        shrunk = without_tool_rows(grown)
        before = moments_of(sharded)
        after = resized_optimizer_state(before, sharded.config, grown)
        back = resized_optimizer_state(after, grown.config, sharded)
    assert_same(parameters(shrunk), parameters(plain))
    assert_same_layout(shrunk, sharded)
    assert_same_layout(after["mu"], grown)
    assert_same_layout(back["mu"], sharded)
    assert_same(parameters(back["mu"]), parameters(before["mu"]))


def forbidden(config: LanguageModelConfig) -> list[int]:
    """Ids that are neither a token nor a tool."""
    return [*range(config.text_tokens or V, V), *range(V + config.num_tools, config.rows)]


def moments_of(model: LanguageModel) -> dict[str, Any]:
    """A state that holds a tree like the model, laid out like it."""
    mesh = model.embedding_vd[...].sharding.mesh if active_mesh_axes() else None
    return {"count": jnp.int32(3), "mu": random_model(model.config, mesh=mesh, seed=5)}


def assert_same_layout(found: LanguageModel, expected: LanguageModel) -> None:
    for path, leaf in parameters(found).items():
        wanted = parameters(expected)[path]
        assert leaf.shape == wanted.shape and leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim), path


def filled(optimizer: optax.GradientTransformation, model: LanguageModel) -> Any:
    """A state of the optimiser for the model, all of it random numbers other than 0."""
    rng = np.random.default_rng(3)
    shapes = jax.eval_shape(optimizer.init, model)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.integers(1, 99, leaf.shape), leaf.dtype), shapes)


def moments(state: Any) -> list[LanguageModel]:
    found = [leaf for leaf in jax.tree.leaves(state, is_leaf=is_model) if is_model(leaf)]
    assert len(found) == 2  # first and second
    return found


def is_model(node: Any) -> bool:
    return isinstance(node, LanguageModel)


def test_optimizer_state_follows(model: LanguageModel) -> None:
    optimizer = optax.adamw(1e-3)
    before = filled(optimizer, model)
    grown = with_name_rows(model, NAMES)
    after = resized_optimizer_state(before, model.config, grown)
    assert jax.tree.structure(after) == jax.tree.structure(jax.eval_shape(optimizer.init, grown))
    assert after[0].count == before[0].count
    for old, new in zip(moments(before), moments(after), strict=True):
        assert parameters(old).keys() == parameters(new).keys()
        for path, leaf in parameters(new).items():
            kept = parameters(old)[path]
            if path in matrices(model):
                assert leaf.shape == parameters(grown)[path].shape
                np.testing.assert_array_equal(leaf[:V], kept)
                assert np.asarray(kept).all() and not np.asarray(leaf[V:]).any()
            else:
                np.testing.assert_array_equal(leaf, kept, err_msg=path)
    back = resized_optimizer_state(after, grown.config, model)
    assert jax.tree.structure(back) == jax.tree.structure(before)
    for found, wanted in zip(jax.tree.leaves(back), jax.tree.leaves(before), strict=True):
        np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("tools", [2, 6])
def test_moments_of_surviving_tools_are_kept(model: LanguageModel, tools: int) -> None:
    grown = with_name_rows(model, NAMES)
    before = filled(optax.adamw(1e-3), grown)
    resized = with_name_rows(model, [[1]] * tools)
    after = resized_optimizer_state(before, grown.config, resized)
    for old, new in zip(moments(before), moments(after), strict=True):
        for path, table in matrices(new).items():
            kept = V + min(tools, 4)
            np.testing.assert_array_equal(table[:kept], matrices(old)[path][:kept])
            assert table[:kept].all() and not table[kept:].any()


def only(paths: set[str]) -> Any:
    """A mask of optax that lets these parameters through."""

    def mask(model: LanguageModel) -> Any:
        flags = [path in paths for path in parameters(model)]
        return jax.tree.unflatten(jax.tree.structure(model), flags)

    return mask


OPTIMIZERS = {
    "momentum": optax.sgd(0.1, momentum=0.9),
    "bfloat16 moments": optax.adam(1e-3, mu_dtype="bfloat16"),
    "adafactor": optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "accumulation": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "rows alone": optax.masked(optax.adam(1e-3), only({"embedding_vd", "head_vd"})),
    "no rows": optax.masked(optax.adam(1e-3), only({"blocks.query_dnh"})),
    "chain": optax.chain(optax.trace(0.9), optax.scale_by_rms(), optax.ema(0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_other_optimizers(name: str) -> None:
    optimizer = OPTIMIZERS[name]
    old = tools_config(CONFIGS["gptj"], 3)
    model = random_model(old)
    change = catalog_change(["a", "b", "c"], ["c", "d", "a", *"efghijklmnopqrstuvwxyz0123456789"])
    grown = with_catalog(model, change, TokenMean(token_ids=[[1]] * change.new_count))
    assert (old.rows, grown.config.rows) == (128, 256)
    source = np.full(256, -1)
    source[: V + 3] = [*range(V), V + 2, -1, V]

    state = filled(optimizer, model)
    found = resized_optimizer_state(state, old, grown, change)
    wanted = jax.eval_shape(optimizer.init, grown)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    rows = 0
    for before, after, shape in zip(*map(jax.tree.leaves, (state, found, wanted)), strict=True):
        assert after.shape == shape.shape and after.dtype == shape.dtype
        expected = np.asarray(before)
        if expected.shape[:1] == (128,):
            rows += 1
            expected = np.where((source >= 0).reshape(-1, *[1] * (expected.ndim - 1)), expected[source], 0)
        np.testing.assert_array_equal(after, expected)
    # Adafactor keeps the bias whole and for a matrix one number per row.
    assert rows == {"momentum": 3, "adafactor": 3, "accumulation": 9, "rows alone": 4, "no rows": 0}.get(name, rows)
    assert rows >= 3 or name == "no rows"


def test_state_of_tool_rows_alone(model: LanguageModel) -> None:
    grown = with_name_rows(model, NAMES)
    optimizer = optax.adam(1e-3)
    part = {path: grown.tool_block.read(leaf) for path, leaf in parameters(grown).items() if path in matrices(grown)}
    part["blocks.query_lora_dr"] = jnp.ones((2, D, 4))
    state = jax.tree.map(lambda leaf: leaf + 7, optimizer.init(part))
    change = catalog_change([*"abcd"], [*"dxb"])
    smaller = with_catalog(grown, change, TokenMean(token_ids=[[], [5], []]))
    found = resized_optimizer_state(state, grown.config, smaller, change)
    for name in ("mu", "nu"):
        moments = getattr(found[0], name)
        assert moments.keys() == part.keys() and (moments["blocks.query_lora_dr"] == 7).all()
        for path in matrices(grown):
            block = np.asarray(moments[path])
            assert (
                block.shape == part[path].shape and (block[[0, 2]] == 7).all() and not block[[1, *range(3, 128)]].any()
            )


def test_states_that_do_not_fit(model: LanguageModel) -> None:
    grown = with_name_rows(model, NAMES)
    with pytest.raises(ValueError, match="from 4 to 0 tools, the models have 0 and 4"):
        resized_optimizer_state({}, model.config, grown, catalog_change([*"abcd"], []))
    with pytest.raises(ValueError, match=r"embedding_vd: optimiser state of shape \[100, 32\], expected \[128, 32\]"):
        resized_optimizer_state([model], grown.config, grown)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([[1], []], "tool 1: its name has no token"),
        ([[1], [0.5]], r"tool 1: its name is \[0.5\], expected token ids"),
        ([[1, V]], rf"tool 0: token ids 1 to {V} are outside the {V} rows"),
        ([[1], [2], [3, -1]], rf"tool 2: token ids -1 to 3 are outside the {V} rows"),
    ],
)
def test_names_without_rows(model: LanguageModel, ids: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mean_rows(model.embedding_vd[...], ids)


@pytest.mark.parametrize(
    ("name", "rows", "words"),
    [
        ("untied", {"embedding_vd": (4, D)}, r"tool rows given for \['embedding_vd'\], the model has"),
        ("untied", {"embedding_vd": (4, D), "head_vd": (4, D), "other": (4, D)}, "tool rows given for"),
        ("untied", {"embedding_vd": (4, D), "head_vd": (3, D)}, rf"have shapes .*, expected one \[T, {D}\]$"),
        ("untied", {"embedding_vd": (4, D - 1), "head_vd": (4, D - 1)}, rf"expected one \[T, {D}\]"),
        ("untied", {"embedding_vd": (D,), "head_vd": (D,)}, rf"expected one \[T, {D}\]"),
        ("tied", {"embedding_vd": (1, D), "head_vd": (1, D)}, r"'head_vd'\], the model has \['embedding_vd'\]"),
        (
            "gptj",
            {"embedding_vd": (4, D), "head_vd": (4, D)},
            r"the model has .*'head_bias_v', 'head_vd'\]",
        ),
        (
            "gptj",
            {"embedding_vd": (4, D), "head_vd": (4, D), "head_bias_v": (4, 1)},
            rf"expected one \[T, {D}\] and \[T\] for the bias",
        ),
    ],
)
def test_rows_that_do_not_fit(name: str, rows: dict[str, tuple[int, ...]], words: str) -> None:
    given = {path: np.zeros(shape, np.float32) for path, shape in rows.items()}
    with pytest.raises(ValueError, match=words):
        with_tool_rows(random_model(CONFIGS[name]), given)


def test_given_rows(model: LanguageModel) -> None:
    rng = np.random.default_rng(0)
    given = {path: rng.standard_normal((5, *leaf.shape[1:])) for path, leaf in matrices(model).items()}
    for path, table in matrices(with_tool_rows(model, given)).items():
        np.testing.assert_array_equal(table[V : V + 5], given[path].astype(np.float32))
        np.testing.assert_array_equal(table[:V], matrices(model)[path])


def test_text_rows_that_the_mesh_does_not_divide_stay_padded() -> None:
    config = dataclasses.replace(CONFIG, vocab_size=101)
    assert tools_config(config, 0) == config
    with jax.set_mesh(make_mesh(MeshConfig(model=2))):
        assert tools_config(config, 0).rows == tools_config(config, 4).rows == 256
