"""Hours in minutes: fifty clients and chaos against the real server on a device of integers; what is left over?

    python -m benchmarks.soak [--minutes 30] [--clients 44] [--tiers] [--output FILE.json]

30 % of the requests are left by their clients, 20 % want JSON, half of these by a schema that was never seen before,
half use one of 64 adapters, for which there are 8 slots, and the pool of pages is too small for all rows. Beside them
are conversations that the server remembers within a small store, and clients that read slowly or not at all, send half
a request, or ask for what must be refused. Every answer is compared with what it must be, character by character. At
the end each request must have ended exactly once, every counter must agree with every other, nothing may be held any
more, and memory must not have grown. Exit code 1 if anything of that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.serve.server import machine
from benchmarks.soaking import ROOT
from benchmarks.soaking.clients import Honest, Tally, harm, wrong
from benchmarks.soaking.device import DISK_GIB, REPORT, kv_folder, make_adapters
from benchmarks.soaking.memory import FolderSamples, Samples
from benchmarks.soaking.talks import Talker
from rootgraft.engine.scheduling.waiting_queue import PATIENCE
from rootgraft.engine.types import Priority

CLIENTS, TALKERS = 44, 6
MOST_GROWTH_MIB = 16  # in a short run, which says nothing about a slope
SAMPLE_SECONDS = 0.5


async def wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """RuntimeError if the server ends instead."""
    async with aiohttp.ClientSession() as session:
        while process.poll() is None:
            try:
                async with session.get(f"{url}/ready") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise RuntimeError("the server has ended")


def engine_of(api: psutil.Process) -> psutil.Process:
    """The engine process of an API process."""
    return next(child for child in api.children() if "engine" in child.cmdline())


async def load(
    url: str, codes: dict[str, int], seconds: float, samples: dict[str, Samples | FolderSamples], clients: int
) -> Tally:
    """Run some honest clients, and the others, for some time. Returns their tally."""
    tally, now = Tally(), asyncio.get_running_loop().time
    begin = now()
    end = begin + seconds
    port = int(url.rpartition(":")[2])

    async def sample() -> None:
        while now() < end:
            for one in samples.values():
                one.take(now() - begin)
            await asyncio.sleep(SAMPLE_SECONDS)

    timeout = aiohttp.ClientTimeout(total=PATIENCE[Priority.BATCH] + 120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(
            sample(),
            *(Honest(url, codes, tally, seed).run(session, end) for seed in range(clients)),
            *(Talker(url, codes, tally, 500 + seed).run(session, end) for seed in range(min(TALKERS, clients))),
            *(harm(port, random.Random(1000 + seed), tally, end) for seed in range(6)),
            wrong(session, url, random.Random(2000), tally, end),
        )
    return tally


async def counters_at_rest(url: str) -> dict[str, float]:
    """/metrics once nothing runs and two heartbeats have passed; sums over labels other than reason."""
    async with aiohttp.ClientSession() as session:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            async with session.get(f"{url}/metrics") as reply:
                text = await reply.text()
            found: dict[str, float] = {}
            for name, labels, value in re.findall(r"^rootgraft:(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
                reason = re.search(r'finished_reason="(\w+)"', labels)
                key = f"{name}.{reason[1]}" if reason else name
                found[key] = found.get(key, 0) + float(value)
            if not found["num_requests_running"] and not found["num_requests_waiting"]:
                await asyncio.sleep(1)
                return found
            await asyncio.sleep(0.5)
    raise RuntimeError("requests are still running, and nobody waits for them")


def equations(
    tally: Tally, metrics: dict[str, float], engine: dict[str, Any], ledger: tuple[int, int, int], lines: list[Any]
) -> dict[str, bool]:
    """Check the equations between the counts of clients, API process, engine, ledger and log."""
    counts = engine["counts"]
    ends = {name.partition(".")[2]: value for name, value in metrics.items() if name.startswith("request_success")}
    logged = [line for line in lines if "finished" in line]
    # A model that does not exist is not a row of the ledger.
    unknown = [line for line in logged if line.get("error") == "model_not_found"]
    return {
        "every answer is what it must be": not tally.wrong,
        "each sequence of the engine ended once": counts["submitted"] == counts["done"] + counts["failed"],
        "the engine holds nothing any more": not any(engine["left"].values()),
        "the API counted the end of each sequence once": sum(ends.values()) == counts["submitted"],
        "nothing failed but what the engine must refuse": (
            ends["error"] == counts["failed"] == tally.counts["refused by the engine"]
        ),
        "each end that a client saw was counted": all(
            tally.counts[f"finished_{reason}"] <= ends[reason] for reason in ("stop", "length")
        ),
        "each request is in the ledger once": (
            ledger[0] + len(unknown) == metrics["key_requests_total"] == len(logged)
        ),
        "ledger, counters and log agree on prompt tokens": ledger[1] == metrics["key_prompt_tokens_total"],
        "and on tokens of answers": ledger[2]
        == metrics["key_generation_tokens_total"]
        == sum(line["completion_tokens"] for line in logged),
        "nothing was lost to the ledger": metrics["usage_ledger_lost_total"] == 0,
    }


def ledger_sums(file: Path) -> tuple[int, int, int]:
    """Requests, prompt tokens, tokens of answers."""
    db = sqlite3.connect(file)
    [row] = db.execute("SELECT sum(requests), sum(prompt_tokens), sum(completion_tokens) FROM usage")
    db.close()
    return row[0], row[1], row[2]


def is_flat(report: dict[str, Any], minutes: float) -> bool:
    """Whether memory stays: in runs of ten minutes and more the slope's interval holds zero or less, or is small."""
    if minutes < 10:
        return bool(report["growth_after_warm_up_mib"] < MOST_GROWTH_MIB)
    return bool(report["slope_95_percent"][0] <= 0 or report["slope_mib_per_hour"] < 1)


