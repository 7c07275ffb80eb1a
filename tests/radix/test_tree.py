"""The tree by itself: its shape after each operation, and the order of eviction."""

from array import array

import pytest

from rootgraft.radix.invariants import check
from rootgraft.radix.namespace import Namespace, Path
from rootgraft.radix.node import Node, descendants
from rootgraft.radix.soft_pins import PinKind
from rootgraft.radix.tree import RadixTree

BASE = Namespace("r1")
ADAPTER = Namespace("r1", "a")


def memory(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def put(tree: RadixTree, tokens: list[int], pages: list[int], path: Path | None = None) -> Node:
    """Enter a sequence of whole pages and end its lease."""
    path = path or Path(BASE)
    node = tree.lock(tree.match(path, b""))
    end = tree.extend(node, path, 0, memory(*tokens), pages).node
    tree.unlock(end)
    check(tree, [])
    return end


def shape(tree: RadixTree) -> list[list[int]]:
    """The pages of each node, in the order of their first."""
    return sorted(node.pages for node in descendants(tree.root) if node.pages)


@pytest.fixture
def tree() -> RadixTree:
    return RadixTree(2)


def test_a_run_splits_where_sequences_part(tree):
    put(tree, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    put(tree, [1, 1, 2, 2, 4, 4], [20, 21, 22])
    assert shape(tree) == [[10, 11], [12], [22]]


def test_a_run_never_goes_over_a_switch(tree):
    put(tree, [1, 1, 2, 2, 3, 3], [10, 11, 12], Path(ADAPTER, 3, BASE))
    put(tree, [1, 1, 2, 2, 3, 3], [20, 21, 22], Path(ADAPTER, 2, BASE))
    put(tree, [1, 1, 2, 2, 3, 3], [30, 31, 32], Path(ADAPTER))
    assert shape(tree) == [[10], [11, 12], [21, 22], [30, 31, 32]]


def test_a_lone_lease_extends_its_node_and_two_do_not(tree):
    first = tree.lock(tree.match(Path(BASE), b""))
    first = tree.extend(first, Path(BASE), 0, memory(1, 1), [10]).node
    first = tree.extend(first, Path(BASE), 2, memory(2, 2), [11]).node
    assert shape(tree) == [[10, 11]]
    second = tree.lock(tree.match(Path(BASE), memory(1, 1, 2, 2)))
    second = tree.extend(second, Path(BASE), 4, memory(3, 3), [12]).node
    assert shape(tree) == [[10, 11], [12]]
    check(tree, [first, second])


def test_a_split_that_tells_nothing_apart_any_more_is_undone(tree):
    put(tree, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    lease = tree.lock(tree.match(Path(BASE), memory(1, 1)))
    assert shape(tree) == [[10], [11, 12]]
    tree.unlock(lease)
    assert shape(tree) == [[10], [11, 12]], "used at different times"
    tree.unlock(tree.lock(tree.match(Path(BASE), memory(1, 1, 2, 2, 3, 3))))
    assert shape(tree) == [[10, 11, 12]]
    check(tree, [])


def test_leases_survive_splits_and_joins_of_their_nodes(tree):
    lease = tree.lock(tree.match(Path(BASE), b""))
    lease = tree.extend(lease, Path(BASE), 0, memory(1, 1, 2, 2, 3, 3), [10, 11, 12]).node
    other = tree.lock(tree.match(Path(BASE), memory(1, 1)))
    check(tree, [lease, other])
    tree.unlock(other)
    again = tree.lock(tree.match(Path(BASE), memory(1, 1, 2, 2, 3, 3)))
    tree.unlock(again)
    assert shape(tree) == [[10, 11, 12]]
    check(tree, [lease])


def test_a_split_stays_while_a_lease_ends_at_it(tree):
    put(tree, [1, 1, 2, 2], [10, 11])
    lease = tree.lock(tree.match(Path(BASE), memory(1, 1)))
    tree.unlock(tree.lock(tree.match(Path(BASE), memory(1, 1, 2, 2))))
    assert shape(tree) == [[10], [11]]
    check(tree, [lease])
    assert tree.evict(2) == [11]


def test_eviction_takes_pages_from_the_end_of_the_oldest_leaf(tree):
    put(tree, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    put(tree, [5, 5, 6, 6], [20, 21])
    assert tree.evict(2) == [11, 12]
    assert tree.evict(2) == [10, 21]
    check(tree, [])
    assert tree.evict(9) == [20]
    assert tree.num_pages == 0


def test_use_makes_young_again(tree):
    for token in (1, 2, 3):
        put(tree, [token, token], [10 * token])
    tree.unlock(tree.lock(tree.match(Path(BASE), memory(1, 1))))
    assert [tree.evict(1) for _ in range(3)] == [[20], [30], [10]]


def test_a_parent_outlives_its_children(tree):
    put(tree, [1, 1, 2, 2], [10, 11])
    put(tree, [1, 1, 3, 3], [20, 21])
    put(tree, [9, 9], [30])
    assert [tree.evict(1) for _ in range(4)] == [[11], [21], [10], [30]]


def test_a_tail_goes_before_the_run_it_ends(tree):
    node = put(tree, [1, 1, 2, 2], [10, 11])
    tree.add_tail(node, Path(BASE), 4, memory(3), 12)
    check(tree, [])
    assert [tree.evict(1) for _ in range(3)] == [[12], [11], [10]]


def test_eviction_stops_at_locked_nodes(tree):
    put(tree, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    lease = tree.lock(tree.match(Path(BASE), memory(1, 1, 2, 2)))
    assert tree.evict(9) == [12]
    assert tree.num_locked == tree.num_pages == 2
    check(tree, [lease])


def test_the_queue_stays_as_small_as_the_tree(tree):
    put(tree, [1, 1], [10])
    put(tree, [2, 2], [20])
    for _ in range(1000):
        tree.unlock(tree.lock(tree.match(Path(BASE), memory(1, 1))))
    assert len(tree.tenant_eviction._shares[""].leaves._heap) < 200 and len(tree.tenant_eviction._order) < 200
    assert [tree.evict(1), tree.evict(1)] == [[20], [10]]


def test_heads_of_many_adapters_are_told_apart(tree):
    paths = [Path(Namespace("r1", str(i)), 1, BASE) for i in range(20)]
    for i, path in enumerate(paths):
        put(tree, [7, 8], [i], path)
    assert tree.match(Path(BASE), memory(7, 8)).num_copied == 1
    for i, path in enumerate(paths):
        assert tree.drop(path.namespace) == [i]
        check(tree, [])
    assert tree.match(Path(BASE), memory(7, 8)).num_copied == 0


def test_the_end_of_a_lease_is_a_use(tree):
    put(tree, [1, 1], [10])
    put(tree, [2, 2], [20])
    first, second = (tree.lock(tree.match(Path(BASE), memory(token, token))) for token in (1, 2))
    tree.unlock(second)
    tree.unlock(first)
    assert [tree.evict(1), tree.evict(1)] == [[20], [10]]


def test_what_stood_above_a_dropped_namespace_can_be_evicted(tree):
    put(tree, [1, 1, 2, 2], [10, 11], Path(ADAPTER, 2, BASE))
    assert tree.drop(ADAPTER) == [11]
    check(tree, [])
    assert tree.evict(2) == [10]


def test_a_drop_forgets_the_namespaces_below_as_well(tree):
    put(tree, [1, 1, 2, 2], [10, 11], Path(ADAPTER, 2, BASE))
    assert sorted(tree.drop(BASE)) == [10, 11]
    check(tree, [])
    assert tree.drop(ADAPTER) == []


def test_held_paths_go_last_and_pins_after_sessions(tree):
    for first, pages in ((1, [10, 11]), (2, [20, 21]), (3, [30, 31])):
        put(tree, [first, 0, first, 1], pages)
    session = tree.pin(tree.match(Path(BASE), memory(1, 0)), PinKind.SESSION)
    pin = tree.pin(tree.match(Path(BASE), memory(2, 0, 2, 1)), PinKind.PIN)
    check(tree, [])
    assert [node.pages for node in descendants(tree.root) if node.pinned] == [[20, 21]]
    assert [tree.evict(1)[0] for _ in range(5)] == [11, 31, 30, 10, 21]
    assert session.node is None and pin.node is not None
    assert tree.evict(9) == [20] and pin.node is None
    tree.unpin(pin)
    check(tree, [])


def test_what_parted_for_a_hold_joins_again_after_it(tree):
    put(tree, [1, 1, 2, 2, 3, 3], [10, 11, 12])
    hold = tree.pin(tree.match(Path(BASE), memory(1, 1, 2, 2)), PinKind.PIN)
    assert shape(tree) == [[10, 11], [12]]
    tree.unpin(hold)
    assert shape(tree) == [[10, 11, 12]]
    check(tree, [])
    assert tree.pin(tree.match(Path(BASE), memory(1)), PinKind.PIN) is None


def test_a_lone_lease_does_not_make_a_held_node_longer(tree):
    put(tree, [1, 1, 2, 2], [10, 11])
    hold = tree.pin(tree.match(Path(BASE), memory(1, 1, 2, 2)), PinKind.PIN)
    lease = tree.lock(tree.match(Path(BASE), memory(1, 1, 2, 2)))
    lease = tree.extend(lease, Path(BASE), 4, memory(3, 3), [12]).node
    assert shape(tree) == [[10, 11], [12]] and tree.pins.num_pages[PinKind.PIN] == 2
    tree.unlock(lease)
    tree.drop(BASE)
    assert hold.node is None and tree.pins.num_pages[PinKind.PIN] == 0
    check(tree, [])
