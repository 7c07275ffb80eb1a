"""A server by the number of connections that ask at once: time for each request, and the wait of the last ones."""

from __future__ import annotations

import asyncio
import random
import resource
import shlex
import sys
import time

from benchmarks.growth.curve import Curve
from benchmarks.serve.load_run import PATH, connected
from benchmarks.serve.server import Server
from rootgraft.api.cli.bench_report import percentile
from rootgraft.api.cli.bench_requests import words
from rootgraft.api.cli.remote_server import RemoteServer, Timing, timed

CONNECTIONS = (1, 10, 100, 500, 1000, 2000)
_LEAST = 64  # requests at each size
_TOKENS = 4
_START_SECONDS = 300.0


def measure(quick: bool) -> list[Curve]:
    """Measure the curves of connections, over HTTP with the default model."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the server inherits it
    serve = f"{shlex.quote(sys.executable)} -P -m rootgraft.api.cli.main serve --port {{port}} --log-level warning"
    server = Server(f"{serve} --max-queued-requests {2 * CONNECTIONS[-1]} --max-queue-seconds 600")
    return asyncio.run(_measure(server, (1, 8) if quick else CONNECTIONS))


async def _measure(server: Server, counts: tuple[int, ...]) -> list[Curve]:
    each, last = [], []
    with server.running() as (url, process):
        async with connected(url, process, _START_SECONDS) as remote:
            await _ask(remote, 16, 32, "warm")
            for count in counts:
                begin = time.perf_counter()
                timings = await _ask(remote, count, max(_LEAST, count), str(count))
                each.append(1e3 * (time.perf_counter() - begin) / len(timings))
                last.append(1e3 * percentile([timing.latency for timing in timings], 99))
    label = "connections at once"
    shared = "all share the engine's steps, and none is looked at by the others"
    return [
        Curve("connections", "Time for each request, ms", label, counts, each, 0.0, shared),
        Curve("connections-p99", "Latency p99, ms", label, counts, last, 1.0, "the last waits for all before it"),
    ]


async def _ask(remote: RemoteServer, connections: int, requests: int, name: str) -> list[Timing]:
    """Send requests, so many at once, each on a connection of its own. Raises RuntimeError if one fails."""
    places, rng = asyncio.Semaphore(connections), random.Random(name)

    async def ask(text: str) -> Timing:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": _TOKENS, "ignore_eos": True}
        async with places:
            return await timed(remote, PATH, body | {"temperature": 1.0})

    timings = await asyncio.gather(*(ask(words(rng, 8)) for _ in range(requests)))
    if failed := [timing.message for timing in timings if timing.error is not None]:
        raise RuntimeError(f"{len(failed)} of {requests} requests failed over {connections} connections: {failed[0]}")
    return timings
