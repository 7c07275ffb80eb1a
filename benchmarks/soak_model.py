"""Two hours of mixed load on the real model: does anything grow, and is every answer what it must be?

    python -m benchmarks.soak_model [--minutes 120] [--cores 0.3] [--threads 1] --output FILE.json
    python -m benchmarks.soak_model --summary FILE.json

Chats free, sampled, structured and with tools, for the model and for adapters; adapters that come, are loaded, asked,
unloaded and deleted; chats over a WebSocket and over gRPC; streams that are left; schemas that nobody has sent before,
and one that doubles; background responses, a second turn after them, cancelled ones; batches with their files; scores
and embeddings; what must be refused. What must come was asked of a server beforehand that did nothing else. The pauses
between requests follow the processor time that the server uses, so that it uses ``--cores``.

Caches of the server are small, so that they are full within the first ten minutes (``benchmarks.soaking
.bounded_server``). Every few seconds are noted, by the roles of processes: memory, descriptors, threads, processes;
and pages of KV that are neither free nor of the prefix cache, and requests that run or wait. The file is written every
minute, and holds for each its slope an hour after the first ten minutes with its 95 % interval. Exit code 1 if an
answer is wrong, a slope is not flat, or the server does not end with code 0.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import psutil

from benchmarks.serve.server import ROOT, free_port, machine
from benchmarks.soaking.judged import Clients, Known
from benchmarks.soaking.processes import Series, is_flat, sample
from rootgraft.api.cli.options import RemoteOptions
from rootgraft.api.cli.remote_server import RemoteServer

CLIENTS = 4
SAMPLE_SECONDS, WRITE_SECONDS = 5.0, 60.0
WARM_SECONDS = 600.0
LEAST_PAUSE, MOST_PAUSE = 0.1, 60.0
REST_SECONDS = 300.0
MOST_SLOPE = {"memory_mib": 2.0}
"""Growth an hour that is small whatever the interval says; 0.5 for all others."""
_GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "kv_cache_pages")


class Pacer:
    """Pauses between requests that lead to a share of a processor.

    Args:
        cores: the share that the server shall use.
    """

    def __init__(self, cores: float) -> None:
        self.pause = 2.0
        self._cores = cores
        self._last: tuple[float, float] | None = None

    def note(self, now: float, used: float) -> None:
        """Follow the processor seconds ``used`` until ``now``; processes that have ended make it smaller."""
        if self._last is not None and used > self._last[1]:
            share = (used - self._last[1]) / (now - self._last[0])
            change = min(1.2, max(0.85, share / self._cores))
            self.pause = min(MOST_PAUSE, max(LEAST_PAUSE, self.pause * change))
        self._last = now, used


@contextmanager
def serving(folder: Path, threads: int) -> Iterator[tuple[str, str, subprocess.Popen[bytes]]]:
    """Start a server with its files in a folder; it is killed if the block has not ended it.

    Yields:
        the URL of its API, the address of its gRPC port, and its process.
    """
    folder.mkdir()
    shutil.copytree(ROOT / "examples" / "adapters", folder / "adapters")
    port, grpc_port = free_port(), free_port()
    words = [sys.executable, "-m", "benchmarks.soaking.bounded_server", "api", str(folder)]
    words += [str(port), str(grpc_port), str(threads)]
    with (folder / "log").open("wb") as log, subprocess.Popen(words, stderr=log, cwd=ROOT) as process:
        try:
            yield f"http://127.0.0.1:{port}/v1", f"127.0.0.1:{grpc_port}", process
        except BaseException:
            print((folder / "log").read_text()[-4000:], file=sys.stderr)
            raise
        finally:
            process.kill()


async def until_ready(http: aiohttp.ClientSession, url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait until a server takes requests. Raises RuntimeError if it ends instead."""
    while process.poll() is None:
        try:
            async with http.get(f"{url.removesuffix('/v1')}/ready") as reply:
                if reply.status == 200:
                    return
        except aiohttp.ClientError:
            pass
        await asyncio.sleep(0.5)
    raise RuntimeError("the server has ended")


