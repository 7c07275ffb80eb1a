"""Kill one of two gateways of a server: new requests go through the other, and what runs behind is done exactly once.

    python -m benchmarks.fleet.gateways [--kills 4] [--signal KILL] [--output gateways.json]

Clients stream from the default model, each with a connection for each request, and compare each answer with what the
model said before. A prober asks for one token again and again, on a new connection each time, and tries again at once
where that breaks off. A batch and background responses run all along. Every so many seconds a gateway that has streams
is killed. Told are

- *takes over*: seconds from a kill until the answer to a probe that began after it, and the longest of all probes that
  were under way then, or began within a second; beside them by how much a short sleep of the prober was too long, which
  tells whether other processes kept all of this from the processor;
- streams broken off, which must be no more than the killed gateways had, and answers that differ, which must be none;
- whether the batch and the background responses were answered once each, and whether the usage ledger holds each
  finished request once, and each one that was cut off at most once.

Exit code 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

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
from benchmarks.serve.server import Server

QUESTIONS = ("Tell me about the sea.", "What is a list?", "Name a colour.", "Why do leaves fall?")
MOST_SECONDS = 1.0
"""For a new request to be answered through another gateway."""
NAP_SECONDS = 0.05
KEYS = ("streams", "probes", "behind")


@dataclass
class Run:
    """Results of a run.

    Attributes:
        probes: (begin, seconds) of each probe that was answered; of one that broke off, its retries included.
        kills: moments, each with the streams that the killed gateway had.
        back: seconds from each kill until all gateways served again.
        naps: (begin, seconds by which it was too long) of each short sleep of this process.
    """

    expected: dict[int, str] = field(default_factory=dict)
    probes: list[tuple[float, float]] = field(default_factory=list)
    kills: list[tuple[float, int]] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    naps: list[tuple[float, float]] = field(default_factory=list)
    answers: int = 0
    different: int = 0
    broken: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    ledger: dict[str, tuple[int, int]] = field(default_factory=dict)


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--replicas", type=int, default=4)
    made.add_argument("--gateways", type=int, default=2)
    made.add_argument("--streams", type=int, default=8)
    made.add_argument("--tokens", type=int, default=48)
    made.add_argument("--kills", type=int, default=4)
    made.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    made.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    made.add_argument("--lines", type=int, default=60, help="requests of the batch")
    made.add_argument("--responses", type=int, default=4, help="background responses")
    options = made.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        limit = 3 * START_SECONDS + 2 * options.kills * options.every
        return int(run_within(limit, _measure(options, Path(folder))))


def _client(url: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_keepalive_connections=0)  # a connection for each request
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False, limits=limits)


async def _measure(options: argparse.Namespace, folder: Path) -> int:
    keys = [{"name": key, "sha256": _digest(key), "scopes": ["inference", "admin"]} for key in KEYS]
    (folder / "keys.json").write_text(json.dumps({"keys": keys}))
    fleet_options = ["--replicas", str(options.replicas), "--gateways", str(options.gateways)]
    stores = ["--usage-ledger", str(folder / "usage.sqlite"), "--batch-dir", str(folder / "batches")]
    command = serve_command(*fleet_options, *stores, "--api-key-file", str(folder / "keys.json"))
    run = Run()
    with Server(command).running() as (url, process):
        await asyncio.to_thread(wait_ready, url, process)
        base = url.removesuffix("/v1")
        async with _client(base, "streams") as http, _client(base, "behind") as behind:
            await _until_all_serve(http, options)
            for number in range(len(QUESTIONS)):
                run.expected[number] = str(await _stream(http, number, options.tokens))
            batch, responses = await _begin_behind(behind, options)
            ended = asyncio.Event()
            clients = [
                asyncio.create_task(_keep_asking(http, run, seed, options, ended)) for seed in range(options.streams)
            ]
            prober = asyncio.create_task(_probe(base, run, ended))
            sleeper = asyncio.create_task(_nap(run, ended))
            await asyncio.sleep(options.every / 3)
            for _ in range(options.kills):
                await _kill(http, run, options)
            ended.set()
            await asyncio.gather(*clients, prober, sleeper)
            done = await _end_behind(behind, batch, responses)
            fleet = (await http.get("/v1/fleet")).json()
        assert process is not None
        process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(process.wait, 60)
    with sqlite3.connect(folder / "usage.sqlite") as database:
        counted = "SELECT key, sum(requests), sum(completion_tokens) FROM usage GROUP BY key"
        run.ledger = {key: (requests, tokens) for key, requests, tokens in database.execute(counted)}
    return _report(run, options, done, fleet, code)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def _until_all_serve(http: httpx.AsyncClient, options: argparse.Namespace) -> None:
    while not await _all_serve(http, options):
        await asyncio.sleep(0.2)


async def _all_serve(http: httpx.AsyncClient, options: argparse.Namespace) -> bool:
    states = [each["state"] for each in (await http.get("/v1/fleet")).json()["gateways"]["data"]]
    return states == ["serving"] * options.gateways


async def _stream(http: httpx.AsyncClient, number: int, tokens: int) -> str | int:
    """Return the answer to a question, or the status of a refusal. Raises httpx.TransportError where it breaks off."""
    body = {"messages": [{"role": "user", "content": QUESTIONS[number]}], "max_tokens": tokens, "temperature": 0}
    text, is_whole = "", False
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as reply:
        if reply.status_code != 200:
            return reply.status_code
        async for line in reply.aiter_lines():
            is_whole = is_whole or line == "data: [DONE]"
            if line.startswith("data: {"):
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
    if not is_whole:
        raise httpx.ReadError("the stream has no end")
    return text


async def _keep_asking(
    http: httpx.AsyncClient, run: Run, seed: int, options: argparse.Namespace, ended: asyncio.Event
) -> None:
    number = seed
    while not ended.is_set():
        number = (number + 1) % len(QUESTIONS)
        try:
            answer = await _stream(http, number, options.tokens)
        except httpx.TransportError:
            run.broken += 1
            continue
        if isinstance(answer, int):
            run.refused[answer] += 1
            continue
        run.answers += 1
        run.different += answer != run.expected[number]


async def _probe(url: str, run: Run, ended: asyncio.Event) -> None:
    """Ask for one token again and again, each on a new connection."""
    async with _client(url, "probes") as http:
        while not ended.is_set():
            began = time.monotonic()
            while True:
                with contextlib.suppress(httpx.TransportError):
                    reply = await http.post("/v1/completions", json={"prompt": "1, 2,", "max_tokens": 1})
                    if reply.status_code == 200:
                        break
                    run.refused[reply.status_code] += 1
            run.probes.append((began, time.monotonic() - began))
            await asyncio.sleep(0.05)


async def _nap(run: Run, ended: asyncio.Event) -> None:
    """Measure how late this process gets the processor."""
    while not ended.is_set():
        began = time.monotonic()
        await asyncio.sleep(NAP_SECONDS)
        run.naps.append((began, time.monotonic() - began - NAP_SECONDS))


async def _kill(http: httpx.AsyncClient, run: Run, options: argparse.Namespace) -> None:
    before = (await http.get("/v1/fleet")).json()["gateways"]
    victim = max(before["data"], key=lambda each: each["active"])
    os.kill(int(victim["place"].removeprefix("process ")), signal.Signals[f"SIG{options.signal}"])
    killed = time.monotonic()
    run.kills.append((killed, victim["active"]))
    while True:
        with contextlib.suppress(httpx.TransportError):
            fleet = (await http.get("/v1/fleet")).json()["gateways"]
            if fleet["lost"] > before["lost"] and await _all_serve(http, options):
                break
        await asyncio.sleep(0.1)
    run.back.append(time.monotonic() - killed)
    await asyncio.sleep(max(0.0, killed + options.every - time.monotonic()))


async def _begin_behind(http: httpx.AsyncClient, options: argparse.Namespace) -> tuple[str, list[str]]:
    """Begin a batch and background responses. Returns their ids."""
    body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 32, "ignore_eos": True}
    request = {"method": "POST", "url": "/v1/chat/completions", "body": body}
    lines = "\n".join(json.dumps({"custom_id": str(number), **request}) for number in range(options.lines))
    uploaded = await http.post("/v1/files", files={"file": ("in.jsonl", lines)}, data={"purpose": "batch"})
    asked = {"input_file_id": uploaded.json()["id"], "endpoint": request["url"], "completion_window": "24h"}
    batch = (await http.post("/v1/batches", json=asked)).json()["id"]
    asked = {"input": QUESTIONS[1], "background": True, "max_output_tokens": 64, "ignore_eos": True}
    responses = [(await http.post("/v1/responses", json=asked)).json()["id"] for _ in range(options.responses)]
    return batch, responses


async def _end_behind(http: httpx.AsyncClient, batch: str, responses: list[str]) -> dict[str, Any]:
    """Wait for the batch and the responses. Returns what they hold."""
    while (found := (await http.get(f"/v1/batches/{batch}")).json())["status"] not in ("completed", "failed"):
        await asyncio.sleep(0.2)
    output = (await http.get(f"/v1/files/{found['output_file_id']}/content")).text.splitlines()
    bodies = [(await http.get(f"/v1/responses/{each}")).json() for each in responses]
    return {
        "lines": Counter(json.loads(line)["custom_id"] for line in output),
        "tokens": sum(json.loads(line)["response"]["body"]["usage"]["completion_tokens"] for line in output)
        + sum(body["usage"]["output_tokens"] for body in bodies),
        "statuses": [body["status"] for body in bodies],
    }


def _report(run: Run, options: argparse.Namespace, done: dict[str, Any], fleet: dict[str, Any], code: int) -> int:
    taken_over = [
        min(begin + took for begin, took in run.probes if begin >= killed) - killed for killed, _ in run.kills
    ]
    near = [took for killed, _ in run.kills for begin, took in run.probes if killed - took <= begin < killed + 1]
    calm = [took for begin, took in run.probes if begin < run.kills[0][0] - 1]
    is_once = done["lines"] == Counter(map(str, range(options.lines)))
    behind = options.lines + options.responses, done["tokens"]
    streams, first = run.ledger["streams"][0], len(QUESTIONS)
    is_counted = run.answers + first <= streams <= run.answers + run.broken + first
    figures = [
        Figure.exactly("answers that differ", run.different, 0),
        Figure.most("streams broken off", run.broken, sum(had for _, had in run.kills)),
        Figure.exactly("requests refused", dict(run.refused), {}),
        Figure.exactly("the batch was answered once", is_once, True),
        Figure.exactly("background responses", done["statuses"], ["incomplete"] * options.responses),
        Figure.exactly("ledger of batch and responses", run.ledger["behind"], behind),
        Figure.exactly("ledger has each stream once", is_counted, True),
        Figure.least("ledger of probes", run.ledger["probes"][0], len(run.probes)),
        Figure.exactly("gateways lost", fleet["gateways"]["lost"], options.kills),
        Figure.exactly("replicas lost", fleet["lost"], 0),
        Figure.exactly("exit code", code, 0),
    ]
    if options.signal == "KILL":
        figures.append(Figure.most("new requests go through another, longest, s", max(taken_over), MOST_SECONDS))
    more = {
        "kills": len(run.kills),
        "takes_over_s": [round(each, 3) for each in taken_over],
        "probe_near_a_kill_s": percentiles(near),
        "probe_before_s": percentiles(calm),
        "all_serve_again_s": [round(each, 2) for each in run.back],
        "prober_late_s": [
            round(max(late for begin, late in run.naps if killed <= begin < killed + 2 * MOST_SECONDS), 3)
            for killed, _ in run.kills
        ],
        "prober_late_before_s": round(max(late for begin, late in run.naps if begin < run.kills[0][0]), 3),
        "streams": run.answers,
        "killed_gateways_had": [had for _, had in run.kills],
        "ledger": run.ledger,
    }
    return finish(options, figures, more)


if __name__ == "__main__":
    sys.exit(main())
