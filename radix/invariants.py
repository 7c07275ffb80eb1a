"""Invariants of the radix tree, checked without using its counts: after each change in tests, and in an idle engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from .namespace import Namespace
from .node import TOKEN_BYTES, Node, descendants, upwards
from .soft_pins import PinKind
from .tree import RadixTree


class BrokenInvariant(Exception):
    """An invariant does not hold, which is a bug. The message contains all terms of the invariant."""


def check(tree: RadixTree, leases: Sequence[Node]) -> list[int]:
    """Check the whole tree, in time linear in its pages. Returns all its page ids. Raises BrokenInvariant.

    Args:
        leases: the end node of each lease.
    """
    reachable = [node for node in descendants(tree.root) if node is not tree.root]
    for node in reachable:
        _check_run(tree, node)
        _check_place(node)
    for node in (tree.root, *reachable):
        if node.children or node.heads:
            _check_children(tree, node)
    _check_switches(tree, reachable)
    _check_tops(tree, reachable)
    _check_locks(tree, reachable, leases)
    _check_pins(tree, reachable)
    _check_queue(tree, reachable)
    _check_shares(tree, reachable)
    return _check_pages(tree, reachable)


def _require(holds: bool, *terms: object) -> None:
    if not holds:
        raise BrokenInvariant(" ".join(map(str, terms)))


def _check_run(tree: RadixTree, node: Node) -> None:
    """Check that a node is full pages, or a tail: one page with fewer tokens, never locked and without children."""
    num_tokens, room = len(node.tokens) // TOKEN_BYTES, len(node.pages) * tree.page_size
    tail = len(node.pages) == 1 and 0 < num_tokens < tree.page_size
    _require(bool(node.pages), node, "has no pages")
    _require(tail or num_tokens == room, node, "has", num_tokens, "tokens, room for", room)
    _require(not (tail and (node.lock or node.children)), "tail", node, "is locked or has children")


def _check_place(node: Node) -> None:
    """Check that no child was used after its parent, and that a switch continues the namespace of its parent."""
    parent, origin = node.parent, node.origin
    assert parent and origin, "only the root has neither"
    _require(parent.last_use >= node.last_use, parent, "was used before its child", node)
    _require(not node.dropped, node, "is dropped but found by matches")
    _require((origin.switch > 0) == (origin.before is not None), node, "switches from nothing")
    if origin.before and parent.origin:
        _require(origin.before == parent.namespace, node, "switches from another than", parent.namespace)


def _check_switches(tree: RadixTree, reachable: list[Node]) -> None:
    """Check that each path changes its namespace at most once."""
    switches = {tree.root: 0}
    for node in reachable:
        parent, origin = node.parent, node.origin
        assert parent and origin
        switched = origin.before is not None or (parent.origin is not None and parent.namespace != origin.namespace)
        switches[node] = switches[parent] + switched
        _require(switches[node] <= 1, node, "ends a path with more than one switch")


def _check_children(tree: RadixTree, node: Node) -> None:
    """Check that children and heads are sorted by origin and first page, and that no key is a prefix of another."""
    heads: Counter[tuple[Namespace, bytes, Node]] = Counter()
    for origin, siblings in node.children.items():
        pairs = list(zip(siblings.keys, siblings.nodes, strict=True))
        _require(bool(pairs), node, "keeps an empty group", origin)
        for key, child in pairs:
            first_page = bytes(child.tokens[: tree.page_size * TOKEN_BYTES])
            _require(key == first_page, child, "has key", key, "but first page", first_page)
            _require(child.origin == origin and child.parent is node, child, "is filed under", origin)
            _require(origin.switch * TOKEN_BYTES < len(key), child, "ends before its switch")
            if origin.before:
                heads[origin.before, key[: origin.switch * TOKEN_BYTES], child] += 1
        for left, right in zip(siblings.keys, siblings.keys[1:], strict=False):
            _require(left < right and not right.startswith(left), "keys out of order or redundant:", left, right)
    filed = Counter(
        (before, key, child)
        for before, siblings in node.heads.items()
        for key, child in zip(siblings.keys, siblings.nodes, strict=True)
    )
    _require(filed == heads, node, "has heads", filed, "but children", heads)
    for siblings in node.heads.values():
        _require(siblings.keys == sorted(siblings.keys), "heads out of order:", siblings.keys)


def _check_tops(tree: RadixTree, reachable: list[Node]) -> None:
    """Check that the index of the nodes at which namespaces begin is complete."""
    begun: dict[Namespace, set[Node]] = {}
    for node in reachable:
        assert node.parent and node.origin
        for namespace in (node.origin.namespace, node.origin.before):
            if namespace and namespace != node.parent.namespace:
                begun.setdefault(namespace, set()).add(node)
    _require(tree.tops == begun, "namespaces begin at", begun, "but the index has", tree.tops)


def _check_locks(tree: RadixTree, reachable: list[Node], leases: Sequence[Node]) -> None:
    """Check that a node's lock counts the leases at or below the node, and dropped nodes are kept only while leased."""
    through = Counter(node for lease in leases for node in upwards(lease))
    nodes = {tree.root, *reachable, *tree.dropped}
    for node in nodes:
        _require(node.lock == through[node], node, "has leases through it:", through[node])
    _require(through.keys() <= nodes, "leases go through nodes outside the tree:", through.keys() - nodes)
    for node in tree.dropped:
        sound = node.dropped and node.lock and not node.children and not node.heads
        _require(bool(sound), node, "is kept as dropped")
    locked = sum(len(node.pages) for node in nodes if node.lock)
    _require(tree.num_locked == locked, "num_locked is", tree.num_locked, "but locked nodes have", locked, "pages")


