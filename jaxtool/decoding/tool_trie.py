"""The trie of tool ids that a constrained decode walks: one integer per beam, its node, stands for the whole prefix.

Built once in NumPy from the token ids of all tools and kept on the device in CSR form. Which tools a text may name, and
how their ids become tokens, is the caller's; scores, beams and the KV cache live elsewhere.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from jaxtool.parallel import active_mesh_axes

DEAD_NODE = 0
ROOT_NODE = 1

_FIRST_CHILD = 2  # edge e leads to node e + 2: nodes are numbered breadth first

IntArray = jax.Array | NDArray[np.int32]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ToolTrie:
    """Ids of T tools as a trie of N nodes over an alphabet of A tokens; a pytree.

    Node 0 is dead: it has no children, and what leaves the trie ends there and stays. Node 1 is the root. Nodes are
    numbered breadth first, in the order of their ids within a level, so the children of a node are consecutive and
    sorted by column, and edge e leads to node e + 2.

    `build` makes NumPy arrays. Put them on the device once (`jax.device_put(trie, sharding)`, replicated on a mesh) and
    hand the trie to jitted functions as an argument: closed over, its arrays would be constants of the program.

    Attributes:
        child_start: int32 [N+1]; the edges of node n are `child_start[n]` up to, without, `child_start[n+1]`.
        child_column: int32 [N-2]; the column of each edge.
        node_tool: int32 [N]; the tool of a leaf, -1 for other nodes.
        node_depth: int32 [N]; edges from the root, 0 for the dead node too.
        run_length: int32 [N]; the number of forced tokens that follow: those of nodes with exactly one child, up to the
            next node that is a decision or a leaf. 0 for such nodes themselves, and for the dead one.
        run_end: int32 [N]; the node behind those tokens.
        first_leaf: int32 [N]; the leaves below a node are `first_leaf` up to and with `last_leaf` in `leaf_order`.
        last_leaf: int32 [N]; -1 for the dead node, whose range is empty.
        leaf_order: int32 [T]; the tools, sorted by id (END edges are part of an id).
        tool_depth: int32 [T]; the tokens of each tool's id, END included: the depth of its leaf.
        alphabet: int32 [A]; the token of each column, ascending: all tokens that occur, END included.
        level_nodes: number of nodes at each depth from 0 to `max_depth`.
        level_children: largest number of children of a node at each of these depths.
        longest_run: most forced tokens in a row that lead to a decision.
        longest_tail: most forced tokens in a row that lead to a leaf, its own not counted.
        end_token: token of the END edges, or None where a tool ends at its last token.
    """

    child_start: IntArray
    child_column: IntArray
    node_tool: IntArray
    node_depth: IntArray
    run_length: IntArray
    run_end: IntArray
    first_leaf: IntArray
    last_leaf: IntArray
    leaf_order: IntArray
    tool_depth: IntArray
    alphabet: IntArray
    level_nodes: tuple[int, ...] = field(metadata={"static": True})
    level_children: tuple[int, ...] = field(metadata={"static": True})
    longest_run: int = field(metadata={"static": True})
    longest_tail: int = field(metadata={"static": True})
    end_token: int | None = field(metadata={"static": True})

    @classmethod
    def build(cls, sequences: Sequence[Sequence[int]], *, end_token: int | None, vocab_rows: int) -> ToolTrie:
        """The trie in which tool i has the id `sequences[i]`.

        Args:
            sequences: token ids of each tool, from the tokenizer call that training used; lengths may differ.
            end_token: closes every id with an edge of this token; one id may then be the beginning of another, or be
                empty. None: a tool ends at its last token.
            vocab_rows: rows of the head; every token must be one of them.

        Raises:
            ValueError: There is no tool, a token is no row of the head, two tools have the same id, an id holds the end
                token, or, without end token, an id is empty or is the beginning of another; names the tools.
        """
        lengths_t, tokens = _checked_tokens(sequences, end_token, vocab_rows)
        if end_token is not None:
            tokens, lengths_t = np.insert(tokens, np.cumsum(lengths_t), end_token), lengths_t + 1
        alphabet, columns = np.unique(tokens, return_inverse=True)
        starts_t = np.cumsum(lengths_t) - lengths_t

        # One sort per level finds the distinct (node, column) pairs: the nodes of the next level, in order.
        node_t = np.full(len(lengths_t), ROOT_NODE, np.int64)
        active = np.arange(len(lengths_t))
        levels: list[NDArray[np.int64]] = []  # of each level: parent, column, leaves below, first of these
        level_nodes, num_nodes, first = [1], 2, np.zeros(1, np.int64)
        while active.size:
            keys = node_t[active] * len(alphabet) + columns[starts_t[active] + len(levels)]
            distinct, inverse, leaves = np.unique(keys, return_inverse=True, return_counts=True)
            parent, column = np.divmod(distinct, len(alphabet))
            # Where the leaves of a node begin: where its parent's do, plus the leaves of the siblings before it.
            before = np.cumsum(leaves) - leaves
            first = first[parent - (num_nodes - level_nodes[-1])] + before - before[np.searchsorted(parent, parent)]
            levels.append(np.stack([parent, column, leaves, first]))
            node_t[active] = num_nodes + inverse
            level_nodes.append(len(distinct))
            num_nodes += len(distinct)
            active = active[lengths_t[active] > len(levels)]

        parent, column, leaves, first = np.concatenate(levels, axis=1)
        first_leaf, leaves = np.concatenate([[0, 0], first]), np.concatenate([[0, len(node_t)], leaves])
        count_n = np.bincount(parent, minlength=num_nodes)
        _check_ends(sequences, node_t, count_n)
        child_start = np.concatenate([[0], np.cumsum(count_n)])
        node_tool = np.full(num_nodes, -1)
        node_tool[node_t] = np.arange(len(node_t))
        leaf_order = np.empty_like(node_t)
        leaf_order[first_leaf[node_t]] = np.arange(len(node_t))
        # Each round doubles how far a node looks along its run.
        run_length = (count_n == 1).astype(np.int64)
        run_end = np.where(count_n == 1, child_start[:-1] + _FIRST_CHILD, np.arange(num_nodes))
        for _ in range(len(levels).bit_length()):
            run_length, run_end = run_length + run_length[run_end], run_end[run_end]
        to_leaf = node_tool[run_end] >= 0
        level_starts = np.cumsum([ROOT_NODE, *level_nodes[:-1]])
        return cls(
            child_start=child_start.astype(np.int32),
            child_column=column.astype(np.int32),
            node_tool=node_tool.astype(np.int32),
            node_depth=np.repeat([0, *range(len(level_nodes))], [1, *level_nodes]).astype(np.int32),
            run_length=run_length.astype(np.int32),
            run_end=run_end.astype(np.int32),
            first_leaf=first_leaf.astype(np.int32),
            last_leaf=(first_leaf + leaves - 1).astype(np.int32),
            leaf_order=leaf_order.astype(np.int32),
            tool_depth=lengths_t.astype(np.int32),
            alphabet=alphabet.astype(np.int32),
            level_nodes=tuple(level_nodes),
            level_children=tuple(np.maximum.reduceat(count_n, level_starts).tolist()),
            longest_run=int(np.max(run_length, where=~to_leaf, initial=0)),
            longest_tail=max(int(np.max(run_length, where=to_leaf, initial=0)) - 1, 0),
            end_token=end_token,
        )

    @property
    def num_tools(self) -> int:
        """Number of tools, T."""
        return self.leaf_order.shape[0]

    @property
    def num_nodes(self) -> int:
        """Number of nodes, N, with the dead one."""
        return self.node_tool.shape[0]

    @property
    def max_depth(self) -> int:
        """Tokens of the longest id, END included."""
        return len(self.level_nodes) - 1

    @property
    def max_children(self) -> int:
        """Largest number of children of a node."""
        return max(self.level_children)

    @property
    def child_node(self) -> jax.Array:
        """int32 [N-2]; the node at the end of each edge: e + 2 for edge e."""
        return jnp.arange(_FIRST_CHILD, self.num_nodes, dtype=jnp.int32)

    def level_columns(self, depth: int, *, decisions_only: bool = False) -> NDArray[np.int32]:
        """The distinct columns of the edges that leave nodes at `depth`, ascending; on the host.

        Args:
            depth: 0 for the root.
            decisions_only: leave the only edges of nodes out.

        Raises:
            ValueError: the trie has no such depth.
        """
        if not 0 <= depth <= self.max_depth:
            raise ValueError(f"depth is {depth}; expected 0 to {self.max_depth}, the deepest level of the trie")
        start = np.asarray(self.child_start)
        first = ROOT_NODE + sum(self.level_nodes[:depth])
        nodes = np.arange(first, first + self.level_nodes[depth])
        columns = np.asarray(self.child_column)[start[nodes[0]] : start[nodes[-1] + 1]]
        count = start[nodes + 1] - start[nodes]
        return np.unique(columns[np.repeat(count, count) > 1] if decisions_only else columns)

    def run_tokens(self, width: int) -> NDArray[np.int32]:
        """The first `width` forced tokens behind each node, [N, width]; on the host.

        They are token ids, not columns: what the model is fed next. Rows with fewer of them are filled up with -1, and
        those with more (`run_length`) are cut off.
        """
        start, column, alphabet = self._host_rows()
        forced_n, node_n = start[1:] - start[:-1] == 1, np.arange(self.num_nodes)
        tokens = np.full((self.num_nodes, width), -1, np.int32)
        for place in range(width):
            going = np.flatnonzero(forced_n[node_n])
            edge = start[node_n[going]]
            tokens[going, place] = alphabet[column[edge]]
            node_n[going] = edge + _FIRST_CHILD
        return tokens

    def walk(self, sequence: Sequence[int]) -> int:
        """The node after `sequence` from the root, 0 if no tool begins so; END is a token like others. On the host."""
        start, column, alphabet = self._host_rows()
        node = ROOT_NODE
        for token in sequence:
            row = alphabet[column[start[node] : start[node + 1]]]
            place = int(np.searchsorted(row, token))
            if place == len(row) or row[place] != token:
                return DEAD_NODE
            node = int(start[node]) + place + _FIRST_CHILD
        return node

    def tool_of(self, sequence: Sequence[int]) -> int | None:
        """The tool with exactly this id, with or without the end token behind it, or None; on the host."""
        tool_n = np.asarray(self.node_tool)
        tool = tool_n[self.walk(sequence)]
        if tool < 0 and self.end_token is not None:
            tool = tool_n[self.walk([*sequence, self.end_token])]
        return int(tool) if tool >= 0 else None

    def node_behind(self, edge: jax.Array) -> jax.Array:
        """The node at the end of each edge."""
        return edge + _FIRST_CHILD

    def column_to(self, node: jax.Array) -> jax.Array:
        """The column of the edge that leads to each node; of any value for the root and the dead node."""
        return take(self.child_column, node - _FIRST_CHILD)

    def children(self, node: jax.Array, width: int) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The first `width` children of each node, by ascending column.

        Args:
            node: int32 [..].
            width: K, static. Children beyond it are left out: give the most that these nodes have (`level_children`).

        Returns:
            Their columns int32 [.., K], nodes int32 [.., K] and bool [.., K], which of them exist; those that don't
            have column 0 and the dead node.
        """
        start, end = take(self.child_start, node), take(self.child_start, node + 1)
        edge = start[..., None] + jnp.arange(width, dtype=jnp.int32)
        valid = edge < end[..., None]
        column = jnp.where(valid, take(self.child_column, edge), 0)
        return column, jnp.where(valid, edge + _FIRST_CHILD, DEAD_NODE), valid

    def child_of(self, node: jax.Array, token: jax.Array) -> jax.Array:
        """The child of each node int32 [..] along a token id [..] (not a column), 0 where there is none.

        Found by bisection; the number of its steps depends on `max_children` alone. Any integer is a token.
        """

        def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = (low + high) // 2
            right = self._edge_token(middle) < token  # may read past the row, but what passed its end isn't found
            return jnp.where(right, middle + 1, low), jnp.where(right, high, middle)

        start, end = take(self.child_start, node), take(self.child_start, node + 1)
        low, _ = jax.lax.fori_loop(0, self.max_children.bit_length(), halve, (start, end))
        found = (low < end) & (self._edge_token(low) == token)
        return jnp.where(found, low + _FIRST_CHILD, DEAD_NODE)

    def child_above(self, node: jax.Array, place: jax.Array) -> jax.Array:
        """The child of each node int32 [..] that leads to the leaf at `place` [..] of `leaf_order`, by bisection.

        The leaf must be below the node; 0 for nodes without children.
        """

        def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            low, high = bounds
            middle = (low + high + 1) // 2
            right = take(self.first_leaf, middle + _FIRST_CHILD) <= place
            return jnp.where(right, middle, low), jnp.where(right, high, middle - 1)

        start, end = take(self.child_start, node), take(self.child_start, node + 1)
        last = jnp.maximum(end - 1, start)
        edge, _ = jax.lax.fori_loop(0, self.max_children.bit_length(), halve, (start, last))
        return jnp.where(start < end, edge + _FIRST_CHILD, DEAD_NODE)

    def _edge_token(self, edge: jax.Array) -> jax.Array:
        return take(self.alphabet, take(self.child_column, edge))

    def _host_rows(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        return np.asarray(self.child_start), np.asarray(self.child_column), np.asarray(self.alphabet)


def take(values: IntArray, index: jax.Array) -> jax.Array:
    """Entries of a replicated array; laid out like the index, which need not be replicated."""
    index = jnp.asarray(index)
    layout = jax.typeof(index).sharding.spec if active_mesh_axes() else None
    return jnp.asarray(values).at[index].get(mode="clip", wrap_negative_indices=False, out_sharding=layout)


def take_each(values: jax.Array, index: jax.Array, axes: int) -> jax.Array:
    """Entries of each of the arrays that the first `axes` axes of `values` number, at its own index or indices."""

    def entries(values: jax.Array, index: jax.Array) -> jax.Array:
        return values.at[index].get(mode="clip", wrap_negative_indices=False)

    for _ in range(axes):
        entries = jax.vmap(entries)
    return entries(values, index)


def _checked_tokens(
    sequences: Sequence[Sequence[int]], end_token: int | None, vocab_rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lengths of the ids [T], and their tokens one after the other."""
    if not 1 <= vocab_rows < 2**31:
        raise ValueError(f"vocab_rows is {vocab_rows}; expected 1 to 2**31 - 1, the rows of the head")
    if end_token is not None and not 0 <= end_token < vocab_rows:
        raise ValueError(f"end_token is {end_token}; expected None or a row of the head, 0 to {vocab_rows - 1}")
    if not len(sequences):
        raise ValueError("sequences is empty; expected the id of at least one tool")
    try:
        lengths_t = np.fromiter(map(len, sequences), np.int64)
        # Unlike NumPy, array refuses what isn't a whole number.
        tokens = np.array(array("q", chain.from_iterable(sequences)), np.int64)
    except (TypeError, OverflowError):
        raise _wrong_token(sequences, vocab_rows) from None
    if tokens.size and not 0 <= tokens.min() <= tokens.max() < vocab_rows:
        raise _wrong_token(sequences, vocab_rows)
    if end_token is None and not lengths_t.all():
        raise ValueError(f"tool {lengths_t.argmin()}: its id is empty; expected at least one token, or an end token")
    if end_token is not None and (inside := np.flatnonzero(tokens == end_token)).size:
        tool = int(np.searchsorted(np.cumsum(lengths_t), inside[0], side="right"))
        place = inside[0] - lengths_t[:tool].sum()
        raise ValueError(f"tool {tool}: token {end_token} at position {place} is the end token; expected none in an id")
    return lengths_t, tokens


def _wrong_token(sequences: Sequence[Sequence[int]], vocab_rows: int) -> ValueError:
    expected = f"expected a whole number from 0 to {vocab_rows - 1}, a row of the head"
    for tool, sequence in enumerate(sequences):
        if isinstance(sequence, str) or not hasattr(sequence, "__len__"):
            return ValueError(f"tool {tool}: its id is {sequence!r:.80}; expected a sequence of token ids")
        for place, token in enumerate(sequence):
            if not isinstance(token, (int, np.integer)) or not 0 <= token < vocab_rows:
                return ValueError(f"tool {tool}: token {token!r:.80} at position {place}; {expected}")
    return ValueError(f"sequences: {expected}")


def _check_ends(sequences: Sequence[Sequence[int]], node_t: NDArray[np.int64], count_n: NDArray[np.int64]) -> None:
    """Refuses two tools that end in one node, and a tool that ends inside another's id."""
    _, first_t, inverse = np.unique(node_t, return_index=True, return_inverse=True)
    repeated = np.flatnonzero(first_t[inverse] != np.arange(len(node_t)))
    if repeated.size:
        tool, first = int(repeated[0]), int(first_t[inverse[repeated[0]]])
        further = f" ({repeated.size - 1:,} more repeat an id)" if repeated.size > 1 else ""
        raise ValueError(f"tools {first} and {tool} have the same id {_shown(sequences[tool])}{further}")
    inner = np.flatnonzero(count_n[node_t])
    if inner.size:
        tool, start = int(inner[0]), [*sequences[inner[0]]]
        longer = next(other for other, s in enumerate(sequences) if other != tool and [*s[: len(start)]] == start)
        further = f" ({inner.size - 1:,} more ids begin others)" if inner.size > 1 else ""
        found = f"its id {_shown(start)} is the beginning of {_shown(sequences[longer])}, the id of tool {longer}"
        raise ValueError(f"tool {tool}: {found}{further}; expected an end token, or ids of which none begins another")


def _shown(sequence: Sequence[int]) -> str:
    head = ", ".join(str(int(token)) for token in sequence[:16])
    return f"({head}, ...)" if len(sequence) > 16 else f"({head})"
