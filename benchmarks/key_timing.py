"""Does the time of a refusal tell how much of an API key was right? Measured as an attacker would.

    python -m benchmarks.key_timing [--tries 10000] [--output FILE.json]

Wrong keys of the right length agree with a valid one in none, one, half or all but one of their first characters, and
go on at random. They come in random order, so many tries of each kind; of each pair of kinds, Welch's t of the times
says whether they differ. 4.5 is the usual threshold of leakage tests. It is taken of all times, and of those below the
95th percentile of all kinds together, where what else the machine does is left out and a small difference shows better.

Measured are the guard in front of all routes, called in this process, and the whole server over HTTP. Each has controls
which show that the instrument would notice: a ring of keys that stops comparing at the first wrong byte, in a loop, and
(in process) as memory is compared. Exit code 1 unless every |t| of the server's own keys is below 4.5, and each
control's largest above it.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import random
import secrets
import socket
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
import uvloop
from starlette.types import Message, Receive, Scope, Send

from benchmarks.serve.server import machine
from rootgraft.api.access.api_keys import Key, KeyRing, new_secret
from rootgraft.api.access.caller import RequestFacts
from rootgraft.api.config import ServerConfig
from rootgraft.api.generate.server_state import ServerState
from rootgraft.api.http.app import create_app
from rootgraft.api.http.connection import uvicorn_options
from rootgraft.api.http.guard import Guard
from rootgraft.api.observe.metrics import Metrics

THRESHOLD = 4.5
OTHER_KEYS = 15
LONG = 24_000  # characters of a control's key: what a header holds
WARM_UP = 200
PATH = "/v1/models"
Attempt = Callable[[bytes], int]


class EarlyExit(KeyRing):
    """The control: a ring that a key's text is compared in until the first wrong byte."""

    def __init__(self, key: str, same: Callable[[bytes, bytes], bool]) -> None:
        super().__init__((key,), None)
        self._text = key.encode()
        self._same = same

    def find(self, token: bytes) -> Key | None:
        return self._keys[0] if self._same(self._text, token) else None


def in_a_loop(left: bytes, right: bytes) -> bool:
    """Byte by byte until two differ."""
    return len(left) == len(right) and all(a == b for a, b in zip(left, right, strict=True))


def as_memory(left: bytes, right: bytes) -> bool:
    """Compare block by block, like ``==``."""
    return left == right


def state_of(ring: KeyRing) -> ServerState:
    """A server whose model is not loaded, which is all that a refusal needs."""
    state = ServerState(ServerConfig(), Metrics("none", dict))
    state.limits.keys = ring
    return state