def _check_pins(tree: RadixTree, reachable: list[Node]) -> None:
    """Check that a node counts the pins that end at or below the node, and that each pin refers to its end."""
    through: dict[PinKind, Counter[Node]] = {kind: Counter() for kind in PinKind}
    for end, pins in tree.pins.ends.items():
        _require(bool(pins), end, "keeps an empty list of holds")
        for pin in pins:
            _require(pin.node is end, "a hold that ends at", end, "says that it ends at", pin.node)
            through[pin.kind].update(upwards(end))
    for kind, counted in through.items():
        for node in (*reachable, *tree.dropped):
            _require(node.pins[kind] == counted[node], node, "has", kind.name, "holds through it:", counted[node])
        _require(counted.keys() <= {tree.root, *reachable}, "holds end outside the tree:", counted.keys())
        pages = sum(len(node.pages) for node in reachable if node.pins[kind])
        counted_pages = tree.pins.num_pages[kind]
        _require(counted_pages == pages, "num_pages of", kind.name, "is", counted_pages, "but nodes have", pages)


def _check_queue(tree: RadixTree, reachable: list[Node]) -> None:
    """Check that the eviction queues contain exactly the evictable leaves."""
    evictable = {node for node in reachable if not node.lock and not node.children}
    queued = tree.tenant_eviction.leaves()
    _require(queued == evictable, "evictable:", evictable, "queued:", queued)


def _check_shares(tree: RadixTree, reachable: list[Node]) -> None:
    """Check that the number of pages of each tenant is the number of its pages in the tree."""
    counted: Counter[str] = Counter()
    for node in (*reachable, *tree.dropped):
        assert node.origin
        counted[node.origin.namespace.tenant] += len(node.pages)
    recorded = tree.tenant_eviction.num_pages()
    _require(recorded == counted, "tenants have", dict(counted), "pages, but are said to have", recorded)


def _check_pages(tree: RadixTree, reachable: list[Node]) -> list[int]:
    """Check that no page is in the tree twice. Returns the ids of all pages."""
    pages = [page for node in (*reachable, *tree.dropped) for page in node.pages]
    twice = [page for page, count in Counter(pages).items() if count > 1]
    _require(not twice, "pages in the tree twice:", twice)
    _require(tree.num_pages == len(pages), "num_pages is", tree.num_pages, "but nodes have", len(pages))
    return pages
