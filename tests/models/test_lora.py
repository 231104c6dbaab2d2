"""Low-rank updates against numpy, the plain model's gradients, and torch."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxtool.config import MeshConfig
from jaxtool.models import (
    LanguageModel,
    abstract_model,
    build_model,
    config_from_json,
    config_to_json,
    lora_config,
    lora_paths,
    parameters,
    with_lora,
    with_parameters,
    without_lora,
)
from jaxtool.parallel import make_mesh
from tests.tiny_models import CONFIG, CONFIGS, load_model, logits, random_model

RANK, ALPHA = 3, 5.0
# The two factors of each weight.
LLAMA = {
    "query_dnh": ("query_lora_dr", "query_lora_rnh"),
    "key_dkh": ("key_lora_dr", "key_lora_rkh"),
    "value_dkh": ("value_lora_dr", "value_lora_rkh"),
    "output_nhd": ("output_lora_nhr", "output_lora_rd"),
    "gate_df": ("gate_lora_dr", "gate_lora_rf"),
    "up_df": ("up_lora_dr", "up_lora_rf"),
    "down_fd": ("down_lora_fr", "down_lora_rd"),
}


def mesh_of(data: int, fsdp: int, model: int) -> Mesh:
    return make_mesh(MeshConfig(data=data, fsdp=fsdp, model=model), jax.devices()[: data * fsdp * model])


def full_lora(config: Any) -> Any:
    return lora_config(config, rank=RANK, alpha=ALPHA, projections=tuple(config.projections))


def merged_by_numpy(model: LanguageModel) -> dict[str, np.ndarray]:
    """float64 weights of the blocks, each with its update added by a plain matrix product per layer."""
    values = {path: np.asarray(leaf, np.float64) for path, leaf in parameters(model).items()}
    merged = {}
    for weight, (first, second) in lora_paths(model.config).items():
        w, a, b = values[weight], values[first], values[second]
        update = [a[layer].reshape(-1, RANK) @ b[layer].reshape(RANK, -1) * (ALPHA / RANK) for layer in range(len(w))]
        merged[weight] = w + np.stack(update).reshape(w.shape)
    return merged


def random_tokens(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).integers(CONFIG.vocab_size, size=shape)


def test_new_factors_change_nothing() -> None:
    model = random_model()
    projections = ("query", "output", "down")
    grown = with_lora(model, rank=RANK, alpha=ALPHA, projections=projections, seed=1)
    assert grown.config == dataclasses.replace(CONFIG, lora_rank=3, lora_alpha=5.0, lora_projections=projections)
    assert config_from_json(config_to_json(grown.config)) == grown.config
    tokens = random_tokens(2, 9)
    np.testing.assert_array_equal(logits(grown, tokens), logits(model, tokens))
    before, after = parameters(model), parameters(grown)
    factors = [name for weight in ("query_dnh", "output_nhd", "down_fd") for name in LLAMA[weight]]
    assert after.keys() - before.keys() == {f"blocks.{name}" for name in factors}
    assert all(after[path] is leaf for path, leaf in before.items())
    sizes = {"d": 32, "n": 4, "h": 8, "f": 48, "r": RANK}
    for name in factors:
        leaf, letters = np.asarray(after[f"blocks.{name}"]), name.rsplit("_", 1)[1]
        assert leaf.shape == (2, *(sizes[letter] for letter in letters))
        if letters[0] == "r":
            assert not leaf.any()
        else:  # normal with variance 1 / inputs
            inputs = math.prod(leaf.shape[1:-1])
            assert 0.7 < leaf.std() * math.sqrt(inputs) < 1.3
            assert not np.array_equal(leaf[0], leaf[1])
    other = with_lora(model, rank=RANK, alpha=ALPHA, projections=projections, seed=2)
    assert not np.array_equal(parameters(other)["blocks.query_lora_dr"], after["blocks.query_lora_dr"])
    back = without_lora(grown)
    assert back.config == dataclasses.replace(CONFIG, lora_alpha=5.0)
    for path, leaf in parameters(back).items():
        np.testing.assert_array_equal(leaf, before[path])


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_weights(name: str) -> None:
    model = random_model(full_lora(CONFIGS[name]))
    merged = without_lora(model)
    assert not merged.config.lora_projections
    found, expected, before = parameters(merged), merged_by_numpy(model), parameters(model)
    assert len(expected) == len(CONFIGS[name].projections)
    if name == "llama":
        assert {w: (a, b) for w, (a, b) in lora_paths(model.config).items()} == {
            f"blocks.{w}": (f"blocks.{a}", f"blocks.{b}") for w, (a, b) in LLAMA.items()
        }
    for path, leaf in found.items():
        if path in expected:
            np.testing.assert_allclose(leaf, expected[path], rtol=1e-6, atol=1e-6)
            assert np.abs(expected[path] - before[path]).max() > 0.3
        else:
            assert leaf is before[path]
    tokens = random_tokens(2, 9)
    np.testing.assert_allclose(logits(merged, tokens), logits(model, tokens), rtol=1e-5, atol=1e-5)
    assert without_lora(merged) is merged


def test_merging_rounds_once() -> None:
    """bfloat16 weights: the update is computed in float32, and only the sum is rounded."""
    model = random_model(dataclasses.replace(full_lora(CONFIG), param_dtype="bfloat16"))
    for path, expected in merged_by_numpy(model).items():
        found = np.asarray(parameters(without_lora(model))[path])
        assert found.dtype == jnp.bfloat16
        # Half a unit in the last of 8 bits, and float32's error.
        half = 2.0 ** (np.floor(np.log2(np.abs(expected))) - 8)
        assert (np.abs(found.astype(np.float64) - expected) <= half + 1e-6).all()


def test_on_eight_devices() -> None:
    mesh = mesh_of(2, 2, 2)
    projections = tuple(CONFIG.projections)
    single = with_lora(random_model(), rank=4, alpha=ALPHA, projections=projections, seed=3)
    with jax.set_mesh(mesh):
        grown = with_lora(random_model(mesh=mesh), rank=4, alpha=ALPHA, projections=projections, seed=3)
        shape = abstract_model(lambda: build_model(grown.config), mesh)
        random = random_model(grown.config, mesh=mesh)
        merged = without_lora(random)
    for path, leaf in parameters(grown).items():
        np.testing.assert_allclose(leaf, parameters(single)[path], rtol=1e-6, err_msg=path)
        assert leaf.sharding == parameters(shape)[path].sharding, path
    assert not parameters(grown)["blocks.query_lora_dr"].sharding.is_fully_replicated
    expected = parameters(without_lora(random_model(grown.config)))
    for path, leaf in parameters(merged).items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-6, atol=1e-6, err_msg=path)
        assert leaf.sharding.is_equivalent_to(parameters(random)[path].sharding, leaf.ndim), path


@pytest.mark.parametrize("on_mesh", [False, True])
def test_abstract_models(on_mesh: bool) -> None:
    mesh = mesh_of(2, 2, 2) if on_mesh else None
    plain = abstract_model(lambda: build_model(CONFIG), mesh)
    config = full_lora(CONFIG)

    def check() -> None:
        grown = with_lora(plain, rank=RANK, alpha=ALPHA, projections=config.lora_projections)
        assert jax.tree.structure(without_lora(grown)) == jax.tree.structure(
            abstract_model(lambda: build_model(dataclasses.replace(CONFIG, lora_alpha=ALPHA)))
        )
        for path, leaf in parameters(abstract_model(lambda: build_model(config), mesh)).items():
            found = parameters(grown)[path]
            assert (found.shape, found.dtype, found.sharding) == (leaf.shape, leaf.dtype, leaf.sharding), path

    if mesh is None:
        check()
    else:
        with jax.set_mesh(mesh):
            check()


def test_gradients_of_the_factors() -> None:
    """dA = s dW B^T and dB = s A^T dW, where dW is the gradient of the merged weight in the plain model."""
    model = random_model(full_lora(CONFIG))
    tokens = jnp.asarray(random_tokens(2, 12))
    positions, segments = jnp.broadcast_to(jnp.arange(12), (2, 12)), jnp.ones((2, 12), int)

    @jax.jit
    @jax.grad
    def gradient(model: LanguageModel) -> jax.Array:
        log_probs = jax.nn.log_softmax(model.logits(model(tokens, positions, segments)))
        return -jnp.mean(jnp.take_along_axis(log_probs[:, :-1], tokens[:, 1:, None], axis=-1))

    found = parameters(gradient(model))
    plain = {path: np.asarray(leaf, np.float64) for path, leaf in parameters(gradient(without_lora(model))).items()}
    factors = {path: np.asarray(leaf, np.float64) for path, leaf in parameters(model).items()}
    scale = ALPHA / RANK
    for weight, pair in LLAMA.items():
        first, second = (f"blocks.{name}" for name in pair)
        for layer in range(CONFIG.num_hidden_layers):
            a, b = factors[first][layer].reshape(-1, RANK), factors[second][layer].reshape(RANK, -1)
            slope = plain[f"blocks.{weight}"][layer].reshape(len(a), -1)
            for path, expected in ((first, scale * slope @ b.T), (second, scale * a.T @ slope)):
                value = np.asarray(found[path][layer], np.float64).reshape(expected.shape)
                error = np.linalg.norm(value - expected) / np.linalg.norm(expected)
                assert error <= 1e-4, f"{path}: {error:.1e}"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rank": 0}, "lora_rank is 0 with 1 projections, expected a positive rank"),
        ({"projections": ()}, "lora_rank is 3 with 0 projections"),
        ({"projections": ("query", "gates")}, "lora_projections has gates, llama has query, key, value"),
    ],
)
def test_settings_that_do_not_fit(changes: dict[str, Any], words: str) -> None:
    settings = {"rank": 3, "alpha": 1.0, "projections": ("query",)} | changes
    with pytest.raises(ValueError, match=words):
        with_lora(random_model(), **settings)


def test_factors_are_added_once() -> None:
    with pytest.raises(ValueError, match="has low-rank factors already, merge them first"):
        with_lora(random_model(full_lora(CONFIG)), rank=1, alpha=1.0, projections=("query",))


@pytest.mark.torch
def test_torch_with_merged_weights(tmp_path: Path) -> None:
    """A checkpoint of transformers, updated in numpy and run by torch, against our factors on the old checkpoint."""
    torch = pytest.importorskip("torch", reason="the parity oracle torch is not installed")
    import transformers

    torch.manual_seed(1)
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=320,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=64,
            initializer_range=0.2,
            attn_implementation="eager",
        )
    ).eval()
    reference.save_pretrained(tmp_path)
    plain = load_model(tmp_path)
    model = with_lora(plain, rank=RANK, alpha=ALPHA, projections=tuple(plain.config.projections))
    rng = np.random.default_rng(3)
    values = parameters(model)
    for path in [name for pair in lora_paths(model.config).values() for name in pair]:
        values[path] = jnp.asarray(0.2 * rng.standard_normal(values[path].shape), jnp.float32)
    model = with_parameters(model, values)

    names = {
        "query_dnh": "self_attn.q_proj",
        "key_dkh": "self_attn.k_proj",
        "value_dkh": "self_attn.v_proj",
        "output_nhd": "self_attn.o_proj",
        "gate_df": "mlp.gate_proj",
        "up_df": "mlp.up_proj",
        "down_fd": "mlp.down_proj",
    }
    with torch.no_grad():
        for layer, block in enumerate(reference.model.layers):
            for weight, name in names.items():
                a, b = (np.asarray(values[f"blocks.{factor}"][layer], np.float64) for factor in LLAMA[weight])
                update = ALPHA / RANK * a.reshape(-1, RANK) @ b.reshape(RANK, -1)
                linear = block.get_submodule(name)  # torch keeps [out, in]
                linear.weight += torch.tensor(update.T, dtype=torch.float32)
        tokens = rng.integers(320, size=(1, 40))
        expected = reference(torch.tensor(tokens)).logits.numpy()
        before = logits(plain, tokens)
    assert np.abs(before - expected).max() > 1
    scale = np.abs(expected).max()
    assert np.abs(logits(model, tokens) - expected).max() <= 1e-5 * scale
    assert np.abs(logits(without_lora(model), tokens) - expected).max() <= 1e-5 * scale
