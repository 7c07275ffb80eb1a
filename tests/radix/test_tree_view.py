"""A bounded picture of the tree: parents first, what is in use, then what was used last."""

from __future__ import annotations

import random
from array import array

import pytest

from rootgraft.engine.kv_cache.prefix_cache import Lease, PrefixCache
from rootgraft.radix import tree_view as module
from rootgraft.radix.namespace import Namespace, Path
from rootgraft.radix.node import TOKEN_BYTES, Node
from rootgraft.radix.tree import RadixTree, descendants
from rootgraft.radix.tree_view import tree_view

PAGE = 4
PATHS = [Path(Namespace("base", adapter)) for adapter in (None, "a", "b")]


class Shop:
    """A cache and its tree, and sequences that come and go."""

    def __init__(self, num_pages: int = 4000) -> None:
        self.cache = PrefixCache(num_pages, PAGE)
        self.tree: RadixTree = self.cache._tree

    def begin(self, path: Path, tokens: list[int]) -> Lease:
        memory = array("i", tokens)
        lease = self.cache.acquire(path, memory, len(memory) - 1)
        lease.take_copy()
        assert self.cache.grow(lease, len(memory))
        self.cache.commit(lease, memory, len(memory))
        return lease

    def end(self, lease: Lease, tokens: list[int]) -> None:
        self.cache.release(lease, array("i", tokens), len(tokens))

    def run(self, path: Path, tokens: list[int]) -> None:
        self.end(self.begin(path, tokens), tokens)


def branching(rng: random.Random, shop: Shop, count: int) -> None:
    for _ in range(count):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(5, 60))]
        shop.run(rng.choice(PATHS), tokens)


def check_shape(shop: Shop, nodes: list[Node]) -> None:
    there = set(descendants(shop.tree.root)) - {shop.tree.root}
    assert len(set(nodes)) == len(nodes) and set(nodes) <= there
    for place, node in enumerate(nodes):
        assert node.parent is shop.tree.root or node.parent in nodes[:place]


def test_an_empty_tree_has_no_nodes() -> None:
    assert Shop().cache.tree_view(10) == []


def test_all_nodes_if_they_fit() -> None:
    shop = Shop()
    branching(random.Random(1), shop, 40)
    nodes = shop.cache.tree_view(10_000)
    check_shape(shop, nodes)
    assert len(nodes) == len(list(descendants(shop.tree.root))) - 1


@pytest.mark.parametrize("seed", range(5))
def test_those_used_last_if_they_do_not_fit(seed: int) -> None:
    shop = Shop()
    branching(random.Random(seed), shop, 60)
    nodes = shop.cache.tree_view(20)
    check_shape(shop, nodes)
    assert len(nodes) == 20
    others = set(descendants(shop.tree.root)) - {shop.tree.root, *nodes}
    assert min(node.last_use for node in nodes) >= max(node.last_use for node in others)


def test_what_is_in_use_comes_first_however_old() -> None:
    shop = Shop()
    tokens = [7] * 30
    lease = shop.begin(PATHS[1], tokens)
    branching(random.Random(2), shop, 60)
    nodes = shop.cache.tree_view(5)
    check_shape(shop, nodes)
    assert lease.node in nodes and lease.node.lock == 1
    shop.end(lease, tokens)


def test_a_node_with_very_many_children_is_not_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_VISITS", 60)
    monkeypatch.setattr(module, "MOST_SIBLINGS", 50)
    shop = Shop()
    for number in range(300):
        shop.run(PATHS[0], [number] * PAGE * 2)
    assert len(tree_view(shop.tree, [], 1000)) == 50


def test_hits_are_counted_where_sequences_begin() -> None:
    shop = Shop()
    common, branches = list(range(8)), [[n] * 8 for n in (20, 21, 22)]
    for branch in branches:
        shop.run(PATHS[0], common + branch)
    assert [node.hits for node in shop.cache.tree_view(1)] == [2]  # the first one computed it
    shop.run(PATHS[0], common + branches[1] + [1])
    by_tokens = {array("i", bytes(node.tokens)).tolist()[0]: node.hits for node in shop.cache.tree_view(10)}
    assert by_tokens[0] == 3 and by_tokens[21] == 1 and by_tokens[20] == 0
    assert sum(len(node.tokens) for node in shop.cache.tree_view(10)) // TOKEN_BYTES == 8 + 3 * 8 + 1
