"""A node of the tree: a run of pages on one path, with its children in the order of their tokens.

Tokens are int32 in the machine's byte order and are only ever compared as memory. The order of keys is that of their
bytes: it means nothing, but the key that shares the longest beginning with a given one is its neighbour.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from .namespace import Namespace, Origin

TOKEN_BYTES = 4


class Node:
    """A run of pages, all but perhaps the first computed wholly in ``namespace``.

    A node is either whole pages, or a *tail*: one page that is filled only in part, where a sequence ended. A tail is
    never locked and never has children, because whoever uses it copies it.

    Attributes:
        origin: who computed the first page; None for the root alone.
        tokens: int32 tokens of the run.
        pages: one page id for each ``page_size`` tokens.
        parent: None for the root and for a node that is no longer in the tree.
        children: by origin of their first page.
        heads: children whose first page holds a switch, by the namespace before it: the cells before the switch can
            be copied by any path of that namespace.
        lock: leases that end here or below.
        last_use: logical time of the last lease through it; never less than a child's.
        pins: sessions and pins that end here or below (``radix.soft_pins``).
        dropped: cut off from matches, kept only until its leases end.
        hits: leases that began with its first page.
    """

    __slots__ = (
        "children",
        "dropped",
        "heads",
        "hits",
        "last_use",
        "lock",
        "origin",
        "pages",
        "parent",
        "pins",
        "tokens",
    )

    def __init__(self, origin: Origin | None, tokens: bytes | bytearray, pages: list[int], last_use: int = 0) -> None:
        self.origin = origin
        self.tokens = bytearray(tokens)
        self.pages = pages
        self.parent: Node | None = None
        self.children: dict[Origin, Siblings] = {}
        self.heads: dict[Namespace, Siblings] = {}
        self.lock = 0
        self.last_use = last_use
        self.pins = [0, 0]
        self.dropped = False
        self.hits = 0

    def __repr__(self) -> str:
        return f"Node(pages={self.pages[:8]}, origin={self.origin}, lock={self.lock}, last_use={self.last_use})"

    @property
    def namespace(self) -> Namespace | None:
        """The namespace of the run's last cell; None for the root."""
        return self.origin.namespace if self.origin else None

    @property
    def evictable(self) -> bool:
        """Whether its last page may be freed: in the tree, used by nobody, nothing below it."""
        return not self.lock and not self.children and self.parent is not None

    @property
    def pinned(self) -> bool:
        """Whether a pin goes through it."""
        return self.pins[1] > 0

    @property
    def rank(self) -> int:
        """What is evicted first: 0 ordinary pages, 1 those of living sessions, 2 pinned ones."""
        sessions, pins = self.pins
        return 2 if pins else int(sessions > 0)

    def only_child(self) -> Node | None:
        """Its child, if it has exactly one."""
        if len(self.children) != 1:
            return None
        (siblings,) = self.children.values()
        return siblings.nodes[0] if len(siblings.nodes) == 1 else None


class Siblings:
    """Children in the order of their keys: ``keys[i]`` are the tokens of ``nodes[i]``'s first page, or its head."""

    __slots__ = ("keys", "nodes")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.nodes: list[Node] = []

    def add(self, key: bytes, node: Node) -> None:
        """Put ``node`` at its place."""
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.nodes.insert(at, node)

    def remove(self, key: bytes, node: Node) -> None:
        """Take ``node`` out; only heads may have equal keys."""
        at = self.nodes.index(node, bisect_left(self.keys, key))
        del self.keys[at], self.nodes[at]

    def find(self, key: bytes) -> Node | None:
        """The node whose key is exactly ``key``."""
        at = bisect_left(self.keys, key)
        return self.nodes[at] if at < len(self.keys) and self.keys[at] == key else None

    def extension_of(self, key: bytes) -> Node | None:
        """A node whose key is ``key`` or begins with it."""
        at = bisect_left(self.keys, key)
        return self.nodes[at] if at < len(self.keys) and self.keys[at].startswith(key) else None

    def newest(self, head: bytes, most: int) -> Node | None:
        """Of the first ``most`` nodes whose key begins with ``head``, the one used last."""
        at = bisect_left(self.keys, head)
        few = range(at, min(at + most, len(self.keys)))
        found = [self.nodes[i] for i in few if self.keys[i].startswith(head)]
        return max(found, key=lambda node: node.last_use, default=None)

    def prefix_of(self, key: bytes) -> Node | None:
        """The node whose key is a proper beginning of ``key``: no key begins another, so it stands just before."""
        at = bisect_left(self.keys, key)
        return self.nodes[at - 1] if at and key.startswith(self.keys[at - 1]) else None

    def longest(self, key: bytes) -> tuple[Node | None, int]:
        """The node that shares the most first tokens with ``key``, and how many."""
        at = bisect_left(self.keys, key)
        best: tuple[Node | None, int] = (None, 0)
        for i in range(max(at - 1, 0), min(at + 1, len(self.keys))):
            shared = common_tokens(key, self.keys[i])
            if shared > best[1]:
                best = (self.nodes[i], shared)
        return best


def common_tokens(left: bytes, right: bytes | bytearray) -> int:
    """How many first tokens are equal. For a page or less: its time goes with the length, whatever the difference."""
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not differing:
        return size // TOKEN_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)


def common_pages(tokens: bytes, start: int, run: bytearray, most: int, page_bytes: int) -> int:
    """How many of the first ``most`` pages of ``run`` stand in ``tokens`` from byte ``start`` on.

    One comparison of memory if all do; else the first difference is found by halving, which reads each byte once more.
    """
    with memoryview(run) as view:
        if tokens.startswith(view[: most * page_bytes], start):
            return most
        low, high = 0, most
        while high - low > 1:
            middle = (low + high) // 2
            if tokens.startswith(view[low * page_bytes : middle * page_bytes], start + low * page_bytes):
                low = middle
            else:
                high = middle
        return low


def upwards(node: Node | None) -> Iterator[Node]:
    """The node, its parent and so on to the root; the node at hand may be cleared on the way."""
    while node:
        parent = node.parent
        yield node
        node = parent


def descendants(node: Node) -> Iterator[Node]:
    """The node and all below it, parents first."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        for siblings in node.children.values():
            stack += siblings.nodes
