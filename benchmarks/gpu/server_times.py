"""The server over HTTP with its defaults: latencies by number of clients, then adapters that come and go, and memory.

Random weights in the shape of Llama-3.2-1B, whose steps are so short that the host's part shows. What the server needs
and this machine lacks is said in the results, and the part is left out.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import torch

from benchmarks.gpu.measure import Line, Machine

NEEDS = ("aiohttp", "msgpack", "numpy", "orjson", "psutil", "safetensors", "tokenizers", "uvloop")
RANK = 16
START_SECONDS = 200.0
LEVEL_SECONDS = 120.0


@dataclass(frozen=True)
class Load:
    """Requests that the server gets."""

    clients: tuple[int, ...]
    prompt: int
    answer: int
    adapters: int
    slots: int
    rounds: int  # Rounds of loading and unloading adapters.


FULL = Load((1, 32, 128), prompt=512, answer=128, adapters=64, slots=8, rounds=3)
SHORT = Load((1, 2), prompt=4, answer=3, adapters=3, slots=2, rounds=2)


def run(machine: Machine) -> Iterator[Line]:
    """Milliseconds between tokens at each number of clients, and bytes that the device lost."""
    if missing := [name for name in NEEDS if importlib.util.find_spec(name) is None]:
        yield Line("server", "server", 0.0, "ms", note=f"left out: no {', '.join(missing)} here")
        return
    from benchmarks.gpu.adapter_files import write_adapter
    from benchmarks.gpu.checkpoint_files import write_model
    from benchmarks.gpu.engine_runs import LLAMA_1B, TINY
    from benchmarks.serve.server import Server

    shape, load = (TINY, SHORT) if machine.tiny else (LLAMA_1B, FULL)
    with tempfile.TemporaryDirectory() as name:
        folder = write_model(Path(name) / "model", shape, machine)
        adapters = [
            f"adapter-{i}={write_adapter(Path(name) / f'adapter-{i}', shape, RANK, seed=i, machine=machine)}"
            for i in range(load.adapters)
        ]
        words = [sys.executable, "-m", "rootgraft", "serve", str(folder), "--port", "{port}", "--enable-lora"]
        words += ["--max-loras", str(load.slots), "--device", machine.device.type, "--lora-modules", *adapters]
        if not machine.tiny:
            torch.cuda.empty_cache()  # what made the weights is the server's now
        server = Server(" ".join(words))
        with server.running() as (url, process):
            try:
                wait_for(url, process)
                yield from levels(url, load)
                yield from churn(url, load, machine)
            except Exception as error:
                error.add_note(f"The server's last lines:\n{server.log_tail()}")
                raise


def wait_for(url: str, process: subprocess.Popen[bytes] | None) -> None:
    """Wait until the server is ready: it tells its models while it still loads them.

    Raises:
        RemoteError: it is not in time, or has ended.
    """
    from rootgraft.api.cli.remote_server import RemoteError

    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process is not None and process.poll() is not None:
            raise RemoteError("not reachable", f"the server ended with code {process.returncode}")
        try:
            with urlopen(f"{url.removesuffix('/v1')}/ready", timeout=5):
                return
        except (URLError, OSError):
            time.sleep(0.2)
    raise RemoteError("not reachable", f"no answer from {url} within {START_SECONDS:g} s")


def levels(url: str, load: Load) -> Iterator[Line]:
    for level in sweep(url, load, load.clients):
        yield from lines(f"{level['clients']} clients", level["figures"])


def churn(url: str, load: Load, machine: Machine) -> Iterator[Line]:
    """Rounds of requests for more adapters than there are slots: latencies of the last, and what the device lost."""
    mix = ("--mix", "adapters", "--adapters", *(f"adapter-{i}" for i in range(load.adapters)))
    clients = load.clients[1]
    free = []
    figures: dict[str, Any] = {}
    for _ in range(load.rounds):
        [level] = sweep(url, load, (clients,), *mix, "--num-prompts", str(2 * (load.adapters + 1)))
        figures = level["figures"]
        free.append(0 if machine.tiny else torch.cuda.mem_get_info()[0])
    yield from lines(f"{clients} clients, {load.adapters} adapters in {load.slots} slots", figures)
    yield Line("server", "memory lost by the last rounds", (free[0] - free[-1]) / 2**20, "MiB")


def sweep(url: str, load: Load, clients: Sequence[int], *more: str) -> list[dict[str, Any]]:
    """Return the levels that ``rootgraft bench serve --sweep`` measures.

    Raises:
        RuntimeError: it fails, or takes too long.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as out:
        words = [sys.executable, "-m", "rootgraft", "bench", "serve", "--url", url, "--endpoint", "completions"]
        words += ["--sweep", ",".join(map(str, clients)), "--input-len", str(load.prompt), "--ignore-eos"]
        words += ["--output-len", str(load.answer), "--output-json", out.name, *more]
        done = subprocess.run(words, capture_output=True, text=True, timeout=LEVEL_SECONDS, check=False)
        if done.returncode:
            raise RuntimeError(f"bench serve ended with code {done.returncode}: {done.stderr[-2000:]}")
        found: list[dict[str, Any]] = json.loads(Path(out.name).read_text())["levels"]
    return found


def lines(name: str, figures: dict[str, Any]) -> Iterator[Line]:
    """Yield what decides of a level: times of tokens, their ratio, throughput, and the requests that failed."""
    between, first = figures["itl_ms"], figures["ttft_ms"]
    yield Line("server", f"{name}: time to first token, p50", first["p50"], "ms", note=f"p99 {first['p99']:.4g} ms")
    yield Line("server", f"{name}: between tokens, p50", between["p50"], "ms", note=f"p99 {between['p99']:.4g} ms")
    yield Line("server", f"{name}: p99 of it against p50", between["p99"] / between["p50"], "times")
    yield Line("server", f"{name}: tokens", figures["output_tokens_per_s"], "1/s")
    failed = figures["requests"] - figures["completed"]
    yield Line("server", f"{name}: requests that failed", failed, "requests", note=json.dumps(figures["errors"]))
