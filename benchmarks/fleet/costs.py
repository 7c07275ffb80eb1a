"""What a fleet costs: one replica behind a fleet beside the same engine without one, in turns.

    python -m benchmarks.fleet.costs [--repeats 3] [--workloads W2 W5] [--output costs.json]

Runs workloads at temperature 1 on ``--autoscale 1:1``, which is a fleet of one replica, and on the plain server, and
takes the processor time of the API process and of the engine for each 1,000 tokens: on a busy machine
that tells more than seconds. Then the processor time of the fleet's API process is taken while nobody asks. Exit code 1
if the fleet makes fewer than 0.95 of the tokens a second, or its first tokens come more than 5 ms later in the median.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from benchmarks.serve.alternate import Alternation, RunPlan
from benchmarks.serve.precision_classes import given
from benchmarks.serve.run_record import RunRecord
from benchmarks.serve.server import Server, machine

LEAST_SPEED, MOST_MILLISECONDS = 0.95, 5.0
IDLE_SECONDS = 20.0
PARTS = ("first", "others")
"""Of a server's processes: the API process, and the engines."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=["W2", "W5"])
    parser.add_argument("--serve", default="", help="further options of both servers")
    parser.add_argument("--output", help="JSON file for all figures")
    options = parser.parse_args()
    serve = f"{shlex.quote(sys.executable)} -P -m rootgraft.api.cli.main serve --port {{port}} {options.serve}"
    document = _compare(f"{serve} --autoscale 1:1", serve, options)
    document["idle_cores"] = _idle(f"{serve} --autoscale 2:2")
    if options.output:
        Path(options.output).write_text(json.dumps(document, indent=1) + "\n")
    return _judge(document)


def _compare(fleet: str, plain: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the machine, and the figures of every repeat by server and workload."""
    measured = replace(given({"fleet": fleet, "plain": plain}), workloads=options.workloads)
    with tempfile.TemporaryDirectory() as folder:
        record = RunRecord(Path(folder) / "runs.jsonl", {"machine": machine()}, same=())
        uvloop.run(Alternation(measured, RunPlan(options.repeats, budget=math.inf), record).run())
    runs: dict[str, dict[str, list[Any]]] = {form.name: {} for form in measured.servers}
    for entry in record.entries("figures"):
        runs[entry["server"]].setdefault(entry["workload"], []).append(entry["figures"])
    if failed := [f"{entry['server']}: {entry['failed']}" for entry in record.entries("failed")]:
        raise SystemExit("\n".join(failed))
    return {"machine": record.settings["machine"], "runs": runs}


def _idle(command: str) -> float:
    """Return the share of a core that the API process of two idle replicas takes."""
    with Server(command).running() as (url, process):
        assert process is not None
        while not _is_ready(url):
            time.sleep(0.5)
        time.sleep(2.0)
        api = psutil.Process(process.pid)
        before = sum(api.cpu_times()[:2])
        time.sleep(IDLE_SECONDS)
        return round((sum(api.cpu_times()[:2]) - before) / IDLE_SECONDS, 4)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(url.replace("/v1", "/ready"), trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _judge(document: dict[str, Any]) -> int:
    wrong = 0
    fleet, plain = (document["runs"][name] for name in ("fleet", "plain"))
    for load in fleet:
        speed, first = (
            [statistics.median(_figure(each, path) for each in runs[load]) for runs in (fleet, plain)]
            for path in (("output_tokens_per_s",), ("ttft_ms", "p50"))
        )
        ratio, later = speed[0] / speed[1], first[0] - first[1]
        wrong += ratio < LEAST_SPEED or later > MOST_MILLISECONDS
        print(f"{load}: {ratio:.3f} of the tokens/s, first tokens {later:+.1f} ms in the median")
        for name, runs in (("fleet", fleet), ("plain", plain)):
            api, engine = (statistics.median(_processor_ms(each, part) for each in runs[load]) for part in PARTS)
            print(
                f"  {name}: {api:.1f} ms of a core for each 1,000 tokens in the API process, {engine:.0f} ms in others"
            )
    print(f"two idle replicas: the API process takes {document['idle_cores']:.1%} of a core")
    return int(wrong > 0)


def _processor_ms(figures: dict[str, Any], part: str) -> float:
    """Return milliseconds of processor time for each 1,000 tokens."""
    return float(figures["processor_s"][part]) / figures["output_tokens"] * 1e6


def _figure(figures: dict[str, Any], path: tuple[str, ...]) -> float:
    value: Any = figures
    for key in path:
        value = value[key]
    return float(value)


if __name__ == "__main__":
    sys.exit(main())
