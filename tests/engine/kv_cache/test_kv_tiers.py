"""KV tiers: pages that leave the tree are not written, sequences wait for reads alone, and nothing waits for ever."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator

import pytest
from support.machine.waits import HANG_SECONDS, wait_until

from rootgraft.engine.kv_cache import kv_tiers
from rootgraft.engine.kv_cache.block_codec import Buffer
from rootgraft.engine.kv_cache.block_keys import BlockId, BlockScheme
from rootgraft.engine.kv_cache.kv_stores import HostStore
from rootgraft.engine.kv_cache.kv_tiers import MOST_READ_SECONDS, KvTiers
from rootgraft.radix.namespace import Namespace, Path

PAGE = 4
SCHEME = BlockScheme("fake", PAGE, 1)
PATH = Path(Namespace("base"))


class Pool:
    """Pages of one byte, whose reads may be held up."""

    def __init__(self) -> None:
        self.pages = {page: page for page in range(100)}
        self.may_read = threading.Event()
        self.may_read.set()
        self.is_reading = threading.Event()

    def read_state(self, slot: int) -> bytes:
        raise AssertionError("a model without states")

    def read_page(self, page: int) -> bytes:
        self.is_reading.set()
        self.may_read.wait()
        return bytes([self.pages[page]])


class SlowStore(HostStore):
    """Host memory whose reads may be held up, and may fail."""

    def __init__(self, capacity: int = 1000) -> None:
        super().__init__(capacity)
        self.may_get = threading.Event()
        self.may_get.set()
        self.is_getting = threading.Event()
        self.fails = False

    def get(self, block: BlockId) -> Buffer | None:
        self.is_getting.set()
        self.may_get.wait()
        if self.fails:
            raise RuntimeError("a bug")
        return super().get(block)


class World:
    def __init__(self, most_fetched: int = 100, capacity: int = 1000) -> None:
        self.pool, self.store = Pool(), SlowStore(capacity)
        self.seconds = 0.0
        self.tiers = KvTiers(SCHEME, self.pool, [self.store], most_fetched=most_fetched, clock=lambda: self.seconds)

    def blocks(self, tokens: array[int]) -> list[BlockId]:
        keys, count = list[bytes](), len(tokens) // PAGE
        SCHEME.extend(keys, PATH, tokens.tobytes(), count)
        return SCHEME.blocks(keys, PATH, tokens.tobytes(), 0, count)

    def fill(self, first: int, count: int) -> array[int]:
        """Store the pages of a sequence that begins with a token; page i of it holds the byte first + i."""
        tokens = array("i", range(first * 1000, first * 1000 + count * PAGE))
        self.tiers.offer(self.blocks(tokens), range(first, first + count))
        self.tiers.flush()
        return tokens

    def awaits(self, number: int, tokens: array[int], num_cached: int = 0) -> bool:
        return self.tiers.awaits(number, PATH, tokens, num_cached, len(tokens) // PAGE)

    def wait(self, number: int, tokens: array[int], num_cached: int = 0) -> list[int]:
        """Return the bytes of the pages that a sequence gets."""
        while self.awaits(number, tokens, num_cached):
            pass
        fetch = self.tiers.fetched(number)
        return [payload[0] for payload in fetch.payloads] if fetch else []


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.pool.may_read.set()
    made.store.may_get.set()
    made.tiers.close()


def test_a_store_that_was_filled_in_vain_takes_what_is_seen_twice() -> None:
    world = World(capacity=12)
    for first in range(0, 60, 3):
        world.fill(first, 3)
    assert world.store.stats()["kv_stored_host"] < 13, "no more than fill it"
    before = world.store.stats()["kv_stored_host"]
    world.fill(57, 3)
    assert world.store.stats()["kv_stored_host"] == before + 3
    world.tiers.close()


@pytest.fixture
def full() -> Iterator[World]:
    """Tiers whose credit is spent, and whose pages 80 to 82 hold what is not written yet."""
    made = World(capacity=12)
    for first in range(0, 60, 3):
        made.fill(first, 3)
        made.tiers.forget(range(first, first + 3))
    made.fill(80, 3)
    yield made
    made.pool.may_read.set()
    made.tiers.close()


def test_pages_that_are_held_back_are_written_in_a_pause(full: World) -> None:
    before = full.store.stats()["kv_stored_host"]
    assert full.tiers.stats()["kv_held_host"] == 3 and before == 12
    full.tiers.rest()
    full.tiers.rest()
    full.tiers.flush()
    assert full.store.stats()["kv_stored_host"] == 15 and full.tiers.stats()["kv_held_host"] == 0


@pytest.mark.parametrize("work", ["waits", "offers"])
def test_a_pause_ends_with_the_next_request(full: World, work: str) -> None:
    full.pool.is_reading.clear()
    full.pool.may_read.clear()
    full.tiers.rest()
    assert full.pool.is_reading.wait(HANG_SECONDS)
    if work == "waits":
        full.awaits(1, array("i", [9] * 12))
    else:
        full.tiers.offer(full.blocks(array("i", [9] * 4)), [90])
    full.pool.may_read.set()
    full.tiers.flush()
    assert full.store.stats()["kv_stored_host"] == 13, "the one that was being written"


def test_close_writes_what_is_held_back(full: World) -> None:
    full.tiers.close()
    assert full.store.stats()["kv_stored_host"] == 15


def test_close_does_not_wait_long_for_what_is_held_back(full: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_tiers, "MOST_CLOSE_SECONDS", 0.0)
    full.pool.is_reading.clear()
    full.pool.may_read.clear()
    full.tiers.rest()
    assert full.pool.is_reading.wait(HANG_SECONDS)
    flush = full.tiers.flush

    def flush_a_disk_that_answers() -> None:
        full.pool.may_read.set()
        flush()

    monkeypatch.setattr(full.tiers, "flush", flush_a_disk_that_answers)
    full.tiers.close()
    assert full.store.stats()["kv_stored_host"] == 13


def test_what_left_the_pool_unwritten_is_written_when_it_is_computed_again(full: World) -> None:
    full.tiers.forget(range(80, 83))
    assert full.tiers.stats()["kv_unwritten_host"] == 20 * 3 - 12 + 3
    full.fill(80, 3)
    stats = full.tiers.stats()
    assert stats["kv_stored_host"] == 15 and stats["kv_ghost_hits_host"] == 3


def test_a_page_that_is_read_pays_for_others(full: World) -> None:
    tokens = array("i", range(9000, 9012))  # the last that was written
    assert full.wait(1, tokens) == [9, 10, 11]
    full.fill(40, 3)
    assert full.store.stats()["kv_stored_host"] == 15


def test_a_page_whose_copy_fails_is_not_held_for_written(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The engine is told of no error, and the page is written when it is offered again."""
    page = world.pool.pages.pop(5)
    tokens = world.fill(5, 1)
    wait_until(lambda: "was not moved" in caplog.text)
    assert world.wait(1, tokens) == []
    world.pool.pages[5] = page
    world.fill(5, 1)
    assert world.wait(2, tokens) == [5]


