"""Pages of several ranks: the parts of all of them, each read when its rank has done what came before."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft.engine.batch import PageCopy, PageLoad, PoolWrite, StateLoad
from rootgraft.engine.errors import EngineDead
from rootgraft.engine.executor.rank_pages import PageServer, RankPages

RANKS = 3


class Pool:
    """A rank's pages: of one byte more than those of the rank before, states of two bytes."""

    refusal, on_device, state_bytes = "", False, 2

    def __init__(self, rank: int) -> None:
        self.form, self.page_bytes, self.rank = f"form {rank}", rank + 1, rank
        self.loaded: list[PoolWrite] = []

    def read_page(self, page: int) -> memoryview:
        return memoryview(bytes([16 * page + self.rank] * self.page_bytes))

    def read_state(self, slot: int) -> memoryview:
        return memoryview(bytes([200 + slot, self.rank]))

    def load(self, loads: Sequence[PoolWrite]) -> None:
        self.loaded += loads


class Others:
    """Servers of the other ranks' pages, and what rank 0 has them load."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.page_links: dict[int, socket.socket] = {}
        self.servers: list[PageServer] = []
        self.theirs: list[socket.socket] = []
        self.loads: list[PoolWrite] = []
        for rank in range(1, RANKS):
            self.page_links[rank], theirs = socket.socketpair()
            self.theirs.append(theirs)
            pages: Any = Pool(rank)
            self.servers.append(PageServer(theirs, pages))

    def load(self, loads: Sequence[PoolWrite]) -> None:
        self.loads += loads


@pytest.fixture
def others() -> Iterator[Others]:
    others = Others()
    yield others
    for link in (*others.page_links.values(), *others.theirs):
        link.close()


@pytest.fixture
def pages(others: Others) -> RankPages:
    own: Any = Pool(0)
    return RankPages(own, others)


def test_a_page_is_the_parts_of_all_ranks(pages: RankPages) -> None:
    assert (pages.page_bytes, pages.state_bytes) == (1 + 2 + 3, 6)
    assert bytes(pages.read_page(5)) == bytes([80, 81, 81, 82, 82, 82])
    assert bytes(pages.read_state(7)) == bytes([207, 0, 207, 1, 207, 2])
    assert pages.form == "rank 0 of 3: form 0 | rank 1 of 3: form 1 | rank 2 of 3: form 2"


def test_each_rank_loads_its_part(pages: RankPages, others: Others) -> None:
    writes = PageLoad(1, b"abbccc"), PageCopy(1, 2, 3), StateLoad(4, b"ddeeff")
    assert [bytes(each.payload) for each in pages.part(writes, 2) if not isinstance(each, PageCopy)] == [b"ccc", b"ff"]
    assert pages.part(writes, 1)[1] == writes[1]
    loads = [each for each in writes if not isinstance(each, PageCopy)]
    pages.load(loads)
    assert others.loads == loads


def test_a_part_is_read_once_its_rank_has_done_what_came_before(pages: RankPages, others: Others) -> None:
    others.num_sent = 2
    found: list[bytes] = []
    thread = threading.Thread(target=lambda: found.append(bytes(pages.read_page(1))), daemon=True)
    thread.start()
    others.servers[0].done(2)
    others.servers[1].done(1)
    assert not found
    others.servers[1].done(2)
    thread.join(HANG_SECONDS)
    assert found == [bytes([16, 17, 17, 18, 18, 18])]


def test_a_rank_that_is_gone_is_an_error_and_no_page(pages: RankPages, others: Others) -> None:
    others.page_links[1].shutdown(socket.SHUT_RDWR)
    with pytest.raises(EngineDead, match="ending all ranks"):
        pages.read_page(0)
