"""Splash attention, its program interpreted on CPU, against float64; and its block sizes against what compiles."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtool.config import MeshConfig
from jaxtool.models import attention as attention_module
from jaxtool.models import splash_attention as module
from jaxtool.models.splash_attention import largest_blocks, padded_length, splash_attention
from jaxtool.parallel import AxisRules, make_mesh
from tests.models.attention_truth import case, check, on_mesh, result_and_gradients
from tests.tiny_models import CONFIG, positions_of, random_model

RULES = AxisRules()
interpreted = functools.partial(splash_attention, interpret=True)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """150 tokens then are two blocks of 128."""
    monkeypatch.setattr(module, "largest_blocks", lambda *_: (128, 256))


@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (2, 2, 256)])
def test_values_and_gradients(heads: int, kv_heads: int, size: int) -> None:
    inputs, segments, expected = case("packed", heads, kv_heads, size)
    check(result_and_gradients(lambda *x: interpreted(*x, RULES), inputs, segments), expected, segments, 4e-6)


@pytest.mark.parametrize("fused_key_blocks", [4, 0])
def test_several_blocks(fused_key_blocks: int, small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the fused backward kernel, and with that of long rows."""
    monkeypatch.setattr(module, "_FUSED_KEY_BLOCKS", fused_key_blocks)
    inputs, segments, expected = case("packed", 4, 2, 8)
    check(result_and_gradients(lambda *x: interpreted(*x, RULES), inputs, segments), expected, segments, 4e-6)


@pytest.mark.parametrize("kv_heads", [2, 1])
def test_on_eight_devices(kv_heads: int, small_blocks: None) -> None:
    """Heads cut in two over the model axis, or, where one key-value head can't be, computed by both."""
    inputs, segments, expected = case("packed", 4, kv_heads, 8)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2))
    rules, notes = RULES.fit(dict(mesh.shape), {"heads": 4, "kv_heads": kv_heads})
    assert len(notes) == (0 if kv_heads == 2 else 2)
    with jax.set_mesh(mesh):
        cut = on_mesh(mesh, rules, inputs, segments)
        check(result_and_gradients(lambda *x: interpreted(*x, rules), *cut), expected, segments, 4e-6)


def kernels(jaxpr: Any) -> int:
    """Kernels of a program whose results are used: compilers leave the others out."""
    count = 0
    for equation in jaxpr.eqns:
        inner = [getattr(value, "jaxpr", value) for value in equation.params.values()]
        if equation.primitive.name == "pallas_call":
            count += 1
        elif equation.outvars:
            count += sum(kernels(each) for each in inner if hasattr(each, "eqns"))
    return count


@pytest.mark.parametrize(("remat", "expected"), [("elementwise", 2), ("full", 3)])
def test_what_the_backward_pass_computes_again(remat: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward and a backward kernel; with full remat the forward kernel once more."""
    monkeypatch.setitem(attention_module.IMPLEMENTATIONS, "splash", interpreted)
    model = random_model(dataclasses.replace(CONFIG, attention="splash", remat=remat))
    ones = np.ones((1, 12), np.int32)
    gradient = jax.make_jaxpr(jax.grad(lambda model: jnp.sum(model(ones, positions_of(ones), ones))))(model)
    assert kernels(gradient.jaxpr) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sequence": "model", "heads": None, "kv_heads": None}, "rules map 'sequence' to mesh axis 'model'"),
        ({"head_size": "model", "heads": None, "kv_heads": None}, "rules map 'head_size' to mesh axis 'model'"),
        ({"kv_heads": None}, "rules map 'heads' to mesh axis 'model' and 'kv_heads' to None"),
    ],
)
def test_rules_that_cut_rows_or_groups_are_refused(changes: dict[str, Any], words: str) -> None:
    x = jnp.zeros((1, 8, 2, 8))
    with jax.set_mesh(make_mesh(MeshConfig(data=4, model=2))), pytest.raises(ValueError, match=words):
        interpreted(x, x, x, jnp.ones((1, 8), jnp.int32), dataclasses.replace(RULES, **changes))


@pytest.mark.parametrize(
    ("length", "block", "expected"),
    [
        (1, 512, (128, 128)),
        (128, 512, (128, 128)),
        (129, 512, (256, 256)),
        (512, 512, (512, 512)),
        (513, 512, (768, 384)),
        (1000, 512, (1024, 512)),
        (2049, 1024, (2304, 768)),
        (8192, 1024, (8192, 1024)),
    ],
)
def test_padded_length(length: int, block: int, expected: tuple[int, int]) -> None:
    assert padded_length(length, block) == expected


@pytest.mark.parametrize(
    ("size", "dtype", "mebibytes", "expected"),
    [
        (64, "bfloat16", 16, (512, 2048)),
        (256, "bfloat16", 16, (512, 1024)),
        (256, "float32", 16, (512, 512)),
        (128, "bfloat16", 64, (1024, 2048)),
        (256, "bfloat16", 128, (512, 2048)),
        (256, "float32", 128, (512, 1024)),
    ],
)
def test_largest_blocks(size: int, dtype: str, mebibytes: int, expected: tuple[int, int]) -> None:
    assert largest_blocks(size, jnp.dtype(dtype), mebibytes * 2**20) == expected
