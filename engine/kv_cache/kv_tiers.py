"""KV tiers: keep pages of KV outside the pool. Pages are written after the steps and read ahead of them.

    pool page enters the tree ---> write queue ---> writer thread ---> stores (host memory, files)
    sequence waits in the queue ---> reader thread ---> fetched pages ---> lease (``PrefixCache.acquire``) ---> pool

The tree remains the only record of the pages in the pool. A tier names pages by content (``block_keys``), so it may
lose any page at any time, and a hit in a tier is as good as a hit in the tree. Only the two threads wait for a disk,
and every failure counts as a miss.

While the engine computes, only the pages that ``WriteAdmission`` admits are written. The others wait in the pool for a
pause of the engine, or for its end.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ...radix.namespace import Path
from .block_codec import Buffer
from .block_keys import BlockId, BlockScheme
from .kv_stores import KvStore
from .peer_reads import PeerReads
from .write_admission import WriteAdmission
from .write_queue import Cell, WriteQueue

logger = logging.getLogger("rootgraft.kv")

_NICENESS = 10  # added to that of the writer: a step whose kernel waits for one of its threads waits as a whole
_MOST_MOVES = 2  # reads of one sequence anew because the tree has lost what came before its pages
MOST_CLOSE_SECONDS = 5.0
"""For which the end of an engine waits for pages that were held back for a pause."""
MOST_READ_SECONDS = 10.0
"""For which sequences wait for a page that is being read: a disk that does not answer costs its pages, no request."""


class PageReader(Protocol):
    """Reads a pool, on any thread."""

    def read_page(self, page: int) -> Buffer:
        """Return a copy of a page's bytes."""

    def read_state(self, slot: int) -> Buffer:
        """Return a copy of a recurrent state's bytes."""


@dataclass(slots=True, eq=False)
class Fetch:
    """The pages of a waiting sequence in tiers and, in a model with recurrent states, the state after the last page.

    Attributes:
        keys: keys of its whole pages, as far as they are known.
        first: index of the first page that is read.
        blocks: the blocks to read, in order; once the read is done, only those that were found.
        payloads: contents of the blocks that were found.
        state: the recurrent state after the last page that was found; None in a model without recurrent states.
        is_done: whether the reader has finished.
        num_moves: number of reads begun so far.
    """

    keys: list[bytes] = field(default_factory=list)
    first: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    payloads: list[Buffer] = field(default_factory=list)
    state: Buffer | None = None
    is_done: bool = True
    num_moves: int = 0

    @property
    def end(self) -> int:
        """Index behind the last page that was found."""
        return self.first + len(self.payloads)


