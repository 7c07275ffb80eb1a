"""A fleet on Ray in a network namespace of its own, whose replicas are lost: prints what became of it.

    unshare -n python -m support.api.ray_scene MODEL local|machines|models|ranks|gpus

The result is a line of JSON. Streams are written while, on a local Ray, an engine process, an actor, and a stopped
engine process are lost one after another; or while a machine of a cluster is taken out. For ``models`` two fleets of
one replica share a local Ray, as those of two models do, and one of them ends before the other. For ``ranks`` a
replica of two ranks loses one, a replica is drained, and another one started. For ``gpus`` the result is which GPUs
the actors see, of which there are none.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from rootgraft.api.config import ServerConfig
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.errors import ConfigError
from rootgraft.engine.messages import Done, Failed, Message, Submit, TokenOut
from rootgraft.engine.types import SamplingParams
from rootgraft.fleet.fleet import Fleet
from rootgraft.fleet.on_ray.cluster_room import ReplicaResources
from rootgraft.fleet.on_ray.ray_cluster import RayCluster
from rootgraft.fleet.on_ray.ray_fleet import ray_fleet
from support import benchmark_package
from support.machine.waits import until

REPLICAS = 2
STREAMS = 6
TOKENS = 400
HEARTBEAT_TIMEOUT = 3.0


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
        await until(lambda: all(self.tokens.get(first + each) for each in range(STREAMS)))

    def has_ended(self, first: int) -> bool:
        return all(first + each in self.ends for each in range(STREAMS))

    async def ended(self, first: int) -> None:
        await until(lambda: self.has_ended(first))

    async def whole(self) -> None:
        """Wait until all replicas serve."""
        while len(self.fleet.replicas) < REPLICAS:
            await asyncio.sleep(0.05)


def engines(module: str = "engine_process") -> list[psutil.Process]:
    """Return the engine processes of this network namespace, or those of another module."""
    namespace, found = os.stat("/proc/self/ns/net").st_ino, []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            is_engine = any(module in part for part in process.cmdline())
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


async def play(model: Path, address: str, strikes: Sequence[Callable[[], object]]) -> dict[str, Any]:
    """Return what became of the streams, strike by strike."""
    config = EngineConfig(dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=200)
    options = ServerConfig(replicas=REPLICAS, ray_address=address, heartbeat_timeout=HEARTBEAT_TIMEOUT)
    began = time.monotonic()
    scene = Scene(ray_fleet(config, model, options.fleet_options))
    facts: dict[str, Any] = {"found_seconds": []}
    try:
        await scene.fleet.start()
        facts["start_seconds"] = time.monotonic() - began
        facts["listening"] = listening()
        await scene.run(first := 0)
        await scene.ended(first)
        for strike in strikes:
            await scene.whole()
            await scene.run(first := first + 100)
            lost, struck = scene.fleet.num_lost, time.monotonic()
            striking = asyncio.create_task(asyncio.to_thread(strike))
            while scene.fleet.num_lost == lost:
                await asyncio.sleep(0.01)
                if scene.has_ended(first):  # before the machine has
                    await scene.run(first := first + 100)
            facts["found_seconds"].append(round(time.monotonic() - struck, 2))
            await scene.ended(first)
            await striking
        await scene.whole()
    finally:
        await scene.fleet.close()
    plain = [scene.tokens[each] for each in range(STREAMS)]
    later = range(100, first + 1, 100)
    facts["equal"] = all([scene.tokens[each + stream] for stream in range(STREAMS)] == plain for each in later)
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


def _strike_local(model: Path) -> dict[str, Any]:
    """Let a local Ray lose an engine process, an actor and the signs of life of a third."""
    return asyncio.run(play(model, "local", (_kill_engine, _kill_actor, _stop_engine)))


def _strike_machines(model: Path) -> dict[str, Any]:
    """Let a cluster lose a machine, in whose place another one comes, and ask it for ranks on two machines."""
    from benchmarks.fleet.ray_machines import RayMachines

    with RayMachines(REPLICAS) as machines:

        def replace() -> None:
            machines.remove(0)
            machines.add()

        refusal = asyncio.run(_refused(model, machines.address))
        return asyncio.run(play(model, machines.address, (replace,))) | {"refusal": refusal}


async def _refused(model: Path, address: str) -> str:
    """Start a replica whose two ranks would need two machines. Returns why that is refused."""
    config = EngineConfig(device="cpu", threads=1, num_gpu_blocks_override=200, pipeline_parallel_size=2)
    fleet = ray_fleet(config, model, ServerConfig(ray_address=address).fleet_options)
    try:
        await fleet.start()
    except ConfigError as error:
        return str(error)
    finally:
        await fleet.close()
    return ""


def _strike_ranks(model: Path) -> dict[str, Any]:
    """Let a local Ray lose a rank of a replica, and drain and add replicas of two ranks."""
    return asyncio.run(_play_ranks(model))


async def _play_ranks(model: Path) -> dict[str, Any]:
    config = EngineConfig(dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=200, tensor_parallel_size=2)
    scene = Scene(ray_fleet(config, model, ServerConfig(replicas=REPLICAS, ray_address="local").fleet_options))
    fleet, facts = scene.fleet, dict[str, Any]()
    try:
        await fleet.start()
        await scene.whole()
        await scene.run(0)
        await scene.ended(0)
        facts["ranks"] = [len(engines()), len(engines("follower_process"))]
        await scene.run(100)
        engines("follower_process")[0].kill()
        await until(lambda: fleet.num_lost == 1)
        await scene.ended(100)
        facts["replays"] = fleet.num_replays
        await scene.whole()
        await scene.run(200)
        fleet.scale(1)
        await scene.ended(200)
        await until(lambda: len(engines()) == len(engines("follower_process")) == 1)
        fleet.scale(REPLICAS)
        await scene.whole()
        await scene.run(300)
        await scene.ended(300)
    finally:
        await fleet.close()
    rounds = [[scene.tokens[first + each] for each in range(STREAMS)] for first in (0, 100, 200, 300)]
    facts["equal"] = all(each == rounds[0] for each in rounds)
    facts["ends"], facts["lost"] = sorted(set(scene.ends.values())), fleet.num_lost
    facts["left"] = [each.pid for each in (*engines(), *engines("follower_process"))]
    return facts


class GpuProbe:
    """An actor that tells which GPUs its process may use."""

    def seen(self) -> str:
        return os.environ.get("CUDA_VISIBLE_DEVICES", "")


def _see_gpus(model: Path) -> dict[str, Any]:
    """Ask actors of a local Ray, each of which takes two of four GPUs."""
    return asyncio.run(_gpus_seen())


async def _gpus_seen() -> dict[str, Any]:
    os.environ["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"
    resources = ReplicaResources(num_cpus=1, num_gpus=2, memory=0, num_ranks=2)
    cluster = RayCluster("local", resources, REPLICAS, REPLICAS)
    await cluster.start()
    try:
        probes = [cluster.ray.remote(GpuProbe).options(**resources.as_options()).remote() for _ in range(REPLICAS)]
        seen = await asyncio.gather(*(probe.seen.remote() for probe in probes))
        return {"seen": sorted(sorted(each.split(",")) for each in seen)}  # Ray names them in any order
    finally:
        await cluster.close()


def _share(model: Path) -> dict[str, Any]:
    """Let fleets of two models share a local Ray, the second of two ranks."""
    return asyncio.run(_share_ray(model))


async def _share_ray(model: Path) -> dict[str, Any]:
    config = EngineConfig(dtype="float32", device="cpu", threads=1, num_gpu_blocks_override=200)
    options = ServerConfig(ray_address="local").fleet_options
    configs = config, replace(config, tensor_parallel_size=2)
    first, second = scenes = [Scene(ray_fleet(each, model, options, len(configs))) for each in configs]
    try:
        await asyncio.gather(*(scene.fleet.start() for scene in scenes))
        await asyncio.gather(*(scene.run(0) for scene in scenes))
        await first.ended(0)
        await first.fleet.close()
        await second.ended(0)
        await second.run(100)
        await second.ended(100)
    finally:
        for scene in scenes:
            await scene.fleet.close()
    equal = [first.tokens[each] == second.tokens[each] == second.tokens[100 + each] for each in range(STREAMS)]
    return {"equal": all(equal), "lost": second.fleet.num_lost, "left": [each.pid for each in engines()]}


if __name__ == "__main__":
    benchmark_package.register()
    from benchmarks.fleet.ray_machines import raise_loopback

    raise_loopback()
    scenes = {"local": _strike_local, "machines": _strike_machines, "models": _share}
    strike = (scenes | {"ranks": _strike_ranks, "gpus": _see_gpus})[sys.argv[2]]
    print(json.dumps(strike(Path(sys.argv[1]))))
