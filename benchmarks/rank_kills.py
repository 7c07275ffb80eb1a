"""Kill or stop a rank of a model on two devices, at any point: every request ends, and no process is left.

    python -m benchmarks.rank_kills [--kills 200] [--seed 1] [--seconds 280] [--at-once 1] [--output FILE.json]

Each time a server of two ranks starts, over gloo, with random weights. A rank, a signal (SIGKILL or SIGSTOP) and a
moment are drawn: while the ranks start, or while four streams run. Told are the seconds from the signal until all
processes of the server have ended, and how many strikes took more than 5 seconds, or for a stopped rank 5 seconds more
than the silence after which it counts as hanging. Exit code 1 if a process is left or a stream has not ended.

With ``--at-once`` so many servers are struck at a time, which load the machine for each other: most of a run is the
start of its server. Each run tells the machine's load, and is drawn from the seed and its own number.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.cache_timing import wait_until_ready
from benchmarks.engine_death import Stream
from benchmarks.serve.server import ROOT, free_port, machine
from rootgraft.engine.checkpoint.locate import resolve_model
from rootgraft.engine.executor.rank_link import PERIOD, SILENT_PERIODS

ALLOWED = 5.0
HANG_SECONDS = 60.0
"""After so many more a process counts as left: on a machine that others use, some seconds are not ours."""
STREAMS = 4
FOLLOWER = "follower_process"
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def strike(folder: Path, seed: str) -> dict[str, Any]:
    """Start a server, strike one of its ranks, and return what was seen."""
    draw = random.Random(seed)
    rank, name = draw.randrange(2), draw.choice(("SIGKILL", "SIGSTOP"))
    is_starting, moment = draw.random() < 0.3, draw.random()
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    options = ["--tensor-parallel-size", "2", "--device", "cpu", "--dtype", "float32", "--load-format", "dummy"]
    options += ["--threads", "1", "--num-gpu-blocks-override", "600", "--port", str(port), "--log-level", "error"]
    command = [sys.executable, "-m", "rootgraft.api.cli.main", "serve", str(folder), *options]
    command += ["--tokenizer", str(resolve_model(None).path)]
    with subprocess.Popen(command, cwd=ROOT) as server:
        try:
            engine, follower = ranks_of(server)
            streams: list[Stream] = []
            if is_starting:
                time.sleep(moment * 5)
            else:
                wait_until_ready(url, server)
                streams = [Stream(url) for _ in range(STREAMS)]
                while not all(stream.begun.is_set() or stream.ended for stream in streams):
                    time.sleep(0.02)
                time.sleep(moment)
            is_ready = bool(streams) or is_up(url)
            seen = fall(server, (engine, follower)[rank], signal.Signals[name], streams)
        finally:
            server.kill()
    return (
        {"rank": rank, "signal": name, "moment": "start" if is_starting else "streams", "ready": is_ready}
        | {
            "seed": seed,
            "load": round(os.getloadavg()[0], 1),
        }
        | seen
    )


def ranks_of(server: subprocess.Popen[bytes]) -> tuple[psutil.Process, psutil.Process]:
    """Wait for both ranks: the engine's process, and the follower among its children."""
    while server.poll() is None:
        for engine in psutil.Process(server.pid).children():
            for child in engine.children():
                if any(FOLLOWER in word for word in child.cmdline()):
                    return engine, child
        time.sleep(0.05)
    raise SystemExit("The server has ended before it was struck.")


def is_up(url: str) -> bool:
    """Whether the model is loaded."""
    try:
        return httpx.get(f"{url}/health", timeout=20, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def fall(
    server: subprocess.Popen[bytes],
    victim: psutil.Process,
    number: signal.Signals,
    streams: list[Stream],
) -> dict[str, Any]:
    """Send the signal, and return how long all processes and streams then last."""
    processes = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
    start = time.perf_counter()
    victim.send_signal(number)
    limit = ALLOWED
    if number is signal.SIGSTOP:
        limit += SILENT_PERIODS * PERIOD
    left = psutil.wait_procs(processes, timeout=limit + HANG_SECONDS)[1]
    gone = time.perf_counter() - start
    for stream in streams:
        stream.join(HANG_SECONDS)
    return {
        "all_gone_seconds": round(gone, 2),
        "limit_seconds": limit,
        "processes": len(processes),
        "left": [" ".join(each.cmdline()[:6]) for each in left if each.is_running()],
        "streams_ended": all(not stream.is_alive() for stream in streams),
    }


def strike_in_turn(folder: Path, seeds: Iterator[str], until: float, runs: list[dict[str, Any]]) -> None:
    """Strike servers one after another until the seeds or the time are used up; append to ``runs`` and print."""
    while time.monotonic() < until and (seed := next(seeds, None)) is not None:
        runs.append(strike(folder, seed))
        print(json.dumps(runs[-1]), flush=True)


def main() -> int:
    """Strike, print, write the file if one is named. 1 if a bound is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="time after which no strike begins")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.at_once) as pool:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPE))
        until = time.monotonic() + options.seconds
        seeds = iter([f"{options.seed}-{number}" for number in range(options.kills)])
        lanes = [pool.submit(strike_in_turn, Path(folder), seeds, until, runs) for _ in range(options.at_once)]
        for lane in lanes:
            lane.result()
    failed = [run for run in runs if run["left"] or not run["streams_ended"]]
    late = [run for run in runs if run["all_gone_seconds"] > run["limit_seconds"]]
    document = {
        "command": f"python -m benchmarks.rank_kills --kills {options.kills} --seed {options.seed} "
        f"--at-once {options.at_once}",
        "machine": machine(),
        "failed": len(failed),
        "late": len(late),
        "slowest_seconds": {
            name: max((run["all_gone_seconds"] for run in runs if run["signal"] == name and run["ready"]), default=None)
            for name in ("SIGKILL", "SIGSTOP")
        },
        "runs": runs,
    }
    if options.output is not None:
        options.output.write_text(json.dumps(document, indent=2) + "\n")
    print(f"{len(runs)} strikes, {len(failed)} failed, {len(late)} late; slowest {document['slowest_seconds']}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
