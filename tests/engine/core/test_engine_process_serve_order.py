"""When the step loop sends what a step brought: at once, or while the device computes the next one."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rootgraft.engine.core import engine_process
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.core.engine_process import serve
from rootgraft.engine.ipc import Channel
from rootgraft.engine.messages import Heartbeat, Message, Shutdown, TokenOut, decode, encode


class World:
    """An engine of three steps and the other end of its channel, which note what happens in which order."""

    def __init__(self, overlaps: bool, waiting: Sequence[tuple[int, ...]] = ((), (), ())) -> None:
        self.overlaps = overlaps
        self.waits = waiting  # by step
        self.seen: list[str] = []
        self.beats: list[tuple[int, tuple[int, ...]]] = []  # steps that were finished before each heartbeat
        self.steps = 0

    @property
    def has_work(self) -> bool:
        return self.steps < 3

    def handle(self, messages: list[Message]) -> None:
        pass

    def launch(self) -> int:
        self.seen.append(f"launch {self.steps}")
        return self.steps + 1

    def finish(self, step: int) -> list[Message]:
        self.steps = step
        return [TokenOut(1, (step - 1,), (), ())]

    def stats(self) -> dict[str, float]:
        return {}

    def take_observations(self) -> dict[str, list[float]]:
        return {}

    def adapters_in_use(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return (), ()

    @property
    def waiting(self) -> tuple[int, ...]:
        return self.waits[min(self.steps, 2)]

    def close(self) -> list[Message]:
        return []

    def receive(self, timeout: float) -> list[bytes]:
        return [] if self.has_work else [encode([Shutdown()])]

    def send(self, payload: bytes) -> None:
        for message in decode(payload):
            if isinstance(message, TokenOut):
                self.seen.append(f"send {message.tokens[0]}")
            elif isinstance(message, Heartbeat):
                self.beats.append((self.steps, message.waiting))

    def drain(self, timeout: float) -> None:
        self.seen.append("drain")


@pytest.mark.parametrize(
    ("overlaps", "wanted"),
    [
        (False, ["launch 0", "send 0", "launch 1", "send 1", "launch 2", "send 2", "drain"]),
        (True, ["launch 0", "launch 1", "send 0", "launch 2", "send 1", "send 2", "drain"]),
    ],
)
def test_tokens_leave_before_the_next_step_unless_the_device_computes_it_meanwhile(
    overlaps: bool, wanted: list[str]
) -> None:
    world: Any = World(overlaps)
    liveness: Any = SimpleNamespace(num_passes=0)
    serve(cast(EngineCore, world), cast(Channel, world), liveness)
    assert world.seen == wanted and liveness.num_passes == 4


def test_a_heartbeat_tells_who_waits_and_the_next_one_leaves_before_a_step_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that a client knows of whom no step has computed anything when the process is killed."""
    monkeypatch.setattr(engine_process, "HEARTBEAT_SECONDS", 1000.0)
    for waiting, beats in (
        (((7, 8), (7, 8), (8,)), [(0, (7, 8)), (2, (8,))]),
        (((7, 8), (8,), (8,)), [(0, (7, 8)), (1, (8,))]),
        (((7,), (), (9,)), [(0, (7,)), (1, ())]),  # 9 is told of by the next one that is due
    ):
        world: Any = World(overlaps=False, waiting=waiting)
        serve(cast(EngineCore, world), cast(Channel, world), cast(Any, SimpleNamespace(num_passes=0)))
        assert world.beats == beats


class IdleWorld(World):
    """An engine that idles after its steps: so many times nothing comes."""

    idle = 3

    def receive(self, timeout: float) -> list[bytes]:
        if self.has_work:
            return []
        self.idle -= 1
        return [] if self.idle >= 0 else [encode([Shutdown()])]


def test_memory_is_trimmed_once_where_the_engine_idles_after_its_work(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = IdleWorld(False)
    monkeypatch.setattr("rootgraft.kernels.memory.trim_heap", lambda: world.seen.append("trim"))
    monkeypatch.setattr(engine_process, "HEARTBEAT_SECONDS", 3600.0)
    serve(cast(EngineCore, world), cast(Channel, world), cast(Any, SimpleNamespace(num_passes=0)))
    assert world.seen[-3:] == ["send 2", "trim", "drain"] and world.seen.count("trim") == 1
