"""When an engine process counts as hung: not for what is slow, busy, loading or asleep, and surely for what is not."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.machine.waits import HANG_SECONDS

from rootgraft.api.config import ServerConfig
from rootgraft.engine.core.liveness_thread import LivenessThread
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.ipc import last_liveness, pack_liveness
from rootgraft.engine.serving.watchdog import FLEET_HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT, TICK_SECONDS, Watchdog

TICKS_A_SECOND = round(1 / TICK_SECONDS)


class World:
    """A watchdog, and a process that it watches, on a clock of their own."""

    def __init__(self, heartbeat: float = 5.0, step: float = 300.0, *, knows_processor: bool = True) -> None:
        self.now = 100.0
        self.processor = 3.0
        self.passes = 0
        self._knows = knows_processor
        self.watchdog = Watchdog(heartbeat, step, lambda: self.processor if self._knows else None)
        self.watchdog.tick(self.now)

    def run(
        self, seconds: float, *, alive: bool = True, passes: bool = True, processor: float = 0.0, jump: float = 0.0
    ) -> tuple[str | None, float]:
        """Let time pass until the watchdog barks; what it says, and after how many seconds.

        Args:
            alive: whether signs of life come.
            passes: whether the step loop goes on.
            processor: share of one core that the process uses.
            jump: seconds for which the watching process itself does not run, before each tick.
        """
        for tick in range(1, round(seconds * TICKS_A_SECOND) + 1):
            self.now += TICK_SECONDS + jump
            self.processor += processor * TICK_SECONDS
            self.passes += passes
            if alive and tick % 2 == 0:
                self.watchdog.sign_of_life(self.passes)
            if reason := self.watchdog.tick(self.now):
                return reason, tick * TICK_SECONDS
        return None, seconds


def test_a_stopped_process_is_found_in_time() -> None:
    world = World(HEARTBEAT_TIMEOUT)
    assert HEARTBEAT_TIMEOUT <= 5
    assert world.run(60, processor=2.0) == (None, 60)
    reason, after = world.run(60, alive=False, passes=False)
    assert reason is not None and "--heartbeat-timeout" in reason and "5 seconds" in reason
    assert 4 < after <= 5


@pytest.mark.parametrize("before", [0.0, 0.5, 0.9, 1.0, 1.1, 2.5])
def test_a_stopped_replica_is_found_in_time_and_a_starved_one_is_left(before: float) -> None:
    """Also one that had got hardly any processor time, and given no sign, for a while before it was stopped."""
    world = World(ServerConfig(replicas=2).silence_seconds)
    assert world.run(60, alive=False, passes=False, processor=0.02) == (None, 60)
    world.run(1)
    world.run(before, alive=False, processor=0.02)
    reason, after = world.run(60, alive=False, passes=False)
    assert reason is not None and "3 seconds" in reason and after <= 3.5


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({}, HEARTBEAT_TIMEOUT),
        ({"replicas": 2}, FLEET_HEARTBEAT_TIMEOUT),
        ({"heartbeat_timeout": 5.0, "replicas": 2}, 5.0),
        ({"heartbeat_timeout": 3.0}, 3.0),
    ],
)
def test_a_timeout_that_is_named_is_taken(options: dict[str, Any], seconds: float) -> None:
    assert ServerConfig(**options).silence_seconds == seconds


@given(st.floats(1, 100), st.booleans())
def test_any_timeout_is_kept(timeout: float, knows_processor: bool) -> None:
    world = World(timeout, knows_processor=knows_processor)
    world.run(1)
    reason, after = world.run(200, alive=False, passes=False)
    assert reason is not None and timeout - 4 * TICK_SECONDS < after <= timeout + 1e-6


def test_a_process_that_computes_without_a_sign_is_only_slow() -> None:
    """Native code that holds the interpreter, a machine with fifty others on each core: some processor time is used."""
    for share in (4.0, 1.0, 0.02, 0.004):
        assert World().run(250, alive=False, passes=False, processor=share)[0] is None
    reason, after = World().run(1000, alive=False, passes=False, processor=1.0)
    assert reason is not None and "--watchdog-timeout" in reason and 299 < after < 300.2


def test_where_processor_time_is_not_known_silence_counts_alone() -> None:
    reason, after = World(knows_processor=False).run(60, alive=False, processor=1.0)
    assert reason is not None and after <= 5


def test_a_long_step_is_no_hang_and_an_endless_one_is() -> None:
    """A prompt on a slow machine, kernels compiled at first use."""
    world = World()
    assert world.run(290, passes=False)[0] is None
    assert world.run(1)[0] is None
    assert world.run(290, passes=False)[0] is None
    assert world.run(20, passes=False)[0] is not None
    reason, after = World(step=10).run(20, passes=False)
    assert reason is not None and "10 seconds (--watchdog-timeout)" in reason and 9 < after < 10.2


def test_time_in_which_the_watching_process_did_not_run_does_not_count() -> None:
    """Both were stopped, or the machine slept; or this process alone was late again and again."""
    world = World()
    for _ in range(20):
        world.now += 3600
        assert world.watchdog.tick(world.now) is None
        assert world.run(1)[0] is None
    assert World().run(2, alive=False, passes=False, jump=60)[0] is None


def test_a_process_that_comes_back_in_time_is_well() -> None:
    world = World()
    for _ in range(10):
        assert world.run(4.5, alive=False, passes=False)[0] is None
        assert world.run(0.5)[0] is None
    assert world.watchdog.silent_seconds < 0.5


@pytest.mark.parametrize("name", ["heartbeat_timeout", "watchdog_timeout"])
def test_limits_of_the_options(name: str) -> None:
    for value in (1, 1.5, 86400):
        assert getattr(ServerConfig(**{name: value}), name) == value
    for value in (0, 0.99, -1, 86401, float("nan")):
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be at"):
            ServerConfig(**{name: value})


@given(st.lists(st.integers(0, 2**64 - 1), max_size=9), st.integers(0, 7))
def test_signs_of_life_in_one_read(counts: list[int], cut: int) -> None:
    data = b"".join(map(pack_liveness, counts))
    assert last_liveness(data + b"x" * cut) == (counts[-1] if counts else None)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def test_a_step_loop_that_stands_still_does_not_silence_the_thread(pipe: tuple[int, int]) -> None:
    thread = LivenessThread(pipe[1])
    seen = [last_liveness(os.read(pipe[0], 8)) for _ in range(3)]
    thread.num_passes = 5
    while seen[-1] != 5:
        seen.append(last_liveness(os.read(pipe[0], 8)))
    assert seen[:3] == [0, 0, 0]
    thread.close()
    while os.read(pipe[0], 1 << 16):
        pass  # and then its end is closed


def test_a_reader_that_sleeps_or_leaves_does_not_keep_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rootgraft.engine.core.liveness_thread.LIVENESS_SECONDS", 0.0)
    reader, writer = os.pipe()
    thread = LivenessThread(writer)
    while len(os.read(reader, 1 << 20)) < 1 << 16:
        time.sleep(0.1)  # the pipe fills: the thread goes on, and drops what finds no room
    os.close(reader)
    thread._thread.join(HANG_SECONDS)
    assert not thread._thread.is_alive()