def tiers_hold(stats: dict[str, float], disk: FolderSamples) -> dict[str, bool]:
    """Check the files of KV."""
    return {
        "files of KV stay within their bound": 0 < disk.most <= DISK_GIB * 2**30,
        "pages were written, evicted and read again": all(
            stats[f"kv_{what}_disk"] for what in ("stored", "evicted", "hits")
        ),
        "no page was refused or lost to a fault": not stats["kv_rejected_disk"] + stats["kv_errors_disk"],
    }


def soak(minutes: float, clients: int = CLIENTS, tiers: bool = False, warm_up: float | None = None) -> dict[str, Any]:
    """One run. The figures, and under ``holds`` what held.

    Args:
        clients: honest ones that ask for completions.
        warm_up: seconds after which memory must not grow; None for those that many clients need to fill all caches.
        tiers: whether pages of KV also go to files.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = make_adapters(folder / "adapters")
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "benchmarks.soaking.device", "api", name, str(port), *["tiers"][:tiers]]
        with (folder / "log").open("wb") as log, subprocess.Popen(command, stderr=log, cwd=ROOT) as server:
            try:
                asyncio.run(wait_until_ready(url, server))
                api = psutil.Process(server.pid)
                samples = {"api": Samples(api), "engine": Samples(engine_of(api))}
                disk = FolderSamples(kv_folder(folder))
                tally = asyncio.run(load(url, codes, 60 * minutes, {**samples, "disk": disk}, clients))
                metrics = asyncio.run(counters_at_rest(url))
                server.send_signal(signal.SIGTERM)
                code = server.wait(60)
            except BaseException:
                server.kill()
                print((folder / "log").read_text()[-4000:], file=sys.stderr)
                raise
        lines = [json.loads(line) for line in (folder / "log").read_bytes().splitlines() if line.startswith(b"{")]
        engine = json.loads((folder / REPORT).read_text())
        holds = equations(tally, metrics, engine, ledger_sums(folder / "usage.db"), lines)
    warm = max(min(60.0, 30 * minutes), 18 * minutes) if warm_up is None else warm_up
    memory = {name: one.report(warm) for name, one in samples.items()}
    claim = f"grew by less than {MOST_GROWTH_MIB} MiB" if minutes < 10 else "is flat"
    holds |= {f"memory of the {name} process {claim}": is_flat(report, minutes) for name, report in memory.items()}
    holds |= {
        f"threads and files of the {name} process": max(one.files[-1], one.threads[-1]) < 2 * (CLIENTS + TALKERS) + 50
        for name, one in samples.items()
    }
    holds["the server ended with code 0, all requests finished"] = code == 0
    holds |= tiers_hold(engine["stats"], disk) if tiers else {}
    holds["no line of the log is an error"] = not any(line["level"] == "error" for line in lines)
    return {
        "minutes": minutes,
        "holds": holds,
        "wrong": tally.wrong[:10],
        "clients": dict(sorted(tally.counts.items())),
        "engine": engine["counts"],
        "checks_of_all_equations_in_the_engine": engine["counts"]["checks"],
        "preemptions": engine["stats"]["preemptions"],
        "evicted_pages": engine["counts"]["evicted_pages"],
        "tiers": {name: value for name, value in engine["stats"].items() if name.startswith("kv_")},
        "most_mib_of_files": round(disk.most / 2**20, 2),
        "warm_up_seconds": warm,
        "memory": memory,
    }


def main() -> int:
    """Soak, print, write the file if one is named. 1 if something does not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=CLIENTS, help="honest ones that ask for completions")
    parser.add_argument("--tiers", action="store_true", help="pages of KV also go to files")
    parser.add_argument("--warm-up", type=float, help="seconds, more with few clients, who fill caches later")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    command = f"python -m benchmarks.soak --minutes {options.minutes:g} --clients {options.clients}"
    command += " --tiers" if options.tiers else ""
    figures = {"command": command, "machine": machine()} | soak(
        options.minutes, options.clients, options.tiers, options.warm_up
    )
    text = json.dumps(figures, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0 if all(figures["holds"].values()) else 1


if __name__ == "__main__":
    sys.exit(main())
