"""What beams read of their own: runs of tokens behind a shared prompt, as one causal chunk for each beam.

The prompt's keys and values lie in the `KVCache`, once for all beams of a row. Each beam has a few slots of its own;
choosing beams anew moves these slots alone. Beams may have read different numbers of tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.kv_cache import KVCache
from jaxtool.decoding.tool_trie import take_each
from jaxtool.models.rotary import rotary_tables
from jaxtool.parallel import AxisRules, einsum, reshape, reshard


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class BeamCache:
    """Keys and values of what M beams of B rows read behind their prompts; T slots for each beam.

    Attributes:
        keys: one array [B, M, K, T, H] for each layer, in the compute dtype, rotated.
        values: the same.
        read_bm: int32, tokens that each beam has read; what later slots hold is never seen.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    read_bm: jax.Array

    @classmethod
    def empty(cls, model: DecodeModel, rows: int) -> BeamCache:
        """One beam for each row, that has no slots."""
        c, rules = model.config, model.rules
        layout = rules.spec("batch", None, "kv_heads", None, "head_size")
        none = reshard(jnp.zeros((rows, 1, c.kv_heads, 0, c.head_dim), c.compute_dtype), layout)
        layers = (none,) * c.num_hidden_layers
        read_bm = reshard(jnp.zeros((rows, 1), jnp.int32), rules.spec("batch", None))
        return cls(keys=layers, values=layers, read_bm=read_bm)

    def padded(self, beams: int, slots: int) -> BeamCache:
        """With room for more beams and slots."""
        _, m, _, t, _ = self.keys[0].shape
        more = ((0, 0), (0, beams - m), (0, 0), (0, slots - t), (0, 0))
        return BeamCache(
            keys=tuple(jnp.pad(x, more) for x in self.keys),
            values=tuple(jnp.pad(x, more) for x in self.values),
            read_bm=jnp.pad(self.read_bm, more[:2]),
        )

    def of_parents(self, parent_bm: jax.Array) -> BeamCache:
        """Of beams that go on from these ones."""
        return jax.tree.map(lambda x: take_each(x, parent_bm, 1), self)


def read_chunks(
    model: DecodeModel, prompt: KVCache, own: BeamCache, tokens_bmc: jax.Array, count_bm: jax.Array
) -> tuple[jax.Array, BeamCache]:
    """Reads up to C tokens into each beam.

    Args:
        model: the model.
        prompt: what all beams of a row have read; at least one token.
        own: what each has read behind it, with slots for what it reads here.
        tokens_bmc: int32 ids [B, M, C] that have a row in the embedding, also behind the count.
        count_bm: int32, how many are read, 0 to C.

    Returns:
        Final normed hidden states [B, M, C, D], of any value behind a beam's count, and the cache.
    """
    b, m, c = tokens_bmc.shape
    slots = own.keys[0].shape[3]
    place_c = jnp.arange(c, dtype=jnp.int32)
    own_place_bmc = own.read_bm[..., None] + place_c
    slot_bmc = jnp.where(place_c < count_bm[..., None], own_place_bmc, slots)
    flat = model.rules.spec("batch", None)
    position_bs = reshape(prompt.length_b[:, None, None] + own_place_bmc, (b, m * c), flat)
    rotary = rotary_tables(position_bs, model.config.frequencies())
    x_bsd = model.outside.embed(reshape(tokens_bmc, (b, m * c), flat))
    keys, values = [], []
    for number, layer in enumerate(model.layers):

        def attend(q_bsnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, number: int = number) -> jax.Array:
            keys.append(_write(own.keys[number], k_bskh, slot_bmc, model.rules))
            values.append(_write(own.values[number], v_bskh, slot_bmc, model.rules))
            of_prompt = prompt.keys_bkht[number], prompt.values_bkth[number], prompt.length_b
            return _attend(q_bsnh, of_prompt, (keys[-1], values[-1], own_place_bmc), model.rules)

        x_bsd = layer(x_bsd, attend, rotary)
    hidden_bsd = model.outside.final_norm(x_bsd)
    hidden_bmcd = reshape(hidden_bsd, (b, m, c, hidden_bsd.shape[-1]), model.rules.spec("batch", None, None, None))
    own = replace(own, keys=tuple(keys), values=tuple(values), read_bm=own.read_bm + count_bm)
    return hidden_bmcd, own


