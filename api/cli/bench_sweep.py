"""``rootgraft bench serve --sweep``: measures throughput and latencies of a server by the number of its clients.

At each level a number of clients send requests, each client one after another (a closed loop). Each prompt differs from
the prompts of all other requests of all levels and runs, except for the text that a mix shares on purpose. A level ends
with its last request.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import uvloop

from .bench_report import summarise
from .bench_requests import BenchRequest, extra_fields, mixed_requests
from .bench_serve import (
    EXIT_INTERRUPTED,
    BenchRun,
    bench_serve,
    explain_errors,
    measure_scale,
    progress,
    seed_of,
    with_extra,
    write_json,
)
from .options import BenchOptions, RemoteOptions
from .remote_server import RemoteServer
from .sweep_chart import write_chart
from .sweep_report import Level, find_knee, sweep_table

_REQUESTS_PER_CLIENT = 4
# Smallest number of requests of a level, because a percentile of fewer requests is meaningless.
_FEWEST_REQUESTS = 16


def bench(remote: RemoteOptions, options: BenchOptions) -> int:
    """Measure one load, or with ``--sweep`` one level after the other. Returns the exit code of the measurement."""
    return bench_serve(remote, options) if options.sweep is None else bench_sweep(remote, options)


def bench_sweep(remote: RemoteOptions, options: BenchOptions) -> int:
    """Measure all levels, print the table, write JSON and curves. Returns 1 if a level has no answer at all, else 0.

    If interrupted, it prints the finished levels, and the ended requests of the last level, and returns 130.

    Raises:
        ConfigError: a file cannot be written, or PNG cannot be made.
    """
    seed = seed_of(options)
    levels: list[Level] = []
    loads: list[BenchRun] = []
    server, interrupted = uvloop.run(_run(remote, options, seed, levels, loads))
    if not levels:
        return EXIT_INTERRUPTED
    knee = find_knee(levels)
    print(sweep_table(levels, knee, in_terminal=sys.stdout.isatty()))
    if options.output_json is not None:
        content = {
            "knee": None if knee is None else levels[knee].clients,
            "levels": [asdict(level) for level in levels],
        }
        write_json(Path(options.output_json), server, options, seed, content)
    if options.output_chart is not None:
        write_chart(Path(options.output_chart), levels, knee, f"{server.model} at {server.url}")
    explain_errors(timing for load in loads for timing in load.timings)
    if interrupted:
        return EXIT_INTERRUPTED
    return 0 if all(level.figures["completed"] for level in levels) else 1


async def _run(
    remote: RemoteOptions, options: BenchOptions, seed: int, levels: list[Level], loads: list[BenchRun]
) -> tuple[RemoteServer, bool]:
    """Measure level after level and append them to ``levels``.

    Returns the server, and whether the run was interrupted.
    """
    extra = extra_fields(options.extra_body)
    async with RemoteServer.connect(remote) as server:
        scale = await measure_scale(server, options, extra)
        rng = Random(seed)
        for clients in options.levels:
            count = options.num_prompts or max(_FEWEST_REQUESTS, _REQUESTS_PER_CLIENT * clients)
            requests = with_extra(mixed_requests(options, scale, rng, count), extra)
            load = BenchRun(server, options)
            loads.append(load)
            try:
                await _measure(load, requests, clients)
            except asyncio.CancelledError:
                if load.timings:
                    levels.append(_level(load, clients, interrupted=True))
                return server, True
            levels.append(_level(load, clients, interrupted=False))
        return server, False


async def _measure(load: BenchRun, requests: Sequence[BenchRequest], clients: int) -> None:
    """Send the requests from ``clients`` clients. A client sends its next request when its last one has ended."""
    left = iter(requests)
    with progress(len(requests), f"{clients} clients") as bar:

        async def client() -> None:
            for request in left:
                await load.send(request)
                bar.update()

        await asyncio.gather(*(client() for _ in range(clients)))


def _level(load: BenchRun, clients: int, *, interrupted: bool) -> Level:
    figures: dict[str, Any] = summarise(load.timings) | {"invalid_answers": dict(load.invalid)}
    return Level(clients, figures, interrupted)
