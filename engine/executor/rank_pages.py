"""Pages of several ranks' KV, for stores outside of the pool: the parts of all ranks are joined, one after another.

Rank 0 requests the parts of the other ranks on a separate link, in parallel with steps. A stored page always has the
parts of all ranks, and its form names the part of each rank.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Protocol

from ..batch import Batch, PageCopy, PageLoad, PoolWrite, StateLoad
from ..errors import EngineDead
from .pool_pages import PoolPages
from .rank_link import read_line, receive_exactly

_ASK = struct.Struct("<qqq")
"""A request: number of messages that rank 0 has sent before, whether a state is read, number of the page or slot."""


class PagesOfRanks(Protocol):
    """The attributes and methods of the other ranks that ``RankPages`` uses.

    Attributes:
        num_sent: number of messages sent so far.
        page_links: links for pages, by rank.
    """

    @property
    def num_sent(self) -> int: ...
    @property
    def page_links(self) -> Mapping[int, socket.socket]: ...

    def load(self, loads: Sequence[PageLoad | StateLoad]) -> None:
        """Have the others fill their parts of pages and slots, between two steps."""


class RankPages:
    """The pages of all ranks, on rank 0 (``kv_cache.make_tiers.KvPages``). Its methods may be called on any thread.

    Args:
        own: pages of rank 0.
        others: the other ranks; their pools must exist already.

    Raises:
        EngineDead: another rank has ended.
    """

    def __init__(self, own: PoolPages, others: PagesOfRanks) -> None:
        self._own = own
        self._others = others
        self._lock = threading.Lock()
        with _all_there():
            told = [json.loads(read_line(link)) for link in others.page_links.values()]
        forms = own.form, *(form for form, _, _ in told)
        self._page_ends = list(accumulate((own.page_bytes, *(size for _, size, _ in told)), initial=0))
        self._state_ends = list(accumulate((own.state_bytes, *(size for _, _, size in told)), initial=0))
        self.form = " | ".join(f"rank {rank} of {len(forms)}: {form}" for rank, form in enumerate(forms))
        self.page_bytes, self.state_bytes = self._page_ends[-1], self._state_ends[-1]
        self.refusal, self.on_device = own.refusal, own.on_device

    def populate_ahead(self) -> None:
        """Begin to allocate rank 0's memory of pages before they are used; the other ranks do so themselves."""
        self._own.populate_ahead()

    def reach(self, batch: Batch) -> None:
        """Note the pages that a step of rank 0 is about to write."""
        self._own.reach(batch)

    def read_page(self, page: int) -> memoryview:
        """Return a copy of a page's bytes. Raises EngineDead."""
        return self._read(False, page, self._own.read_page, self._page_ends)

    def read_state(self, slot: int) -> memoryview:
        """Return a copy of a recurrent state's bytes. Raises EngineDead."""
        return self._read(True, slot, self._own.read_state, self._state_ends)

    def load(self, loads: Sequence[PageLoad | StateLoad]) -> None:
        """Fill pages and slots that no step in flight uses, between two steps."""
        self._others.load(loads)
        self._own.load([each for each in self.part(loads, 0) if not isinstance(each, PageCopy)])

    def part(self, writes: Sequence[PoolWrite], rank: int) -> tuple[PoolWrite, ...]:
        """Return what a rank writes to its pool."""
        return tuple(self._part(write, rank) for write in writes)

    def _part(self, write: PoolWrite, rank: int) -> PoolWrite:
        if isinstance(write, PageCopy):
            return write
        ends = self._state_ends if isinstance(write, StateLoad) else self._page_ends
        return replace(write, payload=memoryview(write.payload)[ends[rank] : ends[rank + 1]])

    def _read(
        self, is_state: bool, number: int, read_own: Callable[[int], memoryview], ends: Sequence[int]
    ) -> memoryview:
        links = self._others.page_links.values()
        sizes = [end - start for start, end in pairwise(ends)]
        with self._lock, _all_there():
            for link in links:
                link.sendall(_ASK.pack(self._others.num_sent, is_state, number))
            parts: list[memoryview | bytes] = [read_own(number)]
            parts += [receive_exactly(link, size) for link, size in zip(links, sizes[1:], strict=True)]
        return memoryview(b"".join(parts))


@contextmanager
def _all_there() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise EngineDead("Another rank has ended: ending all ranks.") from error


class PageServer:
    """Answers rank 0 with this rank's parts of pages, on a thread of its own, until rank 0 is gone.

    This rank may still compute a page that rank 0 has already computed. So a request names a number of messages, and
    the page is read after this rank has processed these messages.

    Args:
        link: connection to rank 0 for pages alone.
        pages: pages of this rank.
    """

    def __init__(self, link: socket.socket, pages: PoolPages) -> None:
        self._link = link
        self._pages = pages
        self._done = 0
        self._progress = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="rank-pages", daemon=True)
        self._thread.start()

    def done(self, number: int) -> None:
        """Record that this rank has processed the messages up to a number."""
        with self._progress:
            self._done = number
            self._progress.notify()

    def _run(self) -> None:
        pages = self._pages
        try:
            self._link.sendall(json.dumps([pages.form, pages.page_bytes, pages.state_bytes]).encode() + b"\n")
            while True:
                after, is_state, number = _ASK.unpack(receive_exactly(self._link, _ASK.size))
                self._wait(after)
                self._link.sendall(pages.read_state(number) if is_state else pages.read_page(number))
        except OSError:
            return  # rank 0 is gone

    def _wait(self, number: int) -> None:
        """Wait until this rank has processed the messages up to a number."""
        with self._progress:
            self._progress.wait_for(lambda: self._done >= number)
