"""Random Llamas made, saved and run by transformers against the same checkpoint in our model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the parity oracle torch is not installed")

import transformers  # noqa: E402

from jaxtool.data import Batch  # noqa: E402
from jaxtool.models import parameters  # noqa: E402
from jaxtool.training import supervised_loss  # noqa: E402
from tests.tiny_models import load_model, log_probs  # noqa: E402

pytestmark = pytest.mark.torch

V, D, F, L, N, K, H, S = 320, 48, 80, 3, 6, 2, 8, 512


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    """The torch model (eager attention, float32, norm scales off 1) and the folder it saved itself to."""
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=V,
        hidden_size=D,
        intermediate_size=F,
        num_hidden_layers=L,
        num_attention_heads=N,
        num_key_value_heads=K,
        max_position_embeddings=S,
        rope_parameters={"rope_type": "default", "rope_theta": 20_000.0},
        rms_norm_eps=1e-5,
        initializer_range=0.2,
        tie_word_embeddings=request.param,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path)
    assert list(tmp_path.glob("*.safetensors"))
    return model, tmp_path


@pytest.fixture
def tokens() -> np.ndarray:
    return np.random.default_rng(2).integers(V, size=(1, S))


def test_log_probs(checkpoint: tuple[Any, Path], tokens: np.ndarray) -> None:
    reference, folder = checkpoint
    with torch.no_grad():
        logits = reference(torch.tensor(tokens)).logits
    expected = torch.log_softmax(logits.double(), dim=-1).numpy()
    found = log_probs(load_model(folder), tokens)
    assert np.abs(found - expected).max() <= 1e-4


def test_gradients_of_next_token_loss(checkpoint: tuple[Any, Path], tokens: np.ndarray) -> None:
    reference, folder = checkpoint
    loss = reference(torch.tensor(tokens), labels=torch.tensor(tokens)).loss
    loss.backward()
    theirs = {name: parameter.grad.numpy() for name, parameter in reference.named_parameters()}

    ids = tokens.astype(np.int32)
    batch = Batch(
        tokens_bs=jnp.asarray(ids),
        positions_bs=jnp.arange(S, dtype=jnp.int32)[None],
        segment_ids_bs=jnp.ones((1, S), jnp.int32),
        supervised_bp=jnp.arange(S - 1, dtype=jnp.int32)[None],
        targets_bpa=jnp.asarray(ids[:, 1:, None]),
        weights_bpa=jnp.ones((1, S - 1, 1), jnp.float32),
    )
    (our_loss, _), gradient = jax.jit(jax.value_and_grad(supervised_loss, has_aux=True))(load_model(folder), batch)
    ours = {path: np.asarray(leaf) for path, leaf in parameters(gradient).items()}

    def layer(name: str) -> np.ndarray:
        return theirs[f"model.layers.1.{name}.weight"]

    # torch keeps linear weights as [out, in], heads outermost in the merged dimension.
    expected = {
        "embedding_vd": theirs["model.embed_tokens.weight"],
        "final_norm_d": theirs["model.norm.weight"],
        "blocks.attention_norm_d": layer("input_layernorm"),
        "blocks.query_dnh": layer("self_attn.q_proj").T.reshape(D, N, H),
        "blocks.key_dkh": layer("self_attn.k_proj").T.reshape(D, K, H),
        "blocks.value_dkh": layer("self_attn.v_proj").T.reshape(D, K, H),
        "blocks.output_nhd": layer("self_attn.o_proj").T.reshape(N, H, D),
        "blocks.mlp_norm_d": layer("post_attention_layernorm"),
        "blocks.gate_df": layer("mlp.gate_proj").T,
        "blocks.up_df": layer("mlp.up_proj").T,
        "blocks.down_fd": layer("mlp.down_proj").T,
    }
    if "lm_head.weight" in theirs:
        expected["head_vd"] = theirs["lm_head.weight"]
    assert ours.keys() == expected.keys()
    assert float(our_loss) == pytest.approx(loss.item(), rel=1e-5)
    for path, value in expected.items():
        found = ours[path][1] if path.startswith("blocks.") else ours[path]
        error = np.linalg.norm(found - value) / np.linalg.norm(value)
        assert error <= 1e-4, f"{path}: {error:.1e}"
