"""Activations that leave a pass with its results: which layers, which tokens, and how they are put together.

Logits are the same bit for bit with and without: what is captured is read on its way, nothing is computed for it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxtool.parallel import AxisRules, reshard

TOKENS = ("last", "mean", "all")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class Capture:
    """What is captured of what a row reads.

    Blocks are counted as `output_hidden_states` of transformers does: 0 is the embedding, l from 1 on the residual
    stream behind layer l, and the last one, L, is taken behind the final norm.

    Attributes:
        blocks: from 0 to L, ascending; negative ones count from the end, -1 is L. Empty: all.
        tokens: "last" token of what is read, "mean" of it (padding left out, sums in float32), or "all" of it.
        generated: also the block states of each generated token, from the step that reads it.
        dtype: of what is handed out.
    """

    blocks: tuple[int, ...] = ()
    tokens: str = "last"
    generated: bool = False
    dtype: str = "float32"

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))  # hashable, from a list too
        if self.tokens not in TOKENS:
            raise ValueError(f"tokens is {self.tokens!r}, expected one of {', '.join(TOKENS)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {', '.join(DTYPES)}")

    def chosen(self, num_layers: int) -> tuple[int, ...]:
        """The blocks of a model with so many layers, as numbers from 0 to L.

        Raises:
            ValueError: one doesn't exist, or they don't ascend.
        """
        if not self.blocks:
            return tuple(range(num_layers + 1))
        found = tuple(block + num_layers + 1 if block < 0 else block for block in self.blocks)
        if any(not 0 <= block <= num_layers for block in found):
            raise ValueError(f"blocks are {self.blocks}, expected 0 (embedding) to {num_layers} (final norm)")
        if list(found) != sorted(set(found)):
            raise ValueError(f"blocks are {self.blocks}, expected them to ascend")
        return found

    @property
    def running_dtype(self) -> str:
        """Of what a row keeps between two reads: a mean in another than float32 would be rounded with each of them."""
        return "float32" if self.tokens == "mean" else self.dtype

    def reduced(self, x_bsd: jax.Array, count_b: jax.Array) -> jax.Array:
        """What is kept of a block's S tokens, `count_b` of them real: [B, D] in `running_dtype`, or all [B, S, D]."""
        if self.tokens == "all":
            return x_bsd.astype(self.dtype)
        if self.tokens == "last":
            return last_token(x_bsd, count_b).astype(self.dtype)
        real_bs = jnp.arange(x_bsd.shape[1]) < count_b[:, None]
        sum_bd = jnp.sum(jnp.where(real_bs[..., None], x_bsd.astype(jnp.float32), 0.0), axis=1)
        return sum_bd / jnp.maximum(count_b, 1)[:, None]

    def merged(self, old: jax.Array, old_count_b: jax.Array, new: jax.Array, count_b: jax.Array) -> jax.Array:
        """What is kept [B, L', D] of a text of which `old_count_b` tokens had been read, and `count_b` more now."""
        none_b = (count_b == 0)[:, None, None]
        if self.tokens == "mean":
            share = (count_b / jnp.maximum(old_count_b + count_b, 1)).astype(jnp.float32)[:, None, None]
            new = old * (1 - share) + new * share
        return jnp.where(none_b, old, new)


def last_token(x_bsd: jax.Array, count_b: jax.Array) -> jax.Array:
    """The states [B, D] of the last of `count_b` tokens; of the first where there is none."""
    return jax.vmap(lambda x_sd, count: x_sd.at[jnp.maximum(count - 1, 0)].get())(x_bsd, count_b)


def stacked(captured: Sequence[jax.Array], rules: AxisRules) -> jax.Array:
    """Blocks side by side, [B, .., L', D]; flattened, they are one vector with the first block in front."""
    made = jnp.stack(captured, axis=-2)
    return reshard(made, rules.spec("batch", *[None] * (made.ndim - 1)))
