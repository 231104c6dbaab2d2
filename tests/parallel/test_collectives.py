"""Collectives counted from text, and from programs whose transfers are known."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.parallel import make_mesh
from jaxtool.parallel.collectives import Collectives, count_collectives

# The form of a TPU program: pieces of one transfer share a channel, a sum that is cut is a fusion of its own name.
HLO = """HloModule jit_step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %y)
}

%piece.1 (p: bf16[1,8]) -> bf16[4,8] {
  %p = bf16[1,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[4,8]{1,0:T(8,128)(2,1)} all-gather(%p), channel_id=7, dimensions={0}
}

%piece.2 (p: bf16[1,8]) -> bf16[4,8] {
  %p = bf16[1,8]{1,0} parameter(0)
  ROOT %all-gather.2 = bf16[4,8]{1,0} all-gather(%p), channel_id=7, dimensions={0}
}

%all-reduce-scatter.3 (p: f32[16,8]) -> f32[4,8] {
  %p = f32[16,8]{1,0} parameter(0)
  %all-reduce.4 = f32[16,8]{1,0:T(8,128)} all-reduce(%p), channel_id=9, to_apply=%add
  ROOT %cut = f32[4,8]{1,0} dynamic-slice(%all-reduce.4), dynamic_slice_sizes={4,8}
}

%never (p: f32[64]) -> f32[64] {
  %p = f32[64]{0} parameter(0)
  ROOT %all-reduce.9 = f32[64]{0} all-reduce(%p), channel_id=99, to_apply=%add
}

%body (carry: (s32[], bf16[1,8])) -> (s32[], bf16[1,8]) {
  %carry = (s32[], bf16[1,8]{1,0}) parameter(0)
  %a = bf16[4,8]{1,0} fusion(%carry), kind=kCustom, calls=%piece.1
  %b = bf16[4,8]{1,0} fusion(%carry), kind=kCustom, calls=%piece.2
  %c = f32[4,8]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.3
  ROOT %done = (s32[], bf16[1,8]{1,0}) tuple(%carry)
}

%condition (carry: (s32[], bf16[1,8])) -> pred[] {
  %carry = (s32[], bf16[1,8]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%carry, %carry), direction=LT
}

ENTRY %main (p: bf16[1,8]) -> f32[] {
  %p = bf16[1,8]{1,0} parameter(0)
  %start = (bf16[1,8]{1,0}, bf16[4,8]{1,0}) all-gather-start(%p), channel_id=1, dimensions={0}
  %end = bf16[4,8]{1,0} all-gather-done(%start)
  %both = (f32[], f32[3]) all-reduce(%p, %p), channel_id=2, to_apply=%add
  %loop = (s32[], bf16[1,8]{1,0}) while(%both), condition=%condition, body=%body
  %cut.1 = f32[2]{0} reduce-scatter(%p), channel_id=4, replica_groups={{0,1,2},{3,4,5}}, dimensions={0}
  %cut.2 = f32[2]{0} reduce-scatter(%p), channel_id=5, replica_groups=[2,4]<=[8], dimensions={0}
  %cut.3 = f32[2]{0} reduce-scatter(%p), channel_id=6, replica_groups=mesh['a'=5,'b'=2,'c'=3] {'a','c'}, dimensions={0}
  ROOT %permuted = f32[5]{0} collective-permute(%p), channel_id=3, source_target_pairs={{0,1}}
}
"""


def test_text_of_a_program() -> None:
    assert count_collectives(HLO) == (
        Collectives(kind="all-gather", count=1, bytes=4 * 8 * 2, loop_count=1, loop_bytes=4 * 8 * 2),
        Collectives(kind="all-reduce", count=1, bytes=4 * 4, loop_count=0, loop_bytes=0),
        Collectives(kind="reduce-scatter", count=3, bytes=2 * 4 * (3 + 4 + 15), loop_count=1, loop_bytes=16 * 8 * 4),
        Collectives(kind="collective-permute", count=1, bytes=5 * 4, loop_count=0, loop_bytes=0),
    )


def test_compiled_program() -> None:
    """A matrix in four parts is gathered before a loop; each turn of the loop sums over the four devices."""
    mesh = make_mesh(MeshConfig(fsdp=4), jax.devices()[:4])

    def program(matrix: jax.Array, rows: jax.Array) -> jax.Array:
        whole = jax.sharding.reshard(matrix, PartitionSpec())

        def turn(x: jax.Array, row: jax.Array) -> tuple[jax.Array, None]:
            product = jnp.einsum("k,kd->d", row, matrix, out_sharding=PartitionSpec(None))
            return x + product, None

        return jax.lax.scan(turn, whole.sum(axis=0), rows)[0]

    with jax.set_mesh(mesh):
        matrix = jax.ShapeDtypeStruct((64, 6), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("fsdp")))
        rows = jax.ShapeDtypeStruct((5, 64), jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(None, "fsdp")))
        found = {
            each.kind: each for each in count_collectives(jax.jit(program).lower(matrix, rows).compile().as_text())
        }
    assert (found["all-gather"].count, found["all-gather"].bytes) == (1, 64 * 6 * 4)
    assert (found["all-reduce"].count, found["all-reduce"].loop_count) == (0, 1)
    assert found["all-reduce"].loop_bytes == 6 * 4
