"""Kill one of two gateways of a server: new requests go through the other, and what runs behind is done exactly once.

    python -m benchmarks.fleet.gateways [--replicas 4] [--gateways 2] [--streams 8] [--kills 4] [--signal KILL]

Clients stream from the default model, each with a connection for each request, and compare each answer with what the
model said before. A prober asks for one token again and again, on a new connection each time, and tries again at once
where that breaks off. A batch and background responses run all along. Every so many seconds a gateway that has streams
is killed. Told are

- *takes over*: seconds from a kill until the answer to the first probe that began after it, and the longest of all
  probes that began within a second of a kill;
- streams broken off, which must be no more than the killed gateways had, and answers that differ, which must be none;
- whether the batch and the background responses were answered once each, and whether the usage ledger holds each
  finished request once, and each one that was cut off at most once.

Exit code 1 for anything wrong, or a probe that was not answered within a second on an idle machine (``--within``).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import json
import os
import shlex
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
import numpy as np

from benchmarks.serve.server import Server, machine

QUESTIONS = ("Tell me about the sea.", "What is a list?", "Name a colour.", "Why do leaves fall?")
START_SECONDS = 300.0
KEYS = ("streams", "probes", "behind")


@dataclass
class Run:
    """What happened.

    Attributes:
        probes: (begin, seconds) of each probe that was answered; of one that broke off, its retries included.
        kills: moments, each with the streams that the killed gateway had.
        back: seconds from each kill until all gateways served again.
    """

    expected: dict[int, str] = field(default_factory=dict)
    probes: list[tuple[float, float]] = field(default_factory=list)
    kills: list[tuple[float, int]] = field(default_factory=list)
    back: list[float] = field(default_factory=list)
    answers: int = 0
    different: int = 0
    broken: int = 0
    refused: Counter[int] = field(default_factory=Counter)
    ledger: dict[str, tuple[int, int]] = field(default_factory=dict)


def main() -> int:
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        report = asyncio.run(_measure(options, Path(folder)))
    print(json.dumps(report, indent=1))
    if options.output:
        arguments = {name: value for name, value in vars(options).items() if name != "output"}
        Path(options.output).write_text(json.dumps({"machine": machine(), "arguments": arguments, **report}, indent=1))
    return int(bool(report["wrong"]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--every", type=float, default=15.0, help="seconds between two kills")
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--lines", type=int, default=60, help="requests of the batch")
    parser.add_argument("--responses", type=int, default=4, help="background responses")
    parser.add_argument("--within", type=float, default=1.0, help="seconds in which each probe must be answered")
    parser.add_argument("--output", help="JSON file for the report")
    return parser.parse_args()


def _client(url: str, key: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_keepalive_connections=0)  # a connection for each request
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(base_url=url, headers=headers, timeout=120, trust_env=False, limits=limits)


async def _measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    keys = [{"name": key, "sha256": _digest(key), "scopes": ["inference", "admin"]} for key in KEYS]
    (folder / "keys.json").write_text(json.dumps({"keys": keys}))
    words = [sys.executable, "-P", "-m", "rootgraft.api.cli.main", "serve", "--threads", "1", "--log-level", "warning"]
    words += ["--kv-cache-memory", "0.25", "--replicas", str(options.replicas), "--gateways", str(options.gateways)]
    words += ["--api-key-file", str(folder / "keys.json"), "--usage-ledger", str(folder / "usage.sqlite")]
    words += ["--batch-dir", str(folder / "batches")]
    run = Run()
    with Server(shlex.join(words) + " --port {port}").running() as (url, process):
        base = url.removesuffix("/v1")
        async with _client(base, "streams") as http, _client(base, "behind") as behind:
            await _wait_ready(http, options)
            for number in range(len(QUESTIONS)):
                run.expected[number] = str(await _stream(http, number, options.tokens))
            batch, responses = await _begin_behind(behind, options)
            ended = asyncio.Event()
            clients = [
                asyncio.create_task(_keep_asking(http, run, seed, options, ended)) for seed in range(options.streams)
            ]
            prober = asyncio.create_task(_probe(base, run, ended))
            await asyncio.sleep(options.every / 3)
            for _ in range(options.kills):
                await _kill(http, run, options)
            ended.set()
            await asyncio.gather(*clients, prober)
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


async def _wait_ready(http: httpx.AsyncClient, options: argparse.Namespace) -> None:
    """Wait until all gateways serve. Raises TimeoutError."""
    async with asyncio.timeout(START_SECONDS):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await http.get("/ready")).status_code == 200 and await _all_serve(http, options):
                    return
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


def _report(
    run: Run, options: argparse.Namespace, done: dict[str, Any], fleet: dict[str, Any], code: int
) -> dict[str, Any]:
    taken_over = [
        min(begin + took for begin, took in run.probes if begin >= killed) - killed for killed, _ in run.kills
    ]
    near = [took for killed, _ in run.kills for begin, took in run.probes if killed - took <= begin < killed + 1]
    calm = [took for begin, took in run.probes if begin < run.kills[0][0] - 1]
    is_once = done["lines"] == Counter(map(str, range(options.lines)))
    behind = options.lines + options.responses, done["tokens"]
    streams, first = run.ledger["streams"][0], len(QUESTIONS)
    wrong = {
        "answers that differ": run.different,
        "more streams broken off than the killed gateways had": max(0, run.broken - sum(had for _, had in run.kills)),
        "requests refused": dict(run.refused),
        "the batch was not answered once": not is_once,
        "a background response did not come to its last token": done["statuses"] != ["incomplete"] * options.responses,
        "the ledger of batch and responses": run.ledger["behind"] != behind and [run.ledger["behind"], behind],
        "the ledger of streams": not run.answers + first <= streams <= run.answers + run.broken + first,
        "the ledger of probes": run.ledger["probes"][0] < len(run.probes),
        "gateways lost": fleet["gateways"]["lost"] != options.kills,
        "replicas lost": fleet["lost"],
        "exit code": code,
        "a probe took longer than allowed": options.signal == "KILL" and max(near) > options.within,
    }
    return {
        "wrong": {what: found for what, found in wrong.items() if found},
        "kills": len(run.kills),
        "takes_over_s": [round(each, 3) for each in taken_over],
        "probe_near_a_kill_s": _percentiles(near),
        "probe_before_s": _percentiles(calm),
        "all_serve_again_s": [round(each, 2) for each in run.back],
        "streams": run.answers,
        "streams_broken_off": run.broken,
        "killed_gateways_had": [had for _, had in run.kills],
        "ledger": run.ledger,
    }


def _percentiles(values: list[float]) -> dict[str, float]:
    p50, p99 = np.percentile(values, (50, 99))
    return {
        "p50": round(float(p50), 3),
        "p99": round(float(p99), 3),
        "longest": round(max(values), 3),
        "n": len(values),
    }


if __name__ == "__main__":
    sys.exit(main())
