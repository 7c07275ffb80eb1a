"""Measure the cost of a fleet, or of two gateways, against the same server without them, in turns.

    python -m benchmarks.fleet.costs [--of fleet] [--repeats 3] [--workloads W2 W5] [--output costs.json]

Runs workloads at temperature 1 on ``--autoscale 1:1``, which is a fleet of one replica, and on the plain server; or,
``--of gateways``, on two replicas with two gateways and with one. Takes the processor time of the first process and of
all others for each 1,000 tokens too: on a busy machine that tells more than seconds. Then, of a fleet, the processor
time of two idle replicas' server is taken, and of the processes of a local Ray where Ray is installed.

Exit code 1 if a figure is missed: the fleet makes fewer than 0.95 of the tokens a second, its first tokens come more
than 5 ms later in the median, or an idle Ray takes more than 3 % of a core. Nothing is asked of two gateways.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shlex
import statistics
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import uvloop

from benchmarks.fleet.fleet_harness import Figure, finish, parser, wait_ready
from benchmarks.serve.alternate import Alternation, RunPlan
from benchmarks.serve.precision_classes import given
from benchmarks.serve.run_record import RunRecord
from benchmarks.serve.server import Server

LEAST_SPEED, MOST_MILLISECONDS, MOST_IDLE = 0.95, 5.0, 0.03
IDLE_SECONDS = 20.0
PARTS = ("first", "others")
"""Of a server's processes: the first one, and all that it has started."""

SERVERS = {
    "fleet": {"fleet": "--autoscale 1:1", "plain": ""},
    "gateways": {"two gateways": "--replicas 2 --gateways 2", "one": "--replicas 2"},
}
"""The one to be judged, and the one that it is compared with: names and options."""


def main() -> int:
    made = parser(__doc__)
    made.add_argument("--of", choices=tuple(SERVERS), default="fleet")
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--workloads", nargs="+", default=["W2", "W5"])
    made.add_argument("--serve", default="", help="further options of both servers")
    options = made.parse_args()
    serve = f"{shlex.quote(sys.executable)} -P -m rootgraft.api.cli.main serve --port {{port}} {options.serve}"
    runs = _compare({name: f"{serve} {more}" for name, more in SERVERS[options.of].items()}, options)
    figures, more = _judged(runs, is_limited=options.of == "fleet")
    if options.of == "fleet":
        more["idle_cores_of_two_replicas"] = _idle(f"{serve} --autoscale 2:2", of_first=True)
        if importlib.util.find_spec("ray") is not None:
            idle = _idle(f"{serve} --replicas 2 --ray-address local", of_first=False)
            figures.append(Figure.most("cores of an idle Ray", idle, MOST_IDLE))
    return finish(options, figures, {**more, "runs": runs})


def _compare(commands: dict[str, str], options: argparse.Namespace) -> dict[str, dict[str, list[Any]]]:
    """Return the figures of every repeat by server and workload."""
    measured = replace(given(commands), workloads=options.workloads)
    with tempfile.TemporaryDirectory() as folder:
        record = RunRecord(Path(folder) / "runs.jsonl", {}, same=())
        uvloop.run(Alternation(measured, RunPlan(options.repeats, budget=math.inf), record).run())
    runs: dict[str, dict[str, list[Any]]] = {form.name: {} for form in measured.servers}
    for entry in record.entries("figures"):
        runs[entry["server"]].setdefault(entry["workload"], []).append(entry["figures"])
    if failed := [f"{entry['server']}: {entry['failed']}" for entry in record.entries("failed")]:
        raise SystemExit("\n".join(failed))
    return runs


def _idle(command: str, *, of_first: bool) -> float:
    """Return the cores that a server's first process takes while nobody asks, or all others that are not engines."""
    with Server(command).running() as (url, process):
        assert process is not None
        wait_ready(url, process)
        time.sleep(2.0)
        first = psutil.Process(process.pid)
        others = [each for each in first.children(recursive=True) if not _is_engine(each)]
        counted = [first] if of_first else others
        before = {each: _processor_seconds(each) for each in counted}
        time.sleep(IDLE_SECONDS)
        return round(sum(_processor_seconds(each) - before[each] for each in counted) / IDLE_SECONDS, 4)


def _processor_seconds(process: psutil.Process) -> float:
    with suppress(psutil.Error):
        return float(sum(process.cpu_times()[:2]))
    return 0.0


def _is_engine(process: psutil.Process) -> bool:
    return any("rootgraft.engine" in word for word in process.cmdline())


def _judged(runs: dict[str, dict[str, list[Any]]], *, is_limited: bool) -> tuple[list[Figure], dict[str, Any]]:
    """Return the figures that have limits, and all ratios."""
    (name, judged), (_, plain) = runs.items()
    figures, more = [], {}
    for load in judged:
        speed, first = (
            [statistics.median(_figure(each, path) for each in found[load]) for found in (judged, plain)]
            for path in (("output_tokens_per_s",), ("ttft_ms", "p50"))
        )
        more[load] = {
            "tokens_per_s": round(speed[0] / speed[1], 3),
            "ttft_p50_ms": [round(each, 1) for each in first],
            "processor_ms_for_1000_tokens": {
                server: [round(statistics.median(_processor_ms(each, part) for each in found[load])) for part in PARTS]
                for server, found in runs.items()
            },
        }
        if is_limited:
            figures += [
                Figure.least(f"{load}, tokens/s of {name} to plain", speed[0] / speed[1], LEAST_SPEED),
                Figure.most(f"{load}, TTFT p50 later by ms", first[0] - first[1], MOST_MILLISECONDS),
            ]
    return figures, more


def _processor_ms(figures: dict[str, Any], part: str) -> float:
    """Return milliseconds of processor time for each 1,000 tokens."""
    return float(figures["processor_s"][part] / figures["output_tokens"] * 1e6)


def _figure(figures: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = figures
    for key in path:
        value = value[key]
    return float(value)


if __name__ == "__main__":
    sys.exit(main())
