"""``rootgraft bench serve``: load an OpenAI-compatible server at a given request rate and concurrency.

The client does little work per arrival of text (two clock readings, one JSON object), because it often shares its
cores with the measured server.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import orjson
import uvloop
from tqdm import tqdm

from ...engine.errors import ConfigError
from .bench_prompts import TokenScale, body_for, dataset_bodies, extra_fields, random_bodies, words
from .bench_report import summarise, table
from .options import BenchOptions, RemoteOptions
from .remote_server import RemoteError, RemoteServer, Timing, timed

_ENDPOINTS = {"chat": "chat/completions", "completions": "completions"}
_PROBE_WORDS = (16, 144)


def bench_serve(remote: RemoteOptions, options: BenchOptions) -> int:
    """Run the load, print the table and write the JSON file. Returns 1 if no request was completed, else 0."""
    model, timings = uvloop.run(_run(remote, options))
    figures = summarise(timings)
    print(table(figures))
    if options.output_json is not None:
        _write(Path(options.output_json), remote, options, model, figures, timings)
    _explain_errors(timings)
    return 0 if figures["completed"] else 1


async def _run(remote: RemoteOptions, options: BenchOptions) -> tuple[str, list[Timing]]:
    extra = extra_fields(options.extra_body)
    async with RemoteServer.connect(remote) as server:
        if options.dataset is None:
            bodies = random_bodies(options, await _measure_scale(server, options, extra))
        else:
            bodies = dataset_bodies(options, Path(options.dataset))
        return server.model, await run_load(
            server, _ENDPOINTS[options.endpoint], [body | extra for body in bodies], options
        )


async def _measure_scale(server: RemoteServer, options: BenchOptions, extra: dict[str, Any]) -> TokenScale:
    """Send two requests of one token, which warm the server up and measure the tokens per word."""
    measured = []
    for count in _PROBE_WORDS:
        body = body_for(words(Random(count), count), 1, options) | extra
        timing = await timed(server, _ENDPOINTS[options.endpoint], body)
        if timing.error is not None:
            raise RemoteError(timing.error, timing.message or timing.error)
        measured.append((count, timing.prompt))
    return TokenScale.fit(measured[0], measured[1])


async def run_load(
    server: RemoteServer, path: str, bodies: Sequence[dict[str, Any]], options: BenchOptions
) -> list[Timing]:
    """Send all requests at the rate and concurrency of ``options``; return timings in the order of ``bodies``."""
    limit = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else contextlib.nullcontext()
    arrivals = _arrivals(len(bodies), options.request_rate, options.seed)
    start = asyncio.get_running_loop().time()
    # The progress bar goes to stderr, and only in a terminal: stdout holds only the table.
    with tqdm(total=len(bodies), unit="req", disable=not sys.stderr.isatty(), leave=False) as bar:

        async def send(body: dict[str, Any], arrival: float) -> Timing:
            await asyncio.sleep(start + arrival - asyncio.get_running_loop().time())
            async with limit:
                timing = await timed(server, path, body)
            bar.update()
            return timing

        return await asyncio.gather(*map(send, bodies, arrivals))


def _arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Arrival times in seconds after the start: a Poisson process, or all 0 for rate inf."""
    rng, now, times = Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate) if rate != float("inf") else 0.0
    return times


def _write(
    path: Path,
    remote: RemoteOptions,
    options: BenchOptions,
    model: str,
    figures: dict[str, Any],
    timings: Sequence[Timing],
) -> None:
    """Write the file of ``--output-json``: options without the key, figures, and every timing."""
    shown = {"url": remote.url, "model": model, **asdict(options)}
    document = {"options": shown, "figures": figures, "timings": [asdict(timing) for timing in timings]}
    try:
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise ConfigError(f"--output-json: {path} cannot be written: {error.strerror}.") from error


def _explain_errors(timings: Sequence[Timing]) -> None:
    """Print one message for each kind of error to standard error."""
    for kind, message in {timing.error: timing.message for timing in timings if timing.error}.items():
        print(f"{kind}: {message}", file=sys.stderr)
