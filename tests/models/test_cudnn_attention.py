"""The cuDNN implementation without a GPU: its program for CUDA, and what it computes with XLA in the kernel's place."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from jaxtool.config import MeshConfig
from jaxtool.models.cudnn_attention import cudnn_attention, one_document_a_row
from jaxtool.parallel import AxisRules, make_mesh
from tests.models.attention_truth import case, check, on_mesh, result_and_gradients

RULES = AxisRules()
with_xla = functools.partial(cudnn_attention, kernel="xla")


@pytest.mark.parametrize(
    ("segments", "expected"),
    [
        ([[1, 1, 1, 1]], True),
        ([[1, 1, 0, 0], [5, 5, 5, 5]], True),
        ([[0, 0, 0, 0]], True),
        ([[1, 1, 1, 1], [1, 1, 2, 2]], False),
        ([[0, 1, 1, 1]], False),
        ([[1, 0, 1, 1]], False),
        ([[-1, 1, 1, 1]], False),
    ],
)
def test_one_document_a_row(segments: list[list[int]], expected: bool) -> None:
    assert bool(one_document_a_row(jnp.asarray(segments))) is expected


@pytest.mark.parametrize("rows", ["one document", "packed"])
@pytest.mark.parametrize("devices", [1, 8])
def test_values_and_gradients(rows: str, devices: int) -> None:
    inputs, segments, expected = case(rows, 4, 2, 8)
    mesh = (
        make_mesh(MeshConfig(data=2, fsdp=2, model=2)) if devices == 8 else make_mesh(MeshConfig(), jax.devices()[:1])
    )
    with jax.set_mesh(mesh):
        cut = on_mesh(mesh, RULES, inputs, segments)
        check(result_and_gradients(lambda *x: with_xla(*x, RULES), *cut), expected, segments, 4e-6)


@pytest.mark.parametrize("devices", [1, 8])
def test_program_for_cuda(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's forward and backward kernels with the causal mask, on the parts of one device."""
    kernels = pytest.importorskip("jax._src.cudnn.fused_attention_stablehlo")
    monkeypatch.setattr(kernels, "cuda_versions", SimpleNamespace(cudnn_get_version=lambda: 91000))

    @jax.jit
    def gradients(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return jax.grad(lambda *qkv: jnp.sum(cudnn_attention(*qkv, segments, RULES)), (0, 1, 2))(q, k, v)

    mesh = (
        make_mesh(MeshConfig(data=2, fsdp=2, model=2)) if devices == 8 else make_mesh(MeshConfig(), jax.devices()[:1])
    )
    with jax.set_mesh(mesh):
        arrays = [
            jax.ShapeDtypeStruct((4, 64, *rest), dtype, sharding=NamedSharding(mesh, RULES.spec("batch", None, *axes)))
            for rest, axes, dtype in [
                ((4, 64), ("heads", None), jnp.bfloat16),
                ((2, 64), ("kv_heads", None), jnp.bfloat16),
                ((2, 64), ("kv_heads", None), jnp.bfloat16),
                ((), (), jnp.int32),
            ]
        ]
        text = gradients.trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmhaSoftmax" in line]
    assert ["Backward" in line for line in calls] == [False, True]
    query = "4x64x4x64xbf16" if devices == 1 else "1x64x2x64xbf16"
    for line in calls:
        assert r"mask_type\22: \22CAUSAL\22" in line and query in line and "Bias" not in line


def test_other_dtypes_are_refused() -> None:
    x, segments = jnp.zeros((1, 8, 2, 8)), jnp.ones((1, 8), jnp.int32)
    with pytest.raises(ValueError, match="'cudnn' computes in bfloat16 or float16, the queries are float32"):
        cudnn_attention(x, x, x, segments, RULES)


def test_without_a_gpu_the_error_says_so() -> None:
    x, segments = jnp.zeros((1, 8, 2, 8), jnp.bfloat16), jnp.ones((1, 8), jnp.int32)
    with pytest.raises(ValueError, match=r"'cudnn' is not available .*expected an NVIDIA GPU with cuDNN"):
        cudnn_attention(x, x, x, segments, RULES)
