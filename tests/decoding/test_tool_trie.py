"""The trie of tool ids against the list of all prefixes, sorted: its position there is a node's number."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.decoding import DEAD_NODE, ROOT_NODE, ToolTrie
from jaxtool.parallel import make_mesh
from tests.decoding.trie_truth import CATALOGUES, END, TOKENS, VOCAB, BruteForce, Ids, built, catalogues

children = jax.jit(ToolTrie.children, static_argnames="width")
child_of = jax.jit(ToolTrie.child_of)
child_above = jax.jit(ToolTrie.child_above)


@pytest.fixture(params=CATALOGUES)
def pair(request: pytest.FixtureRequest) -> tuple[ToolTrie, BruteForce]:
    return built(*CATALOGUES[request.param])


def check_against_brute_force(trie: ToolTrie, truth: BruteForce) -> None:
    assert (trie.num_nodes, trie.num_tools) == (len(truth.prefixes) + 1, len(truth.ids))
    assert trie.alphabet.tolist() == sorted({token for full in truth.ids for token in full})
    assert trie.tool_depth.tolist() == [len(full) for full in truth.ids]
    assert {leaf.dtype for leaf in jax.tree.leaves(trie)} == {np.dtype(np.int32)}
    for prefix, node in truth.node.items():
        row = range(trie.child_start[node], trie.child_start[node + 1])
        assert trie.alphabet[trie.child_column[row]].tolist() == truth.tokens[prefix]
        assert [edge + 2 for edge in row] == [truth.node[*prefix, token] for token in truth.tokens[prefix]]
        assert trie.node_tool[node] == truth.tool.get(prefix, -1)
        assert trie.node_depth[node] == len(prefix)
        assert trie.run_length[node] == len(truth.run(prefix))
        assert trie.run_end[node] == truth.node[prefix + truth.run(prefix)]
        below = trie.leaf_order[trie.first_leaf[node] : trie.last_leaf[node] + 1]
        assert below.tolist() == sorted(truth.below(prefix), key=lambda tool: truth.ids[tool])


def check_levels(trie: ToolTrie, truth: BruteForce) -> None:
    assert trie.max_depth == max(map(len, truth.ids))
    assert trie.max_children == max(map(len, truth.tokens.values()))
    for depth in range(trie.max_depth + 1):
        level = [truth.tokens[prefix] for prefix in truth.prefixes if len(prefix) == depth]
        assert trie.level_nodes[depth] == len(level)
        assert trie.level_children[depth] == max(map(len, level))
        columns = trie.level_columns(depth)
        assert columns.tolist() == sorted(set(columns.tolist()))
        assert set(trie.alphabet[columns].tolist()) == set().union(*level)
        choices = trie.alphabet[trie.level_columns(depth, decisions_only=True)].tolist()
        assert choices == sorted(set().union(*(tokens for tokens in level if len(tokens) > 1)))


def check_runs(trie: ToolTrie, truth: BruteForce) -> None:
    runs = [(len(truth.run(prefix)), prefix + truth.run(prefix) in truth.tool) for prefix in truth.prefixes]
    assert trie.longest_run == max((length for length, to_leaf in runs if not to_leaf), default=0)
    assert trie.longest_tail == max((length - 1 for length, to_leaf in runs if to_leaf and length), default=0)
    for width in (1, 3, trie.max_depth + 1):
        tokens = trie.run_tokens(width)
        assert tokens.shape == (trie.num_nodes, width) and tokens.dtype == np.int32
        assert (tokens[DEAD_NODE] == -1).all()
        for prefix, node in truth.node.items():
            run = truth.run(prefix)[:width]
            assert tokens[node].tolist() == [*run, *(width - len(run)) * [-1]]


def check_dead_node(trie: ToolTrie) -> None:
    assert trie.child_start[DEAD_NODE] == trie.child_start[DEAD_NODE + 1]
    assert (trie.node_tool[DEAD_NODE], trie.node_depth[DEAD_NODE]) == (-1, 0)
    assert (trie.run_length[DEAD_NODE], trie.run_end[DEAD_NODE]) == (0, DEAD_NODE)
    assert trie.first_leaf[DEAD_NODE] > trie.last_leaf[DEAD_NODE]


@given(catalogues())
def test_arrays(catalogue: tuple[Ids, int | None]) -> None:
    trie, truth = built(*catalogue)
    check_against_brute_force(trie, truth)
    check_levels(trie, truth)
    check_runs(trie, truth)
    check_dead_node(trie)


@given(catalogues(), st.lists(st.sampled_from([*TOKENS, END, -1, VOCAB]), max_size=7))
def test_walking(catalogue: tuple[Ids, int | None], other: list[int]) -> None:
    trie, truth = built(*catalogue)
    for prefix, node in truth.node.items():
        assert trie.walk(prefix) == node
    assert trie.walk(other) == truth.node.get(tuple(other), DEAD_NODE)
    for tool, (tokens, full) in enumerate(zip(catalogue[0], truth.ids, strict=True)):
        assert trie.tool_of(tokens) == trie.tool_of(full) == tool
    known = {*catalogue[0], *truth.ids}
    assert (trie.tool_of(other) is not None) == (tuple(other) in known)


@settings(max_examples=10)  # each compiles anew
@given(catalogues())
def test_steps_of_any_catalogue(catalogue: tuple[Ids, int | None]) -> None:
    trie, truth = built(*catalogue)
    check_children(trie, truth)
    check_child_of(trie, truth)
    check_child_above(trie, truth)


def check_children(trie: ToolTrie, truth: BruteForce) -> None:
    nodes = np.arange(trie.num_nodes, dtype=np.int32)
    width = trie.max_children + 1
    columns, found, valid = map(np.asarray, children(trie, nodes, width=width))
    assert columns.shape == found.shape == valid.shape == (trie.num_nodes, width)
    assert columns.dtype == found.dtype == np.int32
    assert not columns[~valid].any() and not found[~valid].any()
    assert not valid[DEAD_NODE].any()
    for prefix, node in truth.node.items():
        tokens = truth.tokens[prefix]
        assert valid[node].tolist() == [True] * len(tokens) + [False] * (width - len(tokens))
        assert trie.alphabet[columns[node][valid[node]]].tolist() == tokens
        assert found[node][valid[node]].tolist() == [truth.node[*prefix, token] for token in tokens]


def check_child_of(trie: ToolTrie, truth: BruteForce) -> None:
    tokens = np.array([*TOKENS, END, 1, -1, VOCAB, 2**31 - 1, -(2**31)], np.int32)
    nodes = np.arange(trie.num_nodes, dtype=np.int32)
    found = np.asarray(child_of(trie, *np.broadcast_arrays(nodes[:, None], tokens)))
    assert found.dtype == np.int32
    assert not found[DEAD_NODE].any()
    for prefix, node in truth.node.items():
        assert found[node].tolist() == [truth.node.get((*prefix, int(token)), DEAD_NODE) for token in tokens]


def check_child_above(trie: ToolTrie, truth: BruteForce) -> None:
    """Every node with every leaf below it."""
    for prefix, node in truth.node.items():
        places = np.arange(trie.first_leaf[node], trie.last_leaf[node] + 1, dtype=np.int32)
        places = np.pad(places, (0, trie.num_tools - len(places)), mode="edge")
        found = np.asarray(child_above(trie, np.full(len(places), node, np.int32), places))
        for place, child in zip(places, found, strict=True):
            full = truth.ids[trie.leaf_order[place]]
            assert child == (DEAD_NODE if full == prefix else truth.node[full[: len(prefix) + 1]])


def test_children(pair: tuple[ToolTrie, BruteForce]) -> None:
    check_children(*pair)
    assert pair[0].child_node.tolist() == list(range(2, pair[0].num_nodes))


def test_children_beyond_the_width_are_left_out() -> None:
    trie, _ = built(*CATALOGUES["digits"])
    whole, cut = children(trie, np.int32(3), width=10), children(trie, np.int32(3), width=4)
    assert np.asarray(whole[2]).all()
    for all_of_it, first in zip(whole, cut, strict=True):
        np.testing.assert_array_equal(first, all_of_it[:4])


def test_child_of(pair: tuple[ToolTrie, BruteForce]) -> None:
    check_child_of(*pair)


def test_child_of_a_wide_node() -> None:
    tokens = np.random.default_rng(0).permutation(np.arange(0, 3000, 3))
    trie = ToolTrie.build([(int(token), 7) for token in tokens], end_token=None, vocab_rows=3000)
    found = np.asarray(child_of(trie, np.full(3000, ROOT_NODE), np.arange(3000)))
    expected = [2 + token // 3 if token % 3 == 0 else DEAD_NODE for token in range(3000)]
    assert found.tolist() == expected


def test_child_above(pair: tuple[ToolTrie, BruteForce]) -> None:
    check_child_above(*pair)


def test_tokens_of_two_ids_are_no_id() -> None:
    """Each pair of neighbours occurs in some id, as a table of bigrams would allow."""
    trie, truth = built([(5, 20, 40), (22, 20, 63), (5, 0, 63), (22, 0, 40)], None)
    accepted = [path for path in itertools.product(TOKENS, repeat=3) if trie.tool_of(path) is not None]
    assert accepted == sorted(truth.ids)
    assert trie.walk((5, 20, 63)) == trie.walk((22, 20, 40)) == trie.walk((5, 0, 40)) == DEAD_NODE
    assert trie.walk((5, 20, 63, 40)) == DEAD_NODE


def test_loop_of_steps() -> None:
    """Every path over the alphabet, stepped in one compiled loop; what left the trie stays dead."""
    trie, truth = built(*CATALOGUES["ids that begin others"])
    paths = np.array([*itertools.product((5, 20, 40, 0, END), repeat=4)], np.int32)

    @jax.jit
    def ends(trie: ToolTrie, paths: jax.Array) -> jax.Array:
        def step(node: jax.Array, token: jax.Array) -> tuple[jax.Array, jax.Array]:
            node = trie.child_of(node, token)
            return node, node

        return jax.lax.scan(step, jnp.full(len(paths), ROOT_NODE, jnp.int32), paths.T)[1].T

    for path, nodes in zip(paths.tolist(), np.asarray(ends(trie, paths)), strict=True):
        assert nodes.tolist() == [truth.node.get(tuple(path[: place + 1]), DEAD_NODE) for place in range(4)]


def test_on_a_mesh() -> None:
    trie, truth = built(*CATALOGUES["digits"])
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2), jax.devices())
    with jax.set_mesh(mesh):
        batch = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        on_mesh = jax.device_put(trie, NamedSharding(mesh, PartitionSpec()))
        nodes = np.arange(40, dtype=np.int32).reshape(8, 5)
        tokens = nodes % 10
        nodes_bm, tokens_bm = jax.device_put((nodes, tokens), batch)
        found = (
            *children(on_mesh, nodes_bm, width=10),
            child_of(on_mesh, nodes_bm, tokens_bm),
            child_above(on_mesh, nodes_bm, on_mesh.first_leaf[nodes]),
        )
        for result in found:
            assert result.sharding.is_equivalent_to(batch, result.ndim)
    above = child_above(trie, nodes, trie.first_leaf[nodes])
    expected = (*children(trie, nodes, width=10), child_of(trie, nodes, tokens), above)
    for result, single in zip(found, expected, strict=True):
        np.testing.assert_array_equal(result, single)
    assert on_mesh.walk((1, 2)) == truth.node[1, 2]
    assert on_mesh.tool_of((1, 2)) == 12


def test_outside_jit() -> None:
    trie, truth = built(*CATALOGUES["mixed lengths"])
    assert trie.child_of(ROOT_NODE, 22) == truth.node[22,]
    assert trie.children(ROOT_NODE, 4)[1].tolist() == [truth.node[token,] for token in (5, 22, 40, 63)]


def test_rows_of_numpy() -> None:
    rows = np.array([[4, 1], [3, 2], [4, 0]], np.uint16)
    trie = ToolTrie.build(rows, end_token=None, vocab_rows=5)
    assert [trie.tool_of(row) for row in rows] == [0, 1, 2]
    assert trie.leaf_order.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("sequences", "end_token", "message"),
    [
        ([], None, "sequences is empty; expected the id of at least one tool"),
        ([(1,), ()], None, "tool 1: its id is empty; expected at least one token, or an end token"),
        ([(), (1,)], None, "tool 0: its id is empty; expected at least one token, or an end token"),
        ([(1,), (2, 3), (4,), (2, 3)], None, "tools 1 and 3 have the same id (2, 3)"),
        ([(1,), (2, 3), (2, 3)], END, "tools 1 and 2 have the same id (2, 3)"),
        ([(), ()], END, "tools 0 and 1 have the same id ()"),
        ([(1,), (2,), (2,), (1,), (1,)], None, "tools 1 and 2 have the same id (2) (2 more repeat an id)"),
        (
            [tuple(range(20))] * 2,
            None,
            "tools 0 and 1 have the same id (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, ...)",
        ),
        (
            [(7,), (1, 2, 3), (1, 2)],
            None,
            "tool 2: its id (1, 2) is the beginning of (1, 2, 3), the id of tool 1; expected an end token, or ids of "
            "which none begins another",
        ),
        (
            [(1,), (1, 2, 3), (1, 2)],
            None,
            "tool 0: its id (1) is the beginning of (1, 2, 3), the id of tool 1 (1 more ids begin others); expected an "
            "end token, or ids of which none begins another",
        ),
        ([(1, 2), (3, END)], END, "tool 1: token 21 at position 1 is the end token; expected none in an id"),
        ([(), (END, 1)], END, "tool 1: token 21 at position 0 is the end token; expected none in an id"),
        ([(1,), (2, 64)], None, "tool 1: token 64 at position 1; expected a whole number from 0 to 63, a row of"),
        ([(1,), (-1,)], None, "tool 1: token -1 at position 0; expected a whole number from 0 to 63, a row of the"),
        ([(1,), (2, 2**70)], None, f"tool 1: token {2**70} at position 1; expected a whole number from 0 to 63"),
        ([(1,), (2, 3.0)], None, "tool 1: token 3.0 at position 1; expected a whole number from 0 to 63"),
        ([(1,), ("2",)], None, "tool 1: token '2' at position 0; expected a whole number from 0 to 63"),
        ([(1,), "23"], None, "tool 1: its id is '23'; expected a sequence of token ids"),
        ([(1,), ((2, 3), (4, 5))], None, "tool 1: token (2, 3) at position 0; expected a whole number from 0 to 63"),
        ([(1,), 23], None, "tool 1: its id is 23; expected a sequence of token ids"),
        ([(1,)], VOCAB, "end_token is 64; expected None or a row of the head, 0 to 63"),
        ([(1,)], -1, "end_token is -1; expected None or a row of the head, 0 to 63"),
    ],
)
def test_refusals(sequences: list[tuple[int, ...]], end_token: int | None, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        ToolTrie.build(sequences, end_token=end_token, vocab_rows=VOCAB)
    assert str(refusal.value).startswith(message)


@pytest.mark.parametrize("vocab_rows", [0, 2**31])
def test_refused_number_of_rows(vocab_rows: int) -> None:
    with pytest.raises(ValueError, match=rf"^vocab_rows is {vocab_rows}; expected 1 to 2\*\*31 - 1, the rows of"):
        ToolTrie.build([(0,)], end_token=None, vocab_rows=vocab_rows)


@pytest.mark.parametrize("depth", [-1, 6])
def test_refused_depth(depth: int) -> None:
    trie, _ = built(*CATALOGUES["mixed lengths"])
    with pytest.raises(ValueError, match=rf"^depth is {depth}; expected 0 to 5, the deepest level of the trie$"):
        trie.level_columns(depth)
