"""Radix tree node: a run of pages on one path, with sorted children. The module also compares runs of tokens.

Tokens are int32 in the machine's byte order and are compared as bytes. Keys are sorted by bytes, so the key with the
longest common prefix is next to the position of a searched key.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator

from .namespace import Namespace, Origin

TOKEN_BYTES = 4


class Node:
    """A run of pages. All pages except perhaps the first were computed entirely in ``namespace``.

    A node is either full pages, or a *tail*: one partly filled page, at which a sequence ended. A tail is never locked
    and has no children, because sequences that use a tail copy it.

    Attributes:
        origin: origin of the first page; None for the root.
        tokens: int32 tokens of the run.
        pages: one page id for each ``page_size`` tokens.
        parent: parent node; None for the root and for a node that is no longer in the tree.
        children: children by the origin of their first page.
        heads: children whose first page contains a namespace switch, by the namespace before the switch. Any path of
            that namespace can copy the slots before the switch.
        lock: number of leases that end at or below this node.
        last_use: logical time of the last lease through this node, which is never less than a child's.
        pins: number of soft pins that end at or below this node, by ``PinKind``.
        dropped: whether matches no longer reach the node, which is kept until its leases end.
        hits: number of leases that began with the node's first page.
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
        """The namespace of the run's last slot; None for the root."""
        return self.origin.namespace if self.origin else None

    @property
    def evictable(self) -> bool:
        """Whether the node's last page may be freed: it is in the tree, without leases and children."""
        return not self.lock and not self.children and self.parent is not None

    @property
    def pinned(self) -> bool:
        return self.pins[1] > 0

    @property
    def rank(self) -> int:
        """Rank for eviction: 0 for ordinary pages, 1 for pages of live sessions, 2 for pinned pages."""
        sessions, pins = self.pins
        return 2 if pins else int(sessions > 0)

    def only_child(self) -> Node | None:
        """Return the node's child if there is exactly one, else None."""
        if len(self.children) != 1:
            return None
        (siblings,) = self.children.values()
        return siblings.nodes[0] if len(siblings.nodes) == 1 else None


class Siblings:
    """Children in the order of their keys.

    ``keys[i]`` are the tokens of the first page of ``nodes[i]``, or its head.
    """

    __slots__ = ("keys", "nodes")

    def __init__(self) -> None:
        self.keys: list[bytes] = []
        self.nodes: list[Node] = []

    def add(self, key: bytes, node: Node) -> None:
        """Insert a node at its position in the order."""
        at = bisect_left(self.keys, key)
        self.keys.insert(at, key)
        self.nodes.insert(at, node)

    def remove(self, key: bytes, node: Node) -> None:
        """Remove a node. Only heads may have equal keys."""
        at = self.nodes.index(node, bisect_left(self.keys, key))
        del self.keys[at], self.nodes[at]

    def find(self, key: bytes) -> Node | None:
        at = bisect_left(self.keys, key)
        return self.nodes[at] if at < len(self.keys) and self.keys[at] == key else None

    def extension_of(self, key: bytes) -> Node | None:
        """Return a node whose key begins with ``key``, or None."""
        at = bisect_left(self.keys, key)
        return self.nodes[at] if at < len(self.keys) and self.keys[at].startswith(key) else None

    def newest(self, head: bytes, most: int) -> Node | None:
        """Return the most recently used of the first ``most`` nodes whose key begins with ``head``."""
        at = bisect_left(self.keys, head)
        few = range(at, min(at + most, len(self.keys)))
        found = [self.nodes[i] for i in few if self.keys[i].startswith(head)]
        return max(found, key=lambda node: node.last_use, default=None)

    def prefix_of(self, key: bytes) -> Node | None:
        """Return the node whose key is a proper prefix of ``key``. It is the previous one, as no key begins another."""
        at = bisect_left(self.keys, key)
        return self.nodes[at - 1] if at and key.startswith(self.keys[at - 1]) else None

    def longest(self, key: bytes) -> tuple[Node | None, int]:
        """Return the node with the longest common prefix with ``key``, and the length of this prefix in tokens."""
        at = bisect_left(self.keys, key)
        best: tuple[Node | None, int] = (None, 0)
        for i in range(max(at - 1, 0), min(at + 1, len(self.keys))):
            shared = common_tokens(key, self.keys[i])
            if shared > best[1]:
                best = (self.nodes[i], shared)
        return best


def common_tokens(left: bytes, right: bytes | bytearray) -> int:
    """Return the number of equal leading tokens of at most a page. The time is always linear in the length."""
    size = min(len(left), len(right))
    differing = int.from_bytes(left[:size], "little") ^ int.from_bytes(right[:size], "little")
    if not differing:
        return size // TOKEN_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * TOKEN_BYTES)


def common_pages(tokens: bytes, start: int, run: bytearray, most: int, page_bytes: int) -> int:
    """Return how many of the first ``most`` pages of ``run`` are in ``tokens`` from byte ``start`` on.

    If all pages are equal, a single memory comparison shows this. Otherwise bisection finds the first difference and
    reads each byte about once more.
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


def common_prefix(left: array[int], right: array[int], limit: int) -> int:
    """Return how many of the first ``limit`` tokens are equal, by bisection. Each byte is compared at most twice."""
    high = min(len(left), len(right), limit)
    width = left.itemsize
    # ``bytes.startswith`` compares memory, while ``==`` of memoryviews compares item by item.
    tokens = left.tobytes()
    with memoryview(right) as view:
        if tokens.startswith(view[:high]):
            return high
        low = 0
        while high - low > 1:
            middle = (low + high) // 2
            if tokens.startswith(view[low:middle], low * width):
                low = middle
            else:
                high = middle
    return low


def upwards(node: Node | None) -> Iterator[Node]:
    """Yield the node and its ancestors up to the root. The caller may clear a node that was yielded."""
    while node:
        parent = node.parent
        yield node
        node = parent


def descendants(node: Node) -> Iterator[Node]:
    """Yield the node and all nodes below it, each after its parent."""
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        for siblings in node.children.values():
            stack += siblings.nodes