def _write(own_bmkth: jax.Array, new_bskh: jax.Array, slot_bmc: jax.Array, rules: AxisRules) -> jax.Array:
    """A layer's own keys or values with new ones in the given slots; slots that don't exist are left out."""
    b, m, c = slot_bmc.shape
    _, _, k, h = new_bskh.shape
    new_bmckh = reshape(new_bskh, (b, m, c, k, h), rules.spec("batch", None, None, "kv_heads", "head_size"))

    def beam(own_kth: jax.Array, new_ckh: jax.Array, slot_c: jax.Array) -> jax.Array:
        return own_kth.at[:, slot_c].set(new_ckh.swapaxes(0, 1), mode="drop", wrap_negative_indices=False)

    return jax.vmap(jax.vmap(beam))(own_bmkth, new_bmckh, slot_bmc)


def _attend(
    q_bsnh: jax.Array,
    of_prompt: tuple[jax.Array, jax.Array, jax.Array],
    of_own: tuple[jax.Array, jax.Array, jax.Array],
    rules: AxisRules,
) -> jax.Array:
    """Attention of the chunks of M beams to their prompt and to their own slots, [B, M x C, N, H].

    Two softmaxes joined by their maxima and sums, so that the prompt's keys are read once for all beams. Scores and
    sums are float32.

    Args:
        q_bsnh: queries, C of each beam.
        of_prompt: keys [B, K, H, S], values [B, K, S, H] and tokens of each prompt [B].
        of_own: keys and values [B, M, K, T, H] and, for each query [B, M, C], the last slot that it sees.
        rules: layouts.
    """
    spec = rules.spec
    keys_bkhs, values_bksh, length_b = of_prompt
    keys_bmkth, values_bmkth, last_bmc = of_own
    b, m, c = last_bmc.shape
    _, _, kv, t, h = keys_bmkth.shape
    g = q_bsnh.shape[2] // kv
    y = g * c
    flat, apart = spec("batch", "kv_heads", None, None), spec("batch", "kv_heads", None, None, None)

    q_bmckgh = reshape(q_bsnh, (b, m, c, kv, g, h), spec("batch", None, None, "kv_heads", None, "head_size"))
    q_bkmyh = reshape(q_bmckgh.transpose(0, 3, 1, 4, 2, 5), (b, kv, m, y, h), apart)
    q_bkxh = reshape(q_bkmyh, (b, kv, m * y, h), flat)
    prompt_bkxs = einsum("bkxh,bkhs->bkxs", q_bkxh, keys_bkhs, out=flat, result_dtype="float32") * h**-0.5
    own_bkmyt = einsum("bkmyh,bmkth->bkmyt", q_bkmyh, keys_bmkth, out=apart, result_dtype="float32") * h**-0.5
    seen_bs = jnp.arange(prompt_bkxs.shape[-1], dtype=jnp.int32) < length_b[:, None]
    seen_bmct = jnp.arange(t, dtype=jnp.int32) <= last_bmc[..., None]
    prompt_bkxs = jnp.where(seen_bs[:, None, None], prompt_bkxs, -jnp.inf)
    own_bkmyt = jnp.where(jnp.tile(seen_bmct, (1, 1, g, 1))[:, None], own_bkmyt, -jnp.inf)

    prompt_top = reshape(jnp.max(prompt_bkxs, axis=-1), (b, kv, m, y), flat)  # finite: no prompt is empty
    top_bkmy = jnp.maximum(prompt_top, jnp.max(own_bkmyt, axis=-1))
    prompt_bkxs = jnp.exp(prompt_bkxs - reshape(top_bkmy, (b, kv, m * y), spec("batch", "kv_heads", None))[..., None])
    own_bkmyt = jnp.exp(own_bkmyt - top_bkmy[..., None])
    total_bkmy = reshape(jnp.sum(prompt_bkxs, axis=-1), (b, kv, m, y), flat) + jnp.sum(own_bkmyt, axis=-1)
    dtype = q_bsnh.dtype
    mixed_bkxh = einsum("bkxs,bksh->bkxh", prompt_bkxs.astype(dtype), values_bksh, out=flat, result_dtype="float32")
    mixed_bkmyh = reshape(mixed_bkxh, (b, kv, m, y, h), apart)
    mixed_bkmyh += einsum(
        "bkmyt,bmkth->bkmyh", own_bkmyt.astype(dtype), values_bmkth, out=apart, result_dtype="float32"
    )
    mixed_bkmyh = (mixed_bkmyh / total_bkmy[..., None]).astype(dtype)
    split = spec("batch", "kv_heads", None, None, None, "head_size")
    mixed_bkmgch = reshape(mixed_bkmyh, (b, kv, m, g, c, h), split)
    whole = spec("batch", "sequence", "heads", "head_size")
    return reshape(mixed_bkmgch.transpose(0, 2, 4, 1, 3, 5), q_bsnh.shape, whole)
