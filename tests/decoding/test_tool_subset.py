"""What a subset has below each node against the list of all prefixes."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from jaxtool.config import MeshConfig
from jaxtool.decoding import DEAD_NODE, ToolSubset, ToolTrie
from jaxtool.parallel import AxisRules, make_mesh
from tests.decoding.trie_truth import CATALOGUES, BruteForce, Ids, built, catalogues


@jax.jit
def looked_up(trie: ToolTrie, allowed_bt: jax.Array | None, nodes_bn: jax.Array) -> tuple[jax.Array, ...]:
    subset = ToolSubset.of(trie, allowed_bt, AxisRules())
    return subset.count(nodes_bn), subset.first_place(nodes_bn), subset.only_child(nodes_bn)


def check(trie: ToolTrie, truth: BruteForce, allowed_bt: np.ndarray | None) -> None:
    rows = np.ones((2, trie.num_tools), bool) if allowed_bt is None else allowed_bt
    nodes_bn = np.tile(np.arange(trie.num_nodes, dtype=np.int32), (len(rows), 1))
    counts, places, children = map(np.asarray, looked_up(trie, allowed_bt, nodes_bn))
    assert not counts[:, DEAD_NODE].any() and not children[:, DEAD_NODE].any()
    for row, tools in enumerate(rows):
        for prefix, node in truth.node.items():
            left = [tool for tool in truth.below(prefix) if tools[tool]]
            assert counts[row, node] == len(left)
            if left:
                assert trie.leaf_order[places[row, node]] == min(left, key=lambda tool: truth.ids[tool])
            nexts = {truth.ids[tool][: len(prefix) + 1] for tool in left if truth.ids[tool] != prefix}
            assert children[row, node] == (truth.node[nexts.pop()] if len(nexts) == 1 else DEAD_NODE)


@pytest.mark.parametrize("name", CATALOGUES)
def test_subsets(name: str) -> None:
    trie, truth = built(*CATALOGUES[name])
    rng = np.random.default_rng(1)
    some = rng.random((4, trie.num_tools)) < [[0.1], [0.3], [0.5], [0.9]]
    none, every, single = np.zeros((1, trie.num_tools)), np.ones((1, trie.num_tools)), np.eye(trie.num_tools)
    check(trie, truth, np.concatenate([some, none, every, single]).astype(bool))
    check(trie, truth, None)


@settings(max_examples=10)  # each compiles anew
@given(catalogues(), st.data())
def test_any_catalogue(catalogue: tuple[Ids, int | None], data: st.DataObject) -> None:
    trie, truth = built(*catalogue)
    row = st.lists(st.booleans(), min_size=trie.num_tools, max_size=trie.num_tools)
    check(trie, truth, np.array([data.draw(row), data.draw(row)]))


def test_on_a_mesh() -> None:
    trie, _ = built(*CATALOGUES["digits"])
    nodes_bn = np.arange(40, dtype=np.int32).reshape(8, 5)
    allowed_bt = np.random.default_rng(2).random((8, trie.num_tools)) < 0.1
    expected = looked_up(trie, allowed_bt, nodes_bn)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, model=2), jax.devices())
    with jax.set_mesh(mesh):
        batch = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        on_mesh = jax.device_put(trie, NamedSharding(mesh, PartitionSpec()))
        found = looked_up(on_mesh, *jax.device_put((allowed_bt, nodes_bn), batch))
    for result, single in zip(found, expected, strict=True):
        assert result.sharding.is_equivalent_to(batch, result.ndim)
        np.testing.assert_array_equal(result, single)


@pytest.mark.parametrize(
    "allowed", [np.ones((1, 7), bool), np.ones((1, 8), np.int32), np.ones(8, bool), np.ones((8, 1), bool)]
)
def test_refused(allowed: np.ndarray) -> None:
    trie, _ = built(*CATALOGUES["mixed lengths"])
    with pytest.raises(
        ValueError, match=r"^allowed has shape .* and type .*; expected bool \[B, 8\], one for each row"
    ):
        ToolSubset.of(trie, allowed, AxisRules())