@dataclass(slots=True)
class ReadQueue:
    """Sequences whose pages the reader thread reads next, and the time since which it reads the page that it reads."""

    clock: Callable[[], float]
    fetches: deque[Fetch] = field(default_factory=deque)
    since: float | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether the page that is read has not come for so long that nobody waits for this thread."""
        since = self.since
        return since is not None and self.clock() > since + MOST_READ_SECONDS


class KvTiers:
    """The stores, in the order in which they are asked, with a writer and a reader thread.

    Args:
        scheme: names of pages.
        reader: reader of the pool.
        stores: the stores, the fastest first.
        peers: tier of other replicas' pages, which is asked after the stores and never written to; None if absent.
        admission: decides which pages are written while the engine computes; None for one that knows of no pool.
        most_fetched: limit on the bytes of pages that are read ahead and not used yet; a single sequence may exceed it.
        inline: whether to write and read at once, on the calling thread instead of the two threads; for tests.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        scheme: BlockScheme,
        reader: PageReader,
        stores: Sequence[KvStore],
        peers: PeerReads | None = None,
        *,
        admission: WriteAdmission | None = None,
        most_fetched: int = 1 << 29,
        inline: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.scheme = scheme
        self.stores = tuple(stores)
        self.peers = peers
        self._reader = reader
        self._most_fetched = max(1, most_fetched // scheme.page_bytes)
        self._lock = threading.Condition()
        # An entry ends when the page leaves the tree, or the checkpoint of the slot is evicted.
        self._writes = WriteQueue()
        self._reads = ReadQueue(clock)
        self._fetches: dict[int, Fetch] = {}  # by sequence
        self._arriving: set[bytes] = set()  # pages that leases take from here, and that are not in the tree yet
        most = max((store.capacity for store in self.stores), default=0)
        self._admission = admission or WriteAdmission(most // scheme.page_bytes)
        self._is_closed = False
        # Without stores pages are read from the host's memory alone, which takes no time, and none is written.
        work = () if inline or not stores else ((self._write_all, "kv-write-behind"), (self._read_all, "kv-read-ahead"))
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for run, name in work]
        for thread in self._threads:
            thread.start()

    # The prefix cache calls these: pages are written behind its steps.

    def offer(self, blocks: Iterable[BlockId], pages: Iterable[int]) -> None:
        """Queue pages of the tree for writing, except those that a store has already.

        The last page of a prefix is written first, so that it is also evicted first. The pages have been computed, and
        do not change until ``forget``.
        """
        self._offer([(Cell(False, page), block) for block, page in reversed(list(zip(blocks, pages, strict=True)))])

    def offer_state(self, page: BlockId, slot: int) -> None:
        """Have the recurrent state after a page of the tree written. It stays in its slot until ``forget_states``."""
        self._offer([(Cell(True, slot), self.scheme.state(page))])

    def _offer(self, blocks: Iterable[tuple[Cell, BlockId]]) -> None:
        writes = self._writes
        writes.is_resting = False
        new = []
        for cell, block in blocks:
            # All stores are asked, so that each notes the use.
            known = [store.touch(block.key) for store in self.stores]
            if not all(known):
                new.append((cell, block))
        if not new:
            return
        with self._lock:
            for cell, block in new:
                if writes.hurry(cell):  # it was used again while it waited
                    continue
                is_due = self._admission.admits(block, self._size(block))
                if (lost := writes.add(cell, block, is_due=is_due)) is not None:
                    self._admission.lose(lost)
            self._lock.notify_all()
        if not self._threads:
            self._write_until_empty()

    def _size(self, block: BlockId) -> int:
        """Return how many pages take as many bytes as a block."""
        return -(-self.scheme.payload_bytes(block) // self.scheme.page_bytes)

    def forget(self, pages: Iterable[int]) -> None:
        """Give up offered pages that leave the tree, and are overwritten soon."""
        self._forget(Cell(False, page) for page in pages)

    def forget_states(self, slots: Iterable[int]) -> None:
        """Give up offered states whose slots are overwritten soon."""
        self._forget(Cell(True, slot) for slot in slots)

    def _forget(self, cells: Iterable[Cell]) -> None:
        if self.stores:
            with self._lock:  # also to see that nothing is queued: the writer may just be taking a block
                lost = self._writes.forget(cells)
                if lost:
                    self._lock.notify_all()
            for block in lost:
                self._admission.lose(block)

    def rest(self) -> None:
        """Write all queued pages while the engine pauses: until pages are offered or a sequence waits."""
        if self._writes.is_resting or self._is_closed:
            return
        with self._lock:
            self._writes.is_resting = True
            self._lock.notify_all()
        if not self._threads:
            self._write_until_empty()

    # The scheduler calls these: pages are read ahead of their sequences.

    @property
    def is_idle(self) -> bool:
        """Whether no sequence can have anything here: there are no stores, and nothing of other replicas."""
        return not self.stores and (self.peers is None or self.peers.is_idle)

    def awaits(self, number: int, path: Path, tokens: array[int], num_cached: int, num_pages: int) -> bool:
        """Return whether pages of a waiting sequence are being read; begin to read the pages that a store has.

        Args:
            number: number of the sequence.
            num_cached: number of its whole pages in the tree, within the limit of a hit.
            num_pages: largest number of pages that it can use.
        """
        self._writes.is_resting = False
        fetch = self._fetches.get(number)
        if fetch is None:
            fetch = self._fetches[number] = Fetch()
        if not fetch.is_done and self._reads.is_stuck:
            self._give_up(fetch)
            fetch = self._fetches[number] = Fetch(num_moves=_MOST_MOVES + 1)
        if not fetch.is_done or (self.peers and self.peers.waits(number)):
            return True
        if num_cached >= num_pages or fetch.first <= num_cached < fetch.end or fetch.num_moves > _MOST_MOVES:
            return False
        if len(fetch.keys) < num_pages:
            self.scheme.extend(fetch.keys, path, tokens[: num_pages * self.scheme.page_size].tobytes(), num_pages)
        end = num_cached
        while end < num_pages and self._touch(fetch.keys[end]):
            end += 1
        end = self._usable(fetch.keys, num_cached, end)
        fetch.payloads = []
        if self.peers and self.peers.ask(number, path, tokens, fetch.keys[:num_pages], end):
            return True
        if end == num_cached:
            return False
        data = tokens[: end * self.scheme.page_size].tobytes()
        return self._begin(fetch, num_cached, self.scheme.blocks(fetch.keys, path, data, num_cached, end))

    def _usable(self, keys: Sequence[bytes], first: int, end: int) -> int:
        """Return how far pages ``first`` to ``end`` may be used: up to the last state that a store has.

        Returns ``first`` if no store has a state. In a model without recurrent states all pages may be used.
        """
        if not self.scheme.state_bytes:
            return end
        counts = range(end, first, -1)
        return next((count for count in counts if self._touch(self.scheme.state_key(keys[count - 1]))), first)

    def _touch(self, key: bytes) -> bool:
        """Note a use of a page in all stores. False if none has it."""
        return True in [store.touch(key) for store in self._sources]

    @property
    def _sources(self) -> tuple[KvStore, ...]:
        """The sources from which pages are read."""
        return (*self.stores, self.peers.store) if self.peers else self.stores

    def knows(self, number: int) -> bool:
        """Return whether ``awaits`` was asked of a waiting sequence."""
        return number in self._fetches

    def _begin(self, fetch: Fetch, first: int, blocks: list[BlockId]) -> bool:
        """Begin to read pages for a sequence. Returns whether it must wait."""
        if self._reads.is_stuck:
            return False
        others = [each for each in self._fetches.values() if each is not fetch and (not each.is_done or each.payloads)]
        coming = self._arriving.union(each.blocks[0].key for each in others if not each.is_done)
        if blocks[0].key in coming:
            return True  # another sequence brings it to the tree
        # Number of pages that take as many bytes as a state.
        state_pages = -(-self.scheme.state_bytes // self.scheme.page_bytes)
        taken = (len(each.payloads if each.is_done else each.blocks) + state_pages for each in others)
        room = self._most_fetched - sum(taken)
        if room <= 0:
            return True  # until one of the others is admitted
        if len(blocks) > room and self.scheme.state_bytes:
            end = self._usable(fetch.keys, first, first + room)
            if end == first:  # the pages up to the first state are more than may be read ahead, at least for now
                return bool(others)
            room = end - first
        fetch.first, fetch.blocks = first, blocks[:room]
        fetch.num_moves += 1
        fetch.is_done = False
        self._admission.want(blocks[0].origin.namespace.tenant, len(fetch.blocks))
        if not self._threads:
            self._read(fetch)
            return False
        with self._lock:
            self._reads.fetches.append(fetch)
            self._lock.notify_all()
        return True

    def fetched(self, number: int) -> Fetch | None:
        """Return what was read for a sequence; None if nothing was."""
        fetch = self._fetches.get(number)
        return fetch if fetch and fetch.is_done and fetch.payloads else None

    def drop(self, number: int) -> None:
        """Forget what was read for a sequence, which has it or has ended."""
        if self.peers:
            self.peers.forget([number])
        fetch = self._fetches.pop(number, None)
        if fetch is not None and not fetch.is_done:
            self._give_up(fetch)

    def _give_up(self, fetch: Fetch) -> None:
        """Have the pages of a sequence not read, if the reader has not begun with them."""
        with self._lock:
            if fetch in self._reads.fetches:
                self._reads.fetches.remove(fetch)

    def arrive(self, keys: Iterable[bytes]) -> None:
        """Note that a lease takes pages, until ``arrived``."""
        self._arriving.update(keys)

    def arrived(self, keys: Iterable[bytes]) -> None:
        """Note that these pages are in the tree, or that their lease has ended without."""
        keys = tuple(keys)
        self._arriving.difference_update(keys)
        if self.peers:
            self.peers.store.discard(keys)

    # The methods from here on concern all sequences and all stores.

    def reset(self) -> None:
        """Forget all sequences and all pages of a pool whose content is not trusted any more. What is stored stays."""
        with self._lock:
            self._writes.clear()
            self._reads.fetches.clear()
        self._fetches.clear()
        self._arriving.clear()
        if self.peers:
            self.peers.reset()

    def clear(self) -> int:
        """Forget all pages of all stores, whose files the writer removes. Returns their number."""
        with self._lock:
            self._writes.clear()
            self._lock.wait_for(lambda: not self._writes.is_writing)
            count = sum(store.clear() for store in self._sources)
            self._writes.is_sweeping = True
            self._lock.notify_all()
        self._admission.clear()
        if not self._threads:
            self._sweep()
        return count

    def flush(self) -> None:
        """Wait until all pages that are due are written or given up; in a pause of the engine all offered ones are."""
        with self._lock:
            self._lock.wait_for(self._is_flushed)

    def _is_flushed(self) -> bool:
        return self._is_closed or not (self._writes.has_work or self._writes.is_writing)

    def stats(self) -> dict[str, float]:
        """Return gauges and counters by name."""
        found: dict[str, float] = {"kv_pages_to_write": len(self._writes.due)}
        for store in self._sources:
            found |= store.stats()
        for store in self.stores:
            found[f"kv_held_{store.tier}"] = len(self._writes.later)
            found[f"kv_unwritten_{store.tier}"] = self._admission.num_unwritten
            found[f"kv_ghost_hits_{store.tier}"] = self._admission.num_ghost_hits
        return found

    def check(self, tree_pages: Iterable[int], kept_slots: Iterable[int] = ()) -> None:
        """Raise AssertionError if a page or state is offered that is not in the tree, or a store counts wrongly."""
        for store in self._sources:
            store.check()
        with self._lock:
            cells = {Cell(False, page) for page in tree_pages} | {Cell(True, slot) for slot in kept_slots}
            assert self._writes.cells <= cells
        self._admission.check()

    def close(self) -> None:
        """Write what was offered, and end the threads. Has no effect the second time.

        For pages that wait for a pause there are some seconds.
        """
        if self._is_closed:
            return
        self.rest()
        with self._lock:
            self._lock.wait_for(self._is_flushed, MOST_CLOSE_SECONDS)
            self._writes.is_resting = False
        self.flush()
        with self._lock:
            self._is_closed = True
            self._lock.notify_all()
        for thread in self._threads:
            thread.join()
        for store in self._sources:
            store.close()

    # These run on the threads of the tiers.

    def _write_all(self) -> None:
        if sys.platform == "linux":  # elsewhere niceness is that of the whole process
            os.nice(_NICENESS)
        self._work(lambda: self._writes.has_work, self._write_next)

    def _read_all(self) -> None:
        self._work(lambda: bool(self._reads.fetches), self._read_next)

    def _work(self, has_work: Callable[[], bool], work: Callable[[], None]) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._is_closed or has_work())
                if self._is_closed:
                    return
            try:
                work()
            except Exception:  # One page failed; the others are still read and written.
                logger.exception("A page of KV was not moved")

    def _write_until_empty(self) -> None:
        while self._writes.has_work:
            self._write_next()

    def _sweep(self) -> None:
        try:
            for store in self.stores:
                store.sweep()
        finally:
            with self._lock:
                self._writes.is_sweeping = False
                self._lock.notify_all()

    def _write_next(self) -> None:
        if self._writes.is_sweeping:
            self._sweep()
        with self._lock:
            taken = self._writes.take()
        if taken is None:
            return
        cell, block = taken
        try:
            payload = self._reader.read_state(cell.number) if cell.is_state else self._reader.read_page(cell.number)
            with self._lock:
                # The page may have left the tree while it was read: then what was read may be another one's.
                is_current = self._writes.end_read()
            if is_current:
                for store in self.stores:
                    if not store.touch(block.key):
                        store.put(block, payload)
        finally:
            with self._lock:
                self._writes.end_write()
                self._lock.notify_all()

    def _read_next(self) -> None:
        with self._lock:
            if not self._reads.fetches:
                return
            fetch = self._reads.fetches.popleft()
        self._read(fetch)

    def _read(self, fetch: Fetch) -> None:
        """Read the pages of a sequence up to the first miss; with recurrent states all or none."""
        found: list[Buffer] = []
        state: Buffer | None = None
        try:
            for block in fetch.blocks:
                payload = self._get(block)
                if payload is None:
                    break
                found.append(payload)
            if self.scheme.state_bytes and len(found) == len(fetch.blocks):
                state = self._get(self.scheme.state(fetch.blocks[-1]))
        finally:
            fetch.payloads = found if state is not None or not self.scheme.state_bytes else []
            fetch.state = state
            fetch.is_done = True

    def _get(self, block: BlockId) -> Buffer | None:
        """Return a block of the first store that has it; None for a miss."""
        self._reads.since = self._reads.clock()
        try:
            holders = [store for store in self._sources if store.touch(block.key)] or self.stores
            payloads = (store.get(block) for store in holders)
            return next((each for each in payloads if each is not None), None)
        finally:
            self._reads.since = None
