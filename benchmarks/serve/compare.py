"""Our server and a peer, in turns, under the same loads on the same machine.

    python benchmarks/serve/compare.py --peer 'env MODEL=m.gguf bash benchmarks/serve/peers/llama_cpp.sh {port}'
    python benchmarks/serve/compare.py --peer-url http://127.0.0.1:9000/v1 --workloads W2 W3 --repeats 5
    python benchmarks/serve/compare.py --workloads W6 W7 --adapters a0 a1 a2 --ours 'rootgraft serve --port {port} ...'

The servers are started and warmed up one after the other. Then each repeat of a workload goes to each of them once the
other is idle: the speed of a shared machine changes from minute to minute, and so both meet the same. The table shows
the median over the repeats; ratios are ours / peer. The JSON file holds every repeat, the commands and the machine.
Adapters (made by ``benchmarks.serve.make_adapters``) are asked for by name in ``model``; llama.cpp wants their numbers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import uvloop  # noqa: E402

from benchmarks.serve.server import Server, machine, memory_mib, processor_seconds  # noqa: E402
from benchmarks.serve.structured import is_valid  # noqa: E402
from benchmarks.serve.workloads import NAMES, WITH_ADAPTERS, Conversation, Workload, workload  # noqa: E402
from rootgraft.api.cli.bench_report import summarise  # noqa: E402
from rootgraft.api.cli.options import RemoteOptions  # noqa: E402
from rootgraft.api.cli.remote_server import RemoteError, RemoteServer, Timing, timed  # noqa: E402

Figures = dict[str, Any]
PATH = "chat/completions"
_REST = 3.0  # seconds before each repeat: threads of vLLM's OpenMP spin on for more than one after their last step
# Heading, path into the figures of a repeat, digits.
COLUMNS = (
    ("out tok/s", ("output_tokens_per_s",), 1),
    ("TTFT p50 ms", ("ttft_ms", "p50"), 1),
    ("TTFT p99 ms", ("ttft_ms", "p99"), 1),
    ("ITL p50 ms", ("itl_ms", "p50"), 2),
    ("ITL p99 ms", ("itl_ms", "p99"), 2),
    ("cached", ("cached_tokens",), 0),
)


def main() -> int:
    args = _arguments()
    if not args.adapters and (wanting := [name for name in args.workloads if name in WITH_ADAPTERS]):
        print(f"{' and '.join(wanting)} need --adapters, the names by which the servers know them", file=sys.stderr)
        return 2
    servers = {"rootgraft": Server(args.ours, None)}
    if args.peer or args.peer_url:
        servers[args.peer_name] = Server(args.peer, args.peer_url)
    runs = uvloop.run(_measure(servers, args))
    print(_table(runs))
    document = {"machine": machine(), "arguments": vars(args), "runs": runs}
    Path(args.output).write_text(json.dumps(document, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ours = f"{shlex.quote(sys.executable)} -m rootgraft.api.cli.main serve --port {{port}}"
    parser.add_argument("--ours", default=ours, help="command of our server; {port} is filled in")
    parser.add_argument("--peer", help="command of the peer; {port} is filled in")
    parser.add_argument("--peer-url", help="address of a peer that already runs")
    parser.add_argument("--peer-name", default="peer", help="what the table calls it")
    parser.add_argument("--workloads", nargs="+", default=list(NAMES[:5]), choices=NAMES)
    parser.add_argument("--adapters", nargs="+", default=[], help="names of adapters, for W6 and W7")
    parser.add_argument("--peer-lora-ids", action="store_true", help="the peer takes adapters as llama.cpp does")
    parser.add_argument("--temperature", type=float, help="of all requests; by default they are greedy")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start-timeout", type=float, default=600.0, help="seconds a server may take to answer")
    parser.add_argument("--output", default="compare.json")
    return parser.parse_args()


async def _measure(servers: dict[str, Server], args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    async with contextlib.AsyncExitStack() as stack:
        runs: dict[str, dict[str, Any]] = {}
        remotes: dict[str, RemoteServer] = {}
        processes = {}
        for name, server in servers.items():
            url, processes[name] = stack.enter_context(server.running())
            started = time.perf_counter()
            remotes[name] = await stack.enter_async_context(_connected(url, processes[name], args.start_timeout))
            ready = time.perf_counter() - started
            print(f"{name}: {remotes[name].model}, answers after {ready:.1f} s", file=sys.stderr)
            runs[name] = {"model": remotes[name].model, "first_answer_s": ready, "loads": {}}
        for load in args.workloads:
            for repeat in range(args.repeats):
                for name, remote in remotes.items():
                    await asyncio.sleep(_REST)
                    before = _processor_seconds(processes[name])
                    figures = await _repeat(name, load, repeat, remote, args)
                    after = _processor_seconds(processes[name])
                    figures["processor_s"] = {part: after[part] - before[part] for part in after}
                    runs[name]["loads"].setdefault(load, []).append(figures)
        for name, process in processes.items():
            runs[name]["memory_mib"] = memory_mib(process) if process else None
        return runs


def _processor_seconds(process: subprocess.Popen[bytes] | None) -> dict[str, float]:
    return {} if process is None else processor_seconds(process)


@contextlib.asynccontextmanager
async def _connected(url: str, process: subprocess.Popen[bytes] | None, limit: float) -> AsyncIterator[RemoteServer]:
    """A connection to the server once it gives a whole answer, which is its warm-up too."""
    deadline = time.monotonic() + limit
    body = {"messages": [{"role": "user", "content": "Say a word."}], "max_tokens": 8}
    while True:
        with contextlib.suppress(RemoteError):
            async with RemoteServer.connect(RemoteOptions(url=url)) as remote:
                if (await timed(remote, PATH, body)).error is None:
                    break
        if time.monotonic() > deadline or (process is not None and process.poll() is not None):
            raise RemoteError("not reachable", f"The server at {url} gave no answer.")
        await asyncio.sleep(0.2)
    async with RemoteServer.connect(RemoteOptions(url=url)) as remote:
        yield remote


async def _repeat(name: str, load: str, repeat: int, remote: RemoteServer, args: argparse.Namespace) -> Figures:
    """One repeat of a load on a server."""
    plan = workload(load, repeat, args.seed, len(args.adapters))
    adapters = None if args.peer_lora_ids and name == args.peer_name else args.adapters
    sampling = {} if args.temperature is None else {"temperature": args.temperature}
    timings, valid = await _run(remote, plan, adapters, sampling)
    figures = summarise(timings) | {"valid": valid, "load_average": os.getloadavg()}
    speed, errors = figures["output_tokens_per_s"], figures["errors"]
    print(f"{name} {load} repeat {repeat}: {speed:.1f} tokens/s {errors or ''}", file=sys.stderr)
    return figures


async def _run(
    remote: RemoteServer, load: Workload, adapters: list[str] | None, sampling: dict[str, Any]
) -> tuple[list[Timing], int]:
    """All conversations of a load, and how many answers kept to their schema. One that fails ends there."""
    limit = asyncio.Semaphore(load.concurrency)
    timings: list[Timing] = []
    valid = 0

    async def talk(conversation: Conversation) -> None:
        nonlocal valid
        messages = [{"role": "system", "content": conversation.system}] if conversation.system else []
        fields = conversation.fields | sampling | _adapter_field(conversation.adapter, adapters)
        async with limit:
            for turn in conversation.turns:
                messages.append({"role": "user", "content": turn})
                pieces: list[str] = []
                timing = await timed(remote, PATH, {"messages": messages, **fields}, pieces.append)
                timings.append(timing)
                if timing.error is not None:
                    return
                answer = "".join(pieces)
                messages.append({"role": "assistant", "content": answer})
                valid += conversation.schema is not None and is_valid(answer, conversation.schema)

    await asyncio.gather(*map(talk, load.conversations))
    return timings, valid


def _adapter_field(adapter: int | None, names: list[str] | None) -> dict[str, Any]:
    """How a request says which adapter it wants: by name in ``model``, or to llama.cpp by number."""
    if names is None:
        return {"lora": [{"id": adapter or 0, "scale": 0.0 if adapter is None else 1.0}]}
    return {} if adapter is None else {"model": names[adapter]}


def _median(runs: list[Figures], path: tuple[str, ...]) -> float | None:
    values = []
    for figures in runs:
        value: Any = figures
        for key in path:
            value = None if value is None else value[key]
        if value is not None:
            values.append(float(value))
    return statistics.median(values) if values else None


def _table(runs: dict[str, dict[str, Any]]) -> str:
    """One line for each workload and server, and one with the ratios where there are two servers."""
    lines = [f"{'':<6}{'':<14}" + "".join(f"{heading:>13}" for heading, _, _ in COLUMNS) + f"{'failed':>8}"]
    for load in next(iter(runs.values()))["loads"]:
        rows = {name: [_median(run["loads"][load], path) for _, path, _ in COLUMNS] for name, run in runs.items()}
        for name, row in rows.items():
            cells = [_cell(value, digits) for value, (_, _, digits) in zip(row, COLUMNS, strict=True)]
            failed = sum(f["requests"] - f["completed"] for f in runs[name]["loads"][load])
            lines.append(f"{load:<6}{name:<14}" + "".join(f"{cell:>13}" for cell in cells) + f"{failed:>8}")
        if len(rows) == 2:
            pairs = zip(*rows.values(), strict=True)
            ratios = [_cell(a / b, 2) if a is not None and b else "-" for a, b in pairs]
            lines.append(f"{load:<6}{'ratio':<14}" + "".join(f"{ratio:>13}" for ratio in ratios))
    return "\n".join(lines)


def _cell(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


if __name__ == "__main__":
    sys.exit(main())
