"""Prefix cache: leases KV pages to sequences, finds computed prefixes in the radix tree, and evicts.

The only writer of the free list and of the tree. Every page has one owner::

    free list ----> a lease's private pages ----> the tree ----> free list
               grow                        commit,          evict,
                                           release          drop

    pages of a lease     |...... shared: in the tree, locked ......|...... private ......|
                         0                                    num_shared           len(pages)

With tiers (``engine.kv_cache.kv_tiers``) a hit may extend beyond the tree. The pages beyond the tree are private; they
are filled from a tier before the first step of the lease, and enter the tree with the commit of that step. Pages that
enter the tree are offered to the tiers.

In a model with recurrent states (``engine.kv_cache.state_cache``) a hit ends at a page with a checkpoint, and a lease
reserves slots for the checkpoints that its next steps make. Checkpoints are offered to the tiers like pages. A hit
beyond the tree ends at a page for which a tier has a checkpoint, which fills a slot of the lease.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import dataclass, field

from ...radix.continuation import continuation
from ...radix.invariants import BrokenInvariant, check
from ...radix.namespace import ENDLESS, Namespace, Path
from ...radix.node import TOKEN_BYTES, Node, upwards
from ...radix.soft_pins import PinKind, SoftPin
from ...radix.tree import RadixTree
from ...radix.tree_view import tree_view
from ..batch import PageCopy, PageLoad, StateLoad
from .block_keys import BlockId, BlockScheme
from .kv_events import KvEventLog
from .kv_tiers import Fetch, KvTiers
from .page_allocator import PageAllocator
from .state_cache import StateCache, StateSlots


@dataclass(slots=True)
class StateUses:
    """The recurrent states that a sequence uses, beside its pending checkpoints.

    Attributes:
        held: page whose checkpoint the sequence's first step reads, until the first ``commit``; -1 for none.
        wanted: positions at which a checkpoint is worth its slot, beside every ``StateCache.interval`` tokens.
        drafted: slots by position, of the states before the drafts of a step.
        resumed: slot of the state that the next step reads in place of the row's own state, which includes rejected
            drafts; -1 for the row's own.
        read: the ``resumed`` slot that a step in flight reads, -1 for none.
    """

    held: int = -1
    wanted: frozenset[int] = frozenset()
    drafted: dict[int, int] = field(default_factory=dict)
    resumed: int = -1
    read: int = -1

    @property
    def draft_slots(self) -> list[int]:
        """The slots of states before drafts that it has."""
        return [*self.drafted.values(), *(slot for slot in (self.resumed, self.read) if slot >= 0)]


@dataclass(slots=True)
class TierUses:
    """The data that a sequence uses from tiers.

    Attributes:
        loads: pages and slots to fill from a tier before the last tokens of the hit have KV, until
            ``Lease.take_loads``.
        arriving: keys of the blocks in ``loads``, until the first ``commit``.
        keys: keys of its whole pages, as many as were needed for tiers or events so far.
    """

    loads: tuple[PageLoad | StateLoad, ...] = ()
    arriving: tuple[bytes, ...] = ()
    keys: list[bytes] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Lease:
    """The pages of a running sequence, from ``acquire`` to ``release``. Written by ``PrefixCache`` and ``take_*``.

    Attributes:
        path: the namespaces of the sequence.
        node: the tree node at which its shared pages end.
        pages: page ids in token order.
        num_shared: leading pages that belong to the tree.
        num_tokens: prefix hit at ``acquire`` in tokens, including those still to be copied.
        num_forked: tokens of the hit in pages that other leases shared at that time.
        copy: the copy to make before the last tokens of the hit have KV, until ``take_copy``.
        first_changed: index of the first page that ``take_changes`` has not returned in its present state; at most
            ``len(pages)``. New pages count as changed.
        sharing: whether its pages are entered in the tree; false once its namespace is dropped.
        released: whether ``release`` was called.
        states: checkpoints of recurrent states; None for a model without recurrent states.
        state: slot of the state at the end of the hit, -1 for none.
        pending: reserved slots, each by the position after which a step saves the state.
        uses: the recurrent states that the sequence uses, in addition to ``state`` and ``pending``.
        tiered: the pages and keys that the sequence uses from tiers.
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
    states: StateCache | None = None
    state: int = -1
    pending: dict[int, int] = field(default_factory=dict)
    uses: StateUses = field(default_factory=StateUses)
    tiered: TierUses = field(default_factory=TierUses)

    def take_changes(self) -> tuple[int, tuple[int, ...]]:
        """Return the index from which ``pages`` changed since the last call, and the ids from there on."""
        first = self.first_changed
        self.first_changed = len(self.pages)
        return first, tuple(self.pages[first:])

    def take_copy(self) -> PageCopy | None:
        """Return the copy for the next batch. Once taken it must be executed, even if the lease ends before."""
        copy, self.copy = self.copy, None
        return copy

    def take_loads(self) -> tuple[PageLoad | StateLoad, ...]:
        """Return what to fill before the next batch. Once taken they must be filled, even if the lease ends."""
        loads, self.tiered.loads = self.tiered.loads, ()
        return loads

    def take_resumed(self) -> int:
        """Return ``StateUses.resumed`` for a step that reads it; -1 for the row's own state."""
        slot, self.uses.resumed = self.uses.resumed, -1
        self.uses.read = slot if slot >= 0 else self.uses.read
        return slot

    def put_back(self, slot: int) -> None:
        """Undo ``take_resumed``, which returned this slot."""
        if slot >= 0:
            self.uses.resumed, self.uses.read = slot, -1

    def most_drafts(self, position: int) -> int | None:
        """Return how many drafts may follow the first ``position`` tokens in a step; None for any number.

        No drafts may follow if the state after these tokens is a checkpoint, since a step saves the state after a token
        only once.
        """
        if self.states is None:
            return None
        return 0 if position in self.pending else self.states.num_free_drafts

    def take_drafted(self, position: int, count: int) -> tuple[tuple[int, int], ...]:
        """Reserve slots for the states before ``count`` drafts that follow the first ``position`` tokens.

        Returns:
            (position, slot) ascending, as ``take_checkpoints``. Empty in a model without states.
        """
        if self.states is None:
            return ()
        self.uses.drafted = {position + index: self.states.reserve_draft() for index in range(count)}
        return tuple(self.uses.drafted.items())

    def take_checkpoints(self, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """Reserve slots for the states that a step saves which computes positions ``start`` to ``end``.

        Returns:
            (position, slot) ascending: the state after ``position`` tokens is saved. Empty in a model without states.
        """
        if self.states is None or not self.sharing:
            return ()
        interval, taken = self.states.interval, []
        regular = range(start - start % interval + interval, end + 1, interval)
        for position in sorted({*regular, *(each for each in self.uses.wanted if start < each <= end)}):
            slot = self.states.reserve()
            if slot is None:
                break
            self.pending[position] = slot
            taken.append((position, slot))
        return tuple(taken)


class PrefixCache:
    """Owns the free pages and the tree, and leases pages to sequences.

    Copies: the source of a copy is not locked, so it may be evicted and leased to another sequence before the copy is
    executed. That is safe only if copies are executed one by one, in the order in which their leases were acquired, all
    before the forward pass: later writes to the source are then targets of later copies or come from the forward. For
    the same reason a source may be the target of an earlier copy. A runner must not read all sources first or write all
    targets at once.

    Attributes:
        num_evicted: number of pages evicted since the start.

    Args:
        num_pages: number of pages of the KV pool.
        page_size: number of tokens in a page.
        sharing: whether prefixes are kept and found.
        states: slots of recurrent states; None for a model without recurrent states.
        tiers: pages outside the pool; None without tiers.
        events: records pages that enter and leave the tree; None if KV events are off.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        sharing: bool = True,
        states: StateSlots | None = None,
        tiers: KvTiers | None = None,
        events: KvEventLog | None = None,
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.num_evicted = 0
        self.sharing = sharing
        self.states = None if states is None else StateCache(states, self._forget_state)
        self.tiers = tiers
        self._events = events
        self._allocator = PageAllocator(num_pages)
        self._tree = RadixTree(page_size)
        self._leases: set[Lease] = set()

    @property
    def num_free(self) -> int:
        return self._allocator.num_free

    @property
    def num_cached(self) -> int:
        return self._tree.num_pages

    @property
    def num_private(self) -> int:
        return sum(len(lease.pages) - lease.num_shared for lease in self._leases)

    def available(self) -> int:
        return self._allocator.num_free + self._tree.num_pages - self._tree.num_locked

    def match(self, path: Path, tokens: array[int], limit: int) -> int:
        """Return the prefix hit of the first ``limit`` tokens, in tokens. Changes nothing."""
        found = self._tree.match(path, _memory(tokens, 0, limit))
        if self.states is not None:
            return self.states.longest(found.pages) * self.page_size
        return len(found.pages) * self.page_size + found.num_copied

    def awaits_pages(self, number: int, path: Path, tokens: array[int], limit: int) -> bool:
        """Return whether pages of a waiting sequence are being read from a tier; begin to read if a tier has them.

        Args:
            number: number of the sequence.
            limit: as in ``acquire``.
        """
        if self.tiers is None or self.tiers.is_idle:
            return False
        num_cached = self._num_usable(self._tree.match(path, _memory(tokens, 0, limit)).pages)
        return self.tiers.awaits(number, path, tokens, num_cached, limit // self.page_size)

    def _num_usable(self, pages: list[int]) -> int:
        """Return how many leading pages a hit may have: up to the last checkpoint, in a model with states."""
        return len(pages) if self.states is None else self.states.longest(pages)

    def acquire(self, path: Path, tokens: array[int], limit: int, fetch: Fetch | None = None) -> Lease:
        """Lease the longest reusable prefix of the first ``limit`` tokens. All pages count as changed.

        A hit that ends inside a page takes a page for a private copy of it, by eviction if need be; if there is no
        page, the hit is cut to whole pages.

        Args:
            path: the namespaces of the sequence.
            tokens: int32 tokens of the sequence.
            limit: most tokens to reuse, at most ``len(tokens)``.
            fetch: pages of the sequence that were read from a tier; they are used if they continue the tree's.
        """
        found = self._tree.match(path, _memory(tokens, 0, limit))
        wanted = frozenset[int]()
        if self.states is not None:
            wanted = frozenset({len(found.pages) * self.page_size, limit // self.page_size * self.page_size})
            found = self._tree.match(path, _memory(tokens, 0, self.states.longest(found.pages) * self.page_size))
        forked, whole = self._tree.num_in_use(found) * self.page_size, len(found.pages)
        node = self._tree.lock(found)
        lease = Lease(path, node, found.pages, whole, whole * self.page_size, self.sharing, forked)
        self._leases.add(lease)
        lease.states, lease.uses.wanted = self.states, wanted
        if self.states is not None and whole:
            lease.uses.held = lease.pages[-1]
            lease.state = self.states.hold(lease.uses.held)
        if self.tiers is not None:
            self._offer(lease, self.tiers, tokens, 0, whole)
            if lease.uses.held >= 0:
                self._offer_state(lease, self.tiers, tokens, whole * self.page_size, lease.state)
            if fetch is not None and self._load(lease, self.tiers, fetch, limit // self.page_size):
                return lease
        if found.num_copied and (target := self._allocate(1)):
            lease.pages += target
            lease.num_tokens += found.num_copied
            if target[0] != found.source:
                lease.copy = PageCopy(found.source, target[0], found.num_copied)
        return lease

    def grow(self, lease: Lease, num_tokens: int) -> bool:
        """Add pages for all positions below ``num_tokens``, by eviction if need be. False, unchanged, if it fails."""
        _check_live(lease)
        missing = -(-num_tokens // self.page_size) - len(lease.pages)
        if missing <= 0:
            return True
        if missing > self.available():
            return False
        lease.pages += self._allocate(missing)
        return True

    def shrink(self, lease: Lease, num_tokens: int) -> None:
        """Free private pages without a position below ``num_tokens``."""
        _check_live(lease)
        kept = max(lease.num_shared, -(-num_tokens // self.page_size))
        self._allocator.free(lease.pages[kept:])
        del lease.pages[kept:]
        lease.first_changed = min(lease.first_changed, len(lease.pages))

    def following(self, lease: Lease, tokens: array[int], limit: int) -> array[int]:
        """Return up to ``limit`` tokens that followed a sequence's tokens in the tree, under its path.

        Returns no token unless the lease's shared pages hold all of ``tokens`` (int32) but the last page.
        """
        start = lease.num_shared * self.page_size
        found = array("i")
        if lease.sharing and lease.node.children and len(tokens) - start <= self.page_size:
            head = _memory(tokens, start, len(tokens))
            found.frombytes(continuation(lease.node, lease.path, start, head, limit, self.page_size))
        return found

    def commit(self, lease: Lease, tokens: array[int], num_computed: int) -> None:
        """Insert the lease's whole pages below ``num_computed`` into the tree.

        Pages that the tree already has for the same tokens replace the lease's own, which are freed. A step in flight
        may still read the freed pages; their next owner writes them only in a later step.

        Args:
            lease: the lease, which locks these pages too from now on.
            tokens: int32 tokens of the sequence, at least ``num_computed``.
            num_computed: tokens whose KV is in the lease's pages.
        """
        _check_live(lease)
        if lease.copy or lease.tiered.loads:
            waiting = lease.copy or f"{len(lease.tiered.loads)} loads"
            raise ValueError(f"commit of {num_computed} tokens before the lease's copy was taken: {waiting}")
        self._check_computed(lease, tokens, num_computed)
        if lease.sharing:
            self._enter(lease, tokens, num_computed // self.page_size)
        if self.states is not None:
            self._keep_states(lease, tokens, num_computed, self.states)
        if lease.tiered.arriving:
            self._end_arrival(lease)

    def release(self, lease: Lease, tokens: array[int], num_computed: int) -> None:
        """End the lease: insert all computed pages, even a partly filled last page, into the tree, and free the rest.

        If the lease's copy was not taken, the lease has computed no page beyond the tree.

        Args:
            tokens: int32 tokens of the sequence, at least ``num_computed``.
            num_computed: tokens whose KV is in the lease's pages.
        """
        _check_live(lease)
        self._check_computed(lease, tokens, num_computed)
        # Until a step of the lease is committed, pages that are filled from outside may not be filled yet.
        is_filled = not lease.tiered.arriving or num_computed > lease.num_tokens
        entering = lease.sharing and lease.copy is None and is_filled
        if lease.tiered.arriving:
            self._end_arrival(lease)
        if entering:
            self._enter(lease, tokens, num_computed // self.page_size)
        if self.states is not None:
            self._keep_states(lease, tokens, num_computed if is_filled else 0, self.states)
            self.states.cancel(lease.pending.values())
            lease.pending.clear()
            self.states.cancel_drafts(lease.uses.draft_slots)
            lease.uses.resumed = lease.uses.read = -1
            entering = False  # a partly filled page has no state, so no hit would reach into it
        self._free(self._tree.unlock(lease.node))
        private = lease.pages[lease.num_shared :]
        start = lease.num_shared * self.page_size
        if entering and start < num_computed:
            tail = _memory(tokens, start, num_computed)
            self._free(self._tree.add_tail(lease.node, lease.path, start, tail, private.pop(0)))
        self._free(private)
        self._leases.remove(lease)
        lease.released = True

    def export(
        self,
        scheme: BlockScheme,
        path: Path,
        tokens: array[int],
        *,
        first: int = 0,
        most: int = ENDLESS,
        keys: list[bytes] | None = None,
    ) -> tuple[list[BlockId], list[int]]:
        """Return whole pages of a prefix in the tree: their names, and their ids, which are valid until the next call.

        In a model with recurrent states, only the pages up to the state of ``export_state`` can be used.

        Args:
            first: index of the first page to return.
            most: largest number of pages to return.
            keys: keys of the prefix's pages, as far as they are known; the others are added.
        """
        data = _memory(tokens, 0, len(tokens))
        pages = self._tree.match(path, data).pages
        end = min(len(pages), first + most)
        keys = [] if keys is None else keys
        scheme.extend(keys, path, data, end)
        return scheme.blocks(keys, path, data, first, end), pages[first:end]

    def export_state(
        self, scheme: BlockScheme, path: Path, tokens: array[int], keys: list[bytes] | None = None
    ) -> tuple[BlockId, int] | None:
        """Return name and slot of a prefix's last recurrent state in the tree. The slot is valid until the next call.

        Returns None if there is no such state. Arguments as in ``export``.
        """
        if self.states is None:
            return None
        data = _memory(tokens, 0, len(tokens))
        pages = self._tree.match(path, data).pages
        count = self.states.longest(pages)
        if not count:
            return None
        keys = [] if keys is None else keys
        scheme.extend(keys, path, data, count)
        [page] = scheme.blocks(keys, path, data, count - 1, count)
        return scheme.state(page), self.states.slot(pages[count - 1])

    def import_pages(self, path: Path, tokens: array[int]) -> tuple[Lease, int]:
        """Lease pages for a prefix of whole pages, as far as there is room: pages of the tree, then private ones.

        The caller fills the private ones at once, commits the lease and releases it. In a model with recurrent states,
        either all pages or none are leased, and the caller also fills the slot that is pending at the prefix's end.

        Returns:
            The lease, and the tokens that it has pages for.
        """
        found = len(self._tree.match(path, _memory(tokens, 0, len(tokens))).pages)
        lease = self.acquire(path, tokens, found * self.page_size)
        found, whole = lease.num_shared, len(tokens) // self.page_size
        num_pages = min(whole, found + self.available())
        if self.states is not None and found < whole:
            slot = self.states.reserve() if num_pages == whole else None
            if slot is None:
                num_pages = found
            else:
                lease.pending[whole * self.page_size] = slot
        self.grow(lease, num_pages * self.page_size)
        return lease, num_pages * self.page_size

    def clear(self) -> int:
        """Evict all pages that no sequence uses. Returns their number."""
        freed = self._tree.evict(self._tree.num_pages - self._tree.num_locked)
        self._free(freed)
        return len(freed)

    def pin(self, path: Path, tokens: array[int], num_tokens: int, kind: PinKind) -> SoftPin | None:
        """Soft-pin the whole pages of the first ``num_tokens`` tokens that are in the tree; None if there are none."""
        return self._tree.pin(self._tree.match(path, _memory(tokens, 0, num_tokens)), kind)

    def unpin(self, pin: SoftPin) -> None:
        self._tree.unpin(pin)

    def tokens_to(self, node: Node) -> array[int]:
        """Return the tokens of the path that ends at a node, int32."""
        tokens = array("i")
        tokens.frombytes(b"".join(bytes(each.tokens) for each in reversed(list(upwards(node)))))
        return tokens

    def demote(self, path: Path, tokens: array[int]) -> None:
        """Have those pages of a sequence evicted first among its tenant's that no other one has used."""
        found = self._tree.match(path, _memory(tokens, 0, len(tokens)))
        if found.inside == len(found.node.pages):
            self._tree.demote(found.node)

    def demote_node(self, node: Node) -> None:
        """Have the pages of the path that ends at a node evicted first among its tenant's."""
        self._tree.demote(node)

    def num_pinned(self, kind: PinKind) -> int:
        return self._tree.pins.num_pages[kind]

    def pinned_nodes(self, pins: Iterable[SoftPin]) -> dict[Node, int]:
        """Return the nodes on the paths of pins, with their number of pages. O(depth) for each pin."""
        return {node: len(node.pages) for pin in pins for node in upwards(pin.node) if node.parent is not None}

    def drop(self, namespace: Namespace) -> int:
        """Drop a namespace: it is no longer found, and present leases insert no more of its pages into the tree.

        Returns:
            Pages freed. Leased pages are freed when their last lease ends.
        """
        for lease in self._leases:
            if lease.path.touches(namespace):
                lease.sharing = False
        freed = self._tree.drop(namespace)
        self._free(freed)
        return len(freed)

    def drop_adapters(self, adapters: Container[str]) -> int:
        """Drop all namespaces of these adapters. Returns pages freed."""
        leased = {namespace for lease in self._leases for namespace in lease.path.namespaces}
        return sum(self.drop(each) for each in leased | self._tree.tops.keys() if each.adapter in adapters)

    def tree_view(self, most: int) -> list[Node]:
        """Return up to ``most`` nodes, each after its parent: leased ones, then the most recently used. Read-only."""
        return tree_view(self._tree, [lease.node for lease in self._leases], most)

    @property
    def num_uses(self) -> int:
        return self._tree.num_uses

    def check(self) -> None:
        """Check that every page has one owner and that the tree is sound. Linear in pages. Raises BrokenInvariant."""
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
        if self.states is not None:
            pending = [slot for lease in leases for slot in lease.pending.values()]
            drafted = [slot for lease in leases for slot in lease.uses.draft_slots]
            self.states.check(cached, pending, [lease.uses.held for lease in leases if lease.uses.held >= 0], drafted)
        if self.tiers is not None:
            self.tiers.check(cached, self.states.kept_slots if self.states is not None else ())

    def _allocate(self, num_pages: int) -> list[int]:
        """Take pages from the free list, after eviction if need be; none if there are not as many."""
        missing = num_pages - self._allocator.num_free
        if missing > 0:
            if num_pages > self.available():
                return []
            evicted = self._tree.evict(missing)
            self.num_evicted += len(evicted)
            self._free(evicted)
        return self._allocator.allocate(num_pages)

    def _enter(self, lease: Lease, tokens: array[int], num_whole: int) -> None:
        """Enter the lease's pages below index ``num_whole`` in the tree, or replace them by the tree's."""
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
        self._free(entered.freed)
        if self._events is not None:
            self._events.store(self._blocks(lease, self._events.scheme, tokens, first, num_whole), entered.pages)
        if self.tiers is not None:
            self._offer(lease, self.tiers, tokens, first, num_whole)

    def _offer(self, lease: Lease, tiers: KvTiers, tokens: array[int], first: int, end: int) -> None:
        """Offer the tree's pages ``first`` to ``end`` of a lease to the tiers; those that have them note the use."""
        if not lease.sharing or first >= end or not tiers.stores:
            return
        tiers.offer(self._blocks(lease, tiers.scheme, tokens, first, end), lease.pages[first:end])

    def _blocks(self, lease: Lease, scheme: BlockScheme, tokens: array[int], first: int, end: int) -> list[BlockId]:
        """Return the names of pages ``first`` to ``end`` of a lease, for whom all that asks has one scheme."""
        data = _memory(tokens, 0, end * self.page_size)
        scheme.extend(lease.tiered.keys, lease.path, data, end)
        return scheme.blocks(lease.tiered.keys, lease.path, data, first, end)

    def _offer_state(self, lease: Lease, tiers: KvTiers, tokens: array[int], position: int, slot: int) -> None:
        """Offer the state after ``position`` tokens, a checkpoint, to the tiers, as ``_offer`` does pages."""
        if not lease.sharing or not tiers.stores:
            return
        end = position // self.page_size
        [page] = self._blocks(lease, tiers.scheme, tokens, end - 1, end)
        tiers.offer_state(page, slot)

    def _forget_state(self, slot: int) -> None:
        if self.tiers is not None:
            self.tiers.forget_states((slot,))

    def _load(self, lease: Lease, tiers: KvTiers, fetch: Fetch, most: int) -> bool:
        """Extend a lease, which has only pages of the tree, by pages that were read. Returns False if they do not fit.

        Args:
            most: largest number of whole pages that the sequence may reuse.
        """
        first = len(lease.pages)
        end = min(fetch.end, most)
        targets = self._allocate(end - first) if fetch.first <= first < end and lease.sharing else []
        if not targets:
            return False
        if self.states is not None and not self._load_state(lease, tiers, fetch, end, self.states):
            self._allocator.free(targets)
            return False
        payloads = fetch.payloads[first - fetch.first : end - fetch.first]
        lease.pages += targets
        lease.num_tokens = end * self.page_size
        lease.tiered.loads = (*map(PageLoad, targets, payloads), *lease.tiered.loads)
        lease.tiered.arriving = (*fetch.keys[first:end], *lease.tiered.arriving)
        tiers.arrive(lease.tiered.arriving)
        return True

    def _load_state(self, lease: Lease, tiers: KvTiers, fetch: Fetch, end: int, states: StateCache) -> bool:
        """Have a lease begin with the state that was read for its first ``end`` pages. False if it cannot."""
        slot = states.reserve() if fetch.state is not None and end == fetch.end else None
        if slot is None or fetch.state is None:
            return False
        if lease.uses.held >= 0:
            states.drop(lease.uses.held)
            lease.uses.held = -1
        lease.pending[end * self.page_size] = lease.state = slot
        lease.tiered.loads = (StateLoad(slot, fetch.state),)
        lease.tiered.arriving = (tiers.scheme.state_key(fetch.keys[end - 1]),)
        return True

    def _end_arrival(self, lease: Lease) -> None:
        assert self.tiers is not None
        self.tiers.arrived(lease.tiered.arriving)
        lease.tiered.arriving = ()

    def _free(self, pages: list[int]) -> None:
        """Free pages, and the checkpoints of those that were in the tree."""
        if self._events is not None:
            self._events.remove(pages)
        if self.states is not None:
            self.states.forget(pages)
        if self.tiers is not None:
            self.tiers.forget(pages)
        self._allocator.free(pages)

    def _keep_states(self, lease: Lease, tokens: array[int], num_computed: int, states: StateCache) -> None:
        """Assign the saved states to their pages, which are in the tree now, and end the hold on the first state.

        Of the states before drafts, the one before the first rejected draft is kept for the next step.
        """
        resumed = lease.uses.drafted.pop(num_computed, -1) if lease.uses.drafted else lease.uses.resumed
        lease.uses.resumed = -1
        states.cancel_drafts(lease.uses.draft_slots)
        lease.uses.drafted, lease.uses.resumed, lease.uses.read = {}, resumed, -1
        if lease.uses.held >= 0:
            states.drop(lease.uses.held)
            lease.uses.held = -1
        for position in [each for each in lease.pending if each <= num_computed]:
            slot = lease.pending.pop(position)
            if lease.sharing:
                page = lease.pages[position // self.page_size - 1]
                is_kept = states.keep(page, slot, lease.path.zone(position - 1)[0].tenant)
                if is_kept and self.tiers is not None:
                    self._offer_state(lease, self.tiers, tokens, position, slot)
            else:
                states.cancel((slot,))

    def _check_computed(self, lease: Lease, tokens: array[int], num_computed: int) -> None:
        """Raise ValueError for more than there are tokens or positions in pages."""
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
    """Return tokens ``start`` to ``stop`` as int32 bytes, which the tree compares."""
    if tokens.itemsize != TOKEN_BYTES:
        raise ValueError(f"tokens must be array('i') of {TOKEN_BYTES} bytes each, not array({tokens.typecode!r})")
    return memoryview(tokens)[start:stop].tobytes()
