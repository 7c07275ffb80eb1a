"""An engine process behind connections: those without the token get none, its death and silence are heard of."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
from array import array
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from json import dumps
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.machine.waits import HANG_SECONDS

from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError, EngineDead
from rootgraft.engine.messages import Done, Message, Submit, TokenOut
from rootgraft.engine.types import SamplingParams
from rootgraft.fleet.on_ray import handover
from rootgraft.fleet.on_ray.handover import CHANNEL, CONTROL, LIVENESS, TOKEN_BYTES, EngineHost
from rootgraft.fleet.on_ray.ray_replica import HostAddress, RayReplica

CONFIG = EngineConfig(dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=40)


class Hosted:
    """A host in a thread, as in an actor, and its client."""

    def __init__(self, path: Path, config: EngineConfig = CONFIG, heartbeat_timeout: float = 30.0) -> None:
        self._before = psutil.Process().children()  # of other tests, which may have ended without being taken note of
        token = secrets.token_bytes(TOKEN_BYTES)
        self.host = EngineHost("127.0.0.1", token)
        self.released = 0
        self.status: int | None = None
        self._arguments = str(path), dumps(asdict(config))
        self.thread = threading.Thread(target=self._run)
        self.thread.start()
        self.client = RayReplica(
            config,
            path,
            HostAddress("127.0.0.1", self.host.port, token),
            self._release,
            heartbeat_timeout=heartbeat_timeout,
            watchdog_timeout=300.0,
        )
        self.death: asyncio.Future[EngineDead] = asyncio.get_running_loop().create_future()
        self.client.on_death = self.death.set_result

    def _run(self) -> None:
        self.status = self.host.run(*self._arguments)

    def _release(self) -> None:
        self.released += 1

    def process(self) -> psutil.Process:
        """Return the engine process, the only living child of this process with that module since the host was made."""
        living = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
        (found,) = [
            each
            for each in living
            if each not in self._before and any("engine_process" in part for part in each.cmdline())
        ]
        return found


async def test_an_engine_behind_connections_is_an_engine(tiny_llama: Path) -> None:
    hosted = Hosted(tiny_llama)
    ready = await hosted.client.start()
    assert ready.num_pages == 40
    tokens: list[int] = []
    done = asyncio.get_running_loop().create_future()

    def take(messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, TokenOut):
                tokens.extend(message.tokens)
            elif isinstance(message, Done):
                done.set_result(message)

    hosted.client.on_frame = take
    hosted.client.submit([Submit(1, array("i", [1, 2, 3]), SamplingParams(temperature=0.0, max_tokens=7))])
    end = await done
    assert len(tokens) == end.usage.completion == 7
    assert (await hosted.client.take_snapshot()) is not None
    await hosted.client.close()
    await asyncio.to_thread(hosted.thread.join)
    assert hosted.status == 0 and hosted.released == 1 and not hosted.death.done()


async def test_a_stopped_engine_is_found_and_killed_through_its_host(tiny_llama: Path) -> None:
    hosted = Hosted(tiny_llama, heartbeat_timeout=2.0)
    await hosted.client.start()
    os.kill(hosted.process().pid, signal.SIGSTOP)
    assert "no sign of life for 2 seconds" in str(await hosted.death)
    hosted.client.kill()
    await hosted.client.close()
    await asyncio.to_thread(hosted.thread.join)
    assert hosted.status == -signal.SIGKILL and hosted.released == 1


async def test_the_end_of_the_process_is_told_at_once_and_that_of_the_gateway_ends_it(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "_END_SECONDS", HANG_SECONDS)
    hosted = Hosted(tiny_llama)
    await hosted.client.start()
    hosted.process().kill()
    await hosted.death
    with pytest.raises(EngineDead):
        hosted.client.submit([])
    await hosted.client.close()
    await asyncio.to_thread(hosted.thread.join)
    left = Hosted(tiny_llama)
    await left.client.start()
    assert left.client._transport is not None
    left.client._hosted.close()  # as if this process were gone: nothing asks the engine to end
    left.client._transport.abort()
    await asyncio.to_thread(left.thread.join)
    assert left.status == 0
    await left.client.close()


async def test_what_is_wrong_at_the_start_comes_through(tiny_llama: Path) -> None:
    config = EngineConfig(dtype="float32", device="cpu", max_model_len=5000)
    hosted = Hosted(tiny_llama, config)
    with pytest.raises(ConfigError, match="512"):
        await hosted.client.start()
    await hosted.client.close()
    await asyncio.to_thread(hosted.thread.join)
    assert hosted.status == 70


async def test_a_host_that_is_gone_cannot_be_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    released: list[int] = []
    client = RayReplica(
        CONFIG,
        Path("m"),
        HostAddress("127.0.0.1", port, b"t" * TOKEN_BYTES),
        lambda: released.append(1),
        heartbeat_timeout=5.0,
        watchdog_timeout=300.0,
    )
    with pytest.raises(EngineDead, match="cannot be reached"):
        await client.start()
    await client.close()
    assert released == [1]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[EngineHost, bytes]]:
    monkeypatch.setattr(handover, "_HELLO_SECONDS", 0.1)
    token = secrets.token_bytes(TOKEN_BYTES)
    made = EngineHost("127.0.0.1", token)
    yield made, token
    made._listener.close()


@pytest.mark.parametrize(
    "hello",
    [
        lambda token: b"",
        lambda token: token[:-1],
        lambda token: token + b"X",
        lambda token: token[:-1] + bytes([token[-1] ^ 1]) + CHANNEL,
        lambda token: b"GET / HTTP/1.1\r\nHost: replica\r\n\r\n",
    ],
)
def test_connections_without_the_token_are_closed(host: Any, hello: Any) -> None:
    made, token = host
    strangers = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(2)]
    for stranger in strangers:
        stranger.sendall(hello(token))
    ours = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(3)]
    for end, purpose in zip(ours, (LIVENESS, CHANNEL, CONTROL), strict=True):
        end.sendall(token + purpose)
    ends = made._accept()
    assert {purpose: end.getpeername() for purpose, end in ends.items()} == {
        purpose: end.getsockname() for purpose, end in zip((LIVENESS, CHANNEL, CONTROL), ours, strict=True)
    }
    for stranger in strangers:
        stranger.settimeout(HANG_SECONDS)
        with suppress(ConnectionError):
            assert stranger.recv(1) == b""
        stranger.close()
    for end in (*ours, *ends.values()):
        end.close()


def test_a_purpose_is_given_once(host: Any) -> None:
    made, token = host
    ours = [socket.create_connection(("127.0.0.1", made.port)) for _ in range(4)]
    for end, purpose in zip(ours, (LIVENESS, LIVENESS, CHANNEL, CONTROL), strict=True):
        end.sendall(token + purpose)
    ends = made._accept()
    assert ends[LIVENESS].getpeername() == ours[0].getsockname()
    for end in (*ours, *ends.values()):
        end.close()


def test_a_host_waits_only_so_long(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "ACCEPT_SECONDS", 0.2)
    with pytest.raises(TimeoutError):
        host[0].run("m", "{}")
