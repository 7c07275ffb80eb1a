"""Inter-token latency while long prompts arrive: our server with several targets, in turns, on the same machine.

    python benchmarks/serve/poisson.py --targets 0 100 50 --rate 1.0
    python benchmarks/serve/poisson.py --peer 'env MODEL=folder bash benchmarks/serve/peers/vllm.sh {port}'

Streams of 256 tokens with prompts of about 1,500, nothing shared, arrive by a Poisson process: at rate 1 a second some
16 of them run at a time on a small machine. All servers are started first; then each repeat goes to each of them once
the others are idle, with the same prompts and the same times of arrival, at temperature 1. The table shows medians over
the repeats, and each latency also as a ratio to that of the first server; 0 is no target.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import uvloop  # noqa: E402

from benchmarks.serve.server import Server, machine  # noqa: E402
from rootgraft.api.cli.bench_report import summarise  # noqa: E402
from rootgraft.api.cli.bench_requests import words  # noqa: E402
from rootgraft.api.cli.options import RemoteOptions  # noqa: E402
from rootgraft.api.cli.remote_server import RemoteError, RemoteServer, Timing, timed  # noqa: E402

Figures = dict[str, Any]
PATH = "chat/completions"
START_TIMEOUT = 600.0
REST = 3.0  # seconds before each repeat: threads of vLLM's OpenMP spin on for more than one after their last step
COLUMNS = (
    ("out tok/s", ("output_tokens_per_s",), 1),
    ("ITL p50 ms", ("itl_ms", "p50"), 2),
    ("ITL p99 ms", ("itl_ms", "p99"), 2),
    ("TTFT p50 ms", ("ttft_ms", "p50"), 1),
    ("TTFT p99 ms", ("ttft_ms", "p99"), 1),
)


def main() -> None:
    args = _arguments()
    commands = {f"target {target}": f"{args.ours} --target-itl-ms {_quoted(target)}" for target in args.targets}
    if args.peer:
        commands[args.peer_name] = args.peer
    runs = uvloop.run(_measure(commands, args))
    print(_table(runs))
    document = {"machine": machine(), "arguments": vars(args), "runs": runs}
    Path(args.output).write_text(json.dumps(document, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours = f"{shlex.quote(sys.executable)} -m rootgraft.api.cli.main serve --port {{port}}"
    parser.add_argument("--ours", default=ours, help="command of our server without its target; {port} is filled in")
    parser.add_argument("--targets", nargs="+", default=["0", "100", "50"], help="of --target-itl-ms: servers")
    parser.add_argument("--peer", help="command of one more server; {port} is filled in")
    parser.add_argument("--peer-name", default="peer", help="what the table calls it")
    parser.add_argument("--rate", type=float, default=1.0, help="arrivals a second")
    parser.add_argument("--requests", type=int, default=32, help="in a repeat")
    parser.add_argument("--prompt", type=int, default=1490, help="words, which are about as many tokens")
    parser.add_argument("--answer", type=int, default=256, help="tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", default="poisson.json")
    return parser.parse_args()


def _quoted(target: str) -> str:
    """A word of a command line in which {port} is to be filled in."""
    return shlex.quote(target).replace("{", "{{").replace("}", "}}")


async def _measure(commands: dict[str, str], args: argparse.Namespace) -> dict[str, list[Figures]]:
    async with contextlib.AsyncExitStack() as stack:
        remotes: dict[str, RemoteServer] = {}
        for name, command in commands.items():
            url, _ = stack.enter_context(Server(command).running())
            remotes[name] = await stack.enter_async_context(_connected(url))
        runs: dict[str, list[Figures]] = {name: [] for name in remotes}
        for repeat in range(args.repeats):
            for name, remote in remotes.items():
                await asyncio.sleep(REST)
                figures = summarise(await _arrivals(remote, Random(f"{args.seed} {repeat}"), args))
                runs[name].append(figures | {"load_average": os.getloadavg()})
                print(f"repeat {repeat}: {name}: {_line(runs[name][-1:])}", file=sys.stderr)
        return runs


@contextlib.asynccontextmanager
async def _connected(url: str) -> AsyncIterator[RemoteServer]:
    """A connection to the server once it gives a whole answer."""
    deadline = time.monotonic() + START_TIMEOUT
    body = {"messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 8}
    while True:
        with contextlib.suppress(RemoteError):
            async with RemoteServer.connect(RemoteOptions(url=url)) as remote:
                if (await timed(remote, PATH, body)).error is None:
                    break
        if time.monotonic() > deadline:
            raise RemoteError("not reachable", f"The server at {url} gave no answer.")
        await asyncio.sleep(0.2)
    async with RemoteServer.connect(RemoteOptions(url=url)) as remote:
        yield remote


async def _arrivals(remote: RemoteServer, rng: Random, args: argparse.Namespace) -> list[Timing]:
    """One repeat: all requests, each at its time."""
    began, at, tasks = time.monotonic(), 0.0, []
    fields = {"max_tokens": args.answer, "temperature": 1, "ignore_eos": True}
    for _ in range(args.requests):
        messages = [{"role": "user", "content": words(rng, args.prompt)}]
        await asyncio.sleep(began + at - time.monotonic())
        tasks.append(asyncio.create_task(timed(remote, PATH, {"messages": messages, **fields})))
        at += rng.expovariate(args.rate)
    return list(await asyncio.gather(*tasks))


def _table(runs: dict[str, list[Figures]]) -> str:
    width = max(map(len, runs)) + 2
    lines = [" " * width + "".join(f"{heading:>20}" for heading, _, _ in COLUMNS) + f"{'failed':>8}"]
    first = _medians(next(iter(runs.values())))
    for name, figures in runs.items():
        medians = zip(_medians(figures), first, COLUMNS, strict=True)
        cells = [f"{value:,.{digits}f} ({value / base:.2f})" for value, base, (_, _, digits) in medians]
        failed = sum(each["requests"] - each["completed"] for each in figures)
        lines.append(f"{name:<{width}}" + "".join(f"{cell:>20}" for cell in cells) + f"{failed:>8}")
    return "\n".join(lines)


def _line(figures: list[Figures]) -> str:
    pairs = zip(_medians(figures), COLUMNS, strict=True)
    return ", ".join(f"{heading} {value:,.{digits}f}" for value, (heading, _, digits) in pairs)


def _medians(figures: list[Figures]) -> list[float]:
    """The columns' medians over repeats; each repeat must have completed requests."""
    return [statistics.median(_at(each, path) for each in figures) for _, path, _ in COLUMNS]


def _at(figures: Figures, path: tuple[str, ...]) -> float:
    value: Any = figures
    for key in path:
        value = value[key]
    return float(value)


if __name__ == "__main__":
    main()
