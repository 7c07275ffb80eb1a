"""Frame of the fleet benchmarks that run servers: command line, figures against their limits, JSON file, exit code.

A benchmark needs no attention: it prints ``holds`` or ``MISSED`` for each figure, ends its server when it is ended
itself, and gives up, with an error, when it takes longer than it may.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.serve.server import machine
from rootgraft.api.cli.remote_server import RemoteError

START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure and what it has to be.

    Attributes:
        value: as it was found.
        wanted: in words.
    """

    name: str
    value: Any
    wanted: str
    holds: bool

    @classmethod
    def most(cls, name: str, value: float, limit: float) -> Figure:
        """Make a figure that may be ``limit`` at most; NaN, where nothing was measured, misses it."""
        return cls(name, round(value, 3), f"at most {limit:g}", value <= limit)

    @classmethod
    def least(cls, name: str, value: float, limit: float) -> Figure:
        """Make a figure that has to be ``limit`` at least; NaN misses it."""
        return cls(name, round(value, 3), f"at least {limit:g}", value >= limit)

    @classmethod
    def exactly(cls, name: str, value: Any, wanted: Any) -> Figure:
        """Make a figure that has one right value."""
        return cls(name, value, f"exactly {wanted}", value == wanted)


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the option ``--output``."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, help="JSON file for the report")
    return made


def serve_command(*options: str) -> str:
    """Return the command of a server whose engines have one thread and 0.25 GiB of KV, with ``{port}``."""
    words = [sys.executable, "-P", "-m", "rootgraft.api.cli.main", "serve", "--threads", "1"]
    words += ["--kv-cache-memory", "0.25", "--log-level", "warning", *options]
    return f"{shlex.join(words)} --port {{port}}"


def wait_ready(url: str, process: subprocess.Popen[bytes] | None) -> None:
    """Wait until a server that was just started is ready. Raises RemoteError if it ends, or is not for too long."""
    until = time.monotonic() + START_SECONDS
    with httpx.Client(trust_env=False, base_url=url.removesuffix("/v1")) as http:
        while True:
            with suppress(httpx.TransportError):
                if http.get("/ready").status_code == 200:
                    return
            if (process is not None and process.poll() is not None) or time.monotonic() > until:
                raise RemoteError("not reachable", f"The server at {url} does not start.")
            time.sleep(0.2)


def run_within(seconds: float, work: Coroutine[Any, Any, Any]) -> Any:
    """Run a benchmark and return its result. SIGTERM ends it as Ctrl-C does. Raises TimeoutError."""

    async def limited() -> Any:
        async with asyncio.timeout(seconds):
            return await work

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    return asyncio.run(limited())


def finish(options: argparse.Namespace, figures: Sequence[Figure], more: Mapping[str, Any]) -> int:
    """Print and keep the report. Returns the exit code: 1 if a figure is missed.

    Args:
        more: what was found beside the figures.
    """
    print(_json(more))
    for each in figures:
        print(f"{'holds ' if each.holds else 'MISSED'}  {each.name}: {each.value} ({each.wanted})", flush=True)
    if options.output is not None:
        arguments = {name: value for name, value in vars(options).items() if name != "output"}
        named = {each.name: {"value": each.value, "wanted": each.wanted, "holds": each.holds} for each in figures}
        document = {"machine": machine(), "arguments": arguments, "figures": named, **more}
        options.output.write_text(_json(document) + "\n")
    return int(not all(each.holds for each in figures))


def _json(document: Mapping[str, Any]) -> str:
    """Return a report as JSON, with null for what was not measured, as NaN is not JSON."""
    return json.dumps(json.loads(json.dumps(document, default=str), parse_constant=lambda _: None), indent=1)


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile, maximum and number of some seconds; NaN where there are none."""
    if not values:
        return {"p50": math.nan, "p99": math.nan, "longest": math.nan, "n": 0}
    p50, p99 = np.percentile(values, (50, 99))
    return {
        "p50": round(float(p50), 3),
        "p99": round(float(p99), 3),
        "longest": round(max(values), 3),
        "n": len(values),
    }
