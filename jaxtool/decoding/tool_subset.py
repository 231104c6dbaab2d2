"""Which tools each row may name, as counts of leaves below a node: what a search asks of the trie of a subset.

No array is as large as the trie: a subset takes two numbers for each tool and row, and its nodes are looked up when a
search comes by.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxtool.decoding.tool_trie import DEAD_NODE, ToolTrie, take, take_each
from jaxtool.parallel import AxisRules, reshard


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ToolSubset:
    """The allowed tools of B rows; a pytree. A node's tools are the allowed ones at or below it.

    Attributes:
        trie: the ids of all T tools.
        before_bt: int32 [B, T+1]; allowed tools in front of each place of the trie's `leaf_order`; None: all are.
        next_bt: int32 [B, T]; the place of the first allowed tool from each place on; None: all are.
    """

    trie: ToolTrie
    before_bt: jax.Array | None
    next_bt: jax.Array | None

    @classmethod
    def of(cls, trie: ToolTrie, allowed_bt: jax.Array | None, rules: AxisRules) -> ToolSubset:
        """The subset of each row of `allowed_bt`, bool [B, T], None for all tools; for use inside jit.

        Raises:
            ValueError: `allowed_bt` isn't of that type and width.
        """
        if allowed_bt is None:
            return cls(trie=trie, before_bt=None, next_bt=None)
        allowed_bt = jnp.asarray(allowed_bt)
        if allowed_bt.dtype != np.bool_ or allowed_bt.ndim != 2 or allowed_bt.shape[1] != trie.num_tools:
            expected = f"expected bool [B, {trie.num_tools}], one for each row and tool"
            raise ValueError(f"allowed has shape {allowed_bt.shape} and type {allowed_bt.dtype}; {expected}")
        allowed_bt = reshard(allowed_bt, rules.spec("batch", None))
        ordered_bt = jnp.take(allowed_bt, jnp.asarray(trie.leaf_order), axis=1, mode="clip")
        place_bt = jnp.where(ordered_bt, jnp.arange(trie.num_tools, dtype=jnp.int32), trie.num_tools)
        return cls(
            trie=trie,
            before_bt=jnp.pad(jnp.cumsum(ordered_bt, axis=1, dtype=jnp.int32), ((0, 0), (1, 0))),
            next_bt=jax.lax.cummin(place_bt, axis=1, reverse=True),
        )

    def count(self, node: jax.Array) -> jax.Array:
        """The number of tools of each node int32 [B, ..]; 0 where the subset doesn't go, and for the dead node."""
        first, end = take(self.trie.first_leaf, node), take(self.trie.last_leaf, node) + 1
        if self.before_bt is None:
            return end - first
        return take_each(self.before_bt, end, 1) - take_each(self.before_bt, first, 1)

    def first_place(self, node: jax.Array) -> jax.Array:
        """The place in `leaf_order` of the first tool of each node int32 [B, ..] that has one."""
        place = take(self.trie.first_leaf, node)
        return place if self.next_bt is None else take_each(self.next_bt, place, 1)

    def only_child(self, node: jax.Array) -> jax.Array:
        """The forced next node of each node int32 [B, ..]: the only child with tools; 0 where none or several have."""
        if self.before_bt is None:
            start, end = take(self.trie.child_start, node), take(self.trie.child_start, node + 1)
            return jnp.where(end - start == 1, self.trie.node_behind(start), DEAD_NODE)
        count = self.count(node)
        child = self.trie.child_above(node, self.first_place(node))
        return jnp.where((count > 0) & (self.count(child) == count), child, DEAD_NODE)
