"""The prefix cache: hands out pages of KV, finds those already computed, and takes computed ones back.

It is the only writer of free pages and of the tree. Every page has one owner::

    free list ----> a lease's private pages ----> the tree ----> free list
               grow                        commit,          evict,
                                           release          drop

    pages of a lease     |...... shared: in the tree, locked ......|...... private ......|
                         0                                    num_shared           len(pages)
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass

from ...radix.continuation import continuation
from ...radix.invariants import BrokenInvariant, check
from ...radix.namespace import Namespace, Path
from ...radix.node import TOKEN_BYTES, Node, upwards
from ...radix.soft_pins import PinKind, SoftPin
from ...radix.tree import RadixTree
from ...radix.tree_view import tree_view
from ..batch import PageCopy
from .page_allocator import PageAllocator


@dataclass(slots=True, eq=False)
class Lease:
    """A sequence's hold on pages, from ``acquire`` to ``release``. Written by ``PrefixCache``, but for ``take_*``.

    Attributes:
        path: the namespaces of the sequence.
        node: where its shared pages end in the tree.
        pages: its page ids in the order of its tokens.
        num_shared: the first pages, which belong to the tree.
        num_tokens: tokens found at ``acquire``, those still to be copied included.
        num_forked: those of them in pages that other leases went through then.
        copy: what must be copied before the KV of the last tokens found is there, until ``take_copy``.
        first_changed: index of the first page that ``take_changes`` has not given as it is now; pages only get more,
            so it is at most their number, and new ones count as changed.
        sharing: whether its pages are ever entered in the tree; no longer once its namespace is dropped.
        released: whether it is over.
    """

    path: Path
    node: Node
    pages: list[int]
    num_shared: int
    num_tokens: int
    sharing: bool
    num_forked: int = 0
    copy: PageCopy | None = None
    first_changed: int = 0
    released: bool = False

    def take_changes(self) -> tuple[int, tuple[int, ...]]:
        """Where ``pages`` changed since the last call, and its ids from there on; the runner's table must follow."""
        first = self.first_changed
        self.first_changed = len(self.pages)
        return first, tuple(self.pages[first:])

    def take_copy(self) -> PageCopy | None:
        """The copy, for the next batch. Once taken it must be executed, even if the lease ends before."""
        copy, self.copy = self.copy, None
        return copy


