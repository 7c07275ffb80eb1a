"""The supervisor over processes that are no gateways: what hangs or ends is replaced, and nothing outlives it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import msgpack
import pytest
from support.api.api_live import make_state
from support.machine.waits import HANG_SECONDS, until

from rootgraft.api.gateways import main_connection, main_supervisor
from rootgraft.api.gateways.main_spawn import GatewaySpawn
from rootgraft.api.gateways.main_supervisor import GatewaySupervisor, settings_of
from rootgraft.engine.config import EngineConfig

SLEEPS = "import time; time.sleep(100)"
ENDS = "pass"


class Started:
    """Processes that run a program in the place of a gateway's, with its descriptors open."""

    def __init__(self, program: str) -> None:
        self.program = program
        self.processes: list[subprocess.Popen[bytes]] = []

    async def spawn(self, listening: int, link: int) -> subprocess.Popen[bytes]:
        process = subprocess.Popen([sys.executable, "-S", "-c", self.program], pass_fds=[listening, link])
        self.processes.append(process)
        return process

    def close(self) -> None:
        """Do nothing."""


@pytest.fixture
async def supervise(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[[GatewaySpawn], GatewaySupervisor]]:
    monkeypatch.setattr(main_supervisor, "RETRY_SECONDS", 0.01)
    # Nothing that plays a gateway here ends by itself.
    monkeypatch.setattr(main_supervisor, "END_SECONDS", 0.01)
    monkeypatch.setattr(main_supervisor, "LAST_SECONDS", 0.01)
    made: list[GatewaySupervisor] = []
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def make(processes: GatewaySpawn) -> GatewaySupervisor:
            made.append(GatewaySupervisor(2, listening, make_state(), EngineConfig(), "/nowhere", processes))
            return made[-1]

        yield make
        for each in made:
            await each.close("The test ends.")


async def test_one_that_gives_no_sign_of_life_is_killed_and_replaced(
    supervise: Callable[..., GatewaySupervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_connection, "SILENT_SECONDS", 0.5)
    started = Started(SLEEPS)
    supervisor = supervise(started)
    await supervisor.start()
    assert [each.state for each in supervisor.status().gateways] == ["starting", "starting"]
    await until(lambda: supervisor.status().num_lost >= 2 and len(supervisor.status().gateways) == 2)
    assert [process.poll() for process in started.processes[:2]] == [-9, -9]
    assert {each.pid for each in supervisor.status().gateways}.isdisjoint(
        process.pid for process in started.processes[:2]
    )


async def test_one_that_ends_at_once_is_tried_again(supervise: Callable[..., GatewaySupervisor]) -> None:
    started = Started(ENDS)
    supervisor = supervise(started)
    await supervisor.start()
    await until(lambda: supervisor.status().num_started >= 5)
    started.program = SLEEPS
    await until(lambda: len(supervisor.status().gateways) == 2)
    status = supervisor.status()
    assert status.num_lost == status.num_started - 2


async def test_a_model_is_served_once_all_gateways_that_take_connections_serve_it(
    supervise: Callable[..., GatewaySupervisor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main_supervisor, "TICK_SECONDS", 0.01)
    monkeypatch.setattr(main_connection.MainConnection, "serve", lambda *_: None)
    model: Any = SimpleNamespace(pack=dict)
    started = Started(SLEEPS)
    supervisor = supervise(started)
    await supervisor.start()
    first, second = supervisor._gateways.values()
    serving = asyncio.create_task(supervisor.serve(model, model))
    first.serves = True
    await asyncio.sleep(0.1)
    assert not serving.done() and not supervisor.status().serves
    second.process.kill()  # its successor takes no connection before it serves
    await asyncio.wait_for(serving, HANG_SECONDS)
    assert supervisor.status().serves


async def test_none_outlives_its_supervisor(supervise: Callable[..., GatewaySupervisor]) -> None:
    started = Started(SLEEPS)
    supervisor = supervise(started)
    await supervisor.start()
    await supervisor.close("The server is shutting down.")
    assert [process.poll() for process in started.processes] == [-9, -9]
    assert supervisor.status().gateways == () and supervisor.status().num_lost == 0


async def test_one_that_is_lost_right_before_the_end_leaves_no_zombie(
    supervise: Callable[..., GatewaySupervisor],
) -> None:
    """Its successor is not begun: the task for that is cancelled before its first step."""
    started = Started(SLEEPS)
    supervisor = supervise(started)
    await supervisor.start()
    lost = next(iter(supervisor._gateways.values()))
    lost.process.kill()
    supervisor._lose(lost)
    await supervisor.close("The server is shutting down.")
    await until(lambda: all(process.returncode is not None for process in started.processes))


async def test_one_that_cannot_be_started_is_tried_again(supervise: Callable[..., GatewaySupervisor]) -> None:
    faults = [OSError(11, "no more processes")] * 3

    class Refused(Started):
        async def spawn(self, listening: int, link: int) -> Any:
            if len(self.processes) >= 2 and faults:
                raise faults.pop()
            return await super().spawn(listening, link)

    started = Refused(SLEEPS)
    supervisor = supervise(started)
    await supervisor.start()
    started.processes[0].kill()
    await until(lambda: len(supervisor.status().gateways) == 2 and not faults)


def test_options_arrive_as_they_were_given() -> None:
    config = EngineConfig(model="m", enable_lora=True, lora_modules=("a=b", "c=d"))
    state = make_state()
    with socket.socket() as listening:
        supervisor = GatewaySupervisor(1, listening, state, config, "/nowhere")
        settings = msgpack.unpackb(msgpack.packb(supervisor._settings(is_loaded=False)))
    assert settings_of(settings) == (config, state.options)
