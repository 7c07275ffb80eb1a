"""Sessions and pins: what they keep in the cache, for how long, within which bounds, and that they stop nobody."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.core_hooks import cache_of, num_matched, session_keys, set_pins_clock, tree_of
from support.engine.fake_worker import FakeWorker
from support.machine.thoroughness import repeats

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.messages import Abort, Done, Failed, Submit
from rootgraft.engine.scheduling import session_pins
from rootgraft.engine.types import SamplingParams, Usage

PAGE = 4


class World:
    """A core whose clock the test sets."""

    def __init__(self, num_pages: int = 40, **options: Any) -> None:
        config = EngineConfig(block_size=PAGE, max_num_seqs=4, max_num_batched_tokens=64, **options)
        self.core = EngineCore(config, FakeWorker(num_pages, PAGE))
        self.now = 0.0
        set_pins_clock(self.core, lambda: self.now)
        self.number = 0

    def submit(self, prompt: Iterable[int], max_tokens: int = 1, **fields: Any) -> int:
        self.number += 1
        submit = Submit(self.number, array("i", prompt), SamplingParams(max_tokens=max_tokens), **fields)
        self.core.handle([submit])
        return self.number

    def run(self) -> dict[int, Done]:
        ends = {}
        while self.core.has_work:
            for message in self.core.step():
                assert not isinstance(message, Failed)
                if isinstance(message, Done):
                    ends[message.id] = message
            self.core.check()
        return ends

    def ask(self, prompt: Iterable[int], **fields: Any) -> Usage:
        number = self.submit(prompt, **fields)
        return self.run()[number].usage

    def fill(self, num_tokens: int = 36 * PAGE) -> None:
        """A request that needs almost the whole pool."""
        self.ask([7] * num_tokens)

    def cached(self, prompt: Iterable[int]) -> int:
        return num_matched(self.core, Submit(0, array("i", prompt), SamplingParams()))

    def stats(self) -> dict[str, float]:
        stats = self.core.stats()
        tokens = {"session_tokens": PAGE * stats["pages_of_sessions"], "pinned_tokens": PAGE * stats["pages_pinned"]}
        return stats | tokens


@pytest.fixture
def world() -> World:
    return World()


A, B = [1] * 16, [2] * 16


def test_the_path_of_a_living_session_is_evicted_last(world: World) -> None:
    world.ask(A, session="a")
    world.ask(B)
    world.ask([3] * 100)
    world.ask([4] * 100)
    assert world.cached(A) == 16 and world.cached(B) == 0
    assert world.stats()["sessions"] == 1 and world.stats()["session_tokens"] == 16


def test_a_session_holds_its_last_call_and_lives_for_a_while(world: World) -> None:
    world.ask(A, session="s")
    world.now = session_pins.SESSION_SECONDS - 1
    usage = world.ask([*A, *B], session="s")
    assert usage.cached == 16 and world.stats()["session_tokens"] == 32
    world.now += session_pins.SESSION_SECONDS - 1
    assert world.stats()["sessions"] == 1
    world.ask(A, session="s", tenant="other")
    world.now += 1
    assert world.stats()["sessions"] == 1 and world.stats()["session_tokens"] == 16
    world.now += session_pins.SESSION_SECONDS
    assert world.stats()["sessions"] == 0 and world.stats()["session_tokens"] == 0


def test_a_pin_outlives_sessions_and_ends_with_its_time(world: World) -> None:
    usage = world.ask([*A, 1, 1], pin_seconds=60.0)
    assert usage.pinned == 16 and world.stats()["pinned_tokens"] == 16 and world.stats()["pins"] == 1
    world.ask(B, session="b")
    world.fill()
    assert world.cached(A) == 16 and world.cached(B) == 0
    world.now = 59.9
    assert world.stats()["pins"] == 1
    world.now = 60.0
    assert world.stats()["pins"] == 0 and world.stats()["pinned_tokens"] == 0
    world.fill(38 * PAGE)
    assert world.cached(A) < 16


def test_beginnings_of_a_prompt_are_pinned_each_for_its_time(world: World) -> None:
    usage = world.ask([*A, *B, 1, 1], prefix_pins=((9, 600.0), (11, 5.0), (33, 60.0)))
    assert usage.pinned == 32 and world.stats()["pinned_tokens"] == 32 and world.stats()["pins"] == 2
    assert world.ask([*A, *B, 2, 2], prefix_pins=((8, 600.0), (32, 60.0))).pinned == 32
    assert world.stats()["pins"] == 2
    world.now = 60.0
    assert world.stats()["pins"] == 1 and world.stats()["pinned_tokens"] == 8
    world.fill(38 * PAGE)
    assert world.cached([*A, *B]) == 8
    world.now = 600.0
    assert world.stats()["pins"] == 0
    assert world.ask(A, prefix_pins=((3, 60.0), (16, 0.0))).pinned == 0


def test_each_pin_ends_with_its_own_time(world: World) -> None:
    for number, seconds in enumerate((30.0, 10.0, 40.0, 20.0)):
        world.ask([number] * 4, pin_seconds=seconds, tenant=str(number % 3))
    for now, left in ((9.9, 4), (10.0, 3), (20.0, 2), (29.9, 2), (30.0, 1), (40.0, 0)):
        world.now = now
        assert world.stats()["pins"] == left


def test_pins_stop_no_request_that_fits_alone(world: World) -> None:
    world.ask(A, pin_seconds=600.0)
    world.ask(B, pin_seconds=600.0, tenant="other")
    usage = world.ask([5] * (40 * PAGE - 1))
    assert usage.completion == 1 and world.cached(A) == world.cached(B) == 0
    assert world.stats()["pinned_tokens"] == 0
    world.now = 600.0
    assert world.stats()["pins"] == 0


def test_a_tenant_pins_a_quarter_of_the_pool_and_all_of_them_half(world: World) -> None:
    assert world.ask([1] * 40, pin_seconds=60.0).pinned == 40  # ten of forty pages
    assert world.ask([2] * 4, pin_seconds=60.0).pinned == 0
    assert world.ask([*[1] * 8, *[3] * 8], pin_seconds=60.0).pinned == 8  # what it has already costs nothing
    assert world.ask([2] * 44, pin_seconds=60.0, tenant="b").pinned == 40
    assert world.ask([3] * 44, pin_seconds=60.0, tenant="c").pinned == 0
    assert world.stats()["pinned_tokens"] == 80
    world.now = 60.0
    assert world.ask([3] * 44, pin_seconds=60.0, tenant="c").pinned == 40


def test_a_longer_pin_takes_the_place_of_those_on_its_path(world: World) -> None:
    for length in range(4, 40, 4):
        assert world.ask([1] * length, pin_seconds=60.0 + length).pinned == length
        assert world.stats()["pins"] == 1
    assert world.ask([1] * 8, pin_seconds=300.0).pinned == 8 and world.stats()["pins"] == 2
    assert world.ask([1] * 8, pin_seconds=1.0).pinned == 8 and world.stats()["pins"] == 2
    world.now = 1.0
    assert world.stats()["pins"] == 1 and world.stats()["pinned_tokens"] == 36


def test_bounds_of_number(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_pins, "MAX_SESSIONS", 3)
    monkeypatch.setattr(session_pins, "MAX_PINS", 2)
    for number, tenant in enumerate("aabac"):
        world.ask([number] * 4, session=f"s{number}", tenant=tenant)
    assert world.stats()["sessions"] == 3
    kept = session_keys(world.core)
    assert kept == [("b", "s2"), ("a", "s3"), ("c", "s4")]
    assert [world.ask([8, n] * 4, pin_seconds=9.0).pinned for n in range(3)] == [8, 8, 0]


def test_sessions_hold_half_of_the_pool(world: World) -> None:
    for number in range(8):
        world.ask([number] * 20, session=str(number), tenant=str(number % 2))
    assert world.stats()["session_tokens"] == 80 and world.stats()["sessions"] == 4
    world.ask([9] * 81, session="0", tenant="0")
    assert world.stats()["sessions"] == 4
    assert ("0", "0") not in session_keys(world.core)


def test_usage_tells_what_a_running_sibling_shares(world: World) -> None:
    world.submit([*A, 1, 2], max_tokens=8)
    world.submit([*A, 3, 4], max_tokens=1)
    ends = world.run()
    assert [(done.usage.cached, done.usage.forked) for done in (ends[1], ends[2])] == [(0, 0), (16, 16)]
    assert (world.ask([*A, 5]).cached, world.ask([*A, 5]).forked) == (16, 0)
    assert world.stats()["prompt_tokens_forked"] == 16


def test_without_a_cache_nothing_is_held() -> None:
    world = World(enable_prefix_caching=False)
    assert world.ask(A, session="a", pin_seconds=60.0).pinned == 0
    assert world.stats()["sessions"] == world.stats()["pins"] == 0


def test_a_pin_dies_with_what_it_pins(world: World) -> None:
    world.ask(A, pin_seconds=60.0)
    (namespace,) = tree_of(world.core).tops
    cache_of(world.core).drop(namespace)
    world.core.check()
    assert world.stats()["pinned_tokens"] == 0
    assert world.ask(A, pin_seconds=60.0).pinned == 16


def test_a_session_is_kept_for_as_long_as_its_call_says(world: World) -> None:
    world.ask(A, session="x", session_seconds=900.0)
    world.ask(B, session="y", session_seconds=10.0)
    world.now = 899.0
    world.fill()
    assert (world.cached(A), session_keys(world.core)) == (16, [("", "x")])
    world.now = 900.0
    world.stats()
    assert session_keys(world.core) == []


def test_a_released_session_is_evicted_first_but_for_what_others_use(world: World) -> None:
    """Though it was used last; and its beginning that another prompt has stays."""
    world.ask([*A, *B], session="x")
    world.ask([*A, 3, 3, 3, 3, 1])
    world.ask([5] * 17)
    world.ask([*A, *B, 1], session="x", session_seconds=0.0)
    assert session_keys(world.core) == []
    assert world.cached([*A, *B]) >= 32
    world.fill(29 * PAGE)
    assert 16 <= world.cached([*A, *B]) < 32
    assert world.cached([5] * 16) == 16


def test_a_session_is_released_without_a_call(world: World) -> None:
    world.ask(A, session="x")
    world.ask(B)
    assert not world.core.sessions.release("", "y")
    assert not world.core.sessions.release("b", "x")
    assert world.core.sessions.release("", "x")
    world.fill(34 * PAGE)
    assert (world.cached(A) < 16, world.cached(B)) == (True, 16)


def test_a_tenant_keeps_a_quarter_of_the_pool_for_longer(world: World) -> None:
    """Beyond it a session is kept as one that asks for nothing."""
    for number in range(4):
        world.ask([*A, *[number] * 8], session=str(number), session_seconds=900.0, tenant="a", cache_tenant="a")
    world.ask(A, session="0", session_seconds=900.0, tenant="b", cache_tenant="b")
    world.now = session_pins.SESSION_SECONDS
    world.stats()
    assert session_keys(world.core) == [("a", "0"), ("a", "1"), ("a", "2"), ("b", "0")]


@settings(max_examples=repeats(60))
@given(data=st.data())
def test_every_request_ends_whatever_is_held(data: st.DataObject) -> None:
    """Random traffic with sessions and pins on a small pool: nobody waits for ever, bounds and audits hold."""
    world = World(num_pages=data.draw(st.integers(6, 24)))
    room = cache_of(world.core).num_pages * PAGE
    waiting: set[int] = set()
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.integers(0, 3)):
            case 0 | 1:
                head = [data.draw(st.integers(0, 2))] * data.draw(st.integers(1, room // 2))
                tail = data.draw(st.lists(st.integers(0, 2), max_size=4))
                tenant = data.draw(st.sampled_from("ab"))
                session = data.draw(st.sampled_from(("", "x", "y")))
                kept = data.draw(st.sampled_from((0.0, 20.0, 300.0, 5000.0)))
                seconds = data.draw(st.sampled_from((0.0, 1.0, 30.0)))
                mark = st.tuples(st.integers(0, len(head + tail)), st.sampled_from((0.0, 1.0, 90.0)))
                marks = tuple(data.draw(st.lists(mark, max_size=2)))
                hints: dict[str, Any] = {"session": session, "session_seconds": kept, "tenant": tenant}
                waiting.add(world.submit(head + tail, 3, pin_seconds=seconds, prefix_pins=marks, **hints))
            case 2:
                for message in world.core.step():
                    if isinstance(message, Done):
                        waiting.remove(message.id)
            case 3:
                world.now += data.draw(st.sampled_from((0.5, 40.0, 400.0)))
                if waiting and data.draw(st.booleans()):
                    world.core.handle([Abort((min(waiting),))])
                world.core.sessions.release(data.draw(st.sampled_from("ab")), data.draw(st.sampled_from("xy")))
        world.core.check()
        stats = world.stats()
        assert stats["pinned_tokens"] <= room / 2 and stats["session_tokens"] <= room / 2
    assert world.run().keys() == waiting
