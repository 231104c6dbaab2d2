"""The KV cache: keys and values of the tokens that rows have read, and attention of new tokens to them.

A row's tokens lie in its first slots, one after the other, so a token's slot is its position and rows of different
lengths need no padding in front. What a slot behind the row's length holds is never seen.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtool.models import LanguageModelConfig
from jaxtool.parallel import AxisRules, einsum, reshape, reshard

_KEYS = ("batch", "kv_heads", "head_size", None)
_VALUES = ("batch", "kv_heads", None, "head_size")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of B rows with T slots each. Keys are kept rotated.

    Keys and values lie in the order in which attention reads them: in both products the long axis of the result is the
    last one of the cache, which takes half the time on CPUs.

    Attributes:
        keys_bkht: one array [B, K, H, T] for each layer, in the compute dtype.
        values_bkth: one array [B, K, T, H] for each layer.
        length_b: int32, tokens that each row holds.
    """

    keys_bkht: tuple[jax.Array, ...]
    values_bkth: tuple[jax.Array, ...]
    length_b: jax.Array

    @classmethod
    def empty(cls, config: LanguageModelConfig, rules: AxisRules, rows: int, slots: int) -> KVCache:
        """A cache without tokens, laid out over the active mesh, for use inside jit. Takes 2 L B K T H numbers."""

        def zeros(axes: tuple[str | None, ...], *shape: int) -> tuple[jax.Array, ...]:
            empty = jnp.zeros((rows, config.kv_heads, *shape), config.compute_dtype)
            return tuple(reshard(empty, rules.spec(*axes)) for _ in range(config.num_hidden_layers))

        return cls(
            keys_bkht=zeros(_KEYS, config.head_dim, slots),
            values_bkth=zeros(_VALUES, slots, config.head_dim),
            length_b=reshard(jnp.zeros(rows, jnp.int32), rules.spec("batch")),
        )

    @property
    def slots(self) -> int:
        """Tokens that a row can hold, T."""
        return self.values_bkth[0].shape[2]


def write_keys(cache_bkht: jax.Array, new_bskh: jax.Array, slot_bs: jax.Array) -> jax.Array:
    """The keys of a layer with new ones in the given slots; slots that don't exist are left out."""

    def row(cache_kht: jax.Array, new_skh: jax.Array, slot_s: jax.Array) -> jax.Array:
        return cache_kht.at[:, :, slot_s].set(new_skh.transpose(1, 2, 0), mode="drop", wrap_negative_indices=False)

    return jax.vmap(row)(cache_bkht, new_bskh, slot_bs)


def write_values(cache_bkth: jax.Array, new_bskh: jax.Array, slot_bs: jax.Array) -> jax.Array:
    """The values of a layer with new ones in the given slots; slots that don't exist are left out."""

    def row(cache_kth: jax.Array, new_skh: jax.Array, slot_s: jax.Array) -> jax.Array:
        return cache_kth.at[:, slot_s].set(new_skh.swapaxes(0, 1), mode="drop", wrap_negative_indices=False)

    return jax.vmap(row)(cache_bkth, new_bskh, slot_bs)


def resized(cache: KVCache, rules: AxisRules, slots: int) -> KVCache:
    """The cache with another number of slots, which must not be below what any row holds; for use inside jit."""

    def fitted(x: jax.Array, axis: int, layout: tuple[str | None, ...]) -> jax.Array:
        if slots <= x.shape[axis]:
            return jax.lax.slice_in_dim(x, 0, slots, axis=axis)
        padding = [(0, slots - x.shape[axis]) if place == axis else (0, 0) for place in range(x.ndim)]
        return reshard(jnp.pad(x, padding), rules.spec(*layout))

    return KVCache(
        keys_bkht=tuple(fitted(x, 3, _KEYS) for x in cache.keys_bkht),
        values_bkth=tuple(fitted(x, 2, _VALUES) for x in cache.values_bkth),
        length_b=cache.length_b,
    )


def attend_to_cache(
    q_bsnh: jax.Array, keys_bkht: jax.Array, values_bkth: jax.Array, position_bs: jax.Array, rules: AxisRules
) -> jax.Array:
    """Softmax(q k / sqrt(H)) v over the slots up to each query's own, [B, S, N, H]; scores and softmax are float32."""
    seen_bst = jnp.arange(values_bkth.shape[2], dtype=jnp.int32) <= position_bs[..., None]
    return attend_to_slots(q_bsnh, keys_bkht, values_bkth, seen_bst, rules)


def attend_to_slots(
    q_bsnh: jax.Array, keys_bkht: jax.Array, values_bkth: jax.Array, seen_bst: jax.Array, rules: AxisRules
) -> jax.Array:
    """The same over the slots that `seen_bst` [B, S, T] says, at least one for each query."""
    spec = rules.spec
    b, s, heads, size = q_bsnh.shape
    kv_heads = values_bkth.shape[1]
    groups = heads // kv_heads
    grouped = spec("batch", "sequence", "kv_heads", None, "head_size")
    rows = spec("batch", "kv_heads", None, "head_size")
    q_bskgh = reshape(q_bsnh, (b, s, kv_heads, groups, size), grouped)
    q_bkxh = reshape(q_bskgh.transpose(0, 2, 3, 1, 4), (b, kv_heads, groups * s, size), rows)
    scores_bkxt = einsum(
        "bkxh,bkht->bkxt", q_bkxh, keys_bkht, out=spec("batch", "kv_heads", None, None), result_dtype="float32"
    )
    seen_bxt = jnp.tile(seen_bst, (1, groups, 1))
    scores_bkxt = jnp.where(seen_bxt[:, None], scores_bkxt * size**-0.5, -jnp.inf)
    weights_bkxt = jax.nn.softmax(scores_bkxt, axis=-1).astype(values_bkth.dtype)
    mixed_bkxh = einsum("bkxt,bkth->bkxh", weights_bkxt, values_bkth, out=rows)
    split = spec("batch", "kv_heads", None, "sequence", "head_size")
    mixed_bkgsh = reshape(mixed_bkxh, (b, kv_heads, groups, s, size), split)
    whole = spec("batch", "sequence", "heads", "head_size")
    return reshape(mixed_bkgsh.transpose(0, 3, 1, 2, 4), q_bsnh.shape, whole)
