"""Reading many short prompts in few rows, behind a beginning that all of them share and that was read once.

For what only the states of prompts are wanted: nothing is generated behind them, so no keys and values are kept.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.kv_cache import KVCache, attend_to_slots
from jaxtool.decoding.rows import repeat_rows
from jaxtool.models.attention import attention
from jaxtool.models.rotary import rotary_tables
from jaxtool.models.xla_attention import attention_mask
from jaxtool.parallel import reshard

LONGEST_BEHIND_PREFIX = 2048  # tokens of a row: scores are whole matrices


def packed_states(
    model: DecodeModel,
    prefix: KVCache | None,
    tokens_bs: jax.Array,
    positions_bs: jax.Array,
    segment_ids_bs: jax.Array,
) -> jax.Array:
    """Final normed hidden states [B, S, D] in the compute dtype; for use inside jit.

    Args:
        model: the model.
        prefix: what all segments of all rows begin with, from `prefix.read_prefix` (None: nothing).
        tokens_bs: int32 ids [B, S], without the prefix.
        positions_bs: int32 positions [B, S]; behind a prefix of P tokens those of a segment begin with P.
        segment_ids_bs: int32 [B, S], 0 for padding; tokens attend within their segment and to the prefix.
    """
    rules, spec = model.rules, model.rules.spec
    x_bsd = model.outside.embed(tokens_bs)
    rotary = rotary_tables(positions_bs, model.config.frequencies())
    rows, length = tokens_bs.shape
    mask_bst = attention_mask(segment_ids_bs)
    if prefix is not None:
        if length > LONGEST_BEHIND_PREFIX:
            raise ValueError(f"rows of {length:,} tokens behind a prefix, expected at most {LONGEST_BEHIND_PREFIX:,}")
        all_seen = reshard(jnp.ones((rows, length, prefix.slots), bool), spec("batch", None, None))
        mask_bst = jnp.concatenate([all_seen, mask_bst], axis=-1)

    for number, layer in enumerate(model.layers):

        def attend(q_bsnh: jax.Array, k_bskh: jax.Array, v_bskh: jax.Array, number: int = number) -> jax.Array:
            if prefix is None:
                return attention(q_bsnh, k_bskh, v_bskh, segment_ids_bs, rules, model.config.attention)
            cut = spec("batch", "kv_heads", None, None)
            old_keys = reshard(repeat_rows(rules, prefix.keys_bkht[number], rows), cut)
            old_values = reshard(repeat_rows(rules, prefix.values_bkth[number], rows), cut)
            keys_bkht = jnp.concatenate([old_keys, reshard(k_bskh.transpose(0, 2, 3, 1), cut)], axis=3)
            values_bkth = jnp.concatenate([old_values, reshard(v_bskh.transpose(0, 2, 1, 3), cut)], axis=2)
            return attend_to_slots(q_bsnh, keys_bkht, values_bkth, mask_bst, rules)

        x_bsd = layer(x_bsd, attend, rotary)
    return model.outside.final_norm(x_bsd)
