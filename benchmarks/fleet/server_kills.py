"""Kill replicas of a server under mixed streams over HTTP: none fails, none differs, none is counted twice.

    python -m benchmarks.fleet.server_kills [--strike KILL] [--seconds 300] [--every 15] [--output kills.json]
    unshare -n python -m benchmarks.fleet.server_kills --strike MACHINE

First each of the requests is answered by a server of one process. Then so many clients ask a server of replicas for
the same again and again; after ``--calm`` seconds one replica is struck every so many seconds: killed, or stopped, or
its machine is taken out of a cluster of Ray's, and another machine comes. Text, calls, logprobs, ends and token counts
must be those of the one process, structured answers must follow their schema, and the usage ledger must hold each
request once.

The *stall* of a stream is its pause at the moment of a strike; told are those of the streams that were replayed, as
many as the fleet says, and what a strike has added to the median pause of the calm before. A stopped replica has to be
found first, and its streams have so much longer. Exit code 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fleet.fleet_harness import (
    START_SECONDS,
    Figure,
    finish,
    parser,
    percentiles,
    run_within,
    serve_command,
    wait_ready,
)
from benchmarks.fleet.mixed_requests import Answer, ask, first_difference, is_whole, request, schema_of
from benchmarks.fleet.ray_machines import RayMachines
from benchmarks.serve.server import ROOT, Server
from rootgraft.api.cli.options import RemoteOptions
from rootgraft.api.cli.remote_server import RemoteError, RemoteServer

ADAPTERS = ROOT / "examples" / "adapters"
STRIKES = ("KILL", "STOP", "MACHINE")
MOST_STALL, MOST_FOUND, MOST_BACK = 2.5, 3.5, 15.0
LOST_SECONDS = 120.0
"""Without all replicas after a strike, after which the run is given up."""


@dataclass
class Run:
    """Results of a run.

    Attributes:
        answers: with the number of their requests.
        kills: moments at which a replica was struck.
        found: seconds from each until the replica was given up.
        back: seconds from each until all replicas served again.
        hit: for each strike, how many sequences were replayed.
    """

    answers: list[tuple[int, Answer]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    hit: list[int] = field(default_factory=list)


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder, _machines(options) as machines:
        limit = 3 * START_SECONDS + options.calm + options.seconds
        return int(run_within(limit, _measure(options, Path(folder) / "usage.sqlite", machines)))


def _options() -> argparse.Namespace:
    made = parser(__doc__)
    made.add_argument("--replicas", type=int, default=4)
    made.add_argument("--streams", type=int, default=32)
    made.add_argument("--seconds", type=float, default=300.0)
    made.add_argument("--calm", type=float, default=20.0)
    made.add_argument("--every", type=float, default=15.0)
    made.add_argument("--strike", choices=STRIKES, default="KILL")
    made.add_argument("--requests", type=int, default=36, help="different ones")
    made.add_argument("--tokens", type=int, default=64)
    return made.parse_args()


@contextmanager
def _machines(options: argparse.Namespace) -> Iterator[RayMachines | None]:
    """Run a cluster of as many machines as there are replicas, if they are what is struck."""
    if options.strike != "MACHINE":
        yield None
        return
    with RayMachines(options.replicas) as machines:
        yield machines


def _command(*more: str) -> str:
    adapters = ["--enable-lora", "--lora-dir", str(ADAPTERS), "--lora-modules", f"second-pirate={ADAPTERS / 'pirate'}"]
    return serve_command(*adapters, *more)


async def _measure(options: argparse.Namespace, ledger: Path, machines: RayMachines | None) -> int:
    bodies = [request(number, options.tokens) for number in range(options.requests)]
    with Server(_command()).running() as (url, process):
        await asyncio.to_thread(wait_ready, url, process)
        async with RemoteServer.connect(RemoteOptions(url)) as server:
            limit = asyncio.Semaphore(8)
            plain = await asyncio.gather(*(_limited(limit, server, body) for body in bodies))
    if failed := [answer.error for answer in plain if answer.error]:
        raise RemoteError("failed", f"A server of one process fails: {failed[0]}")
    run = Run()
    more = ["--replicas", str(options.replicas), "--usage-ledger", str(ledger)]
    if machines is not None:
        more += ["--ray-address", machines.address, "--device", "cpu"]
    with Server(_command(*more)).running() as (url, process):
        await asyncio.to_thread(wait_ready, url, process)
        async with RemoteServer.connect(RemoteOptions(url)) as server:
            until = time.monotonic() + options.calm + options.seconds
            clients = [_client(server, bodies, run, number, until) for number in range(options.streams)]
            async with asyncio.TaskGroup() as group:
                group.create_task(_strike(server, run, options, until, machines))
                for client in clients:
                    group.create_task(client)
            fleet = await server.get("fleet")
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 60)
    return _report(run, bodies, plain, fleet, ledger, options)


async def _limited(limit: asyncio.Semaphore, server: RemoteServer, body: dict[str, Any]) -> Answer:
    async with limit:
        return await ask(server, body)


async def _client(server: RemoteServer, bodies: list[dict[str, Any]], run: Run, seed: int, until: float) -> None:
    draw = random.Random(seed)
    while time.monotonic() < until:
        number = draw.randrange(len(bodies))
        run.answers.append((number, await ask(server, bodies[number])))


async def _strike(
    server: RemoteServer, run: Run, options: argparse.Namespace, until: float, machines: RayMachines | None
) -> None:
    """Strike a replica every so many seconds. Raises TimeoutError if all do not serve again."""
    draw = random.Random(1)
    await asyncio.sleep(options.calm)
    while time.monotonic() + options.every < until:
        before = await server.get("fleet")
        run.kills.append(killed := time.monotonic())
        if machines is not None:
            await asyncio.to_thread(machines.remove, draw.randrange(options.replicas))
        else:
            victim = draw.choice([each for each in before["data"] if each["running"]] or before["data"])
            os.kill(int(victim["place"].removeprefix("process ")), signal.Signals[f"SIG{options.strike}"])
        newcomer = asyncio.create_task(asyncio.to_thread(machines.add)) if machines is not None else None
        async with asyncio.timeout(LOST_SECONDS):
            fleet = await _until_back(server, run, before, options.replicas)
        run.back.append(time.monotonic() - killed)
        run.hit.append(fleet["replays"] - before["replays"])
        if newcomer is not None:
            await newcomer
        await asyncio.sleep(max(0.0, killed + options.every - time.monotonic()))


async def _until_back(server: RemoteServer, run: Run, before: Any, replicas: int) -> Any:
    """Wait until a replica was given up, and all serve again. Returns the fleet."""
    while True:
        fleet = await server.get("fleet")
        if fleet["lost"] > before["lost"]:
            if len(run.found) < len(run.kills):
                run.found.append(time.monotonic() - run.kills[-1])
            if len(fleet["data"]) == replicas:
                return fleet
        await asyncio.sleep(0.1)


def _report(
    run: Run,
    bodies: list[dict[str, Any]],
    plain: list[Answer],
    fleet: dict[str, Any],
    ledger: Path,
    options: argparse.Namespace,
) -> int:
    whole = [(number, answer) for number, answer in run.answers if not answer.error]
    different = [(number, answer) for number, answer in whole if answer.facts() != plain[number].facts()]
    for number, answer in different[:3]:
        print(f"request {number}: {first_difference(plain[number].facts(), answer.facts())}", file=sys.stderr)
    for error in sorted({answer.error for _, answer in run.answers if answer.error}):
        print(f"failed: {error}", file=sys.stderr)
    calm = [pause for _, answer in whole for at, pause in _pauses(answer) if at < run.kills[0]]
    stalls = percentiles(_stalls(run, bodies, structured=None))
    found, is_found_late = percentiles(run.found), options.strike != "KILL"
    added = stalls["p99"] - statistics.median(calm) - (found["longest"] if is_found_late else 0.0)
    figures = [
        Figure.exactly("failed", len(run.answers) - len(whole), 0),
        Figure.exactly("different", len(different), 0),
        Figure.exactly("invalid", sum(not is_whole(bodies[number], answer) for number, answer in whole), 0),
        Figure.exactly("ledger", _counted(ledger), _expected(whole)),
        Figure.exactly("strikes found", fleet["lost"], len(run.kills)),
        Figure.most("added stall p99, s" + (" after it was found" if is_found_late else ""), added, MOST_STALL),
        Figure.most("given up, longest, s", found["longest"], MOST_FOUND),
        Figure.most("all serve again, longest, s", max(run.back), MOST_BACK),
    ]
    more = {
        "answers": len(run.answers),
        "strikes": len(run.kills),
        "replays": fleet["replays"],
        "calm_pause_s": percentiles(calm),
        "stall_s": stalls,
        "structured_stall_s": percentiles(_stalls(run, bodies, structured=True)),
        "found_s": found,
        "all_serve_again_s": percentiles(run.back),
    }
    return finish(options, figures, more)


def _pauses(answer: Answer) -> list[tuple[float, float]]:
    """Return the pauses with the moments at which they ended."""
    return list(zip(answer.arrivals[1:], answer.pauses(), strict=True))


def _stalls(run: Run, bodies: list[dict[str, Any]], *, structured: bool | None) -> list[float]:
    """Return the pauses at the kills, of as many streams as were replayed: the longest ones."""
    found: list[float] = []
    for killed, hit in zip(run.kills, run.hit, strict=True):
        pauses = []
        for number, answer in run.answers:
            pause = next((pause for at, pause in _pauses(answer) if at - pause <= killed < at), None)
            if pause is not None:
                pauses.append((pause, schema_of(bodies[number]) is not None or "tools" in bodies[number]))
        longest = sorted(pauses, reverse=True)[:hit]
        found += [pause for pause, is_structured in longest if structured in (None, is_structured)]
    return found


def _counted(ledger: Path) -> tuple[int, int, int]:
    with sqlite3.connect(ledger) as database:
        [row] = database.execute("SELECT sum(requests), sum(prompt_tokens), sum(completion_tokens) FROM usage")
    return row[0], row[1], row[2]


def _expected(whole: list[tuple[int, Answer]]) -> tuple[int, int, int]:
    tokens = [answer.tokens for _, answer in whole]
    return len(tokens), sum(prompt for prompt, _ in tokens), sum(completion for _, completion in tokens)


if __name__ == "__main__":
    sys.exit(main())
