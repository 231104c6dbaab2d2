"""The abstract tree: its shapes, its shardings, and filling it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.models import Llama, LlamaConfig, abstract_model, initialise, parameters, with_parameters
from jaxtool.parallel import AxisRules, make_mesh

P = PartitionSpec

CONFIG = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)
SHAPES = {
    "embedding_vd": (96, 32),
    "blocks.attention_norm_d": (2, 32),
    "blocks.query_dnh": (2, 32, 4, 8),
    "blocks.key_dkh": (2, 32, 2, 8),
    "blocks.value_dkh": (2, 32, 2, 8),
    "blocks.output_nhd": (2, 4, 8, 32),
    "blocks.mlp_norm_d": (2, 32),
    "blocks.gate_df": (2, 32, 48),
    "blocks.up_df": (2, 32, 48),
    "blocks.down_fd": (2, 48, 32),
    "final_norm_d": (32,),
    "head_vd": (96, 32),
}
SPECS = {
    "embedding_vd": P("model", "fsdp"),
    "blocks.attention_norm_d": P(None, None),
    "blocks.query_dnh": P(None, "fsdp", "model", None),
    "blocks.key_dkh": P(None, "fsdp", "model", None),
    "blocks.value_dkh": P(None, "fsdp", "model", None),
    "blocks.output_nhd": P(None, "model", None, "fsdp"),
    "blocks.mlp_norm_d": P(None, None),
    "blocks.gate_df": P(None, "fsdp", "model"),
    "blocks.up_df": P(None, "fsdp", "model"),
    "blocks.down_fd": P(None, "model", "fsdp"),
    "final_norm_d": P(None),
    "head_vd": P("model", "fsdp"),
}


def build(config: LlamaConfig = CONFIG, rules: AxisRules = AxisRules()) -> Llama:  # noqa: B008
    return Llama(config, rules, rngs=nnx.Rngs(0))


def test_shapes() -> None:
    leaves = parameters(abstract_model(build))
    assert {path: leaf.shape for path, leaf in leaves.items()} == SHAPES
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) and leaf.dtype == jnp.float32 for leaf in leaves.values())


@pytest.mark.parametrize("tied", [False, True])
def test_shardings_follow_the_rules(tied: bool) -> None:
    mesh = make_mesh(MeshConfig(fsdp=2, model=2))
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    leaves = parameters(abstract_model(lambda: build(config), mesh))
    expected = {path: spec for path, spec in SPECS.items() if not (tied and path == "head_vd")}
    assert leaves.keys() == expected.keys()
    for path, leaf in leaves.items():
        assert leaf.sharding.mesh == mesh, path
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, expected[path]), leaf.ndim), path


def test_other_rules_give_other_shardings() -> None:
    mesh = make_mesh(MeshConfig(fsdp=2, model=2))
    rules = AxisRules(embed=None, vocabulary=("fsdp", "model"), heads=None, kv_heads=None)
    leaves = parameters(abstract_model(lambda: build(rules=rules), mesh))
    assert leaves["embedding_vd"].sharding.spec == P(("fsdp", "model"), None)
    assert leaves["blocks.query_dnh"].sharding.is_fully_replicated
    assert leaves["blocks.down_fd"].sharding.spec == P(None, "model", None)


def test_initialised_parameters_are_born_sharded_and_do_not_depend_on_the_mesh() -> None:
    mesh = make_mesh(MeshConfig(fsdp=2, model=2))
    plain, sharded = parameters(initialise(build)), parameters(initialise(build, mesh))
    for path, leaf in sharded.items():
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, SPECS[path]), leaf.ndim), path
        np.testing.assert_allclose(leaf, plain[path], rtol=1e-6, atol=1e-7, err_msg=path)
    # Layers are drawn apart.
    query = np.asarray(plain["blocks.query_dnh"])
    assert np.abs(query[0] - query[1]).max() > 0.1


def test_llama_3_8b_has_the_published_size() -> None:
    """8,030,261,248 parameters; 46,985 tools pad both matrices to 175,360 rows. Nothing is allocated."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    mesh = make_mesh(MeshConfig(data=1, fsdp=4, model=2))

    def count(config: LlamaConfig) -> int:
        leaves = parameters(abstract_model(lambda: build(config), mesh)).values()
        return sum(leaf.size for leaf in leaves)

    assert count(config) == 8_030_261_248
    tools = dataclasses.replace(config, num_tools=46_985)
    assert count(tools) - count(config) == 2 * 4096 * (175_360 - 128_256)


def test_replacing_parameters() -> None:
    abstract = abstract_model(build)
    values = {path: jnp.full(shape, row, jnp.float32) for row, (path, shape) in enumerate(SHAPES.items())}
    model = with_parameters(abstract, values)
    assert all(leaf is values[path] for path, leaf in parameters(model).items())
    assert model.blocks.up_df[...] is values["blocks.up_df"]
    assert isinstance(parameters(abstract)["head_vd"], jax.ShapeDtypeStruct)


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("head_vd", None, r"missing \['head_vd'\], surplus none"),
        ("blocks.bias_d", jnp.zeros(1), r"missing none, surplus \['blocks.bias_d'\]"),
        ("final_norm_d", jnp.zeros(31), r"final_norm_d: expected float32\[32\], found float32\[31\]"),
        ("final_norm_d", jnp.zeros(32, jnp.bfloat16), r"final_norm_d: expected float32\[32\], found bfloat16\[32\]"),
    ],
)
def test_values_that_do_not_fit(path: str, value: Any, words: str) -> None:
    values = {name: jnp.zeros(shape) for name, shape in SHAPES.items()}
    if value is None:
        del values[path]
    else:
        values[path] = value
    with pytest.raises(ValueError, match=words):
        with_parameters(abstract_model(build), values)


def test_other_dtype_where_it_is_meant() -> None:
    values = {name: jnp.zeros(shape, jnp.bfloat16) for name, shape in SHAPES.items()}
    model = with_parameters(abstract_model(build), values, check_dtypes=False)
    assert parameters(model)["head_vd"].dtype == jnp.bfloat16
