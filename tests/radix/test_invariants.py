"""The audit finds each thing it is there to find: a sound tree is damaged by hand, in one place at a time."""

from array import array

import pytest

from rootgraft.radix.invariants import BrokenInvariant, check
from rootgraft.radix.namespace import Namespace, Origin, Path
from rootgraft.radix.node import Node
from rootgraft.radix.soft_pins import PinKind, SoftPin
from rootgraft.radix.tenant_eviction import EvictionQueue
from rootgraft.radix.tree import RadixTree

BASE = Namespace("r1")
ADAPTER = Namespace("r1", "a")


def memory(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


class Sample:
    """A run [10, 11], below it an unlocked whole page [12], a locked one [20] with a switch, and a tail [30]."""

    def __init__(self) -> None:
        tree = self.tree = RadixTree(2)
        root = tree.lock(tree.match(Path(BASE), b""))
        self.whole = tree.extend(root, Path(BASE), 0, memory(1, 1, 2, 2, 3, 3), [10, 11, 12]).node
        tree.unlock(self.whole)
        path = Path(ADAPTER, 5, BASE)
        self.run = tree.lock(tree.match(path, memory(1, 1, 2, 2)))
        self.lease = tree.extend(self.run, path, 4, memory(3, 3), [20]).node
        tree.add_tail(self.run, Path(BASE), 4, memory(4), 30)
        (self.tail,) = (node for node in self.siblings.nodes if node is not self.whole)

    @property
    def siblings(self):
        return self.run.children[Origin(BASE)]


def unlink_parent(sample: Sample) -> None:
    sample.whole.parent = sample.tree.root


def swap_keys(sample: Sample) -> None:
    sample.siblings.keys.reverse()
    sample.siblings.nodes.reverse()


def second_switch(sample: Sample) -> None:
    sample.lease.children[Origin(BASE)] = siblings = type(sample.siblings)()
    child = Node(Origin(BASE), memory(6, 6), [40])
    child.parent = sample.lease
    siblings.add(memory(6, 6), child)


def lose_queue(sample: Sample) -> None:
    sample.tree.tenant_eviction._shares[""].leaves = EvictionQueue()


DAMAGE = {
    "has no pages": lambda s: s.whole.pages.clear(),
    "room for": lambda s: s.whole.tokens.extend(memory(9)),
    "is locked or has children": lambda s: setattr(s.tail, "lock", 1),
    "was used before its child": lambda s: setattr(s.whole, "last_use", 99),
    "is dropped but found": lambda s: setattr(s.whole, "dropped", True),
    "switches from another": lambda s: setattr(s.lease, "origin", Origin(ADAPTER, 1, Namespace("r2"))),
    "more than one switch": second_switch,
    "is filed under": unlink_parent,
    "keys out of order": swap_keys,
    "but first page": lambda s: s.siblings.keys.__setitem__(0, b"0000"),
    "has heads": lambda s: s.run.heads.clear(),
    "namespaces begin at": lambda s: s.tree.tops.clear(),
    "has leases through it": lambda s: setattr(s.run, "lock", 2),
    "num_locked is": lambda s: setattr(s.tree, "num_locked", 0),
    "evictable:": lose_queue,
    "are said to have": lambda s: setattr(s.tree.tenant_eviction._shares[""], "num_pages", 9),
    "pages in the tree twice": lambda s: s.whole.pages.__setitem__(0, 10),
    "num_pages is": lambda s: setattr(s.tree, "num_pages", 6),
    "SESSION holds through it": lambda s: s.run.pins.__setitem__(0, 1),
    "num_pages of PIN": lambda s: s.tree.pins.num_pages.__setitem__(PinKind.PIN, 1),
    "says that it ends at": lambda s: s.tree.pins.ends.__setitem__(s.run, [SoftPin(s.whole, PinKind.PIN)]),
    "is kept as dropped": lambda s: s.tree.dropped.add(s.lease),
}


def test_a_sound_tree_passes():
    sample = Sample()
    assert sorted(check(sample.tree, [sample.lease])) == [10, 11, 12, 20, 30]


@pytest.mark.parametrize("message", DAMAGE)
def test_damage_is_found(message):
    sample = Sample()
    DAMAGE[message](sample)
    with pytest.raises(BrokenInvariant, match=message):
        check(sample.tree, [sample.lease])


def test_a_lease_outside_the_tree_is_found():
    sample = Sample()
    with pytest.raises(BrokenInvariant, match="outside the tree"):
        check(sample.tree, [sample.lease, Node(None, b"", [])])
