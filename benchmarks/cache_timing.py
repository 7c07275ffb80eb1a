"""Can one tenant tell by the time of its first token what another has asked? Measured as an attacker would.

    python -m benchmarks.cache_timing [--trials 1000] [--output FILE.json]

In each trial a victim sends a prompt, in half of them the attacker's guess and otherwise another; then the attacker
sends the guess with its own key and takes the time. AUC is the chance that a trial in which the guess was right was
faster than one in which it was not: 0.5 tells nothing. The same with ``--share-cache-between-keys`` shows that the
test would notice. Exit code 1 unless the first is within 0.45 to 0.55, or within what so few trials give by chance in
95 of 100 runs, and the second above 0.95; or if ``cached_tokens`` says what the time must not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.serve.server import ROOT, machine

PROMPT = 96  # tokens
CONTROL_TRIALS = 60
LARGEST_TOKEN = 40_000


def auc(right: list[float], wrong: list[float]) -> tuple[float, float]:
    """Area under the curve of a classifier by time, and half its 95 % interval where there is nothing to see."""
    faster = sum((hit < miss) + (hit == miss) / 2 for hit in right for miss in wrong)
    spread = math.sqrt((len(right) + len(wrong) + 1) / (12 * len(right) * len(wrong)))
    return faster / (len(right) * len(wrong)), 1.96 * spread


class Tenant:
    """A client with a key of its own."""

    def __init__(self, url: str, key: str) -> None:
        self._http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=120, trust_env=False
        )

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Return the seconds to the first token, and the reported cached tokens. Raises RuntimeError for no token."""
        begin = time.perf_counter()
        reply = self._http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1, "temperature": 0})
        seconds = time.perf_counter() - begin
        if reply.status_code != 200:
            raise RuntimeError(reply.text)
        return seconds, reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


def measure(url: str, trials: int, rng: random.Random) -> dict[str, Any]:
    """Times of the attacker's first tokens, and what can be told from them."""
    victim, attacker = Tenant(url, "key-victim"), Tenant(url, "key-attacker")
    times: dict[bool, list[float]] = {True: [], False: []}
    told = 0
    firsts = iter(rng.sample(range(LARGEST_TOKEN), 2 * trials))  # so no prompt begins like an earlier one of one's own
    for _ in range(trials):
        guess, other = ([next(firsts), *(rng.randrange(LARGEST_TOKEN) for _ in range(PROMPT - 1))] for _ in range(2))
        is_right = rng.random() < 0.5
        victim.ask(guess if is_right else other)
        seconds, cached = attacker.ask(guess)
        times[is_right].append(seconds)
        told = max(told, cached)
    area, interval = auc(times[True], times[False])
    middle = {name: sorted(times[kind])[len(times[kind]) // 2] for name, kind in (("right", True), ("wrong", False))}
    return {
        "trials": trials,
        "auc": round(area, 4),
        "auc_of_no_signal_95_percent": [round(0.5 - interval, 4), round(0.5 + interval, 4)],
        "most_cached_tokens_told": told,
        "median_ms": {name: round(1000 * seconds, 3) for name, seconds in middle.items()},
    }


def run(trials: int, *options: str) -> dict[str, Any]:
    """A server with two tenants, on the default model, and the attack on it."""
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        keys = [
            {"name": tenant, "sha256": hashlib.sha256(f"key-{tenant}".encode()).hexdigest()}
            for tenant in ("victim", "attacker")
        ]
        file = Path(name) / "keys.json"
        file.write_text(json.dumps({"keys": keys}))
        probe.close()
        command = [
            sys.executable,
            "-m",
            "rootgraft.api.cli.main",
            "serve",
            "--port",
            str(port),
            "--api-key-file",
            str(file),
        ]
        command += ["--log-level", "warning", *options]
        with subprocess.Popen(command, cwd=ROOT) as server:
            try:
                url = f"http://127.0.0.1:{port}"
                wait_until_ready(url, server)
                return measure(url, trials, random.Random(1))
            finally:
                server.terminate()


def wait_until_ready(url: str, server: subprocess.Popen[bytes]) -> None:
    """RuntimeError if the server ends instead."""
    while server.poll() is None:
        try:
            if httpx.get(f"{url}/ready", trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise RuntimeError("the server has ended")


def main() -> int:
    """Attack, print, write the file if one is named. 1 if there is a signal, or none where there must be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "command": f"python -m benchmarks.cache_timing --trials {options.trials}",
        "machine": machine(),
        "prompt_tokens": PROMPT,
        "tenants_apart": run(options.trials),
        "cache_shared": run(CONTROL_TRIALS, "--share-cache-between-keys"),
    }
    text = json.dumps(figures, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    apart: dict[str, Any] = figures["tenants_apart"]
    allowed = max(0.05, apart["auc_of_no_signal_95_percent"][1] - 0.5)
    unseen = abs(apart["auc"] - 0.5) <= allowed and not apart["most_cached_tokens_told"]
    return 0 if unseen and figures["cache_shared"]["auc"] > 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
