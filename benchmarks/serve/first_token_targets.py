"""Share of first tokens within their targets, without targets, with them, and with ``x-slo: strict``.

    python -m benchmarks.serve.first_token_targets [--seconds 25] [--load 1.6] [--output FILE.json]

A real server of eight rows on the real model; arrivals of two tiers by a Poisson process, one prompt in ten long. First
the server's rate is measured in a closed loop; then ``--load`` times that rate arrives at a server without targets, and
the same requests at the same times at one with ``--target-ttft-ms``, once without and once with the header. Told are,
for each tier, the share of all requests whose first token was in time, and of those that were taken. Exit code 1 if
targets bring fewer interactive ones in time, cost realtime ones, or if a strict request is refused late.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
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
from rootgraft.api.cli.bench_requests import words

ROWS, ANSWER = 8, 24
SHORT, LONG = (20, 60), 500
"""Words of prompts."""
REALTIME_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request: when it is sent, in seconds, its tier, and the words of its prompt."""

    at: float
    tier: str
    prompt: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a request: seconds to the first token or to the refusal."""

    tier: str
    seconds: float
    is_refused: bool = False


def arrivals(rate: float, seconds: float, seed: int) -> list[Arrival]:
    """Draw the arrivals of a run; no prompt comes twice."""
    draw, at, found = Random(seed), 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        tier = "realtime" if draw.random() < REALTIME_SHARE else "interactive"
        is_long = tier == "interactive" and draw.random() < 0.1
        found.append(Arrival(at, tier, words(draw, LONG if is_long else draw.randrange(*SHORT))))
    return found


async def ask(http: httpx.AsyncClient, request: Arrival, *, strict: bool = False) -> Outcome:
    """Send a request and read its stream to the end."""
    body = {"prompt": request.prompt, "max_tokens": ANSWER, "ignore_eos": True, "priority": request.tier}
    headers = {"x-slo": "strict"} if strict else {}
    begin, first = time.perf_counter(), None
    async with http.stream("POST", "/completions", json={**body, "stream": True}, headers=headers) as reply:
        if reply.status_code == 503:
            code = json.loads(await reply.aread())["error"]["code"]
            assert code == "server_overloaded" or strict, code
            return Outcome(request.tier, time.perf_counter() - begin, is_refused=True)
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if first is None and line.startswith("data: "):
                first = time.perf_counter() - begin
    assert first is not None
    return Outcome(request.tier, first)


async def closed_loop(http: httpx.AsyncClient, count: int) -> float:
    """Return the requests a second that the server answers where twice as many as its rows are always under way."""
    limit, asked = asyncio.Semaphore(2 * ROWS), arrivals(1000.0, count / 1000, 99)

    async def one(request: Arrival) -> None:
        async with limit:
            await ask(http, request)

    begin = time.perf_counter()
    await asyncio.gather(*map(one, asked))
    return len(asked) / (time.perf_counter() - begin)


async def run(http: httpx.AsyncClient, asked: Sequence[Arrival], *, strict: bool = False) -> list[Outcome]:
    """Send all requests at their times."""
    begin = time.perf_counter()

    async def one(request: Arrival) -> Outcome:
        await asyncio.sleep(begin + request.at - time.perf_counter())
        return await ask(http, request, strict=strict)

    return list(await asyncio.gather(*map(one, asked)))


def summary(outcomes: Sequence[Outcome], targets: dict[str, int]) -> dict[str, Any]:
    """Return for each tier the shares in time, of all and of those taken, refusals, and times to first token."""
    found = {}
    for tier, target in targets.items():
        own = [each for each in outcomes if each.tier == tier]
        taken = [each.seconds for each in own if not each.is_refused]
        in_time = sum(seconds <= target / 1000 for seconds in taken)
        found[tier] = {
            "asked": len(own),
            "in_time": in_time,
            "share_of_all": round(in_time / max(1, len(own)), 3),
            "share_of_taken": round(in_time / max(1, len(taken)), 3),
            "refused": len(own) - len(taken),
            "ttft_s": percentiles(taken),
            "refused_after_s": percentiles([each.seconds for each in own if each.is_refused]),
        }
    return found


async def measure(options: argparse.Namespace) -> int:
    """Run all three and report."""
    targets = {"realtime": options.realtime, "interactive": options.interactive}
    common = ["--max-num-seqs", str(ROWS), "--threads", str(options.threads)]
    found: dict[str, Any] = {}
    asked: list[Arrival] = []
    for is_target in (False, True):
        # Doubled braces, as the command is a format of its port.
        quoted = json.dumps(targets).replace("{", "{{").replace("}", "}}")
        more = ["--target-ttft-ms", quoted] if is_target else []
        with Server(serve_command(*common, *more)).running() as (url, process):
            await asyncio.to_thread(wait_ready, url, process)
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False, limits=limits) as http:
                # The first loop meets cold caches and step costs that are not known yet.
                await closed_loop(http, 2 * ROWS)
                rate = await closed_loop(http, 6 * ROWS)
                if not asked:
                    found["closed_loop_per_s"] = round(rate, 2)
                    asked = arrivals(options.load * rate, options.seconds, options.seed)
                name = "with targets" if is_target else "without targets"
                found[name] = summary(await run(http, asked), targets)
                if is_target:
                    found["strict"] = summary(await run(http, _others(asked), strict=True), targets)
    return _report(options, found, targets)


def _others(asked: Sequence[Arrival]) -> list[Arrival]:
    """Return the same arrivals with other prompts of the same lengths, of which nothing is cached."""
    return [Arrival(each.at, each.tier, f"again: {each.prompt}") for each in asked]


def _report(options: argparse.Namespace, found: dict[str, Any], targets: dict[str, int]) -> int:
    without, targeted, strict = (found[name] for name in ("without targets", "with targets", "strict"))
    figures = [
        Figure.least(
            "interactive first tokens in time, with targets",
            targeted["interactive"]["in_time"],
            without["interactive"]["in_time"] + 1,
        ),
        Figure.least(
            "realtime first tokens in time, with targets",
            targeted["realtime"]["in_time"],
            0.9 * without["realtime"]["in_time"],
        ),
        Figure.least(
            "share in time of the strict interactive ones that were taken",
            strict["interactive"]["share_of_taken"],
            targeted["interactive"]["share_of_taken"],
        ),
        Figure.least("strict ones refused", strict["interactive"]["refused"], 1),
        Figure.most(
            "refused after, p99, s", strict["interactive"]["refused_after_s"]["p99"], targets["interactive"] / 2000
        ),
    ]
    return finish(options, figures, found)


def main() -> int:
    """Measure. Returns 1 if something does not hold."""
    made = parser(__doc__)
    made.add_argument("--seconds", type=float, default=25.0, help="time of arrivals in each run")
    made.add_argument("--load", type=float, default=1.6, help="rate of arrivals, as a multiple of the rate of answers")
    made.add_argument("--realtime", type=int, default=500, help="target in ms")
    made.add_argument("--interactive", type=int, default=2000, help="target in ms")
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--seed", type=int, default=1)
    options = made.parse_args()
    options.command = "python -m benchmarks.serve.first_token_targets " + shlex.join(sys.argv[1:])
    return run_within(2 * START_SECONDS + 30 * options.seconds, measure(options))  # type: ignore[no-any-return]


if __name__ == "__main__":
    sys.exit(main())
