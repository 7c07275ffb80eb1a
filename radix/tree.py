"""Radix tree over pages of tokens: maps each prefix, in its namespace, to the pages that hold its KV.

A node is a run of pages. A child is found by the origin (``radix.namespace``) and the tokens of its first page.
Sequences share full pages. The tokens of a hit after its last full page are copied from any page that follows the match
and begins with the same tokens::

    tokens of a sequence     |...... matched pages ......|.... copied ....|.. to compute ..
                             root -> node -> ... -> node   source page     private pages

The tree contains page ids and counts, not KV. The tree frees no page itself; each change returns the ids that left the
tree.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from .cursor import Cursor, Extension, Match
from .namespace import Namespace, Origin, Path
from .node import TOKEN_BYTES, Node, Siblings, common_tokens, descendants, upwards
from .soft_pins import PinKind, SoftPin, SoftPins
from .tenant_eviction import TenantEviction

GroupName = TypeVar("GroupName")


class RadixTree:
    """The radix tree. ``num_pages`` is the number of its pages, ``num_locked`` that of its leased pages.

    Args:
        page_size: number of tokens in a page.
        clock: returns monotonic time in seconds, for the detection of idle tenants.
    """

    def __init__(self, page_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.page_size = page_size
        self.root = Node(None, b"", [])
        self.num_pages = 0
        self.num_locked = 0
        self.dropped: set[Node] = set()
        self.tops: dict[Namespace, set[Node]] = {}
        self.tenant_eviction = TenantEviction(clock)
        self.pins = SoftPins(self.tenant_eviction)
        self._page_bytes = page_size * TOKEN_BYTES
        self._clock = 0

    @property
    def num_uses(self) -> int:
        """Number of leases begun and ended so far: the logical time of ``Node.last_use``."""
        return self._clock

    # Methods for lookups

    def match(self, path: Path, tokens: bytes) -> Match:
        """Return the longest reusable prefix of ``tokens`` (int32 as bytes). The tree does not change."""
        cursor = Cursor(path, tokens, self.page_size)
        node, inside = self.root, 0
        pages: list[int] = []
        while inside == len(node.pages) and (child := self._child(node, cursor)):
            node, inside = child, cursor.agreeing(child)
            pages += node.pages[:inside]
            cursor.advance(inside)
        source, num_copied = self._partial(node, inside, cursor)
        return Match(node, inside, pages, source, num_copied)

    def _child(self, node: Node, cursor: Cursor) -> Node | None:
        """Return the child whose first page equals the page at the cursor."""
        siblings = node.children.get(cursor.origin)
        key = cursor.page
        return siblings.find(key) if siblings and len(key) == self._page_bytes else None

    def _partial(self, node: Node, inside: int, cursor: Cursor) -> tuple[int, int]:
        """Return the id of the page that continues a match by the most tokens, and the number of these tokens."""
        namespace, pure = cursor.pure
        if inside < len(node.pages):
            following = node.tokens[inside * self._page_bytes :][: self._page_bytes]
            shared = common_tokens(pure, following) if node.namespace == namespace else 0
            return (node.pages[inside], shared) if shared else (-1, 0)
        groups = [(node.children.get(Origin(namespace)), pure), (node.heads.get(namespace), pure)]
        if len(pure) < len(cursor.page):
            groups.append((node.children.get(cursor.origin), cursor.page))
        found = [siblings.longest(key) for siblings, key in groups if siblings]
        best, shared = max(found, key=lambda each: each[1], default=(None, 0))
        return (best.pages[0], shared) if best else (-1, 0)

    # Methods for leases

    def lock(self, match: Match) -> Node:
        """Begin a lease on the full pages of a match, which must be current.

        Returns the node at which the lease ends.
        """
        self._clock += 1
        node = self._end(match)
        self.tenant_eviction.use(node)
        for each in upwards(node):
            each.last_use = self._clock
            each.hits += 1
            self._add_lock(each)
        return node

    def unlock(self, node: Node) -> list[int]:
        """End a lease at ``node``. Returns the pages of dropped namespaces that have left the tree now."""
        self._clock += 1
        self.tenant_eviction.use(node)
        freed: list[int] = []
        for each in upwards(node):
            each.last_use = self._clock
            each.lock -= 1
            if not each.lock:
                self.num_locked -= len(each.pages)
            if each.dropped and not each.lock:
                self.dropped.remove(each)
                freed += self._clear(each)
            if each.evictable:
                self.tenant_eviction.push(each)
        self._join(node)
        return freed

    def num_in_use(self, match: Match) -> int:
        """Return how many leading pages of a match are leased."""
        unused, node = 0, match.node
        while not node.lock and node.parent is not None:
            unused += match.inside if node is match.node else len(node.pages)
            node = node.parent
        return len(match.pages) - unused

    def pin(self, match: Match, kind: PinKind) -> SoftPin | None:
        """Soft-pin the full pages of a match, which must be current. Returns None for a match without full pages."""
        return self.pins.pin(self._end(match), kind) if match.pages else None

    def unpin(self, pin: SoftPin) -> None:
        """End a soft pin."""
        node = pin.node
        self.pins.unpin(pin)
        if node is not None:
            below = node.only_child()
            whole = below is not None and len(below.tokens) == len(below.pages) * self._page_bytes
            # A node that ends with a partly filled page stays a separate node.
            self._join(below if below and whole else node)

    def demote(self, node: Node) -> None:
        """Mark the end of a path as least recently used, so that the end is evicted first.

        Each node above the end is marked, too, unless it has another child, a lease or a pin. If a partly filled page
        (a tail) is below the end of the path, the tail is also marked.
        """
        below = node.only_child()
        leaf = node = below if below and len(below.tokens) < len(below.pages) * self._page_bytes else node
        if not leaf.evictable:
            return
        while node.parent is not None and not node.lock and not any(node.pins):
            node.last_use = 0
            if node.parent.only_child() is None:
                break
            node = node.parent
        self.tenant_eviction.push(leaf)

    def _end(self, match: Match) -> Node:
        """Return the node that ends with the full pages of a match. If necessary, a node is split."""
        inside = match.inside < len(match.node.pages)
        return self._split(match.node, match.inside) if inside else match.node

    def _add_lock(self, node: Node) -> None:
        if not node.lock:
            self.num_locked += len(node.pages)
        node.lock += 1

    # Methods that insert pages

    def extend(self, node: Node, path: Path, position: int, tokens: bytes, pages: list[int]) -> Extension:
        """Insert full pages below ``node``, at which a lease ends, and move the end of the lease to the last page.

        If the tree has the same tokens already, the given pages are duplicates and are returned as freed.

        Args:
            node: the end of the lease; not dropped.
            path: the namespaces of the sequence.
            position: number of tokens up to the end of ``node``, a multiple of the page size.
            tokens: the tokens of ``pages``, int32 as bytes.
            pages: page ids.
        """
        cursor = Cursor(path, tokens, self.page_size, position)
        kept: list[int] = []
        freed: list[int] = []
        while rest := pages[len(kept) :]:
            child = self._child(node, cursor)
            if child is None:
                num = cursor.run_pages
                node = self._append(node, cursor, rest[:num], freed)
                kept += rest[:num]
            else:
                num = cursor.agreeing(child)
                freed += rest[:num]
                kept += child.pages[:num]
                node = child if num == len(child.pages) else self._split(child, num)
                self._add_lock(node)
            cursor.advance(num)
        return Extension(node, kept, freed)

    def _append(self, node: Node, cursor: Cursor, pages: list[int], freed: list[int]) -> Node:
        """Insert pages that the tree lacks: in ``node`` itself if only one lease ends there, else in a new child."""
        origin, tokens = cursor.origin, cursor.tokens[cursor.start :][: len(pages) * self._page_bytes]
        freed += self._supersede(node, origin, cursor.page)
        alone = node.lock == 1 and not node.children and not node.rank
        if alone and node.origin and origin == Origin(node.origin.namespace):
            node.tokens += tokens
            node.pages += pages
            self._count(node, len(pages))
            self.num_locked += len(pages)
            return node
        child = Node(origin, tokens, pages, node.last_use)
        self._attach(child, node)
        self._count(child, len(pages))
        self._add_lock(child)
        return child

    def add_tail(self, node: Node, path: Path, position: int, tokens: bytes, page: int) -> list[int]:
        """Insert a partly filled page below ``node``. Returns the pages that are no longer needed.

        Args:
            node: a node in the tree, which ``path`` reaches after ``position`` tokens.
            path: the namespaces of the sequence.
            position: number of tokens before ``page``, a multiple of the page size.
            tokens: the tokens of the page, int32 as bytes, at least one and fewer than a page.
            page: the page's id.
        """
        origin = path.origin(position, position + len(tokens) // TOKEN_BYTES)
        siblings = node.children.get(origin)
        if siblings and siblings.extension_of(tokens):
            return [page]
        freed = self._supersede(node, origin, tokens)
        tail = Node(origin, tokens, [page], node.last_use)
        self._attach(tail, node)
        self._count(tail, 1)
        self.tenant_eviction.push(tail)
        return freed

    def _supersede(self, node: Node, origin: Origin, key: bytes) -> list[int]:
        """Remove the tail below ``node`` whose key is a prefix of ``key``, if there is one."""
        siblings = node.children.get(origin)
        tail = siblings.prefix_of(key) if siblings else None
        if tail is None:
            return []
        self._detach(tail)
        return self._clear(tail)

    # Methods that remove pages

    def evict(self, num_pages: int) -> list[int]:
        """Evict up to ``num_pages`` pages from the ends of leaves, in the order of ``radix.tenant_eviction``."""
        freed: list[int] = []
        while len(freed) < num_pages and (victim := self.tenant_eviction.next()):
            leaf, most = victim
            missing = min(most, num_pages - len(freed))
            if missing < len(leaf.pages):
                self.pins.shrink(leaf, missing)
                freed += leaf.pages[-missing:]
                del leaf.pages[-missing:], leaf.tokens[-missing * self._page_bytes :]
                self._count(leaf, -missing)
            else:
                parent = leaf.parent
                self.pins.move_up(leaf)
                self._detach(leaf)
                freed += self._clear(leaf)
                if parent and parent.evictable:
                    self.tenant_eviction.push(parent)
        return freed

    def drop(self, namespace: Namespace) -> list[int]:
        """Remove a namespace and all nodes below it. Returns the pages that are free now.

        Leased nodes leave the tree when their last lease ends. Until then, no match finds them.
        """
        freed: list[int] = []
        for top in tuple(self.tops.get(namespace, ())):
            parent, nodes = top.parent, tuple(descendants(top))
            assert parent, "of a namespace's tops none is below another"
            for node in nodes:
                self.pins.forget(node)
            self._detach(top)
            if parent.evictable:
                self.tenant_eviction.push(parent)
            for node in nodes:
                freed += self._give_up(node)
        return freed

    def _give_up(self, node: Node) -> list[int]:
        """Clear a node that matches no longer reach, or keep it until its leases end.

        Returns the pages that are free.
        """
        self._end_tops(node)
        if not node.lock:
            return self._clear(node)
        node.dropped = True
        node.children.clear()
        node.heads.clear()
        self.dropped.add(node)
        return []

    def _clear(self, node: Node) -> list[int]:
        """Remove the pages from a node that has been detached."""
        pages, node.pages, node.parent = node.pages, [], None
        node.tokens.clear()
        self._count(node, -len(pages))
        return pages

    def _count(self, node: Node, num_pages: int) -> None:
        """Count pages that a node has gained. The number is negative for lost pages."""
        self.num_pages += num_pages
        self.tenant_eviction.count(node, num_pages)

    # Methods that split and merge nodes

    def _split(self, node: Node, at: int) -> Node:
        """Move the first ``at`` pages of a node to a new parent node. Leases that end at ``node`` do not change."""
        assert node.parent and node.origin
        parent, size = node.parent, at * self._page_bytes
        self._detach(node)
        upper = Node(node.origin, node.tokens[:size], node.pages[:at], node.last_use)
        upper.lock, upper.pins, upper.hits = node.lock, node.pins[:], node.hits
        node.origin = Origin(node.origin.namespace)
        del node.tokens[:size], node.pages[:at]
        self._attach(upper, parent)
        self._attach(node, upper)
        return upper

    def _join(self, node: Node) -> None:
        """Undo splits above ``node`` that are no longer needed for a lease, a pin, a different last use or a branch."""
        chain = [node]
        while parent := chain[-1].parent:
            if _inseparable(parent, chain[-1]):
                chain.append(parent)
                continue
            self._merge(chain)
            chain = [parent]

    def _merge(self, chain: list[Node]) -> None:
        """Merge a chain of nodes, the lowest first, into the lowest, because leases may end there."""
        if len(chain) == 1:
            return
        lowest, highest = chain[0], chain[-1]
        self._detach(highest)
        tokens, pages = bytearray(), list[int]()
        for each in reversed(chain):
            tokens += each.tokens
            pages += each.pages
        parent = highest.parent
        assert parent
        for each in chain[1:]:
            each.parent = None
        lowest.origin, lowest.tokens, lowest.pages = highest.origin, tokens, pages
        lowest.hits = highest.hits
        self._attach(lowest, parent)

    def _attach(self, node: Node, parent: Node) -> None:
        assert node.origin
        node.parent = parent
        key = bytes(node.tokens[: self._page_bytes])
        parent.children.setdefault(node.origin, Siblings()).add(key, node)
        if before := node.origin.before:
            parent.heads.setdefault(before, Siblings()).add(key[: node.origin.switch * TOKEN_BYTES], node)
        for namespace in _begun(node):
            self.tops.setdefault(namespace, set()).add(node)

    def _detach(self, node: Node) -> None:
        """Undo ``_attach``, but keep the link to the parent, which leases through ``node`` still need."""
        assert node.parent and node.origin
        parent = node.parent
        key = bytes(node.tokens[: self._page_bytes])
        _remove(parent.children, node.origin, key, node)
        if before := node.origin.before:
            _remove(parent.heads, before, key[: node.origin.switch * TOKEN_BYTES], node)
        self._end_tops(node)

    def _end_tops(self, node: Node) -> None:
        for namespace in _begun(node):
            tops = self.tops.get(namespace, set())
            tops.discard(node)
            if not tops:
                self.tops.pop(namespace, None)


def _remove(groups: dict[GroupName, Siblings], name: GroupName, key: bytes, node: Node) -> None:
    """Remove a node from its group. An empty group is removed, too."""
    groups[name].remove(key, node)
    if not groups[name].nodes:
        del groups[name]


def _begun(node: Node) -> set[Namespace]:
    """Return the namespaces that begin at a node of the tree, which its parent does not have."""
    assert node.parent and node.origin
    namespaces = {node.origin.namespace, node.origin.before or node.origin.namespace}
    return namespaces - {node.parent.namespace}


def _inseparable(parent: Node, child: Node) -> bool:
    """Return whether ``parent`` and its only child could be merged: equal leases, pins and last use, and no switch."""
    return (
        parent.lock == child.lock
        and parent.pins == child.pins
        and parent.last_use == child.last_use
        and parent.namespace == child.namespace
        and parent.only_child() is child
    )