async def gauges(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Return requests that run and wait, and pages of KV in use."""
    async with http.get(f"{url.removesuffix('/v1')}/metrics") as reply:
        text = await reply.text()
    found = dict.fromkeys(_GAUGES, 0.0)
    for name, value in re.findall(r"^rootgraft:(\w+)(?:\{.*\})? (\S+)$", text, re.MULTILINE):
        if name in found:
            found[name] += float(value)
    pages = found.pop("kv_cache_usage_perc") * found.pop("kv_cache_pages")
    return {f"requests.{name}": value for name, value in found.items()} | {"kv.pages_in_use": pages}


class Soak:
    """One run and what it finds.

    Args:
        options: those of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._known = Known()
        self._series = Series()
        self._pacer = Pacer(options.cores)
        self._begin = time.monotonic()
        self._clients: Clients | None = None
        self._ends: dict[str, bool] = {}
        self._machine = machine()

    async def run(self, folder: Path) -> dict[str, Any]:
        """Learn what must come, then soak. Returns the report."""
        timeout = aiohttp.ClientTimeout(total=900)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
            with serving(folder / "alone", self._options.threads) as (url, address, process):
                await until_ready(http, url, process)
                async with (
                    RemoteServer.connect(RemoteOptions(url)) as server,
                    grpc.aio.insecure_channel(address) as rpc,
                ):
                    await Clients(server, http, rpc, url, folder / "alone" / "adapters", self._known).learn()
                self._ends["the server without load ended with code 0"] = await _end(process) == 0
            with serving(folder / "soaked", self._options.threads) as (url, address, process):
                await until_ready(http, url, process)
                async with (
                    RemoteServer.connect(RemoteOptions(url)) as server,
                    grpc.aio.insecure_channel(address) as rpc,
                ):
                    self._clients = Clients(server, http, rpc, url, folder / "soaked" / "adapters", self._known)
                    await self._load(http, url, psutil.Process(process.pid))
                self._ends["the server ended with code 0"] = await _end(process) == 0
            self._note_log(folder / "soaked" / "log")
        return self.report(is_over=True)

    async def _load(self, http: aiohttp.ClientSession, url: str, api: psutil.Process) -> None:
        self._begin = time.monotonic()
        end = self._begin + 60 * self._options.minutes
        assert self._clients is not None
        async with asyncio.TaskGroup() as group:
            group.create_task(self._watch(http, url, api, end))
            for seed in range(CLIENTS):
                group.create_task(self._ask(random.Random(seed), end))
        until = time.monotonic() + REST_SECONDS
        while any((rest := await gauges(http, url)).values()) and time.monotonic() < until:
            await asyncio.sleep(1)
        self._ends["no request and no page of one is left"] = not any(rest.values())
        async with http.post(f"{url}/chat/completions", json=_SIMPLE) as reply:
            self._ends["the next request is answered"] = reply.status == 200

    async def _ask(self, rng: random.Random, end: float) -> None:
        assert self._clients is not None
        while time.monotonic() < end:
            await self._clients.one(rng)
            await asyncio.sleep(rng.expovariate(1 / self._pacer.pause))

    async def _watch(self, http: aiohttp.ClientSession, url: str, api: psutil.Process, end: float) -> None:
        written = 0.0
        while (now := time.monotonic()) < end:
            held, used = await asyncio.to_thread(sample, api)
            self._pacer.note(now, used)
            self._series.add(now - self._begin, held | await gauges(http, url) | {"pause": self._pacer.pause})
            if now - written > WRITE_SECONDS:
                written = now
                write(self._options.output, self.report(is_over=False))
            await asyncio.sleep(SAMPLE_SECONDS)

    def _note_log(self, file: Path) -> None:
        lines = [json.loads(line) for line in file.read_bytes().splitlines() if line.startswith(b"{")]
        self._ends["no line of the log is an error"] = not any(line["level"] == "error" for line in lines)

    def report(self, *, is_over: bool) -> dict[str, Any]:
        """Return what was found so far."""
        assert self._clients is not None
        seconds = self._series.seconds[-1] if self._series.seconds else 0.0
        found = self._series.report(min(WARM_SECONDS, seconds / 4))
        found.pop("pause", None)
        flat = {
            f"{name} is flat": is_flat(each, MOST_SLOPE.get(name.partition(".")[2], 0.5))
            for name, each in found.items()
            if each["slope_per_hour"] is not None
        }
        counts = self._clients.counts
        holds = {"every answer is what it must be": not counts["wrong"]} | flat | self._ends
        return {
            "command": f"python -m benchmarks.soak_model --minutes {self._options.minutes:g} "
            f"--cores {self._options.cores:g} --threads {self._options.threads}",
            "machine": self._machine,
            "is_over": is_over,
            "minutes": round(seconds / 60, 1),
            "holds": holds,
            "judged": dict(sorted(counts.items())),
            "wrong": self._clients.wrong,
            "held": found,
        }


_SIMPLE = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


async def _end(process: subprocess.Popen[bytes]) -> int:
    process.send_signal(signal.SIGTERM)
    return await asyncio.to_thread(process.wait, 120)


def write(file: Path, report: dict[str, Any]) -> None:
    """Replace a file by a report, in one step; lists stand on one line."""
    text = json.dumps(report, indent=1)
    text = re.sub(r"\[\s+([-\d.,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    part = file.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(file)


def summary(report: dict[str, Any]) -> str:
    """Return a report's figures as lines, what holds and what does not at the end."""
    lines = [f"{report['minutes']} minutes, {'over' if report['is_over'] else 'under way'}: {report['judged']}"]
    lines += report["wrong"]
    lines += [
        f"{name:32} start {each['start']:8} most {each['most']:8} end {each['end']:8}"
        f"  slope an hour {each['slope_per_hour']} {each['interval_95']}"
        for name, each in report["held"].items()
    ]
    lines += [f"{'holds ' if held else 'MISSED'}  {name}" for name, held in report["holds"].items()]
    return "\n".join(lines)


def main() -> int:
    """Soak, or print what a file holds. Returns 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--cores", type=float, default=0.3, help="number of cores' processor time that the server uses")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--output", type=Path, default=Path("soak-model.json"))
    parser.add_argument("--summary", type=Path, help="print what a file holds, and end")
    options = parser.parse_args()
    if options.summary is not None:
        report = json.loads(options.summary.read_text())
    else:
        with tempfile.TemporaryDirectory() as name:
            report = asyncio.run(Soak(options).run(Path(name)))
        write(options.output, report)
    print(summary(report))
    return int(not all(report["holds"].values()))


if __name__ == "__main__":
    sys.exit(main())
