"""A fleet on a local Ray in a network namespace of its own, whose replicas are killed: prints what became of it.

    unshare -n python -m support.api.ray_scene MODEL

The result is a line of JSON. Streams are written while an engine process, an actor, and a stopped engine process are
lost one after another.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import socket
import struct
import sys
import time
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from rootgraft.api.config import ServerConfig
from rootgraft.api.fleet.fleet import Fleet
from rootgraft.api.fleet.on_ray.ray_fleet import ray_fleet
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.messages import Done, Failed, Message, Submit, TokenOut
from rootgraft.engine.types import SamplingParams

REPLICAS = 2
STREAMS = 6
TOKENS = 400
HEARTBEAT_TIMEOUT = 3.0


def raise_loopback() -> None:
    """Bring the loopback interface of this network namespace up."""
    flags_of, set_flags, is_up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as end:
        request = struct.pack("16sh14s", b"lo", 0, b"")
        _, flags, _ = struct.unpack("16sh14s", fcntl.ioctl(end, flags_of, request))
        fcntl.ioctl(end, set_flags, struct.pack("16sh14s", b"lo", flags | is_up, b""))


class Scene:
    """The fleet and what it has delivered."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, str] = {}
        fleet.on_frame = self._take

    def _take(self, messages: list[Message]) -> None:
        for message in messages:
            if isinstance(message, TokenOut):
                self.tokens.setdefault(message.id, []).extend(message.tokens)
            elif isinstance(message, Done):
                self.ends[message.id] = message.reason.name
            elif isinstance(message, Failed):
                self.ends[message.id] = message.message

    async def run(self, first: int) -> None:
        """Let streams begin, with numbers from ``first`` on, and wait for their first tokens."""
        params = SamplingParams(temperature=1.0, seed=7, max_tokens=TOKENS, ignore_eos=True)
        self.fleet.submit([Submit(first + each, array("i", [1, 2, each + 3]), params) for each in range(STREAMS)])
        while not all(self.tokens.get(first + each) for each in range(STREAMS)):
            await asyncio.sleep(0.01)

    async def ended(self, first: int) -> None:
        while not all(first + each in self.ends for each in range(STREAMS)):
            await asyncio.sleep(0.01)

    async def whole(self) -> None:
        """Wait until all replicas serve."""
        while len(self.fleet.replicas) < REPLICAS:
            await asyncio.sleep(0.05)


def engines() -> list[psutil.Process]:
    """Return the engine processes of this network namespace."""
    namespace, found = os.stat("/proc/self/ns/net").st_ino, []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_engine = any("engine_process" in part for part in process.cmdline())
            if is_engine and os.stat(f"/proc/{process.pid}/ns/net").st_ino == namespace:
                found.append(process)
    return found


def listening() -> list[str]:
    """Return the addresses that processes of this network namespace listen on, without those of loopback."""
    return sorted(
        {
            each.laddr.ip
            for each in psutil.net_connections("tcp")
            if each.status == psutil.CONN_LISTEN and each.laddr.ip not in ("127.0.0.1", "::ffff:127.0.0.1", "::1")
        }
    )


async def play(model: Path) -> dict[str, Any]:
    """Return what became of the streams, step by step."""
    config = EngineConfig(dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=200)
    options = ServerConfig(replicas=REPLICAS, ray_address="local", heartbeat_timeout=HEARTBEAT_TIMEOUT)
    began = time.monotonic()
    scene = Scene(ray_fleet(config, model, options))
    facts: dict[str, Any] = {}
    try:
        await scene.fleet.start()
        facts["start_seconds"] = time.monotonic() - began
        facts["listening"] = listening()
        await scene.run(0)
        await scene.ended(0)
        for turn, strike in enumerate((_kill_engine, _kill_actor, _stop_engine), 1):
            await scene.whole()
            await scene.run(100 * turn)
            lost, struck = scene.fleet.num_lost, time.monotonic()
            strike()
            while scene.fleet.num_lost == lost:
                await asyncio.sleep(0.01)
            facts[f"{strike.__name__}_seconds"] = time.monotonic() - struck
            await scene.ended(100 * turn)
        await scene.whole()
    finally:
        await scene.fleet.close()
    plain = [scene.tokens[each] for each in range(STREAMS)]
    facts["equal"] = all([scene.tokens[100 * turn + each] for each in range(STREAMS)] == plain for turn in range(1, 4))
    facts["ends"] = sorted(set(scene.ends.values()))
    facts["lengths"] = sorted({len(tokens) for tokens in plain})
    facts["replays"], facts["lost"] = scene.fleet.num_replays, scene.fleet.num_lost
    facts["left"] = [each.pid for each in engines()]
    return facts


def _kill_engine() -> None:
    engines()[0].kill()


def _kill_actor() -> None:
    parent = engines()[0].parent()
    assert parent is not None
    parent.kill()


def _stop_engine() -> None:
    engines()[0].send_signal(signal.SIGSTOP)


if __name__ == "__main__":
    raise_loopback()
    print(json.dumps(asyncio.run(play(Path(sys.argv[1])))))
