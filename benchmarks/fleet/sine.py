"""Autoscaling under a sine: from one replica's load to three and back, and from none at first.

    python -m benchmarks.fleet.sine [--seconds 600] [--most 3] [--rows 8] [--output sine.json]

A server with ``--autoscale 0:MOST`` whose replicas take so many sequences has been idle for a minute, so that none
runs. Clients then follow a sine of one period with as many streams at a time as one to ``--most`` replicas are meant to
have. Told are the wait for the first answer, scale events, streams that failed or differ from the first answer to the
same prompt, and how long each new replica took. Exit code 1 for a broken stream or more than four events after the
first start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import shlex
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.fleet.mixed_requests import Answer, ask
from benchmarks.serve.server import Server, machine
from rootgraft.api.cli.options import RemoteOptions
from rootgraft.api.cli.remote_server import RemoteError, RemoteServer

MOST_EVENTS = 4
PROMPTS = 24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the sine's period")
    parser.add_argument("--most", type=int, default=3)
    parser.add_argument("--rows", type=int, default=8, help="sequences that a replica is meant to have")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--output", help="JSON file for the report")
    options = parser.parse_args()
    report = asyncio.run(_measure(options))
    print(json.dumps(report, indent=1))
    if options.output:
        document = {"machine": machine(), "arguments": vars(options), **report}
        Path(options.output).write_text(json.dumps(document, indent=1) + "\n")
    broken = report["failed"] or report["different"]
    return int(bool(broken) or report["events"] > MOST_EVENTS + 1)


async def _measure(options: argparse.Namespace) -> dict[str, Any]:
    words = [sys.executable, "-P", "-m", "rootgraft.api.cli.main", "serve", "--autoscale", f"0:{options.most}"]
    words += ["--threads", "1", "--kv-cache-memory", "0.25", "--max-num-seqs", str(2 * options.rows)]
    with Server(shlex.join([*words, "--log-level", "warning"]) + " --port {port}").running() as (url, process):
        async with RemoteServer.connect(RemoteOptions(url, None, "-")) as server:
            await _until_none_runs(server, process)
        began = time.monotonic()
        async with RemoteServer.connect(RemoteOptions(url)) as server:
            first = await ask(server, _body(0, options.tokens))
            held = first.arrivals[0] - began if first.arrivals else math.inf
            return {"held_s": round(held, 2), **await _follow(server, options)}


async def _until_none_runs(server: RemoteServer, process: Any) -> None:
    while process.poll() is None:
        with suppress(RemoteError):
            fleet = await server.get("fleet")
            if not fleet["wanted"] and not fleet["data"]:
                return
        await asyncio.sleep(1.0)
    raise RemoteError("ended", "The server has ended.")


def _body(number: int, tokens: int) -> dict[str, Any]:
    question = f"Tell me a story of the number {number}."
    fields = {"max_tokens": tokens, "temperature": 1, "seed": number, "ignore_eos": True}
    return {"messages": [{"role": "user", "content": question}], **fields}


async def _follow(server: RemoteServer, options: argparse.Namespace) -> dict[str, Any]:
    """Keep as many streams under way as the sine says, for its period and a while after it."""
    least, most = 0.6 * options.rows, (options.most - 0.4) * options.rows
    began, running, number = time.monotonic(), set(), 0
    answers: list[tuple[int, asyncio.Task[Answer]]] = []
    counts: list[tuple[float, int, int]] = []  # second, streams, replicas that serve
    while (second := time.monotonic() - began) < options.seconds:
        wanted = round((least + most) / 2 - (most - least) / 2 * math.cos(2 * math.pi * second / options.seconds))
        while len(running) < wanted:
            task = asyncio.create_task(ask(server, _body(number % PROMPTS, options.tokens)))
            answers.append((number % PROMPTS, task))
            running.add(task)
            task.add_done_callback(running.discard)
            number += 1
        fleet = await server.get("fleet")
        counts.append((second, len(running), sum(each["state"] == "serving" for each in fleet["data"])))
        await asyncio.sleep(0.5)
    told = [(prompt, await task) for prompt, task in answers]
    while (fleet := await server.get("fleet"))["wanted"] > 1:
        await asyncio.sleep(1.0)
    whole: dict[int, Any] = {}
    different = sum(
        whole.setdefault(prompt, answer.facts()) != answer.facts() for prompt, answer in told if not answer.error
    )
    return {
        "answers": len(told),
        "failed": sum(bool(answer.error) for _, answer in told),
        "different": different,
        "events": fleet["scaled_up"] + fleet["scaled_down"] - 1,  # not the one to none
        "lost": fleet["lost"],
        "drained": fleet["drained"],
        "replays": fleet["replays"],
        "most_streams": max(streams for _, streams, _ in counts),
        "share_of_time_by_replicas": _shares([replicas for _, _, replicas in counts]),
    }


def _shares(values: list[int]) -> dict[str, float]:
    return {str(value): round(count / len(values), 2) for value, count in sorted(Counter(values).items())}


if __name__ == "__main__":
    sys.exit(main())
