"""What a full tier evicts: blocks of idle tenants, then of the largest one, the least recently used first."""

from __future__ import annotations

import random

from rootgraft.engine.kv_cache.tier_index import IDLE_SECONDS, TierIndex


def key(number: int) -> bytes:
    return number.to_bytes(4, "little")


def test_a_tenant_that_fills_a_tier_evicts_its_own_blocks() -> None:
    index = TierIndex(100, lambda: 0.0)
    for number in range(4):
        index.add(key(number), "small", 10)
    for number in range(4, 100):
        assert index.make_room(10) is not None
        index.add(key(number), "large", 10)
        index.check()
    assert index.tenants() == {"small": 40, "large": 60}
    assert [each for each in range(100) if key(each) in index] == [*range(4), *range(94, 100)]


def test_the_least_recently_used_goes_first() -> None:
    index = TierIndex(30, lambda: 0.0)
    for number in range(3):
        index.add(key(number), "", 10)
    assert index.touch(key(0)) and not index.touch(key(9))
    assert [each for each, _ in index.make_room(20) or ()] == [key(1), key(2)]


def test_tenants_that_are_idle_have_no_share() -> None:
    now = 0.0
    index = TierIndex(40, lambda: now)
    index.add(key(0), "idle", 10)
    now = IDLE_SECONDS + 1
    for number in range(1, 4):
        index.add(key(number), "busy", 10)
    assert [each for each, _ in index.make_room(10) or ()] == [key(0)]


def test_what_never_fits_evicts_nothing() -> None:
    index = TierIndex(30, lambda: 0.0)
    index.add(key(0), "", 30)
    assert index.make_room(31) is None
    assert key(0) in index and index.make_room(0) == []


def test_sums_hold_over_random_changes() -> None:
    rng, now = random.Random(3), 0.0
    index = TierIndex(500, lambda: now)
    for _ in range(3000):
        now += rng.choice((0.0, 1.0, 900.0))
        size = rng.randint(1, 60)
        if rng.random() < 0.6 and index.make_room(size) is not None:
            index.add(key(rng.randrange(60)), rng.choice("abc"), size)
        elif rng.random() < 0.5:
            index.remove(key(rng.randrange(60)))
        else:
            index.touch(key(rng.randrange(60)))
        index.check()
