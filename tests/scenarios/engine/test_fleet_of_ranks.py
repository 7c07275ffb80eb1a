"""A server of two replicas of two ranks each: killed ranks lose no request, and after a drain no process is left."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.api.real_server import RealServer, tiny_server
from support.engine.tiny_llm import write_model
from support.machine.waits import HANG_SECONDS, wait_until

pytestmark = pytest.mark.heavy

PROMPTS = [f"{number} ab cd " * 4 for number in range(4)]
TOKENS = 200
RANKS = ("--replicas", "2", "--tensor-parallel-size", "2")
OPTIONS = (*RANKS, "--served-model-name", "small", "--num-gpu-blocks-override", "200")


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealServer]:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    with tiny_server(write_model(tmp_path / "model"), *OPTIONS) as server:
        wait_until(lambda: len(serving(server)) == 2, 0.1)
        yield server


def test_killed_ranks_lose_no_request(server: RealServer, tmp_path: Path) -> None:
    """A follower, then rank 0 of the other replica; while that is being replaced, the server drains."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        expected = list(pool.map(partial(answer, server), PROMPTS))
        first, other = serving(server)
        [follower], [orphan] = first.children(), other.children()
        assert answers_amid(server, pool, follower, first) == expected
        psutil.wait_procs([first, follower], HANG_SECONDS)
        wait_until(lambda: len(serving(server)) == 2 and first not in serving(server), 0.1)
        assert answers_amid(server, pool, other, other) == expected
        psutil.wait_procs([other, orphan], HANG_SECONDS)
    assert fleet_of(server)["lost"] == 2 and fleet_of(server)["replays"] > 0
    everybody = psutil.Process(server.process.pid).children(recursive=True)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(HANG_SECONDS) == 0
    assert not psutil.wait_procs([first, follower, other, orphan, *everybody], HANG_SECONDS)[1]
    assert not list((tmp_path / "temporary").glob("rootgraft-ranks-*"))


def answers_amid(
    server: RealServer, pool: ThreadPoolExecutor, victim: psutil.Process, replica: psutil.Process
) -> list[str]:
    """Ask all prompts again and again, kill a process of a replica that computes, and return each prompt's answers."""
    lost = fleet_of(server)["lost"]
    asked = [pool.submit(ask_until, server, prompt, lambda: fleet_of(server)["lost"] > lost) for prompt in PROMPTS]
    wait_until(lambda: running(server).get(replica.pid, 0) > 0, 0.02)
    victim.kill()
    return [each.result(HANG_SECONDS) for each in asked]


def ask_until(server: RealServer, prompt: str, condition: Callable[[], bool]) -> str:
    """Ask until a condition holds. Returns the answer, which must be the same each time."""
    found = {answer(server, prompt)}
    while not condition():
        found.add(answer(server, prompt))
    [text] = found
    return text


def answer(server: RealServer, prompt: str) -> str:
    body = {"model": "small", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    reply = server.http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def fleet_of(server: RealServer) -> dict[str, Any]:
    """Return what the server tells of its replicas."""
    return dict(server.http.get("/v1/fleet").json())


def running(server: RealServer) -> dict[int, int]:
    """Return how many sequences the serving replicas run, by the number of the process of rank 0."""
    replicas = [each for each in fleet_of(server)["data"] if each["state"] == "serving"]
    return {int(each["place"].removeprefix("process ")): each["running"] for each in replicas}


def serving(server: RealServer) -> list[psutil.Process]:
    """Return rank 0 of each replica that serves."""
    return [psutil.Process(number) for number in running(server)]
