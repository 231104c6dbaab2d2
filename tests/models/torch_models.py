"""The oracle of the parity tests: tiny random models of transformers, one for each network that the ports cover.

Importing this skips the importing test module where torch is absent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the parity oracle torch is not installed")

import transformers  # noqa: E402

FAR = 131_072

_LLAMA: dict[str, Any] = {
    "vocab_size": 323,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": FAR,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.2,
}
_PLAIN = {"rope_type": "default", "rope_theta": 500_000.0}
# The original length is short, so that with these few frequencies all three cases of the rescaling occur.
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}

# Class and settings by the published model with the same features.
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptj": (
        transformers.GPTJConfig,
        {
            "vocab_size": 336,
            "n_embd": 48,
            "n_inner": 80,
            "n_layer": 3,
            "n_head": 4,
            "rotary_dim": 8,
            "n_positions": FAR,
            "initializer_range": 0.2,
        },
    ),
    "llama-2": (
        transformers.LlamaConfig,
        _LLAMA | {"num_key_value_heads": 6, "rope_parameters": _PLAIN | {"rope_theta": 10_000.0}},
    ),
    "llama-3": (transformers.LlamaConfig, _LLAMA | {"rope_parameters": _PLAIN}),
    "llama-3.1": (transformers.LlamaConfig, _LLAMA | {"rope_parameters": _SCALED, "head_dim": 16}),
    "llama-3.2": (
        transformers.LlamaConfig,
        _LLAMA | {"rope_parameters": _SCALED | {"factor": 32.0}, "tie_word_embeddings": True},
    ),
    "qwen3": (
        transformers.Qwen3Config,
        _LLAMA | {"head_dim": 12, "rms_norm_eps": 1e-6, "rope_parameters": _PLAIN | {"rope_theta": 1_000_000.0}},
    ),
}
# Rows that the tokenizer knows; the other rows of GPT-J's matrices are never predicted.
TEXT_TOKENS = {"gptj": 325}


def random_reference(config: Any, seed: int = 1) -> Any:
    """The network of a transformers config: eager attention, float32, no parameter at 0 or 1."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            assert parameter.dtype == torch.float32 and parameter.abs().max() > 0, name
    return model


def reference_of(name: str, folder: Path) -> Any:
    """The network of `MODELS[name]`, saved to `folder`."""
    kind, settings = MODELS[name]
    model = random_reference(kind(**settings, bos_token_id=None, eos_token_id=None))
    save(model, folder)
    return model


def save(model: Any, folder: Path) -> None:
    """`save_pretrained` without its progress bar."""
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    assert list(folder.glob("*.safetensors"))


def reference_logits(model: Any, tokens_bs: np.ndarray, positions_bs: np.ndarray | None = None) -> Any:
    """torch float32 [B, S, V] of one causal segment for each row, at the given positions (default: from 0)."""
    batch, length = tokens_bs.shape
    if positions_bs is None:
        positions_bs = np.broadcast_to(np.arange(length), tokens_bs.shape)
    # A mask of our own: from jumps in the positions transformers would conclude that rows are packed.
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1).expand(batch, 1, -1, -1)
    return model(
        torch.tensor(tokens_bs), position_ids=torch.tensor(positions_bs), attention_mask=mask, use_cache=False
    ).logits


def reference_log_probs(
    model: Any, tokens_bs: np.ndarray, positions_bs: np.ndarray | None = None, *, text_tokens: int | None = None
) -> np.ndarray:
    """float64 [B, S, V] over the first `text_tokens` columns, the softmax taken in float64."""
    with torch.no_grad():
        logits = reference_logits(model, tokens_bs, positions_bs)[..., :text_tokens]
        return torch.log_softmax(logits.double(), dim=-1).numpy()


@contextmanager
def one_thread() -> Iterator[None]:
    """Waiting threads of torch spin, which on a busy machine costs ten times what a second thread gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