def test_a_sequence_gets_what_another_one_left(world: World) -> None:
    tokens = world.fill(5, 3)
    assert world.wait(1, tokens) == [5, 6, 7]
    assert world.wait(2, tokens, 2) == [7], "only what the tree lacks"
    assert world.wait(3, array("i", [*tokens[:8], 1, 2, 3, 4])) == [5, 6]
    assert world.wait(4, array("i", [9, *tokens[1:]])) == []


def test_a_page_that_leaves_the_tree_while_it_is_read_is_not_written(world: World) -> None:
    tokens = array("i", range(2 * PAGE))
    world.pool.may_read.clear()
    world.tiers.offer(world.blocks(tokens), [1, 2])
    assert world.pool.is_reading.wait(HANG_SECONDS)
    world.tiers.forget([2])  # the last page is read first
    world.pool.pages[2] = 99
    world.pool.may_read.set()
    world.tiers.flush()
    assert not world.store.touch(world.blocks(tokens)[1].key) and world.store.touch(world.blocks(tokens)[0].key)


def test_a_sequence_waits_while_its_pages_are_read(world: World) -> None:
    tokens = world.fill(5, 3)
    world.store.may_get.clear()
    assert world.awaits(1, tokens) and world.awaits(1, tokens)
    assert not world.awaits(2, array("i", [7] * 12)), "others do not"
    assert world.tiers.fetched(1) is None
    world.store.may_get.set()
    assert world.wait(1, tokens) == [5, 6, 7]


