"""Kill replicas of a server under mixed streams over HTTP: none fails, none differs, none is counted twice.

    python -m benchmarks.fleet.server_kills [--replicas 4] [--streams 32] [--seconds 300] [--every 15] [--signal KILL]

First each of the requests is answered by a server of one process. Then so many clients ask a server of replicas for
the same again and again; after ``--calm`` seconds one replica is killed, or stopped, every so many seconds. Text,
calls, logprobs, ends and token counts must be those of the one process, structured answers must follow their schema,
and the usage ledger must hold each request once. The *stall* of a stream is its pause at the moment of a kill; told are
those of the streams that were replayed, as many as the fleet says, and the pauses of all streams in the calm before.
Exit code 1 for anything wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shlex
import signal
import sqlite3
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet.mixed_requests import Answer, ask, first_difference, is_whole, request, schema_of
from benchmarks.serve.server import ROOT, Server, machine
from rootgraft.api.cli.options import RemoteOptions
from rootgraft.api.cli.remote_server import RemoteError, RemoteServer

ADAPTERS = ROOT / "examples" / "adapters"
START_SECONDS = 300.0


@dataclass
class Run:
    """What happened.

    Attributes:
        answers: with the number of their requests.
        kills: moments at which a replica was killed.
        found: seconds from each until the replica was given up.
        back: seconds from each until all replicas served again.
        hit: for each kill, how many sequences were replayed.
    """

    answers: list[tuple[int, Answer]] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    found: list[float] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    hit: list[int] = field(default_factory=list)


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(_measure(options, Path(folder) / "usage.sqlite"))
    print(json.dumps(report, indent=1))
    if options.output:
        Path(options.output).write_text(
            json.dumps({"machine": machine(), "arguments": vars(options), **report}, indent=1)
        )
    return int(bool(report["failed"] or report["different"] or report["invalid"] or not report["ledger_is_exact"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--calm", type=float, default=20.0)
    parser.add_argument("--every", type=float, default=15.0)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--requests", type=int, default=36, help="different ones")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--output", help="JSON file for the report")
    return parser.parse_args()


def _command(*more: str) -> str:
    adapters = ["--enable-lora", "--lora-dir", str(ADAPTERS), "--lora-modules", f"second-pirate={ADAPTERS / 'pirate'}"]
    words = [
        sys.executable,
        "-P",
        "-m",
        "rootgraft.api.cli.main",
        "serve",
        "--threads",
        "1",
        "--kv-cache-memory",
        "0.25",
    ]
    return shlex.join([*words, *adapters, "--log-level", "warning", *more]) + " --port {port}"


async def _measure(options: argparse.Namespace, ledger: Path) -> dict[str, Any]:
    bodies = [request(number, options.tokens) for number in range(options.requests)]
    with Server(_command()).running() as (url, process):
        async with RemoteServer.connect(await _ready(url, process)) as server:
            limit = asyncio.Semaphore(8)
            plain = await asyncio.gather(*(_limited(limit, server, body) for body in bodies))
    if failed := [answer.error for answer in plain if answer.error]:
        raise RemoteError("failed", f"A server of one process fails: {failed[0]}")
    run = Run()
    command = _command("--replicas", str(options.replicas), "--usage-ledger", str(ledger))
    with Server(command).running() as (url, process):
        async with RemoteServer.connect(await _ready(url, process)) as server:
            until = time.monotonic() + options.calm + options.seconds
            clients = [_client(server, bodies, run, number, until) for number in range(options.streams)]
            killer = asyncio.create_task(_kill(server, run, options, until))
            await asyncio.gather(*clients)
            await killer
            fleet = await server.get("fleet")
        assert process is not None
        process.send_signal(signal.SIGTERM)
        await asyncio.to_thread(process.wait, 60)
    return _report(run, bodies, plain, fleet, ledger)


async def _ready(url: str, process: Any) -> RemoteOptions:
    """Wait until a server answers. Returns how to connect to it. Raises RemoteError."""
    until = time.monotonic() + START_SECONDS
    while True:
        with suppress(RemoteError):
            async with RemoteServer.connect(RemoteOptions(url, None, "-")) as server:
                await server.get("fleet")
            return RemoteOptions(url, None, None)
        if process.poll() is not None or time.monotonic() > until:
            raise RemoteError("not reachable", f"The server at {url} does not start.")
        await asyncio.sleep(0.2)


async def _limited(limit: asyncio.Semaphore, server: RemoteServer, body: dict[str, Any]) -> Answer:
    async with limit:
        return await ask(server, body)


async def _client(server: RemoteServer, bodies: list[dict[str, Any]], run: Run, seed: int, until: float) -> None:
    draw = random.Random(seed)
    while time.monotonic() < until:
        number = draw.randrange(len(bodies))
        run.answers.append((number, await ask(server, bodies[number])))


async def _kill(server: RemoteServer, run: Run, options: argparse.Namespace, until: float) -> None:
    draw = random.Random(1)
    await asyncio.sleep(options.calm)
    while time.monotonic() + options.every < until:
        before = await server.get("fleet")
        victim = draw.choice([each for each in before["data"] if each["running"]] or before["data"])
        os.kill(int(victim["place"].removeprefix("process ")), signal.Signals[f"SIG{options.signal}"])
        killed = time.monotonic()
        run.kills.append(killed)
        while True:
            fleet = await server.get("fleet")
            if fleet["lost"] > before["lost"] and len(run.found) < len(run.kills):
                run.found.append(time.monotonic() - killed)
            if fleet["lost"] > before["lost"] and len(fleet["data"]) == options.replicas:
                break
            await asyncio.sleep(0.1)
        run.back.append(time.monotonic() - killed)
        run.hit.append(fleet["replays"] - before["replays"])
        await asyncio.sleep(max(0.0, killed + options.every - time.monotonic()))


def _report(
    run: Run, bodies: list[dict[str, Any]], plain: list[Answer], fleet: dict[str, Any], ledger: Path
) -> dict[str, Any]:
    whole = [(number, answer) for number, answer in run.answers if not answer.error]
    different = [(number, answer) for number, answer in whole if answer.facts() != plain[number].facts()]
    for number, answer in different[:3]:
        print(f"request {number}: {first_difference(plain[number].facts(), answer.facts())}", file=sys.stderr)
    for error in sorted({answer.error for _, answer in run.answers if answer.error}):
        print(f"failed: {error}", file=sys.stderr)
    calm = [pause for _, answer in whole for at, pause in _pauses(answer) if at < run.kills[0]]
    return {
        "answers": len(run.answers),
        "failed": len(run.answers) - len(whole),
        "different": len(different),
        "invalid": sum(not is_whole(bodies[number], answer) for number, answer in whole),
        "ledger_is_exact": _counted(ledger) == _expected(whole),
        "kills": len(run.kills),
        "replays": fleet["replays"],
        "calm_pause_s": _percentiles(calm),
        "stall_s": _percentiles(_stalls(run, bodies, structured=None)),
        "structured_stall_s": _percentiles(_stalls(run, bodies, structured=True)),
        "found_s": _percentiles(run.found),
        "all_serve_again_s": {"longest": round(max(run.back), 2), "mean": round(float(np.mean(run.back)), 2)},
    }


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


def _percentiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99 = np.percentile(values, (50, 99))
    return {
        "p50": round(float(p50), 3),
        "p99": round(float(p99), 3),
        "longest": round(max(values), 3),
        "n": len(values),
    }


def _counted(ledger: Path) -> tuple[int, int, int]:
    with sqlite3.connect(ledger) as database:
        [row] = database.execute("SELECT sum(requests), sum(prompt_tokens), sum(completion_tokens) FROM usage")
    return row[0], row[1], row[2]


def _expected(whole: list[tuple[int, Answer]]) -> tuple[int, int, int]:
    tokens = [answer.tokens for _, answer in whole]
    return len(tokens), sum(prompt for prompt, _ in tokens), sum(completion for _, completion in tokens)


if __name__ == "__main__":
    sys.exit(main())
