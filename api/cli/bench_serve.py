"""``rootgraft bench serve``: load an OpenAI-compatible server at a given request rate and concurrency.

For each arrival of text, the client only reads the clock twice and parses one JSON object, because the client often
shares its cores with the measured server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from secrets import randbits
from typing import Any

import orjson
import uvloop
from tqdm import tqdm

from ...engine.errors import ConfigError
from ...engine.whole_file import write_whole
from .bench_report import summarise, table
from .bench_requests import BenchRequest, TokenScale, body_for, dataset_requests, extra_fields, mixed_requests, words
from .options import BenchOptions, RemoteOptions
from .remote_server import RemoteError, RemoteServer, Timing, timed

ENDPOINTS = {"chat": "chat/completions", "completions": "completions"}
_PROBE_WORDS = (16, 144)
_SEED_BITS = 31
EXIT_INTERRUPTED = 130


class BenchRun:
    """A server under load: sends requests and measures them. The measurements remain after a cancellation.

    Attributes:
        timings: timings of the requests that have ended, in the order of their ends.
        invalid: number of answers that violated their schema, by fault.
    """

    def __init__(self, server: RemoteServer, options: BenchOptions) -> None:
        self._server = server
        self._path = ENDPOINTS[options.endpoint]
        self.timings: list[Timing] = []
        self.invalid: Counter[str] = Counter()

    async def send(self, request: BenchRequest) -> None:
        """Send one request and measure it."""
        pieces: list[str] = []
        on_text = None if request.schema is None else pieces.append
        timing = await timed(self._server, self._path, request.body, on_text)
        self.timings.append(timing)
        if request.schema is not None and timing.error is None:
            fault = broken(request.schema, "".join(pieces), timing.finish)
            self.invalid.update([fault] if fault else [])


def broken(schema: dict[str, Any], text: str, finish: str | None) -> str | None:
    """Return the fault of a structured answer, "cut off", "not JSON" or "breaks its schema"; None without fault."""
    from ..structured.jsonschema_validators import Draft202012Validator

    try:
        value = json.loads(text)
    except ValueError:
        return "cut off" if finish == "length" else "not JSON"
    return None if Draft202012Validator(schema).is_valid(value) else "breaks its schema"


def bench_serve(remote: RemoteOptions, options: BenchOptions) -> int:
    """Run the load, print the table and write the JSON file. Returns 1 if no request was completed, else 0.

    If interrupted, it reports the requests that have ended so far, and returns 130.
    """
    seed = seed_of(options)
    server, load, interrupted = uvloop.run(_run(remote, options, seed))
    if not load.timings:
        return EXIT_INTERRUPTED
    figures = summarise(load.timings) | {"invalid_answers": dict(load.invalid)}
    print(table(figures))
    if options.output_json is not None:
        document = {"figures": figures, "timings": [asdict(timing) for timing in load.timings]}
        write_json(Path(options.output_json), server, options, seed, document)
    explain_errors(load.timings)
    if interrupted:
        print("Interrupted: the results cover the requests that had ended by then.", file=sys.stderr)
        return EXIT_INTERRUPTED
    return 0 if figures["completed"] else 1


async def _run(remote: RemoteOptions, options: BenchOptions, seed: int) -> tuple[RemoteServer, BenchRun, bool]:
    """Return the server, the measurements, and whether the run was interrupted."""
    extra = extra_fields(options.extra_body)
    async with RemoteServer.connect(remote) as server:
        load = BenchRun(server, options)
        if options.dataset is None:
            scale = await measure_scale(server, options, extra)
            requests = mixed_requests(options, scale, Random(seed), options.num_requests)
        else:
            requests = dataset_requests(options, Path(options.dataset))
        try:
            await _send_all(load, with_extra(requests, extra), options, seed)
        except asyncio.CancelledError:
            return server, load, True
        return server, load, False


def seed_of(options: BenchOptions) -> int:
    """Return the seed of the run, given or new, and print it."""
    seed = randbits(_SEED_BITS) if options.seed is None else options.seed
    why = "as given: prompts that this server has seen are cached" if options.seed is not None else "new prompts"
    print(f"Seed {seed} ({why}), temperature {options.temperature:g}.", file=sys.stderr)
    return seed


def with_extra(requests: Sequence[BenchRequest], extra: dict[str, Any]) -> list[BenchRequest]:
    """Return the requests with the fields of ``--extra-body``."""
    return [replace(request, body=request.body | extra) for request in requests]


async def measure_scale(server: RemoteServer, options: BenchOptions, extra: dict[str, Any]) -> TokenScale:
    """Send two requests of one token, which warm up the server and measure the number of tokens per word."""
    measured = []
    for count in _PROBE_WORDS:
        body = body_for(words(Random(count), count), 1, options) | extra
        timing = await timed(server, ENDPOINTS[options.endpoint], body)
        if timing.error is not None:
            raise RemoteError(timing.error, timing.message or timing.error)
        measured.append((count, timing.prompt))
    return TokenScale.fit(measured[0], measured[1])


async def _send_all(load: BenchRun, requests: Sequence[BenchRequest], options: BenchOptions, seed: int) -> None:
    """Send all requests at the rate and concurrency of ``options``."""
    limit = asyncio.Semaphore(options.max_concurrency) if options.max_concurrency else contextlib.nullcontext()
    arrivals = _arrivals(len(requests), options.request_rate, seed)
    start = asyncio.get_running_loop().time()
    with progress(len(requests)) as bar:

        async def send(request: BenchRequest, arrival: float) -> None:
            await asyncio.sleep(start + arrival - asyncio.get_running_loop().time())
            async with limit:
                await load.send(request)
            bar.update()

        await asyncio.gather(*map(send, requests, arrivals))


def progress(total: int, description: str | None = None) -> tqdm:
    """Return a progress bar on standard error, only in a terminal: standard output contains only the table."""
    return tqdm(total=total, desc=description, unit="req", disable=not sys.stderr.isatty(), leave=False)


def _arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Return arrival times in seconds after the start: a Poisson process, or all 0 for rate inf."""
    rng, now, times = Random(seed), 0.0, []
    for _ in range(count):
        times.append(now)
        now += rng.expovariate(rate) if rate != float("inf") else 0.0
    return times


def write_json(path: Path, server: RemoteServer, options: BenchOptions, seed: int, content: dict[str, Any]) -> None:
    """Write the file of ``--output-json``: options without the key, the seed in use, then ``content``."""
    shown = {"url": server.url, "model": server.model, **asdict(options), "seed": seed}
    try:
        write_whole(path, orjson.dumps({"options": shown, **content}, option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise ConfigError(f"--output-json: {path} cannot be written: {error.strerror}.") from error


def explain_errors(timings: Iterable[Timing]) -> None:
    """Print the message of each kind of failure once, on standard error."""
    for kind, message in {timing.error: timing.message for timing in timings if timing.error}.items():
        print(f"{kind}: {message}", file=sys.stderr)
