"""Rows that switch between free text and the names of tools inside one compiled loop.

A row is at a node of the trie of tool ids: `FREE` while it writes text, else it may only write what some tool's id goes
on with. A trigger takes it to the root; the end of an id takes it back, or ends the row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp

from jaxtool.decoding.rows import FREE, NO_TOOL, UNNAMED, Rows
from jaxtool.decoding.sampling import RowSampling, choose
from jaxtool.decoding.tool_subset import ToolSubset
from jaxtool.decoding.tool_trie import ROOT_NODE, ToolTrie, take
from jaxtool.parallel import AxisRules


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Constraint:
    """When rows name tools, and which; a pytree that `read` and `decode` take as an argument.

    Attributes:
        trie: ids of the tools.
        trigger_ids: int32 [K], text tokens behind which a tool must be named (none: -1).
        allowed_bt: bool [B, T], the tools that each row may name (None: all). A row that may name none never leaves
            free text.
        first_tokens: whether the first token of a tool's id, written in free text, begins the naming of it.
        stop_at_tool: whether a row ends when it has named a tool, or that it needs none.
        no_tool: the entry of the trie that stands for none of the tools; rows that name it have `NO_TOOL` (-2) as their
            tool (None: there is none). `allowed_bt` says for it too which rows may name it.

    Raises:
        ValueError: when it is used, if the trie has no entry `no_tool`.
    """

    trie: ToolTrie
    trigger_ids: jax.Array
    allowed_bt: jax.Array | None = None
    first_tokens: bool = field(default=False, metadata={"static": True})
    stop_at_tool: bool = field(default=True, metadata={"static": True})
    no_tool: int | None = field(default=None, metadata={"static": True})

    def chosen(
        self,
        state: Rows,
        logits_bv: jax.Array,
        free_b: jax.Array,
        sampling: RowSampling,
        rules: AxisRules,
        *,
        draws: bool,
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """The next token of each row, and where it takes the row.

        Args:
            state: the rows.
            logits_bv: float32, after the penalty.
            free_b: int32, the token that each row would choose in free text.
            sampling: settings of the rows; temperature and filters apply among the tokens that may come next.
            rules: layouts.
            draws: whether any row has a temperature.

        Returns:
            Tokens, nodes and named tools (`UNNAMED` if none was named by this token), int32 [B], and bool [B], whether
            the token was constrained.
        """
        trie = self.trie
        if self.no_tool is not None and not 0 <= self.no_tool < trie.num_tools:
            raise ValueError(f"no_tool is {self.no_tool}, expected an entry of the trie, 0 to {trie.num_tools - 1}")
        subset = ToolSubset.of(trie, self.allowed_bt, rules)
        # A row whose root can't reach a tool, or that the caller put to a dead end, goes on in free text.
        column_bk, child_bk, valid_bk = trie.children(state.node_b, trie.max_children)
        valid_bk &= subset.count(child_bk) > 0
        inside_b = (state.node_b != FREE) & jnp.any(valid_bk, axis=-1)
        # The mask comes first; a free row's is opened, so that no row is without anything to choose.
        token_bk = take(trie.alphabet, column_bk)
        logits_bk = jax.vmap(lambda logits_v, token_k: logits_v.at[token_k].get())(logits_bv, token_bk)
        logits_bk = jnp.where(valid_bk | ~inside_b[:, None], logits_bk, -jnp.inf)
        place_b = choose(logits_bk, sampling, state.count_b, draws=draws)
        pick = jax.vmap(lambda x_k, place: x_k.at[place].get())
        token_b = jnp.where(inside_b, pick(token_bk, place_b), free_b)

        begins_b = jnp.any(free_b[:, None] == jnp.asarray(self.trigger_ids), axis=-1)
        started_b = jnp.where(begins_b, ROOT_NODE, FREE)
        if self.first_tokens:
            child_b = trie.child_of(jnp.full_like(started_b, ROOT_NODE), free_b)
            started_b = jnp.where(begins_b, started_b, child_b)
        started_b = jnp.where(subset.count(started_b) > 0, started_b, FREE)
        node_b = jnp.where(inside_b, pick(child_bk, place_b), started_b)
        tool_b = take(trie.node_tool, node_b)
        node_b = jnp.where(tool_b >= 0, FREE, node_b)
        if self.no_tool is not None:
            tool_b = jnp.where(tool_b == self.no_tool, NO_TOOL, tool_b)
        return token_b, node_b, tool_b, inside_b

    def applied(self, state: Rows, which_b: jax.Array, node_b: jax.Array, tool_b: jax.Array) -> Rows:
        """The rows `which_b` at their new nodes, with the tools that they named."""
        return replace(
            state,
            node_b=jnp.where(which_b, node_b, state.node_b),
            tool_b=jnp.where(which_b & (tool_b != UNNAMED), tool_b, state.tool_b),
        )
