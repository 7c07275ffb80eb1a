"""How API process and engine share the cores: workloads with some numbers of threads and some priorities of the API.

    python -m benchmarks.serve.core_sharing [--threads 1 2] [--api-nice 0 10] [--workloads W1 W2 W3] [--repeats 3]

One server at a time; on each, repeats at the priorities of the API process alternate. The client runs on the same
cores. Figures are medians: output tokens a second, milliseconds to the first token and between tokens, and seconds of
processor time a second of the API process and of the engine with its threads. A niceness is added to that of this
process; only a privileged user can take it back.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import psutil

from benchmarks.serve.load_run import Adapters, connected, run_repeat, warm_up
from benchmarks.serve.server import Server
from benchmarks.serve.workloads import NAMES, workload

_START_SECONDS = 300.0
Figures = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--api-nice", type=int, nargs="+", default=[0, 10])
    parser.add_argument("--workloads", nargs="+", default=["W1", "W2", "W3"], choices=NAMES[:5])
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    seed = random.randrange(10**6)
    print("| threads | API niceness | load | tok/s | TTFT p50 | between tokens p50, p99 | API, engine |")
    print("|---|---|---|---|---|---|---|")
    for threads in args.threads:
        asyncio.run(_measure(threads, args, seed))
    return 0


async def _measure(threads: int, args: argparse.Namespace, seed: int) -> None:
    serve = f"{shlex.quote(sys.executable)} -P -m rootgraft.api.cli.main serve --port {{port}} --log-level warning"
    with Server(f"{serve} --threads {threads}").running() as (url, process):
        assert process is not None
        api = psutil.Process(process.pid)
        usual = api.nice()
        async with connected(url, process, _START_SECONDS) as remote:
            await warm_up(remote)
            for name in args.workloads:
                found: dict[int, list[Figures]] = defaultdict(list)
                for repeat in range(args.repeats):
                    for turn, nice in enumerate(args.api_nice):
                        api.nice(usual + nice)
                        load = workload(name, repeat * len(args.api_nice) + turn, seed)
                        found[nice].append(_figures(await run_repeat(remote, load, 1.0, Adapters(()), process)))
                for nice, each in found.items():
                    print(_row(threads, nice, name, each), flush=True)


def _figures(run: dict[str, Any]) -> Figures:
    return {
        "throughput": run["output_tokens_per_s"],
        "ttft": run["ttft_ms"]["p50"],
        "itl": run["itl_ms"]["p50"],
        "itl_p99": run["itl_ms"]["p99"],
        "api": run["processor_s"]["first"] / run["seconds"],
        "engine": run["processor_s"]["others"] / run["seconds"],
    }


def _row(threads: int, nice: int, name: str, runs: Sequence[Figures]) -> str:
    at = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    cells = (
        f"{threads}",
        f"{nice}",
        name,
        f"{at['throughput']:.0f}",
        f"{at['ttft']:.0f}",
        f"{at['itl']:.1f}, {at['itl_p99']:.0f}",
        f"{at['api']:.2f}, {at['engine']:.2f}",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
