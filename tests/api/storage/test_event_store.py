"""Logs of events: read from any number, bounded in size by owner and in time, never half read in silence."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from rootgraft.api.errors import HTTPError
from rootgraft.api.storage.event_store import EventLog, EventStore
from rootgraft.engine.errors import RequestError


class _Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def _all(log: EventLog, after: int) -> bytes:
    return b"".join([piece async for piece in log.read(after)])


def _numbered(count: int) -> Iterator[bytes]:
    return (b"<%d>" % number for number in range(count))


def test_events_are_read_from_behind_any_number() -> None:
    log = EventStore(1 << 20, 60).open("a", "one")
    events = list(_numbered(40))
    for event in events:
        log.append(event)
    log.end()
    for after in range(-1, 40):
        log.check(after)
        assert asyncio.run(_all(log, after)) == b"".join(events[after + 1 :])
    with pytest.raises(RequestError, match="at most the last event, 39"):
        log.check(40)


def test_readers_of_a_running_log_get_each_event_once() -> None:
    log = EventStore(1 << 20, 60).open("a", "one")

    async def run() -> list[bytes]:
        readers = [asyncio.create_task(_all(log, after)) for after in (-1, 3)]
        for event in _numbered(9):
            log.append(event)
            await asyncio.sleep(0)
        log.end()
        return await asyncio.gather(*readers)

    whole = b"".join(_numbered(9))
    assert asyncio.run(run()) == [whole, whole.removeprefix(b"<0><1><2><3>")]


def test_an_owner_sees_its_own_logs_alone() -> None:
    store = EventStore(1 << 20, 60)
    log = store.open("a", "one")
    assert store.get("one", "a") is log
    assert store.get("two", "a") is None and store.get("", "a") is None and store.get("one", "b") is None


def test_logs_are_forgotten_some_time_after_their_end() -> None:
    clock = _Clock()
    store = EventStore(1 << 20, 60, clock)
    first, second = store.open("a", "one"), store.open("b", "one")
    first.append(b"x")
    second.append(b"y")
    first.end()
    clock.now = 59.0
    assert store.get("one", "a") is first
    clock.now = 60.0
    assert store.get("one", "a") is None and store.get("one", "b") is second and len(store) == 1
    second.end()
    clock.now = 120.0
    assert store.get("one", "b") is None and store.num_bytes == 0


def test_the_owner_with_the_most_loses_first() -> None:
    store = EventStore(4096, 60)
    small = store.open("small", "one")
    small.append(b"x" * 100)
    small.end()
    logs = [store.open(str(number), "two") for number in range(9)]
    for log in logs:
        log.append(b"x" * 900)
        log.end()
        assert store.num_bytes <= 4096
    assert store.get("one", "small") is small
    assert [store.get("two", str(number)) is not None for number in range(9)] == [False] * 6 + [True] * 3


def test_a_running_log_that_is_too_long_loses_its_older_events_by_name() -> None:
    store = EventStore(2048, 60)
    log = store.open("a", "one")
    for event in _numbered(100):
        log.append(event)
        assert store.num_bytes <= 2048
    log.end()
    assert 0 < log.first < log.next_number == 100
    with pytest.raises(HTTPError, match=f"events up to number {log.first - 1}") as caught:
        log.check(log.first - 2)
    assert (caught.value.status_code, caught.value.code) == (410, "events_not_kept")
    with pytest.raises(HTTPError):
        asyncio.run(_all(log, -1))
    kept = asyncio.run(_all(log, log.first - 1))
    assert kept == b"".join(list(_numbered(100))[log.first :])


def test_a_reader_of_a_log_that_is_dropped_gets_an_error() -> None:
    store = EventStore(1 << 20, 60)
    log = store.open("a", "one")

    async def run() -> None:
        reader = asyncio.create_task(_all(log, -1))
        await asyncio.sleep(0)
        store.drop("a")
        with pytest.raises(HTTPError, match="not stored"):
            await reader

    log.append(b"x")
    asyncio.run(run())
    log.append(b"y")  # its response is still being made
    log.end()
    assert store.num_bytes == len(store) == 0


@pytest.mark.parametrize("seed", range(5))
def test_counts_hold_through_random_lives(seed: int) -> None:
    rng, clock = random.Random(seed), _Clock()
    store = EventStore(5000, 50, clock)
    logs: list[EventLog] = []
    for step in range(400):
        match rng.randrange(5):
            case 0:
                logs.append(store.open(f"r{step}", rng.choice(("", "one", "two"))))
            case 1 | 2 if logs:
                rng.choice(logs).append(b"x" * rng.randrange(600))
            case 3 if logs:
                rng.choice(logs).end()
            case 4 if logs:
                store.drop(rng.choice(logs).response_id)
        clock.now += rng.random()
        kept = [log for log in logs if store.get(log.owner, log.response_id) is log]
        assert store.num_bytes == sum(log.num_bytes for log in kept) <= 5000 and len(store) == len(kept)
