"""A model follows its tool catalogue: growing, shrinking and growing again by the difference of the names.

The truth is a dictionary from name to learned row, kept beside the model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.models import (
    CatalogChange,
    LanguageModel,
    LanguageModelConfig,
    LlamaConfig,
    TokenMean,
    abstract_model,
    build_model,
    catalog_change,
    initialise,
    parameters,
    resized_optimizer_state,
    tools_config,
    with_catalog,
    with_parameters,
    without_tool_rows,
)
from jaxtool.parallel import make_mesh
from jaxtool.tools import Tool, ToolCatalog
from tests.tiny_models import CONFIG, GPTJ_CONFIG, QWEN3_CONFIG, logits, random_model

ROWS = ("embedding_vd", "head_vd", "head_bias_v")
CONFIGS = {
    "llama": CONFIG,
    "qwen3 tied": dataclasses.replace(QWEN3_CONFIG, tie_word_embeddings=True),
    "gptj": dataclasses.replace(GPTJ_CONFIG, text_tokens=93),
}


# ---- the difference of two lists of names ---------------------------------------------------------------------------

some_names = st.lists(st.sampled_from("abcdefghijkl"), unique=True)


@given(some_names, some_names)
def test_difference(old: list[str], new: list[str]) -> None:
    change = catalog_change(old, new)
    assert change.old_count == len(old) and change.new_count == len(new)
    for tool, source in enumerate(change.sources):
        assert (new[tool] not in old) if source is None else (old[source] == new[tool])
    assert change.kept == len(set(old) & set(new))
    assert change.added == len(set(new) - set(old))
    assert change.removed == len(set(old) - set(new))
    assert change.moved == sum(old.index(name) != new.index(name) for name in set(old) & set(new))
    assert [new[tool] for tool in change.added_ids] == [name for name in new if name not in old]
    back = catalog_change(new, old)
    assert (back.added, back.removed, back.kept, back.moved) == (
        change.removed,
        change.added,
        change.kept,
        change.moved,
    )


def test_line() -> None:
    old = [f"tool {i}" for i in range(2000)]
    assert str(catalog_change(old, ["tool 0", "new", *old[5:]])) == (
        "2,000 tools before, 1,997 now: 1,996 kept (1,995 with another id), 1 added, 4 removed"
    )


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (["a", "b", "a"], ["a"], "old tools 0 and 2 are both named 'a'"),
        (["a"], ["b", "c", "c"], "new tools 1 and 2 are both named 'c'"),
        (["a"], "ab", "new tools: expected a sequence of names, found the text 'ab'"),
    ],
)
def test_names_that_are_no_key(old: Sequence[str], new: Sequence[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        catalog_change(old, new)


def test_names_are_compared_exactly() -> None:
    change = catalog_change(["Get", "a b", "é"], ["get", "a  b", "e\u0301", "Get"])
    assert change.sources == (None, None, None, 0)


@pytest.mark.parametrize(
    ("sources", "words"),
    [
        ((0, 3), "new tool 1 comes from old tool 3, expected 0 to 2"),
        ((-1,), "new tool 0 comes from old tool -1"),
        ((1, None, 1), "new tools 0 and 2 both come from old tool 1"),
    ],
)
def test_impossible_changes(sources: tuple[int | None, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        CatalogChange(old_count=3, sources=sources)


# ---- models and optimiser states through a series of catalogues -----------------------------------------------------

CATALOGS = [
    [f"<<tool {i}&&call>>" for i in range(9)],
    # Some leave from the middle, the rest turns round, others come in between.
    ["x && y", "<<tool 8&&call>>", "<<tool 4&&call>>", "new", "<<tool 1&&call>>", "<<tool 0&&call>>"],
    ["<<tool 0&&call>>"],
    # More than a block of rows; a tool that left comes back as a new one.
    ["<<tool 4&&call>>", *(f"many {i}" for i in range(130)), "<<tool 0&&call>>"],
    [],
    ["<<tool 0&&call>>", "last"],
]


def name_ids(name: str) -> list[int]:
    return [byte % 90 for byte in name.encode()]


def same(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


def random_like(model: LanguageModel, rng: np.random.Generator) -> LanguageModel:
    """The model after some training: other values in text and tool rows, zeros where no row is."""
    values = parameters(model)
    used = model.config.vocab_size + model.config.num_tools
    for path in ROWS:
        if path in values:
            table = rng.standard_normal(values[path].shape).astype(np.float32)
            table[used:] = 0
            values[path] = jax.device_put(table, values[path].sharding)
    return with_parameters(model, values)


@pytest.mark.parametrize("on_mesh", [False, True], ids=["one device", "mesh"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_a_model_follows_its_catalogue(config: LanguageModelConfig, on_mesh: bool) -> None:
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2)) if on_mesh else None
    multiple = 256 if on_mesh else 128
    rng = np.random.default_rng(0)
    original = model = random_model(config, mesh=mesh)
    v = config.vocab_size
    text = {path: np.asarray(leaf) for path, leaf in parameters(model).items() if path in ROWS}
    moment_text: dict[str, np.ndarray] = {}
    learned: dict[str, dict[str, np.ndarray]] = {path: {} for path in text}
    moments: dict[str, dict[str, np.ndarray]] = {path: {} for path in text}
    catalog = ToolCatalog([])
    with jax.set_mesh(mesh) if mesh else jax.default_device(None):
        for names in CATALOGS:
            new = ToolCatalog([Tool(name=name) for name in names])
            change = catalog_change([tool.name for tool in catalog], [tool.name for tool in new])

            # The optimiser's state before: its moments are those of every row, zero behind the last tool.
            state = (
                optax.ScaleByAdamState(count=jnp.int32(7), mu=random_like(model, rng), nu=model),
                optax.EmptyState(),
            )
            for path in text:
                table = np.asarray(parameters(state[0].mu)[path])
                moment_text[path] = table[:v]
                moments[path] = {tool.name: table[v + i] for i, tool in enumerate(catalog)}

            before = model.config
            model = with_catalog(model, change, TokenMean(token_ids=[name_ids(tool.name) for tool in new]))
            state = resized_optimizer_state(state, before, model, change)
            catalog = new

            assert model.config.num_tools == len(names)
            assert model.config.rows == (-(-(v + len(names)) // multiple) * multiple if names else v)
            for path in text:
                table = np.asarray(parameters(model)[path])
                moment = np.asarray(parameters(state[0].mu)[path])
                assert table.shape == moment.shape == (model.config.rows, *text[path].shape[1:])
                same(table[:v], text[path])
                same(moment[:v], moment_text[path])
                for tool, name in enumerate(names, v):
                    if name in learned[path]:
                        same(table[tool], learned[path][name])
                        same(moment[tool], moments[path][name])
                        assert moment[tool].any()
                    else:
                        mean = text[path][name_ids(name)].astype(np.float64).mean(axis=0)
                        np.testing.assert_allclose(table[tool], mean, rtol=1e-5, atol=1e-6)
                        assert not moment[tool].any()
                assert not table[v + len(names) :].any() and not moment[v + len(names) :].any()
                for leaf in (parameters(model)[path], parameters(state[0].mu)[path]):
                    assert not mesh or leaf.sharding.is_equivalent_to(parameters(original)[path].sharding, leaf.ndim)
            assert state[0].count == 7
            for path in parameters(model).keys() - text.keys():
                same(parameters(model)[path], parameters(original)[path])

            # Training goes on: tool rows change, text rows don't.
            trained = parameters(random_like(model, rng))
            for path in text:
                table = np.concatenate([text[path], np.asarray(trained[path])[v:]])
                trained[path] = jax.device_put(table, parameters(model)[path].sharding)
                learned[path] = {name: table[tool] for tool, name in enumerate(names, v)}
            model = with_parameters(model, trained)

        assert learned["embedding_vd"].keys() == {"<<tool 0&&call>>", "last"}
        impossible = np.isneginf(logits(model, [[1, v, v + 1]] * 4))
        assert impossible.shape[-1] == multiple
        allowed = {*range(config.text_tokens or v), v, v + 1}
        assert (impossible == [i not in allowed for i in range(multiple)]).all()
        shrunk = without_tool_rows(model)
    assert shrunk.config == original.config
    for path, leaf in parameters(original).items():
        same(parameters(shrunk)[path], leaf)
        assert parameters(shrunk)[path].sharding.is_equivalent_to(leaf.sharding, leaf.ndim)


def test_a_change_of_other_tools() -> None:
    with pytest.raises(ValueError, match="a change of 3 tools, the model has 0"):
        with_catalog(random_model(), catalog_change(["a", "b", "c"], []))


# ---- 46,985 tools ---------------------------------------------------------------------------------------------------

LLAMA_3 = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    param_dtype="bfloat16",
)
TOOLS = [f"<<tool {i}&&call>>" for i in range(46_985)]


def digits(name: str) -> list[int]:
    return [100 + ord(letter) for letter in name if letter.isdigit()] or [7]


def count_of(model: LanguageModel) -> int:
    return sum(leaf.size for leaf in parameters(model).values())


@pytest.mark.parametrize(("parts", "rows"), [(1, 175_360), (4, 175_616)])
def test_llama_3_with_all_tools(parts: int, rows: int) -> None:
    """Shapes alone. 128,256 + 46,985 = 175,241, which is 1,369.1 times 128 and 342.3 times 512."""
    mesh = make_mesh(MeshConfig(fsdp=8 // parts, model=parts))
    change = catalog_change([], TOOLS)
    grow = lambda model: with_catalog(model, change, TokenMean(token_ids=[digits(name) for name in TOOLS]))  # noqa: E731
    with jax.set_mesh(mesh):
        text = abstract_model(lambda: build_model(LLAMA_3), mesh)
        grown = jax.eval_shape(grow, text)
        assert grown.config == tools_config(LLAMA_3, 46_985)
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14_336 + 2 * 4096
    body = 32 * block + 4096
    assert count_of(text) == body + 2 * 128_256 * 4096 == 8_030_261_248
    assert count_of(grown) == body + 2 * rows * 4096
    for path in ("embedding_vd", "head_vd"):
        leaf = parameters(grown)[path]
        assert (leaf.shape, leaf.dtype) == ((rows, 4096), jnp.bfloat16)
        assert leaf.sharding.spec == PartitionSpec("model", "fsdp")


def test_all_tools_on_a_narrow_model() -> None:
    """The real numbers of rows, and a catalogue that loses a seventh of its tools, is shuffled and gains a thousand."""
    config = dataclasses.replace(
        LLAMA_3,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        param_dtype="float32",
    )
    rng = np.random.default_rng(0)
    model = initialise(lambda: build_model(config))
    grown = with_catalog(model, catalog_change([], TOOLS), TokenMean(token_ids=[digits(name) for name in TOOLS]))
    first = tables_of(grown)
    for path, table in first.items():
        text = tables_of(model)[path]
        assert table.shape == (175_360, 16)
        same(table[:128_256], text)
        means = np.stack([text[digits(name)].mean(axis=0) for name in TOOLS[:2000]])
        np.testing.assert_allclose(table[128_256:130_256], means, rtol=1e-5, atol=1e-7)
        assert len(np.unique(table[128_256:175_241], axis=0)) > 1000 and not table[175_241:].any()

    names = [name for i, name in enumerate(TOOLS) if i % 7] + [f"<<added {i}&&call>>" for i in range(1000)]
    names = [names[i] for i in rng.permutation(len(names))]
    change = catalog_change(TOOLS, names)
    assert (change.kept, change.added, change.removed) == (40_272, 1000, 6713)
    changed = with_catalog(grown, change, TokenMean(token_ids=[digits(name) for name in names]))
    ids = {name: i for i, name in enumerate(TOOLS)}
    old = np.asarray([ids.get(name, -1) for name in names])
    for path, table in tables_of(changed).items():
        assert table.shape == (169_600, 16)  # 169,528 rows, 1,324.4 times 128
        same(table[:128_256], first[path][:128_256])
        tools = table[128_256:169_528]
        same(tools[old >= 0], first[path][128_256 + old[old >= 0]])
        new = [first[path][digits(names[i])].mean(axis=0) for i in np.flatnonzero(old < 0)]
        np.testing.assert_allclose(tools[old < 0], new, rtol=1e-5, atol=1e-7)
        assert not table[169_528:].any()
    for path, table in tables_of(without_tool_rows(changed)).items():
        same(table, tables_of(model)[path])


def tables_of(model: LanguageModel) -> Mapping[str, np.ndarray]:
    return {path: np.asarray(leaf) for path, leaf in parameters(model).items() if path in ROWS}
