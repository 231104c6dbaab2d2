"""The rows of the head that the search of a trie can need, gathered for each of its levels.

A search under the normalisers "slice" and "allowed" never computes a column that the trie can't reach. Which levels are
steps of their own, and which are one loop with one slice, is decided here too.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from numpy.typing import NDArray

from jaxtool.decoding.decode_model import DecodeModel
from jaxtool.decoding.tool_trie import ToolTrie
from jaxtool.parallel import active_mesh_axes, einsum

NORMALIZE = ("full", "slice", "allowed")

# Levels down to the last node that has more children than this are steps of their own, so that others gather fewer. At
# most so many: each is a copy of the model in the program, which has to be compiled.
_WIDE = 256
_MOST_UNROLLED = 4


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class HeadSlice:
    """Rows of the head, whole on every device, for tokens of the trie's alphabet [A].

    Attributes:
        rows_xd: X of the head's rows, in the compute dtype.
        bias_x: float32 bias of these rows, 0 where the model has none.
        place_a: int32, the row of each column of the alphabet; of any value for columns that aren't here.
        at_depth: bool [depths, X], which of them occur at each depth of the trie; None: the slice is that of one depth.
    """

    rows_xd: jax.Array
    bias_x: jax.Array
    place_a: jax.Array
    at_depth: jax.Array | None

    def logits(self, hidden_bsd: jax.Array, out: PartitionSpec) -> jax.Array:
        """float32 [B, S, X] of hidden states [B, S, D]."""
        return einsum("bsd,xd->bsx", hidden_bsd, self.rows_xd, out=out, result_dtype="float32") + self.bias_x


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrieHead:
    """The head's rows for a trie; a pytree to make once for a model and a trie and hand to every search.

    Attributes:
        slices: one for each level that is a step of its own, and one for all the others; none under "full".
        normalize: what they are for: "slice" wants all tokens of a level, "allowed" those that are a choice.
    """

    slices: tuple[HeadSlice, ...]
    normalize: str = field(metadata={"static": True})

    @classmethod
    def build(cls, model: DecodeModel, trie: ToolTrie, normalize: str) -> TrieHead:
        """Gathers the rows. Not for use inside jit, except under "full", which needs none.

        Raises:
            ValueError: `normalize` is unknown, or an id has a token that the model never predicts (a padded row, or one
                that the tokenizer doesn't know).
        """
        if normalize not in NORMALIZE:
            raise ValueError(f"normalize is {normalize!r}, expected one of {', '.join(NORMALIZE)}")
        if normalize == "full":
            return cls(slices=(), normalize=normalize)
        alphabet = np.asarray(trie.alphabet)
        unknown = alphabet[~np.asarray(model.config.is_predicted(jnp.asarray(alphabet)))]
        if unknown.size:
            raise ValueError(
                f"{unknown.size:,} tokens of tool ids are none that the model predicts, the first is {unknown[0]}; "
                "expected text tokens or tool rows"
            )
        steps, last = search_levels(trie, normalize)
        level = [trie.level_columns(depth, decisions_only=normalize == "allowed") for depth in range(last + 1)]
        columns = [*level[:steps], *([_union(level[steps:])] if steps <= last else [])]
        columns = [some if some.size else np.zeros(1, np.int32) for some in columns]  # all forced: nothing is read
        rows, bias = _gather(model, [alphabet[some] for some in columns])
        slices = []
        for number, some in enumerate(columns):
            place_a = np.zeros(len(alphabet), np.int32)
            place_a[some] = np.arange(len(some))
            at_depth = None
            if number == steps and normalize == "slice":
                at_depth = jnp.asarray([np.isin(some, level[depth]) & (depth >= steps) for depth in range(last + 1)])
            slices.append(
                HeadSlice(rows_xd=rows[number], bias_x=bias[number], place_a=jnp.asarray(place_a), at_depth=at_depth)
            )
        return cls(slices=tuple(slices), normalize=normalize)


def search_levels(trie: ToolTrie, normalize: str) -> tuple[int, int]:
    """How many levels are steps of their own, and the deepest level at which there is something to score.

    Under "allowed" nothing behind the last decision of an id is scored.
    """
    last = trie.max_depth - 1
    if normalize == "allowed":
        last = max((depth for depth, most in enumerate(trie.level_children) if most > 1), default=0)
    steps = 1
    while steps < min(last + 1, _MOST_UNROLLED) and max(trie.level_children[steps : last + 1]) > _WIDE:
        steps += 1
    return steps, last


def _union(columns: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.unique(np.concatenate(columns))


@jax.jit
def _gather(model: DecodeModel, tokens: list[NDArray[np.int32]]) -> tuple[list[jax.Array], list[jax.Array]]:
    """Rows [X, D] and biases [X] of the head for each list of tokens."""
    outside, config = model.outside, model.config
    whole = PartitionSpec(None, None) if active_mesh_axes() else None
    part = PartitionSpec(None) if active_mesh_axes() else None
    head_vd = outside.head_rows().astype(config.compute_dtype)
    rows = [head_vd.at[some].get(out_sharding=whole) for some in tokens]
    if not config.head_bias:
        return rows, [jnp.zeros(len(some), jnp.float32) for some in tokens]
    bias_v = outside.head_bias_v[...].astype(jnp.float32)
    return rows, [bias_v.at[some].get(out_sharding=part) for some in tokens]
