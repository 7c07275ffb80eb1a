"""Measure goodput and times to the first token with five times the load that the server can carry.

    python -m benchmarks.overload [--output FILE.json]

The server is the real one, over HTTP, with the real scheduler and cache; only the device is simulated: a step takes
``STEP`` seconds and ``PER_TOKEN`` for each of its tokens, in which it sleeps. So the figures are those of the policy,
on any machine. In order: the peak (closed loop), 0.9 times the peak (Poisson arrivals) with the default limits, then
five times the peak with ``--max-queue-seconds`` set to the 99th percentile of time to first token just seen, from one
tenant, and from two of which one asks ten times as much as the other. At last, how long wrong requests take.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import random
import socket
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
import uvloop

from benchmarks.computed_step import ComputedStep
from benchmarks.serve.server import machine
from rootgraft.api.config import ServerConfig
from rootgraft.api.generate.model_engine import ModelEngine
from rootgraft.api.generate.server_state import ServerState
from rootgraft.api.http.app import create_app
from rootgraft.api.http.connection import uvicorn_options
from rootgraft.api.observe.metrics import Metrics
from rootgraft.engine.batch import Batch, RowResult, StepHandle, StepResult
from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.config import EngineConfig
from rootgraft.engine.core.engine_core import EngineCore
from rootgraft.engine.kv_cache.state_cache import StateSlots
from rootgraft.engine.messages import Abort, Message, Submit
from rootgraft.engine.serving.async_engine import AsyncEngine
from rootgraft.engine.text.tokenizer import Tokenizer
from rootgraft.engine.types import Pooler
from rootgraft.lora.adapter_pool import AdapterPool
from rootgraft.radix.namespace import ENDLESS

STEP, PER_TOKEN = 0.020, 0.00005
ROWS, BUDGET, PAGES = 16, 512, 4096
PROMPT, ANSWER = 128, 32
WORD = 500  # the token of all answers


class SimulatedWorker:
    """A device on which every answer is the same word."""

    num_pages, max_model_len, vocab_size = PAGES, 8192, 1000
    eos_ids: tuple[int, ...] = ()
    summary: tuple[str, ...] = ("simulated",)
    base_digest = "simulated"
    adapters: AdapterPool | None = None
    states: StateSlots | None = None
    draft = kv_pages = None
    pooler = Pooler()
    rope_switch = ENDLESS
    overlaps = False

    def close(self) -> None:
        """Nothing computes beside it."""

    def free_memory(self) -> None:
        pass

    def launch(self, batch: Batch) -> StepHandle:
        """Compute nothing; the time is spent by ``SimulatedClient``, which must not block its loop."""
        result = StepResult(tuple(RowResult((WORD,) if row.draws else ()) for row in batch.rows))
        return ComputedStep(batch, result)


class SimulatedClient:
    """An ``EngineClient`` whose engine lives in the same event loop."""

    is_alive = True
    death = None
    silent_seconds = 0.0
    adapters: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        config = EngineConfig(max_num_seqs=ROWS, max_num_batched_tokens=BUDGET)
        self.core = EngineCore(config, SimulatedWorker())
        self.stats: dict[str, float] = {}  # Statistics of the last step.
        self.on_frame: Any = None
        self.on_death: Any = None
        self._wake = asyncio.Event()

    def submit(self, submits: list[Submit]) -> None:
        self._tell(*submits)

    def abort(self, ids: list[int]) -> None:
        self._tell(Abort(tuple(ids)))

    def _tell(self, *messages: Message) -> None:
        self.core.handle(messages)
        self._wake.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        free_at = loop.time()
        while True:
            if not self.core.has_work:
                self._wake.clear()
                await self._wake.wait()
                free_at = loop.time()
            before = self.core.stats()["computed_tokens"]
            messages = self.core.step()
            free_at += STEP + PER_TOKEN * (self.core.stats()["computed_tokens"] - before)
            await asyncio.sleep(max(0.0, free_at - loop.time()))
            self.stats = self.core.stats()
            self.on_frame(messages)


def serve(sock: socket.socket, options: ServerConfig, tokenizer: Tokenizer, up: Any) -> None:
    """A server process, until it is killed."""

    async def main() -> None:
        client: Any = SimulatedClient()
        state = ServerState(
            options, Metrics("simulated", dict), names=("simulated",), engine=ModelEngine(options, client)
        )
        state.engine.async_engine = AsyncEngine(client, tokenizer, client.core.ready)
        server = uvicorn.Server(uvicorn.Config(create_app(state), **uvicorn_options()))
        engine = asyncio.create_task(client.run())
        up.set()
        await server.serve([sock])
        engine.cancel()

    uvloop.run(main())


class Served:
    """A server process with these options, while the ``with`` lasts."""

    def __init__(self, tokenizer: Tokenizer, **options: Any) -> None:
        self._tokenizer = tokenizer
        self._options = ServerConfig(log_level="error", **options)

    def __enter__(self) -> str:
        sock = socket.create_server(("127.0.0.1", 0))
        context = multiprocessing.get_context("fork")
        up = context.Event()
        self._process = context.Process(target=serve, args=(sock, self._options, self._tokenizer, up), daemon=True)
        self._process.start()
        up.wait()
        port = sock.getsockname()[1]
        sock.close()
        return f"http://127.0.0.1:{port}"

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()


@dataclass
class Asked:
    """One request: when it was sent, its first token, its end, its status."""

    sent: float
    tenant: str
    first: float | None = None
    ended: float = 0.0
    status: int = 0
    retry_after: bool = False


async def ask(session: aiohttp.ClientSession, url: str, tenant: str, rng: random.Random) -> Asked:
    """Send a request with a prompt of its own and read its stream."""
    prompt = [rng.randrange(1000) for _ in range(PROMPT)]
    body = {"prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "stream": True}
    asked = Asked(time.perf_counter(), tenant)
    headers = {"authorization": f"Bearer {tenant}"}
    async with session.post(f"{url}/v1/completions", json=body, headers=headers) as reply:
        asked.status = reply.status
        asked.retry_after = "retry-after" in reply.headers
        async for _ in reply.content.iter_any():
            asked.first = asked.first or (time.perf_counter() if reply.status == 200 else None)
    asked.ended = time.perf_counter()
    return asked


async def closed_loop(url: str, clients: int, seconds: float) -> list[Asked]:
    """Run clients that each wait for their answer before they send the next request."""
    rng, done = random.Random(0), []
    end = time.perf_counter() + seconds

    async def client(session: aiohttp.ClientSession) -> None:
        while time.perf_counter() < end:
            done.append(await ask(session, url, "-", rng))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(client(session) for _ in range(clients)))
    return done


async def open_loop(url: str, rates: dict[str, float], seconds: float) -> list[Asked]:
    """Requests of each tenant at its rate, whatever becomes of the earlier ones."""
    rng = random.Random(1)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def tenant(name: str, rate: float) -> list[Asked]:
            tasks, at = [], time.perf_counter()
            end = at + seconds
            while at < end:
                at += rng.expovariate(rate)
                await asyncio.sleep(at - time.perf_counter())
                tasks.append(asyncio.create_task(ask(session, url, name, rng)))
            return await asyncio.gather(*tasks)

        return [
            each for several in await asyncio.gather(*(tenant(*item) for item in rates.items())) for each in several
        ]


def goodput(done: list[Asked], start: float, end: float, tenant: str | None = None) -> float:
    """Answers a second that ended between these times."""
    ended = [each for each in done if each.status == 200 and start <= each.ended < end]
    return sum(tenant is None or each.tenant == tenant for each in ended) / (end - start)


def figures(done: list[Asked], seconds: float, warm: float) -> dict[str, Any]:
    """Return the figures of the time after the first ``warm`` seconds."""
    begin = min(each.sent for each in done)
    start, end = begin + warm, begin + seconds
    seen = [each for each in done if start <= each.sent < end]
    taken = [each for each in seen if each.status == 200 and each.first is not None]
    refused = [each for each in seen if each.status != 200]
    waits = sorted(each.first - each.sent for each in taken if each.first is not None)
    return {
        "asked_per_second": round(len(seen) / (end - start), 2),
        "answered_per_second": round(goodput(done, start, end), 2),
        "ttft_p50_seconds": round(waits[len(waits) // 2], 3),
        "ttft_p99_seconds": round(waits[int(len(waits) * 0.99)], 3),
        "refused": {
            str(status): sum(each.status == status for each in refused)
            for status in sorted({each.status for each in refused})
        },
        "refused_without_retry_after": sum(not each.retry_after for each in refused),
        "refusal_p50_ms": round(1000 * statistics.median(each.ended - each.sent for each in refused), 2)
        if refused
        else None,
    }


WRONG = {
    "a number out of its bounds": b'{"prompt": "x", "temperature": 3}',
    "a token out of the vocabulary": b'{"prompt": [1, -1]}',
    "an unknown field": b'{"prompt": "x", "foo": 1}',
    "NaN": b'{"prompt": "x", "temperature": NaN}',
    "100,000 open brackets": b"[" * 100_000,
    "10,000 stop strings": json.dumps({"prompt": "x", "stop": ["a"] * 10_000}).encode(),
    "a prompt of a million characters": json.dumps({"prompt": "x" * 1_000_000}).encode(),
}


async def wrong_requests(url: str, count: int) -> dict[str, float]:
    """The median of milliseconds until a wrong request is refused, one after the other, by its kind and of all."""
    medians, every = {}, []
    async with aiohttp.ClientSession(headers={"content-type": "application/json"}) as session:
        for kind, body in WRONG.items():
            times = []
            for _ in range(count):
                start = time.perf_counter()
                async with session.post(f"{url}/v1/completions", data=body) as reply:
                    await reply.read()
                    assert reply.status == 400, await reply.text()
                times.append(1000 * (time.perf_counter() - start))
            medians[kind] = round(statistics.median(times), 2)
            every += times
    return {"median_ms": round(statistics.median(every), 2), **medians}


def keys_of(names: tuple[str, ...], folder: str) -> str:
    """A file with a key of each name, which reads as its name."""
    file = Path(folder) / "keys.json"
    entries = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in names]
    file.write_text(json.dumps({"keys": entries}))
    return str(file)


def measure(scale: float) -> dict[str, Any]:
    """All parts; ``scale`` stretches their times."""
    warm = 4.0 * scale
    tokenizer = Tokenizer.load(resolve_model(None).path)
    with Served(tokenizer) as url:
        seconds = 12.0 * scale
        peak = figures(asyncio.run(closed_loop(url, 3 * ROWS, seconds)), seconds, warm)
        capacity = peak["answered_per_second"]
        seconds = 24.0 * scale
        below = figures(asyncio.run(open_loop(url, {"-": 0.9 * capacity}, seconds)), seconds, warm)
        wrong = asyncio.run(wrong_requests(url, 20))
    allowed = below["ttft_p99_seconds"]
    seconds = 14.0 * scale
    with Served(tokenizer, max_queue_seconds=allowed) as url:
        above = figures(asyncio.run(open_loop(url, {"-": 5 * capacity}, seconds)), seconds, warm)
    with tempfile.TemporaryDirectory() as folder:
        file = keys_of(("many", "few"), folder)
        with Served(tokenizer, max_queue_seconds=allowed, max_queued_requests=64, api_key_file=file) as url:
            rates = {"many": 5 * capacity * 10 / 11, "few": 5 * capacity / 11}
            done = asyncio.run(open_loop(url, rates, seconds))
        start = min(each.sent for each in done)
        shares = {name: goodput(done, start + warm, start + seconds, name) for name in rates}
    return {
        "peak": peak,
        "at_0.9": below,
        "max_queue_seconds": allowed,
        "at_5": above,
        "goodput_at_5_of_peak": round(above["answered_per_second"] / capacity, 3),
        "ttft_p99_at_5_of_0.9": round(above["ttft_p99_seconds"] / below["ttft_p99_seconds"], 3),
        "two_tenants_at_5": {
            "asked_per_second": {name: round(rate, 2) for name, rate in rates.items()},
            "answered_per_second": {name: round(rate, 2) for name, rate in shares.items()},
        },
        "wrong_requests": wrong,
    }


def main() -> None:
    """Measure, print, and write the file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--scale", type=float, default=1.0, help="stretches all times (default: 1)")
    options = parser.parse_args()
    command = f"python -m benchmarks.overload --scale {options.scale}"
    setup = {
        "step_seconds": STEP, "seconds_per_token": PER_TOKEN, "rows": ROWS, "prompt_tokens": PROMPT,
        "answer_tokens": ANSWER, "scale": options.scale,
    }  # fmt: skip
    document = {"command": command, "machine": machine(), "setup": setup, "figures": measure(options.scale)}
    text = json.dumps(document, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")


if __name__ == "__main__":
    main()
