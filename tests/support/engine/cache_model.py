"""A cache under test between a fake KV pool and a fake scheduler, with everything checked that can be.

A cell of the fake pool holds a number that stands for all that real KV depends on: the namespace and the token of
each position up to its own. Steps write cells and execute copies as a runner would. So a sequence that reads back
the right numbers has seen no stale, foreign or misplaced KV.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from rootgraft.engine.batch import PageCopy
from rootgraft.engine.kv_cache.prefix_cache import Lease, PrefixCache
from rootgraft.radix.namespace import Namespace, Path
from rootgraft.radix.node import Node
from rootgraft.radix.soft_pins import PinKind, SoftPin
from rootgraft.radix.tenant_eviction import IDLE_SECONDS

BASE = Namespace("r1")
NAMESPACES = (
    BASE,
    Namespace("r1", "a"),
    Namespace("r1", "b"),
    Namespace("r1", tenant="t"),
    Namespace("r1", "a", tenant="u"),
    Namespace("r1", None, "a"),
    Namespace("r1", "a", "a"),
    Namespace("r1", "b", tenant="t"),
    Namespace("r2"),
)
GARBAGE = -1


def chain(before: int, namespace: Namespace, token: int) -> int:
    """The content of a cell, from that of the cell before it."""
    return hash((before, namespace, token))


def contents(path: Path, tokens: array[int]) -> list[int]:
    """The right content of every cell of a sequence."""
    cells, last = [], 0
    for position, token in enumerate(tokens):
        last = chain(last, _namespace(path, position), token)
        cells.append(last)
    return cells


def _namespace(path: Path, position: int) -> Namespace:
    return path.before if path.before and position < path.switch_at else path.namespace


@dataclass(eq=False)
class Running:
    """A sequence that runs, and the line of the page table that its runner sees."""

    path: Path
    tokens: array[int]
    lease: Lease
    num_computed: int
    cells: list[int]
    table: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Held:
    """A path that is held: the content of the last cell of each page, as far as they are still in the tree."""

    hold: SoftPin
    path: Path
    ends: list[int]


@dataclass
class Evictable:
    """What eviction could take: tenant and rank of each page, and the leaves."""

    pages: dict[int, tuple[str, int]]
    leaves: set[Node]


class Simulation:
    """Operations on a cache, each followed by every check."""

    def __init__(self, num_pages: int, page_size: int, *, sharing: bool = True) -> None:
        self.cache = PrefixCache(num_pages, page_size, sharing=sharing)
        self.pool = [[GARBAGE] * page_size for _ in range(num_pages)]
        self.copies: list[PageCopy] = []
        self.running: list[Running] = []
        self.held: list[Held] = []
        self.used: dict[int, int] = {}
        self.clock = 0
        self.now = 0.0
        self.cache._tree.tenant_eviction._clock = lambda: self.now
        self.active: set[str] = set()

    def start(self, path: Path, tokens: array[int], limit: int) -> Running:
        """Acquire; what is found must be what a search of the whole tree finds."""
        expected = self._longest(path, tokens, limit)
        assert self.cache.match(path, tokens, limit) == expected
        before = self._evictable()
        lease = self.cache.acquire(path, tokens, limit)
        whole = expected // self.cache.page_size
        assert lease.num_shared == whole
        if len(lease.pages) == whole:
            assert lease.num_tokens == whole * self.cache.page_size
            assert expected % self.cache.page_size == 0 or self.cache.available() == 0
        else:
            assert lease.num_tokens == expected
        self._use(lease.pages[:whole])
        self._note(lease.node)
        self._check_evicted(before)
        sequence = Running(path, tokens, lease, lease.num_tokens, contents(path, tokens))
        self.running.append(sequence)
        return sequence

    def give_up(self, sequence: Running) -> None:
        """End a lease whose copy was not taken."""
        self._end(sequence)

    def admit(self, sequence: Running) -> None:
        """Put the copy on the list of the next step."""
        if copy := sequence.lease.take_copy():
            self.copies.append(copy)
        self._follow(sequence)

    def extend(self, sequence: Running, num_new: int) -> bool:
        """Compute up to ``num_new`` of the sequence's tokens, if pages can be had."""
        end = min(sequence.num_computed + num_new, len(sequence.tokens))
        before, pages = self._evictable(), list(sequence.lease.pages)
        missing = -(-end // self.cache.page_size) - len(pages)
        possible = missing <= self.cache.available()
        assert self.cache.grow(sequence.lease, end) == possible
        if not possible:
            assert sequence.lease.pages == pages
            return False
        self._check_evicted(before)
        self._follow(sequence)
        self._step(sequence, end)
        return True

    def draft(self, sequence: Running, num_drafts: int) -> None:
        """Compute tokens behind the sequence's own that then do not stand, and give their pages back."""
        before, table = self._evictable(), list(sequence.table)
        if not self.cache.grow(sequence.lease, len(sequence.tokens) + num_drafts):
            return
        self._check_evicted(before)
        self._follow(sequence)
        self._copy()
        size = self.cache.page_size
        for position in range(len(sequence.tokens), len(sequence.tokens) + num_drafts):
            assert position // size >= sequence.lease.num_shared
            self.pool[sequence.table[position // size]][position % size] = GARBAGE
        self.cache.shrink(sequence.lease, sequence.num_computed)
        self._follow(sequence)
        assert sequence.table == table[: len(sequence.table)]

    def append(self, sequence: Running, token: int) -> None:
        """Draw a token."""
        sequence.tokens.append(token)
        sequence.cells = contents(sequence.path, sequence.tokens)

    def commit(self, sequence: Running) -> None:
        """Enter what is computed, and let the runner's table follow."""
        there = self._owners()
        self.cache.commit(sequence.lease, sequence.tokens, sequence.num_computed)
        self._note_new(there)
        self._follow(sequence)

    def finish(self, sequence: Running) -> None:
        """Release with all that is computed; preemption and abort are the same."""
        self._end(sequence)

    def keep(self, path: Path, tokens: array[int], kind: PinKind) -> None:
        """Hold what is there of a path."""
        hold = self.cache.pin(path, tokens, len(tokens), kind)
        cells, size = contents(path, tokens), self.cache.page_size
        ends, present = cells[size - 1 :: size], {end for _, _, end in self._pages()}
        while ends and ends[-1] not in present:
            ends.pop()
        assert (hold is None) == (not ends)
        if hold:
            self.held.append(Held(hold, path, ends))

    def unpin(self, held: Held) -> None:
        """End a hold."""
        self.held.remove(held)
        self.cache.unpin(held.hold)

    def drop(self, namespace: Namespace) -> None:
        """Forget a namespace, and the holds that go through it."""
        for held in self.held[:]:
            num_tokens = len(held.ends) * self.cache.page_size
            if any(_namespace(held.path, position) == namespace for position in range(num_tokens)):
                self.held.remove(held)
        self.cache.drop(namespace)
        for node, _ in self._nodes():
            assert node.origin and namespace not in (node.origin.namespace, node.origin.before)

    def wait(self) -> None:
        """Let so much time pass that all tenants are idle."""
        self.now += IDLE_SECONDS + 1
        self.active.clear()

    def check(self) -> None:
        """All equations, and the content of every cell that anybody may read."""
        self.cache.check()
        pool = [list(page) for page in self.pool]
        for copy in self.copies:
            pool[copy.target][: copy.num_tokens] = pool[copy.source][: copy.num_tokens]
        size = self.cache.page_size
        self._check_held()
        for node, cells in self._nodes():
            for index, cell in enumerate(cells):
                assert pool[node.pages[index // size]][index % size] == cell
        for sequence in self.running:
            readable = sequence.num_computed if sequence.lease.copy is None else sequence.lease.num_shared * size
            for position in range(readable):
                assert pool[sequence.lease.pages[position // size]][position % size] == sequence.cells[position]

    def _step(self, sequence: Running, end: int) -> None:
        """A forward: copies in order, then the writes of one sequence, through the runner's table."""
        self._copy()
        size = self.cache.page_size
        for position in range(sequence.num_computed, end):
            assert position // size >= sequence.lease.num_shared
            self.pool[sequence.table[position // size]][position % size] = sequence.cells[position]
        sequence.num_computed = end

    def _copy(self) -> None:
        for copy in self.copies:
            self.pool[copy.target][: copy.num_tokens] = self.pool[copy.source][: copy.num_tokens]
        self.copies.clear()

    def _follow(self, sequence: Running) -> None:
        first, pages = sequence.lease.take_changes()
        sequence.table[first:] = pages
        assert sequence.table == sequence.lease.pages

    def _end(self, sequence: Running) -> None:
        lease, size = sequence.lease, self.cache.page_size
        entered, there = lease.sharing and lease.copy is None, self._owners()
        self.cache.release(lease, sequence.tokens, sequence.num_computed)
        self._note(lease.node)
        self._note_new(there)
        self.running.remove(sequence)
        reachable = {page for node, _ in self._nodes() for page in node.pages}
        last = sequence.num_computed // size + 1 if entered else lease.num_shared
        self._use([page for page in lease.pages[:last] if page in reachable])

    def _check_held(self) -> None:
        """Each page has the rank of the holds on it; a hold ends where the tree has no more of its path."""
        present = {end for _, _, end in self._pages()}
        for held in self.held:
            while held.ends and held.ends[-1] not in present:
                held.ends.pop()
            assert (held.hold.node is None) == (not held.ends)
        for node, _, end in self._pages():
            assert self._rank(end) == node.rank
        for kind in PinKind:
            of_kind = {end for held in self.held if held.hold.kind is kind for end in held.ends}
            assert self.cache.num_pinned(kind) == len(of_kind)

    def _rank(self, end: int | None) -> int:
        return max((1 + held.hold.kind for held in self.held if end in held.ends), default=0)

    def _pages(self) -> Iterator[tuple[Node, int, int | None]]:
        """Node, id and content of the last cell of each page; None for one that is filled only in part."""
        size = self.cache.page_size
        for node, cells in self._nodes():
            ends = cells[size - 1 :: size] or [None]
            yield from ((node, page, end) for page, end in zip(node.pages, ends, strict=True))

    # The tree as it is, not as it is searched

    def _nodes(self) -> Iterator[tuple[Node, list[int]]]:
        """Every node that matches reach, with the right content of its cells."""
        stack: list[tuple[Node, int]] = [(self.cache._tree.root, 0)]
        while stack:
            parent, last = stack.pop()
            for siblings in parent.children.values():
                for node in siblings.nodes:
                    assert node.origin
                    cells, end = [], last
                    for index, token in enumerate(array("i", bytes(node.tokens))):
                        before = node.origin.before if index < node.origin.switch else None
                        end = chain(end, before or node.origin.namespace, token)
                        cells.append(end)
                    yield node, cells
                    stack.append((node, end))

    def _longest(self, path: Path, tokens: array[int], limit: int) -> int:
        present = {cell for _, cells in self._nodes() for cell in cells}
        cells = contents(path, tokens[:limit])
        return max((count for count in range(1, limit + 1) if cells[count - 1] in present), default=0)

    def _use(self, pages: list[int]) -> None:
        self.clock += 1
        self.used.update(dict.fromkeys(pages, self.clock))

    def _note(self, node: Node) -> None:
        """A lease begins or ends at a node: its tenant is active."""
        if node.namespace:
            self.active.add(node.namespace.tenant)

    def _note_new(self, there: dict[int, str]) -> None:
        """Who has got pages is active."""
        self.active |= {tenant for page, tenant in self._owners().items() if page not in there}

    def _owners(self) -> dict[int, str]:
        """The tenant of each page in the tree, and of those that are kept for leases alone."""
        nodes = [*(node for node, _ in self._nodes()), *self.cache._tree.dropped]
        return {page: node.namespace.tenant for node in nodes if node.namespace for page in node.pages}

    def _evictable(self) -> Evictable:
        """What may be evicted, and which nodes it would begin with."""
        owners = self._owners()
        pages = {page: (owners[page], self._rank(end)) for node, page, end in self._pages() if not node.lock}
        return Evictable(pages, {node for node, _ in self._nodes() if node.evictable})

    def _check_evicted(self, before: Evictable) -> None:
        """Of what may be evicted went what ``radix.tenant_eviction`` says.

        Neither rank nor use grows on the way down a path. What stood above another tenant's leaf is left out: its turn
        came with the end of that leaf.
        """
        after, sizes = self._evictable(), Counter(self._owners().values())
        there = {page for node, _ in self._nodes() for page in node.pages}
        gone = [(*before.pages[page], self.used[page]) for page in before.pages.keys() - there]
        ends = [node.pages[-1] for node in before.leaves & after.leaves]
        left = [(*after.pages[page], self.used[page]) for page in ends]
        pins_gone, pins_left = ([use for _, rank, use in each if rank == 2] for each in (gone, left))
        assert max(pins_gone, default=0) <= min(pins_left, default=self.clock)
        assert not pins_gone or all(rank == 2 for _, rank, _ in left)
        for loser, *last in (each for each in gone if each[1] < 2):
            for tenant, *first in (each for each in left if each[1] < 2):
                if tenant == loser:
                    assert last <= first
                elif loser in self.active:
                    assert tenant in self.active
                    assert sizes[loser] + 1 >= sizes[tenant]
