"""When the step loop sends what a step brought: at once, or while the device computes the next one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.core.engine_process import serve
from rootgraft.engine.ipc import Channel
from rootgraft.engine.messages import Message, Shutdown, TokenOut, decode, encode


class World:
    """An engine of three steps and the other end of its channel, which note what happens in which order."""

    def __init__(self, overlaps: bool) -> None:
        self.overlaps = overlaps
        self.seen: list[str] = []
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

    def close(self) -> list[Message]:
        return []

    def receive(self, timeout: float) -> list[bytes]:
        return [] if self.has_work else [encode([Shutdown()])]

    def send(self, payload: bytes) -> None:
        self.seen += [f"send {message.tokens[0]}" for message in decode(payload) if isinstance(message, TokenOut)]

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
