"""A model made ready for decoding: its layers apart, its matrices in the compute dtype, new tokens read into a cache.

Training scans over stacked layers. To decode, each layer's matrices have to be arrays of their own: a scan would copy
every one of them out of the stack before each product, which at small batches is most of the time.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtool.decoding.capture import Capture, last_token
from jaxtool.decoding.kv_cache import KVCache, attend_to_cache, write_keys, write_values
from jaxtool.models import LanguageModel, LanguageModelConfig, without_lora
from jaxtool.models.fused_projections import fuse
from jaxtool.models.language_model import DecoderBlock
from jaxtool.models.rotary import rotary_tables
from jaxtool.parallel import AxisRules, active_mesh_axes, reshard


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class DecodeModel:
    """A pytree that jitted functions take as an argument. Low-rank updates are merged, projections fused.

    Attributes:
        outside: the model without its blocks: embedding, final norm, head.
        layers: the blocks, one for each layer.
    """

    outside: LanguageModel
    layers: tuple[DecoderBlock, ...]

    @property
    def config(self) -> LanguageModelConfig:
        """The model's."""
        return self.outside.config

    @property
    def rules(self) -> AxisRules:
        """The model's."""
        return self.outside.rules

    def extend(self, tokens_bs: jax.Array, count_b: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Reads up to S further tokens into each row.

        This is prefill (whole or in chunks), a step of decoding (S = 1), and appending a tool's response; a row of
        which nothing is read stays as it is, so rows go their own ways.

        Args:
            tokens_bs: int32 ids [B, S]; what lies behind a row's count is ignored.
            count_b: int32 [B], how many of them are read, 0 to S.
            cache: what the rows hold; tokens that no slot is left for are not kept, and results are then wrong: give
                every row as many slots as it will have tokens.

        Returns:
            Final normed hidden states [B, S, D], of any value behind a row's count, and the cache.
        """
        hidden_bsd, cache, _, _ = self.extend_captured(tokens_bs, count_b, cache, None)
        return hidden_bsd, cache

    def extend_captured(
        self, tokens_bs: jax.Array, count_b: jax.Array, cache: KVCache, capture: Capture | None
    ) -> tuple[jax.Array, KVCache, tuple[jax.Array, ...], tuple[jax.Array, ...]]:
        """As `extend`, and what is captured of each block of what is read, [B, D] each ([B, S, D] of all tokens).

        Behind that, where generated tokens are captured, the first tokens that are read [B, D]: a row that reads a
        response begins with the token that it generated last.
        """
        blocks = capture.chosen(self.config.num_hidden_layers) if capture else ()
        captured: list[jax.Array] = []
        first: list[jax.Array] = []

        def tap(block: int, x_bsd: jax.Array) -> None:
            if capture is not None and block in blocks:
                captured.append(capture.reduced(x_bsd, count_b))
                if capture.generated:
                    first.append(x_bsd[:, 0].astype(capture.dtype))

        place_s = jnp.arange(tokens_bs.shape[1], dtype=jnp.int32)
        position_bs = cache.length_b[:, None] + place_s
        read_bs = place_s < count_b[:, None]
        slot_bs = jnp.where(read_bs, position_bs, cache.slots)
        # Ids behind the count may be anything; those without a row of the embedding would be NaN, and reach all slots.
        x_bsd = self.outside.embed(jnp.where(read_bs, tokens_bs, 0))
        rotary = rotary_tables(position_bs, self.config.frequencies())
        tap(0, x_bsd)
        keys, values = [], []
        caches = zip(self.layers, cache.keys_bkht, cache.values_bkth, strict=True)
        for number, (layer, old_keys, old_values) in enumerate(caches, start=1):

            def attend(
                q_bsnh: jax.Array,
                k_bskh: jax.Array,
                v_bskh: jax.Array,
                old_keys: jax.Array = old_keys,
                old_values: jax.Array = old_values,
            ) -> jax.Array:
                keys.append(write_keys(old_keys, k_bskh, slot_bs))
                values.append(write_values(old_values, v_bskh, slot_bs))
                return attend_to_cache(q_bsnh, keys[-1], values[-1], position_bs, self.rules)

            x_bsd = layer(x_bsd, attend, rotary)
            if number < len(self.layers):
                tap(number, x_bsd)
        hidden_bsd = self.outside.final_norm(x_bsd)
        tap(len(self.layers), hidden_bsd)
        cache = KVCache(keys_bkht=tuple(keys), values_bkth=tuple(values), length_b=cache.length_b + count_b)
        return hidden_bsd, cache, tuple(captured), tuple(first)

    def last_logits(self, hidden_bsd: jax.Array, count_b: jax.Array) -> jax.Array:
        """float32 logits [B, V] behind the last of `count_b` tokens of each row (at least 1)."""
        logits_bv = self.outside.logits(last_token(hidden_bsd, count_b)[:, None])[:, 0]
        return reshard(logits_bv, self.rules.spec("batch", None))  # what chooses needs all columns


def decode_model(model: LanguageModel, *, donate: bool = False) -> DecodeModel:
    """The model made ready for decoding, on the mesh that it lies on.

    Args:
        model: a model, its parameters on the active mesh.
        donate: give the memory of the model's blocks up, so that they exist once; it must not be used again.
    """
    made = _split(model)
    if donate:
        jax.block_until_ready(made)
        for leaf in jax.tree.leaves(model.blocks):  # stacks of layers: no part of them is part of the result
            leaf.delete()
    return made


@jax.jit(static_argnames="slots")
def prefill(
    model: DecodeModel, tokens_bs: jax.Array, count_b: jax.Array, *, slots: int = 0
) -> tuple[jax.Array, KVCache]:
    """Reads prompts into a new cache.

    Args:
        model: the model.
        tokens_bs: int32 ids [B, S], what lies behind a row's count of any value (see `padded`).
        count_b: int32 [B], tokens of each prompt, at least 1.
        slots: tokens that a row can hold (0: S).

    Returns:
        Final normed hidden states [B, D] of the prompts' last tokens, and the cache.
    """
    spec = model.rules.spec
    tokens_bs, count_b = reshard(jnp.asarray(tokens_bs), spec("batch", None)), reshard(count_b, spec("batch"))
    cache = KVCache.empty(model.config, model.rules, len(count_b), slots or tokens_bs.shape[1])
    hidden_bsd, cache = model.extend(tokens_bs, count_b, cache)
    return last_token(hidden_bsd, count_b), cache


@jax.jit
def _split(model: LanguageModel) -> DecodeModel:
    model = without_lora(model)
    config = model.config

    def ready(x: jax.Array) -> jax.Array:
        return x.astype(config.compute_dtype) if x.ndim > 1 else x  # norms and biases stay as they are

    # FSDP would gather every matrix anew for each token.
    def whole(x: jax.Array) -> jax.Array:
        if not active_mesh_axes():
            return x
        fsdp = model.rules.embed
        spec = jax.typeof(x).sharding.spec
        return reshard(x, jax.sharding.PartitionSpec(*(None if fsdp and axis == fsdp else axis for axis in spec)))

    outside = copy.copy(model)
    del outside.blocks
    layers = tuple(
        fuse(jax.tree.map(lambda x, layer=layer: whole(ready(x[layer])), model.blocks))
        for layer in range(config.num_hidden_layers)
    )
    outside = jax.tree.map(ready, outside)
    # Of the embedding a step reads a few rows, of the head all.
    head = "embedding_vd" if config.tie_word_embeddings else "head_vd"
    setattr(outside, head, jax.tree.map(whole, getattr(outside, head)))
    return DecodeModel(outside=outside, layers=layers)