def guesses(key: str, rng: random.Random) -> dict[str, bytes]:
    """A wrong key of each kind, as long as the right one."""
    made = {}
    for kind, right in (("0", 0), ("1", 1), ("half", len(key) // 2), ("all but one", len(key) - 1)):
        wrong = "x" if key[right] != "x" else "y"
        rest = rng.randbytes(len(key)).hex()[: len(key) - right - 1]
        made[kind] = (key[:right] + wrong + rest).encode()
    return made


def times_of(key: str, attempt: Attempt, tries: int) -> dict[str, list[int]]:
    """Nanoseconds of each kind of guess, so many of each, in random order."""
    rng = random.Random(secrets.randbits(64))
    times: dict[str, list[int]] = {}
    gc.disable()
    for number in range(-WARM_UP, tries):
        kinds = list(guesses(key, rng).items())
        rng.shuffle(kinds)
        for kind, guess in kinds:
            nanoseconds = attempt(guess)
            if number >= 0:
                times.setdefault(kind, []).append(nanoseconds)
        if number % 1000 == 0:
            gc.collect()
    gc.enable()
    return times


def welch(left: np.ndarray, right: np.ndarray) -> float:
    """Welch's t of two samples."""
    error = left.var(ddof=1) / len(left) + right.var(ddof=1) / len(right)
    return float((left.mean() - right.mean()) / np.sqrt(error))


def judged(times: dict[str, list[int]]) -> dict[str, Any]:
    """Return what the times of the kinds reveal."""
    kinds = {kind: np.array(times[kind], dtype=float) for kind in ("0", "1", "half", "all but one")}
    limit = np.quantile(np.concatenate(list(kinds.values())), 0.95)
    cropped = {kind: values[values < limit] for kind, values in kinds.items()}
    pairs = list(combinations(kinds, 2))
    t = {f"{a} : {b}": [round(welch(each[a], each[b]), 2) for each in (kinds, cropped)] for a, b in pairs}
    return {
        "tries_of_each_kind": len(times["0"]),
        "median_us": {kind: round(float(np.median(values)) / 1000, 3) for kind, values in kinds.items()},
        "t_of_all_times_and_of_those_below_the_95th_percentile": t,
        "largest_t": max(abs(value) for both in t.values() for value in both),
    }


def in_process(key: str, ring: KeyRing, tries: int) -> dict[str, Any]:
    """The guard alone, with the answer that it makes."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError("the guard let a wrong key in")

    async def receive() -> Message:
        raise AssertionError("the guard read the body of a wrong key's request")

    statuses: list[int] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    guard = Guard(app, state=state_of(ring))

    def attempt(guess: bytes) -> int:
        headers = [(b"host", b"localhost"), (b"authorization", b"Bearer " + guess)]
        scope = {"type": "http", "method": "GET", "path": PATH, "state": {"facts": RequestFacts()}, "headers": headers}
        call = guard(scope, receive, send)
        start = time.perf_counter_ns()
        try:
            call.send(None)
        except StopIteration:
            return time.perf_counter_ns() - start
        raise AssertionError("the guard waits for something")

    times = times_of(key, attempt, tries)
    assert set(statuses) == {401}
    return judged(times)


def serve(sock: socket.socket, ring: KeyRing) -> None:
    """A server process, until it is killed."""
    settings = uvicorn.Config(create_app(state_of(ring)), **uvicorn_options())
    uvloop.run(uvicorn.Server(settings).serve([sock]))


def over_http(key: str, ring: KeyRing, tries: int) -> dict[str, Any]:
    """The server, asked over one connection."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        process = multiprocessing.get_context("fork").Process(target=serve, args=(sock, ring), daemon=True)
        process.start()
        address = sock.getsockname()
    try:
        with socket.create_connection(address, timeout=20) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

            def attempt(guess: bytes) -> int:
                request = b"GET %s HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n\r\n"
                request %= PATH.encode(), guess
                start = time.perf_counter_ns()
                connection.sendall(request)
                answer = connection.recv(1 << 16)
                nanoseconds = time.perf_counter_ns() - start
                while not answer.endswith(b"}"):
                    answer += connection.recv(1 << 16)
                assert answer.startswith(b"HTTP/1.1 401 "), answer
                return nanoseconds

            return judged(times_of(key, attempt, tries))
    finally:
        process.kill()
        process.join()


def measure(tries: int) -> dict[str, Any]:
    """All figures."""
    key, *others = (new_secret() for _ in range(1 + OTHER_KEYS))
    ring = KeyRing((*others[: OTHER_KEYS // 2], key, *others[OTHER_KEYS // 2 :]), None)
    long = secrets.token_urlsafe(LONG)[:LONG]
    return {
        "guard": in_process(key, ring, tries),
        "guard, control: the same key, in a loop": in_process(key, EarlyExit(key, in_a_loop), tries),
        "guard, control: a long key, as memory": in_process(long, EarlyExit(long, as_memory), tries),
        "http": over_http(key, ring, tries),
        "http, control: a long key, in a loop": over_http(long, EarlyExit(long, in_a_loop), max(tries // 10, 100)),
    }


def main() -> int:
    """Measure, print, write the file if one is named. 1 if there is a signal, or none where there must be one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tries", type=int, default=10_000, help="tries of each kind (default: 10000)")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    figures = measure(options.tries)
    document = {
        "command": f"python -m benchmarks.key_timing --tries {options.tries}",
        "machine": machine(),
        "versions": {name: version(name) for name in ("uvicorn", "uvloop", "starlette", "fastapi", "numpy")},
        "keys": 1 + OTHER_KEYS,
        "threshold": THRESHOLD,
        "figures": figures,
    }
    text = json.dumps(document, indent=2)
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    own = [each["largest_t"] for what, each in figures.items() if "control" not in what]
    controls = [each["largest_t"] for what, each in figures.items() if "control" in what]
    return 0 if max(own) < THRESHOLD and min(controls) > THRESHOLD else 1


if __name__ == "__main__":
    sys.exit(main())