class PrefixCache:
    """Free pages, the tree, and the leases between them.

    Copies: the source of a lease's copy is not locked, so it may be evicted and handed to another sequence before the
    copy is executed. That is right as long as copies are executed one after the other in the order in which their
    leases were acquired, all before the forward: what is written to the page since is either the target of a later
    copy or comes from the forward. For the same reason the source may be the target of an earlier copy. Not right is
    a runner that reads all sources first, or writes all targets at once.

    Attributes:
        sharing: whether prefixes are found and kept.
        num_evicted: pages evicted since the start.

    Args:
        num_pages: pages of the KV pool.
        page_size: tokens in a page.
        sharing: off, nothing is ever found or kept, and all else is the same.
    """

    def __init__(self, num_pages: int, page_size: int, *, sharing: bool = True) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_evicted = 0
        self.sharing = sharing
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixTree(page_size)
        self._leases: set[Lease] = set()

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        """Pages in the tree."""
        return self._tree.num_pages

    @property
    def num_private(self) -> int:
        """Pages that belong to one lease each."""
        return sum(len(lease.pages) - lease.num_shared for lease in self._leases)

    def available(self) -> int:
        """Pages that are free or can be made so by eviction."""
        return self._allocator.num_free + self._tree.num_pages - self._tree.num_locked

    def match(self, path: Path, tokens: array[int], limit: int) -> int:
        """How many of the first ``limit`` tokens could be reused now. Changes nothing."""
        found = self._tree.match(path, _memory(tokens, 0, limit))
        return len(found.pages) * self.page_size + found.num_copied

    def acquire(self, path: Path, tokens: array[int], limit: int) -> Lease:
        """Begin a lease on the longest reusable prefix of the first ``limit`` tokens.

        A prefix that ends inside a page takes a page for a private copy of it, by eviction if need be; if no page can
        be had, the prefix is cut to whole pages. All pages count as changed.

        Args:
            path: the namespaces of the sequence.
            tokens: int32 tokens of the sequence.
            limit: most tokens to reuse, at most ``len(tokens)``.
        """
        found = self._tree.match(path, _memory(tokens, 0, limit))
        forked, whole = self._tree.num_in_use(found) * self.page_size, len(found.pages)
        node = self._tree.lock(found)
        lease = Lease(path, node, found.pages, whole, whole * self.page_size, self.sharing, forked)
        self._leases.add(lease)
        if found.num_copied and (target := self._allocate(1)):
            lease.pages += target
            lease.num_tokens += found.num_copied
            if target[0] != found.source:
                lease.copy = PageCopy(found.source, target[0], found.num_copied)
        return lease

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Give the lease pages for all positions below ``num_tokens``, by eviction if need be.

        Returns:
            False if that many pages cannot be had; then nothing has changed.
        """
        _check_live(lease)
        missing = -(-num_tokens // self.page_size) - len(lease.pages)
        if missing <= 0:
            return True
        if missing > self.available():
            return False
        lease.pages += self._allocate(missing)
        return True

    def shrink(self, lease: Lease, num_tokens: int) -> None:
        """Free the lease's private pages that hold no position below ``num_tokens``."""
        _check_live(lease)
        kept = max(lease.num_shared, -(-num_tokens // self.page_size))
        self._allocator.free(lease.pages[kept:])
        del lease.pages[kept:]
        lease.first_changed = min(lease.first_changed, len(lease.pages))

    def following(self, lease: Lease, tokens: array[int], limit: int) -> array[int]:
        """Up to ``limit`` tokens that came next when all of a sequence's tokens were computed before, under its path.

        Args:
            lease: its shared pages hold all of ``tokens`` but those of a page; otherwise nothing is found.
            tokens: int32 tokens of the sequence.
        """
        start = lease.num_shared * self.page_size
        found = array("i")
        if lease.sharing and lease.node.children and len(tokens) - start <= self.page_size:
            head = _memory(tokens, start, len(tokens))
            found.frombytes(continuation(lease.node, lease.path, start, head, limit, self.page_size))
        return found

    def commit(self, lease: Lease, tokens: array[int], num_computed: int) -> None:
        """Enter the lease's whole pages below ``num_computed`` in the tree.

        Pages that the tree already has for the same tokens replace the lease's own, which are freed. A step that is
        under way may still read those: their next owner writes them in a later step, which begins when it is done.

        Args:
            lease: stays, and now locks these pages too.
            tokens: int32 tokens of the sequence, at least ``num_computed``.
            num_computed: tokens whose KV is in the lease's pages.
        """
        _check_live(lease)
        if lease.copy:
            raise ValueError(f"commit of {num_computed} tokens before the lease's copy was taken: {lease.copy}")
        self._check_computed(lease, tokens, num_computed)
        if lease.sharing:
            self._enter(lease, tokens, num_computed // self.page_size)

    def release(self, lease: Lease, tokens: array[int], num_computed: int) -> None:
        """End the lease: enter all that was computed, the last page even if partly filled, and free the rest.

        A lease whose copy was not taken has computed nothing beyond the tree.

        Args:
            lease: ends.
            tokens: int32 tokens of the sequence, at least ``num_computed``.
            num_computed: tokens whose KV is in the lease's pages.
        """
        _check_live(lease)
        self._check_computed(lease, tokens, num_computed)
        entering = lease.sharing and lease.copy is None
        if entering:
            self._enter(lease, tokens, num_computed // self.page_size)
        self._allocator.free(self._tree.unlock(lease.node))
        private = lease.pages[lease.num_shared :]
        start = lease.num_shared * self.page_size
        if entering and start < num_computed:
            tail = _memory(tokens, start, num_computed)
            self._allocator.free(self._tree.add_tail(lease.node, lease.path, start, tail, private.pop(0)))
        self._allocator.free(private)
        self._leases.remove(lease)
        lease.released = True

    def keep(self, path: Path, tokens: array[int], num_tokens: int, kind: PinKind) -> SoftPin | None:
        """Have the whole pages of the first ``num_tokens`` tokens evicted late, as far as they are in the tree.

        Returns:
            What ``let_go`` takes; None if there is no such page.
        """
        return self._tree.hold(self._tree.match(path, _memory(tokens, 0, num_tokens)), kind)

    def unpin(self, hold: SoftPin) -> None:
        """End what ``keep`` began."""
        self._tree.unpin(hold)

    def num_held(self, kind: PinKind) -> int:
        """Pages that are held, by anybody."""
        return self._tree.pins.num_pages[kind]

    def held(self, pins: Iterable[SoftPin]) -> dict[Node, int]:
        """The nodes that any of these holds goes through, with their pages. O(depth) for each hold."""
        return {node: len(node.pages) for hold in pins for node in upwards(hold.node) if node.parent is not None}

    def drop(self, namespace: Namespace) -> int:
        """Forget a namespace: nothing of it is found from now on, and no lease held now enters any more of it.

        Returns:
            Pages freed. Those that leases still hold are freed when the last of them ends.
        """
        for lease in self._leases:
            if lease.path.touches(namespace):
                lease.sharing = False
        freed = self._tree.drop(namespace)
        self._allocator.free(freed)
        return len(freed)

    def drop_adapters(self, adapters: Container[str]) -> int:
        """Forget all namespaces of these adapters, whatever their salt: see ``drop``. Returns pages freed."""
        leased = {namespace for lease in self._leases for namespace in lease.path.namespaces}
        return sum(self.drop(each) for each in leased | self._tree.tops.keys() if each.adapter in adapters)

    def tree_view(self, most: int) -> list[Node]:
        """At most ``most`` nodes of the tree, each after its parent: those that leases go through, then those used
        last. To be read at once, and never written.
        """
        return tree_view(self._tree, [lease.node for lease in self._leases], most)

    @property
    def num_uses(self) -> int:
        """The clock of ``Node.last_use``."""
        return self._tree.num_uses

    def check(self) -> None:
        """Verify that every page has one owner and that the tree is sound, in time linear in pages.

        Raises:
            BrokenInvariant: with all terms of what does not hold.
        """
        leases = list(self._leases)
        cached = check(self._tree, [lease.node for lease in leases])
        for lease in leases:
            shared = [page for node in reversed(list(upwards(lease.node))) for page in node.pages]
            if lease.pages[: lease.num_shared] != shared:
                raise BrokenInvariant(
                    f"lease shares {lease.pages[: lease.num_shared]}, its path in the tree is {shared}"
                )
        private = [page for lease in leases for page in lease.pages[lease.num_shared :]]
        owned = [*self._allocator.free_pages, *cached, *private]
        if sorted(owned) != list(range(self.num_pages)):
            counts = Counter(owned)
            raise BrokenInvariant(
                f"free {self.num_free} + in tree {len(cached)} + private {len(private)} != total {self.num_pages}; "
                f"owned twice: {[page for page, count in counts.items() if count > 1]}, "
                f"by nobody: {[page for page in range(self.num_pages) if page not in counts]}"
            )

    def _allocate(self, num_pages: int) -> list[int]:
        """Pages from the free list, filled up by eviction; none if that many cannot be had."""
        missing = num_pages - self._allocator.num_free
        if missing > 0:
            if num_pages > self.available():
                return []
            evicted = self._tree.evict(missing)
            self.num_evicted += len(evicted)
            self._allocator.free(evicted)
        return self._allocator.allocate(num_pages)

    def _enter(self, lease: Lease, tokens: array[int], num_whole: int) -> None:
        """Give the lease's pages below index ``num_whole`` to the tree, or take the tree's for them."""
        first = lease.num_shared
        if num_whole <= first:
            return
        start = first * self.page_size
        new = _memory(tokens, start, num_whole * self.page_size)
        own = lease.pages[first:num_whole]
        entered = self._tree.extend(lease.node, lease.path, start, new, own)
        for index, (before, after) in enumerate(zip(own, entered.pages, strict=True), first):
            if before != after:
                lease.first_changed = min(lease.first_changed, index)
                break
        lease.pages[first:num_whole] = entered.pages
        lease.node, lease.num_shared = entered.node, num_whole
        self._allocator.free(entered.freed)

    def _check_computed(self, lease: Lease, tokens: array[int], num_computed: int) -> None:
        """Refuse a count that tokens or pages cannot back."""
        most = min(len(tokens), len(lease.pages) * self.page_size)
        if not 0 <= num_computed <= most:
            raise ValueError(
                f"num_computed is {num_computed}, but there are {len(tokens)} tokens "
                f"and {len(lease.pages)} pages of {self.page_size}"
            )


def _check_live(lease: Lease) -> None:
    if lease.released:
        raise ValueError(f"the lease on pages {lease.pages} was released before")


def _memory(tokens: array[int], start: int, stop: int) -> bytes:
    """Tokens ``start`` to ``stop`` as the tree compares them."""
    if tokens.itemsize != TOKEN_BYTES:
        raise ValueError(f"tokens must be array('i') of {TOKEN_BYTES} bytes each, not array({tokens.typecode!r})")
    return memoryview(tokens)[start:stop].tobytes()
