"""Autoscaling under a sine: from one replica's load to three and back, and from none at first.

    python -m benchmarks.fleet.sine [--seconds 600] [--most 3] [--rows 8] [--output sine.json]

A server with ``--autoscale 0:MOST`` whose replicas take so many sequences has been idle for a minute, so that none
runs. Clients then follow a sine of one period with as many streams at a time as one to ``--most`` replicas are meant to
have. Told are the wait for the first answer, scale events after the first start, streams that failed or differ from the
first answer to the same prompt, and how long each new replica took to serve. Exit code 1 if a figure is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from benchmarks.fleet.fleet_harness import START_SECONDS, Figure, finish, parser, percentiles, run_within, serve_command
from benchmarks.fleet.mixed_requests import Answer, ask
from benchmarks.serve.server import Server
from rootgraft.api.cli.options import RemoteOptions
from rootgraft.api.cli.remote_server import RemoteError, RemoteServer

MOST_EVENTS, MOST_READY = 4, 15.0
PROMPTS = 24
LOOK_SECONDS = 0.25
IDLE_SECONDS = 360.0
"""In which the replicas go down again, one a minute."""


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=600.0, help="period of the sine")
    made.add_argument("--most", type=int, default=3)
    made.add_argument("--rows", type=int, default=8, help="target number of sequences of a replica")
    made.add_argument("--tokens", type=int, default=96)
    options = made.parse_args()
    return int(run_within(2 * START_SECONDS + options.seconds + IDLE_SECONDS, _measure(options)))


async def _measure(options: argparse.Namespace) -> int:
    command = serve_command("--autoscale", f"0:{options.most}", "--max-num-seqs", str(2 * options.rows))
    with Server(command).running() as (url, process):
        async with RemoteServer.connect(RemoteOptions(url, None, "-")) as server:
            await _until_none_runs(server, process)
        began = time.monotonic()
        async with RemoteServer.connect(RemoteOptions(url)) as server:
            first = await ask(server, _body(0, options.tokens))
            held = first.arrivals[0] - began if not first.error else math.nan
            return await _follow(server, options, held)


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


async def _follow(server: RemoteServer, options: argparse.Namespace, held: float) -> int:
    """Keep as many streams under way as the sine says, for its period and a while after it."""
    least, most = 0.6 * options.rows, (options.most - 0.4) * options.rows
    before = await server.get("fleet")
    began, number = time.monotonic(), 0
    running: set[asyncio.Task[Answer]] = set()
    answers: list[tuple[int, asyncio.Task[Answer]]] = []
    looks: list[tuple[float, int, int, int]] = []  # second, streams, replicas wanted, and that serve
    while (second := time.monotonic() - began) < options.seconds:
        wanted = round((least + most) / 2 - (most - least) / 2 * math.cos(2 * math.pi * second / options.seconds))
        while len(running) < wanted:
            task = asyncio.create_task(ask(server, _body(number % PROMPTS, options.tokens)))
            answers.append((number % PROMPTS, task))
            running.add(task)
            task.add_done_callback(running.discard)
            number += 1
        fleet = await server.get("fleet")
        serving = sum(each["state"] == "serving" for each in fleet["data"])
        looks.append((second, len(running), fleet["wanted"], serving))
        await asyncio.sleep(LOOK_SECONDS)
    told = [(prompt, await task) for prompt, task in answers]
    while (fleet := await server.get("fleet"))["wanted"] > 1:
        await asyncio.sleep(1.0)
    whole: dict[int, Any] = {}
    different = sum(
        whole.setdefault(prompt, answer.facts()) != answer.facts() for prompt, answer in told if not answer.error
    )
    ready = _ready_seconds([(second, wanted, serving) for second, _, wanted, serving in looks])
    events = sum(fleet[name] - before[name] for name in ("scaled_up", "scaled_down"))
    replicas = [serving for *_, serving in looks]
    figures = [
        Figure.most("the first request was held and answered, s", held, START_SECONDS),
        Figure.exactly("failed", sum(bool(answer.error) for _, answer in told), 0),
        Figure.exactly("different", different, 0),
        Figure.most("scale events", events, MOST_EVENTS),
        Figure.exactly("most replicas", max(replicas), options.most),
        Figure.exactly("replicas at the end", fleet["wanted"], 1),
        Figure.most("new replica serves, longest, s", max(ready, default=math.nan), MOST_READY),
        Figure.exactly("replicas lost", fleet["lost"], 0),
    ]
    more = {
        "answers": len(told),
        "ready_s": percentiles(ready),
        "drained": fleet["drained"],
        "replays": fleet["replays"],
        "most_streams": max(streams for _, streams, _, _ in looks),
        "share_of_time_by_replicas": _shares(replicas),
    }
    return finish(options, figures, more)


def _ready_seconds(looks: Sequence[tuple[float, int, int]]) -> list[float]:
    """Return the seconds from each moment at which more replicas were wanted until so many served.

    Args:
        looks: second, replicas wanted and replicas that serve; one that was not yet there at the last look counts until
            then.
    """
    found, since, last = [], None, looks[0][1]
    for second, wanted, serving in looks:
        if wanted > last and since is None:
            since = second
        if since is not None and serving >= wanted:
            found.append(second - since)
            since = None
        last = wanted
    return found if since is None else [*found, looks[-1][0] - since]


def _shares(values: list[int]) -> dict[str, float]:
    return {str(value): round(count / len(values), 2) for value, count in sorted(Counter(values).items())}


if __name__ == "__main__":
    sys.exit(main())
