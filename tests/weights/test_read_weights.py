"""From a folder to sharded arrays: values, shardings, bytes read, every mismatch between model and file."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import huggingface_hub
import huggingface_hub.utils
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from jaxtool.models import Llama, LlamaConfig, abstract_model, parameters
from jaxtool.weights import WeightsError, plan_weights, read_weights, resolve_model
from jaxtool.weights.load import HUB_PATTERNS
from jaxtool.weights.safetensors_reader import SafetensorsFolder
from jaxtool.weights.tensor_tables import LLAMA_TENSORS

WriteGguf = Callable[..., Path]

Abstract = dict[str, jax.ShapeDtypeStruct]
Arrays = dict[str, np.ndarray]

# Every kind of cut: over heads, inside heads, over both, over rows, over columns, over several mesh axes.
SPECS = {
    "embedding_vd": P("model", ("data", "fsdp")),
    "head_vd": P(("model", "fsdp"), None),
    "final_norm_d": P("model"),
    "blocks.attention_norm_d": P(None, None),
    "blocks.query_dnh": P(None, "fsdp", "model", None),
    "blocks.key_dkh": P(None, None, "model", "fsdp"),
    "blocks.value_dkh": P(None, ("data", "fsdp"), None, "model"),
    "blocks.output_nhd": P(None, "model", "fsdp", "data"),
    "blocks.mlp_norm_d": P(None, ("data", "fsdp", "model")),
    "blocks.gate_df": P(None, "fsdp", "model"),
    "blocks.up_df": P(None, ("data", "fsdp", "model"), None),
    "blocks.down_fd": P(None, "model", "fsdp"),
}


@pytest.fixture
def mesh() -> Mesh:
    return jax.make_mesh((2, 2, 2), ("data", "fsdp", "model"), axis_types=(AxisType.Explicit,) * 3)


def on_mesh(abstract: Abstract, mesh: Mesh) -> Abstract:
    return {
        path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, SPECS[path]))
        for path, leaf in abstract.items()
    }


def rewrite(folder: Path, tensors: Arrays, **config: Any) -> None:
    save_file(tensors, folder / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(fields))


def assert_equal(found: dict[str, jax.Array], expected: Arrays) -> None:
    assert found.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(found[path], value, err_msg=path)


@pytest.mark.parametrize("kind", ["model_folder", "sharded_folder"])
def test_on_one_device(kind: str, request: pytest.FixtureRequest, abstract: Abstract, expected: Arrays) -> None:
    assert_equal(read_weights(request.getfixturevalue(kind), abstract), expected)


@pytest.mark.parametrize("kind", ["model_folder", "sharded_folder", "gguf"])
def test_on_eight_devices(
    kind: str,
    request: pytest.FixtureRequest,
    write_gguf: WriteGguf,
    abstract: Abstract,
    expected: Arrays,
    mesh: Mesh,
) -> None:
    source = write_gguf() if kind == "gguf" else request.getfixturevalue(kind)
    found = read_weights(source, on_mesh(abstract, mesh))
    assert_equal(found, expected)
    for path, array in found.items():
        assert array.sharding == NamedSharding(mesh, SPECS[path])


def test_sharded_layers(model_folder: Path, abstract: Abstract, expected: Arrays) -> None:
    mesh = jax.make_mesh((3,), ("layer",), devices=jax.devices()[:3])
    leaf = abstract["blocks.query_dnh"]
    abstract["blocks.query_dnh"] = jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P("layer", None, None, None))
    )
    np.testing.assert_array_equal(
        read_weights(model_folder, abstract)["blocks.query_dnh"], expected["blocks.query_dnh"]
    )


def test_each_element_is_read_once_for_all_devices(
    model_folder: Path, hf_tensors: Arrays, abstract: Abstract, mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: Counter[str] = Counter()
    original = SafetensorsFolder.read

    def counting(self: SafetensorsFolder, name: str, index: tuple[slice, ...]) -> np.ndarray:
        part = original(self, name, index)
        read[name] += part.size
        return part

    monkeypatch.setattr(SafetensorsFolder, "read", counting)
    read_weights(model_folder, on_mesh(abstract, mesh))
    assert read == {name: value.size for name, value in hf_tensors.items()}


@pytest.mark.parametrize("stored", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_dtypes(
    model_folder: Path, hf_tensors: Arrays, abstract: Abstract, expected: Arrays, stored: Any, wanted: Any
) -> None:
    rewrite(model_folder, {name: value.astype(stored) for name, value in hf_tensors.items()})
    abstract = {path: jax.ShapeDtypeStruct(leaf.shape, wanted) for path, leaf in abstract.items()}
    found = read_weights(model_folder, abstract)
    for path, value in expected.items():
        assert found[path].dtype == wanted
        np.testing.assert_array_equal(found[path], value.astype(stored).astype(np.float32).astype(wanted))


@pytest.mark.parametrize("rows", [273, 384])
def test_rows_for_tools_are_zero(
    model_folder: Path, abstract: Abstract, expected: Arrays, mesh: Mesh, rows: int
) -> None:
    for path in ("embedding_vd", "head_vd"):
        abstract[path] = jax.ShapeDtypeStruct((rows, 64), jnp.float32)
    plan = plan_weights(model_folder, abstract)
    assert f"embedding_vd: {rows - 272} rows behind the 272 of the file are zero" in plan.notes
    for tree in [abstract] + [on_mesh(abstract, mesh)] * (rows % 8 == 0):
        found = read_weights(model_folder, tree)
        for path in ("embedding_vd", "head_vd"):
            rows_vd = np.asarray(found[path])
            np.testing.assert_array_equal(rows_vd[:272], expected[path])
            assert not rows_vd[272:].any()


def test_one_device_may_hold_nothing_but_added_rows(model_folder: Path, abstract: Abstract, expected: Arrays) -> None:
    mesh = jax.make_mesh((8,), ("model",))
    sharding = NamedSharding(mesh, P("model", None))
    abstract["embedding_vd"] = jax.ShapeDtypeStruct((1024, 64), jnp.float32, sharding=sharding)
    found = np.asarray(read_weights(model_folder, abstract)["embedding_vd"])
    np.testing.assert_array_equal(found[:272], expected["embedding_vd"])
    assert not found[272:].any()


def test_fewer_rows_than_the_vocabulary(model_folder: Path, abstract: Abstract) -> None:
    abstract["embedding_vd"] = jax.ShapeDtypeStruct((256, 64), jnp.float32)
    with pytest.raises(WeightsError, match="embedding_vd has 256 rows, the vocabulary 272"):
        read_weights(model_folder, abstract)


def test_abstract_mesh_is_refused(model_folder: Path, abstract: Abstract, mesh: Mesh) -> None:
    sharding = NamedSharding(mesh.abstract_mesh, P(None))
    abstract["final_norm_d"] = jax.ShapeDtypeStruct((64,), jnp.float32, sharding=sharding)
    with pytest.raises(WeightsError, match="final_norm_d: its sharding is on an abstract mesh"):
        read_weights(model_folder, abstract)


def test_missing_surplus_and_misshapen_are_told_at_once(
    model_folder: Path, hf_tensors: Arrays, abstract: Abstract
) -> None:
    del hf_tensors["model.layers.1.mlp.up_proj.weight"]
    hf_tensors["model.layers.3.mlp.up_proj.weight"] = np.zeros((96, 64), np.float32)
    hf_tensors["model.layers.0.self_attn.k_proj.weight"] = np.zeros((64, 64), np.float32)
    hf_tensors["model.norm.weight"] = np.zeros(64, np.int8)
    rewrite(model_folder, hf_tensors)
    with pytest.raises(WeightsError) as error:
        plan_weights(model_folder, abstract)
    for words in (
        str(model_folder),
        "missing (1): model.layers.1.mlp.up_proj.weight [96, 64]",
        "surplus (1): model.layers.3.mlp.up_proj.weight [96, 64] in model.safetensors",
        "wrong shape (1): model.layers.0.self_attn.k_proj.weight: expected [32, 64], found [64, 64] in m",
        "dtype not among BF16, F16, F32 (1): model.norm.weight: I8 in model.safetensors",
    ):
        assert words in str(error.value)


def test_long_lists_are_cut_with_their_number(model_folder: Path, hf_tensors: Arrays, abstract: Abstract) -> None:
    rewrite(model_folder, hf_tensors | {f"bias.{i:02}": np.zeros(1, np.float32) for i in range(25)})
    with pytest.raises(
        WeightsError, match=r"surplus \(25\): bias\.00 .*bias\.19 \[1\] in model\.safetensors and 5 more$"
    ):
        read_weights(model_folder, abstract)


def test_model_with_other_parameters(model_folder: Path, abstract: Abstract) -> None:
    abstract["lora_a"] = abstract.pop("final_norm_d")
    with pytest.raises(WeightsError, match="unknown lora_a, absent final_norm_d"):
        read_weights(model_folder, abstract)


@pytest.mark.parametrize("leaf", [jax.ShapeDtypeStruct((64, 1), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)])
def test_parameter_that_no_tensor_can_fill(model_folder: Path, abstract: Abstract, leaf: jax.ShapeDtypeStruct) -> None:
    abstract["final_norm_d"] = leaf
    with pytest.raises(WeightsError, match=r"parameter final_norm_d is .*expected 1 axes of a floating dtype"):
        read_weights(model_folder, abstract)


class TestTied:
    @pytest.fixture(autouse=True)
    def tied_abstract(self, abstract: Abstract) -> None:
        del abstract["head_vd"]

    def test_without_head(self, model_folder: Path, hf_tensors: Arrays, abstract: Abstract, expected: Arrays) -> None:
        del hf_tensors["lm_head.weight"], expected["head_vd"]
        rewrite(model_folder, hf_tensors, tie_word_embeddings=True)
        assert_equal(read_weights(model_folder, abstract), expected)

    def test_head_that_repeats_the_embedding(
        self, model_folder: Path, hf_tensors: Arrays, abstract: Abstract, expected: Arrays
    ) -> None:
        del expected["head_vd"]
        hf_tensors["lm_head.weight"] = hf_tensors["model.embed_tokens.weight"].copy()
        rewrite(model_folder, hf_tensors, tie_word_embeddings=True)
        assert_equal(read_weights(model_folder, abstract), expected)
        assert any(
            "lm_head.weight repeats the tied embedding" in note for note in plan_weights(model_folder, abstract).notes
        )

    def test_head_that_differs_in_one_value(self, model_folder: Path, hf_tensors: Arrays, abstract: Abstract) -> None:
        hf_tensors["lm_head.weight"] = hf_tensors["model.embed_tokens.weight"].copy()
        hf_tensors["lm_head.weight"][271, 63] += 1e-3
        rewrite(model_folder, hf_tensors, tie_word_embeddings=True)
        with pytest.raises(
            WeightsError, match=r"lm_head\.weight in model\.safetensors differs from model\.embed_tokens"
        ):
            read_weights(model_folder, abstract)

    def test_head_of_another_shape(self, model_folder: Path, hf_tensors: Arrays, abstract: Abstract) -> None:
        hf_tensors["lm_head.weight"] = np.zeros((8, 64), np.float32)
        rewrite(model_folder, hf_tensors, tie_word_embeddings=True)
        with pytest.raises(WeightsError, match=r"lm_head\.weight: expected \[272, 64\], found \[8, 64\]"):
            read_weights(model_folder, abstract)


def test_untied_without_head(model_folder: Path, hf_tensors: Arrays, abstract: Abstract) -> None:
    del hf_tensors["lm_head.weight"]
    rewrite(model_folder, hf_tensors)
    with pytest.raises(WeightsError, match=r"missing \(1\): lm_head\.weight"):
        read_weights(model_folder, abstract)


def test_rotary_frequencies_of_old_checkpoints(
    model_folder: Path, hf_tensors: Arrays, abstract: Abstract, expected: Arrays
) -> None:
    old = {f"model.layers.{layer}.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32) for layer in range(3)}
    rewrite(model_folder, hf_tensors | old)
    assert_equal(read_weights(model_folder, abstract), expected)
    (note,) = plan_weights(model_folder, abstract).notes
    assert "3 tensors that follow from the config not read: model.layers.0.self_attn.rotary_emb.inv_freq" in note


def test_table_covers_the_model_exactly() -> None:
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    model = parameters(abstract_model(lambda: Llama(config, rngs=nnx.Rngs(0))))
    assert sorted(rule.path for rule in LLAMA_TENSORS) == sorted(model)
    for rule in LLAMA_TENSORS:
        shape = model[rule.path].shape[1:] if rule.stacked else model[rule.path].shape
        assert sorted(axis for axes in rule.axes for axis in axes) == list(range(len(shape)))
        assert rule.stacked == ("{layer}" in rule.gguf) == rule.path.startswith("blocks.")
    assert sum(math.prod(leaf.shape) for leaf in model.values()) == 8_030_261_248  # Llama 3 8B


@pytest.mark.torch
def test_against_a_checkpoint_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=96,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
    )
    theirs.to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    layer = theirs.model.layers[1]
    x_d = torch.randn(32, dtype=torch.float64)
    theirs = theirs.to(torch.float64)

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    found = read_weights(
        tmp_path,
        {
            "embedding_vd": leaf(96, 32),
            "head_vd": leaf(96, 32),
            "final_norm_d": leaf(32),
            "blocks.attention_norm_d": leaf(2, 32),
            "blocks.query_dnh": leaf(2, 32, 4, 16),
            "blocks.key_dkh": leaf(2, 32, 2, 16),
            "blocks.value_dkh": leaf(2, 32, 2, 16),
            "blocks.output_nhd": leaf(2, 4, 16, 32),
            "blocks.mlp_norm_d": leaf(2, 32),
            "blocks.gate_df": leaf(2, 32, 48),
            "blocks.up_df": leaf(2, 32, 48),
            "blocks.down_fd": leaf(2, 48, 32),
        },
    )
    ours = {path: np.asarray(value, np.float64) for path, value in found.items()}
    x = x_d.numpy()
    with torch.no_grad():
        for path, module, product in (
            ("blocks.query_dnh", layer.self_attn.q_proj, "d,dnh->nh"),
            ("blocks.key_dkh", layer.self_attn.k_proj, "d,dkh->kh"),
            ("blocks.value_dkh", layer.self_attn.v_proj, "d,dkh->kh"),
            ("blocks.gate_df", layer.mlp.gate_proj, "d,df->f"),
            ("blocks.up_df", layer.mlp.up_proj, "d,df->f"),
        ):
            np.testing.assert_allclose(np.einsum(product, x, ours[path][1]).ravel(), module(x_d).numpy(), atol=1e-12)
        z_nh = torch.randn(64, dtype=torch.float64)
        np.testing.assert_allclose(
            np.einsum("nh,nhd->d", z_nh.numpy().reshape(4, 16), ours["blocks.output_nhd"][1]),
            layer.self_attn.o_proj(z_nh).numpy(),
            atol=1e-12,
        )
        z_f = torch.randn(48, dtype=torch.float64)
        np.testing.assert_allclose(
            z_f.numpy() @ ours["blocks.down_fd"][1], layer.mlp.down_proj(z_f).numpy(), atol=1e-12
        )
        np.testing.assert_allclose(ours["head_vd"] @ x, theirs.lm_head(x_d).numpy(), atol=1e-12)
        np.testing.assert_array_equal(ours["embedding_vd"], theirs.model.embed_tokens.weight.numpy())


class TestResolveModel:
    def test_local(self, model_folder: Path, write_gguf: WriteGguf) -> None:
        assert resolve_model(str(model_folder)) == model_folder
        assert resolve_model(write_gguf()) == write_gguf()

    def test_other_file(self, model_folder: Path) -> None:
        with pytest.raises(ValueError, match=r"expected a model folder, a \.gguf file or a hub id"):
            resolve_model(str(model_folder / "config.json"))

    @pytest.mark.parametrize("source", ["none", "/no/such/folder", "a/b/c", "../x/y", "dir/model.gguf", "", "~/x"])
    def test_nothing_there(self, source: str) -> None:
        with pytest.raises(FileNotFoundError, match=r"no such folder or \.gguf file, and not a hub id"):
            resolve_model(source)

    def test_absent_path(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match="no such folder"):
            resolve_model(tmp_path / "none")

    def test_offline(self) -> None:
        with pytest.raises(FileNotFoundError, match=r"nobody/nothing: no such local folder, and neither fetched"):
            resolve_model("nobody/nothing")

    def test_hub_id(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        files = [
            "config.json",
            "model-00001-of-00002.safetensors",
            "model.safetensors.index.json",
            "tokenizer.json",
        ]
        files += ["chat_template.jinja"]
        others = [
            "pytorch_model.bin",
            "original/consolidated.00.pth",
            "onnx/config.json",
            "x.py",
            "README.md",
        ]

        def download(repo_id: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
            assert repo_id == "owner/name-1.5B"
            kept = huggingface_hub.utils.filter_repo_objects(
                files + others, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            )
            assert list(kept) == files
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve_model("owner/name-1.5B") == tmp_path
        assert not any(pattern.endswith((".bin", ".pth", ".pt", ".py")) for pattern in HUB_PATTERNS)


def test_dequantised_columns(write_gguf: WriteGguf, abstract: Abstract, mesh: Mesh) -> None:
    """A quantised file gives the same values whichever way it is cut."""
    path = write_gguf(dtype=gguf.GGMLQuantizationType.Q8_0)
    whole, cut = read_weights(path, abstract), read_weights(path, on_mesh(abstract, mesh))
    for name, value in whole.items():
        np.testing.assert_array_equal(cut[name], value)