def test_one_of_several_sequences_reads_what_they_share(world: World) -> None:
    tokens = world.fill(5, 3)
    world.store.may_get.clear()
    assert world.awaits(1, tokens) and world.awaits(2, tokens)
    world.tiers.drop(1)
    world.store.may_get.set()
    assert world.wait(2, tokens) == [5, 6, 7], "the one that read it has ended"
    keys = [block.key for block in world.blocks(tokens)]
    world.tiers.drop(2)
    world.tiers.arrive(keys)
    assert world.awaits(3, tokens) and world.tiers.fetched(3) is None, "it comes to the tree"
    world.tiers.arrived(keys)
    assert world.wait(3, tokens) == [5, 6, 7]


def test_what_is_read_ahead_is_bounded() -> None:
    world = World(most_fetched=4)
    try:
        first, second = world.fill(5, 3), world.fill(20, 3)
        assert world.wait(1, first) == [5, 6, 7]
        assert world.wait(2, second) == [20], "there was room for one more"
        third = world.fill(40, 3)
        assert world.awaits(3, third) and world.awaits(3, third)
        world.tiers.drop(1)
        assert world.wait(3, third) == [40, 41, 42]
    finally:
        world.tiers.close()


def test_a_tree_that_loses_pages_before_those_that_were_read(world: World) -> None:
    tokens = world.fill(5, 4)
    assert world.wait(1, tokens, 2) == [7, 8]
    assert world.wait(1, tokens, 1) == [6, 7, 8]
    assert world.wait(1, tokens, 4) == [6, 7, 8], "the tree has all"
    assert world.wait(1, tokens, 0) == [5, 6, 7, 8]
    world.store.may_get.clear()
    world.tiers.drop(1)


def test_a_store_that_loses_pages_is_not_waited_for(world: World) -> None:
    tokens = world.fill(5, 3)
    world.store.may_get.clear()
    assert world.awaits(1, tokens)
    world.store.clear()
    world.store.may_get.set()
    assert world.wait(1, tokens) == []


def test_a_disk_that_does_not_answer_is_not_waited_for(world: World) -> None:
    """By a sequence whose page it reads, one that waits behind it, and one that comes later; afterwards it is read."""
    tokens, others = world.fill(5, 3), world.fill(20, 3)
    world.store.may_get.clear()
    assert world.awaits(1, tokens) and world.awaits(2, others)
    assert world.store.is_getting.wait(HANG_SECONDS)
    world.seconds += MOST_READ_SECONDS
    assert world.awaits(1, tokens) and world.awaits(2, others)
    world.seconds += 1
    assert [world.wait(number, each) for number, each in ((1, tokens), (2, others), (3, tokens))] == [[], [], []]
    assert not world.awaits(1, tokens)
    world.store.may_get.set()
    numbers = iter(range(4, 10**9))
    wait_until(lambda: world.wait(next(numbers), tokens) == [5, 6, 7])


def test_an_exception_in_a_read_is_a_miss(world: World, caplog: pytest.LogCaptureFixture) -> None:
    tokens = world.fill(5, 3)
    world.store.fails = True
    assert world.wait(1, tokens) == []
    world.store.fails = False
    assert world.wait(2, tokens) == [5, 6, 7]
    assert "was not moved" in caplog.text


def test_clear_removes_what_was_offered_too(world: World) -> None:
    tokens = world.fill(5, 3)
    world.pool.may_read.clear()
    world.tiers.offer(world.blocks(array("i", [1] * 12)), [50, 51, 52])
    world.pool.may_read.set()
    assert world.tiers.clear() >= 3
    assert world.wait(1, tokens) == [] and not world.store.stats()["kv_bytes_host"]


def test_close_writes_what_was_offered() -> None:
    world = World()
    tokens = array("i", range(8))
    world.pool.may_read.clear()
    world.tiers.offer(world.blocks(tokens), [1, 2])
    world.pool.may_read.set()
    world.tiers.flush()
    assert world.store.stats()["kv_stored_host"] == 2
    world.tiers.close()
    world.tiers.close()
