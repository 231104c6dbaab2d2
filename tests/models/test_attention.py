"""What all implementations have in common: packing changes nothing, and a run gets one that its devices have."""

from __future__ import annotations

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.models import attention as module
from jaxtool.models import config_from_json, config_to_json, parameters, resolve_attention
from jaxtool.models.cudnn_attention import cudnn_attention
from jaxtool.models.splash_attention import splash_attention
from jaxtool.models.xla_attention import attend_in_blocks
from tests.tiny_models import CONFIG, positions_of, random_model

# How each implementation runs on CPU.
ON_CPU = {
    "blocks": ("xla", functools.partial(attend_in_blocks, block=16)),
    "splash": ("splash", functools.partial(splash_attention, interpret=True)),
    "cudnn": ("cudnn", functools.partial(cudnn_attention, kernel="xla")),
}
LENGTHS = [13, 7, 20, 4, 31]


def gradients_of(config: Any, tokens: np.ndarray, segments: np.ndarray) -> tuple[float, dict[str, np.ndarray]]:
    """Sum of the next-token losses within all documents, and its gradient."""
    inside = segments[:, :-1] * (segments[:, :-1] == segments[:, 1:]) > 0

    @jax.jit
    @jax.value_and_grad
    def loss(model: Any) -> jax.Array:
        log_probs = jax.nn.log_softmax(model.logits(model(tokens, positions_of(segments), segments))[:, :-1])
        return -jnp.sum(inside * jnp.take_along_axis(log_probs, tokens[:, 1:, None], axis=-1)[..., 0])

    total, gradient = loss(random_model(config))
    return float(total), {path: np.asarray(leaf, np.float64) for path, leaf in parameters(gradient).items()}


def packed(padding_before: int, rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and segments [rows, 60] of documents by their lengths."""
    tokens, segments = np.zeros((2, len(rows), 60), np.int32)
    for row, lengths in enumerate(rows):
        start = padding_before
        for number, length in enumerate(lengths):
            tokens[row, start : start + length] = np.random.default_rng(length).integers(100, size=length)
            segments[row, start : start + length] = number + 1
            start += length
    return tokens, segments


@functools.cache
def alone() -> tuple[float, dict[str, np.ndarray]]:
    return gradients_of(CONFIG, *packed(0, [[length] for length in LENGTHS]))


@pytest.mark.parametrize("padding_before", [0, 3])
@pytest.mark.parametrize("name", [None, *ON_CPU])
def test_packed_documents_have_the_loss_and_gradients_of_documents_alone(
    name: str | None, padding_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG
    if name is not None:
        field, implementation = ON_CPU[name]
        monkeypatch.setitem(module.IMPLEMENTATIONS, field, implementation)
        # bfloat16 by name only: the checks of cuDNN's dtypes are not what is tested here.
        config = dataclasses.replace(CONFIG, compute_dtype="bfloat16", attention=field)
        object.__setattr__(config, "compute_dtype", "float32")
    total, gradients = gradients_of(config, *packed(padding_before, [LENGTHS[:3], LENGTHS[3:]]))
    expected_total, expected = alone()
    assert total == pytest.approx(expected_total, rel=1e-6)
    for path, right in expected.items():
        scale = np.linalg.norm(right)
        assert scale > 0 and np.linalg.norm(gradients[path] - right) <= 2e-6 * scale, path


def device(platform: str, kind: str, capability: str | None = None) -> Any:
    fields = {} if capability is None else {"compute_capability": capability}
    return SimpleNamespace(platform=platform, device_kind=kind, **fields)


CPU, TPU = device("cpu", "cpu"), device("tpu", "TPU v5 lite")
VOLTA, AMPERE, HOPPER = (device("gpu", f"GPU {capability}", capability) for capability in ("7.0", "8.6", "9.0"))
AMD = device("gpu", "AMD", "gfx942")


@pytest.mark.parametrize(
    ("where", "dtype", "size", "expected", "words"),
    [
        (CPU, "float32", 64, "xla", "attention: xla, on cpu"),
        (TPU, "float32", 64, "splash", "on tpu (TPU v5 lite)"),
        (TPU, "bfloat16", 256, "splash", "on tpu"),
        (HOPPER, "bfloat16", 256, "cudnn", "on gpu (GPU 9.0)"),
        (AMPERE, "float16", 128, "cudnn", "on gpu"),
        (AMPERE, "bfloat16", 256, "xla", "because the head size is 256, not a multiple of 8 up to 128"),
        (HOPPER, "bfloat16", 100, "xla", "because the head size is 100"),
        (HOPPER, "float32", 128, "xla", "because compute_dtype is float32, not bfloat16 or float16"),
        (VOLTA, "float16", 128, "xla", "because the devices have compute capability 7.0, below 8.0"),
        (AMD, "bfloat16", 128, "xla", "because the devices are gpu (AMD), not NVIDIA GPUs"),
    ],
)
def test_auto_takes_what_the_devices_have(where: Any, dtype: str, size: int, expected: str, words: str) -> None:
    chosen, reason = resolve_attention("auto", compute_dtype=dtype, head_size=size, device=where)
    assert chosen == expected and words in reason
    asked, _ = resolve_attention(expected, compute_dtype=dtype, head_size=size, device=where)
    assert asked == expected


@pytest.mark.parametrize(
    ("requested", "where", "dtype", "words"),
    [
        ("flash", CPU, "float32", "attention is 'flash', expected one of auto, xla, cudnn, splash"),
        ("splash", CPU, "float32", "attention is 'splash', but the devices are cpu"),
        ("splash", HOPPER, "bfloat16", "attention is 'splash', but the devices are gpu"),
        ("cudnn", CPU, "bfloat16", "attention is 'cudnn', but the devices are cpu .*, not NVIDIA GPUs"),
        ("cudnn", TPU, "bfloat16", "attention is 'cudnn', but the devices are tpu"),
        ("cudnn", HOPPER, "float32", "attention is 'cudnn', but compute_dtype is float32"),
    ],
)
def test_what_the_devices_do_not_have_is_refused(requested: str, where: Any, dtype: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        resolve_attention(requested, compute_dtype=dtype, head_size=128, device=where)


def test_the_real_devices_can_be_asked() -> None:
    assert resolve_attention("auto", compute_dtype="float32", head_size=64, device=jax.devices()[0])[0] == "xla"


def test_the_implementation_is_no_property_of_a_stored_model() -> None:
    config = dataclasses.replace(CONFIG, attention="splash")
    assert config_to_json(config) == config_to_json(CONFIG)
    assert config_from_json(config_to_json(config)) == CONFIG


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": "auto"}, "attention is 'auto', expected one of xla, cudnn, splash"),
        ({"attention": "cudnn"}, "attention is 'cudnn' and compute_dtype float32, expected bfloat16 or float16"),
    ],
)
def test_config_errors(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(CONFIG, **changes)
