"""/health/live and /health/ready: each reason by its name, their body, and who need not fear a restart."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from support.api.api_live import Live, make_state, serve

from rootgraft.api.access.overload import Load
from rootgraft.api.access.wait_estimate import Work
from rootgraft.api.config import ServerConfig
from rootgraft.api.observe.replica_view import GatewaysStatus
from rootgraft.engine.errors import EngineDead
from rootgraft.engine.types import Priority


@pytest.fixture
def http(live: Live) -> Iterator[httpx.Client]:
    with live.http() as client:
        yield client


def told(http: httpx.Client, path: str) -> tuple[int, str, str | None]:
    reply = http.get(path)
    body = reply.json()
    assert len(reply.content) < 400 and http.head(path).status_code == reply.status_code
    assert {"status", "model_loaded", "avg_latency_ms", "requests_served"} <= body.keys()
    assert (reply.status_code == 503) == ("reason" in body) == ("error" in body)
    if "reason" in body:
        assert body["error"]["code"] == body["reason"]
    return reply.status_code, body["status"], body.get("reason")


def test_of_a_server_that_serves(http: httpx.Client) -> None:
    before = http.get("/health/ready").json()
    assert told(http, "/health/live") == (200, "live", None)
    assert told(http, "/health/ready") == (200, "ready", None)
    assert http.get("/health").json() == {**before, "status": "ok"}
    assert http.post("/v1/completions", json={"prompt": "x", "n": 2}).status_code == 200
    after = http.get("/health/ready").json()
    assert after["model_loaded"] is True and after["requests_served"] == before["requests_served"] + 2
    assert after["avg_latency_ms"] > 0


def test_a_model_that_is_loading_lives() -> None:
    state = make_state()
    state.engine.async_engine, state.engine.client = None, None
    for server in serve(state):
        with server.http() as http:
            assert told(http, "/health/live") == (200, "live", None)
            assert told(http, "/health/ready") == (503, "not_ready", "loading")
            body = http.get("/health/ready").json()
            assert (body["model_loaded"], body["avg_latency_ms"], body["requests_served"]) == (False, None, 0)


def test_an_engine_that_ends_while_it_loads_is_dead(live: Live, http: httpx.Client) -> None:
    frontend, live.state.engine.async_engine = live.state.engine.async_engine, None
    live.client.death = EngineDead("The engine process ended.")
    assert told(http, "/health/live") == (503, "dead", "engine_dead")
    assert told(http, "/health/ready") == (503, "not_ready", "engine_dead")
    live.state.engine.async_engine = frontend


def test_an_engine_that_hangs(live: Live, http: httpx.Client) -> None:
    live.client.hang()
    assert told(http, "/health/live") == (503, "dead", "engine_dead")
    assert told(http, "/health/ready") == (503, "not_ready", "engine_dead")


def test_an_engine_without_a_sign_of_life(live: Live, http: httpx.Client) -> None:
    live.client.silent_seconds = 2.5
    assert told(http, "/health/live") == (200, "live", None)
    assert told(http, "/health/ready") == (503, "not_ready", "engine_silent")
    live.client.silent_seconds = 1.9
    assert told(http, "/health/ready") == (200, "ready", None)


def test_a_server_that_is_ending(live: Live, http: httpx.Client) -> None:
    live.state.engine.draining = True
    assert told(http, "/health/live") == (200, "draining", None)
    assert told(http, "/health/ready") == (503, "not_ready", "shutting_down")


def test_gateways_that_do_not_serve_yet(live: Live, http: httpx.Client) -> None:
    live.state.observers.gateways = lambda: GatewaysStatus((), 2, 0, serves=False)
    assert told(http, "/health/ready") == (503, "not_ready", "loading")
    live.state.observers.gateways = None


@pytest.mark.parametrize(
    ("available", "waiting", "reason"), [(2, 1, "kv_full"), (0, 1, "kv_full"), (3, 1, None), (0, 0, None)]
)
def test_room_for_keys_and_values(
    live: Live, http: httpx.Client, available: float, waiting: float, reason: str | None
) -> None:
    """A full pool with nobody waiting is a server that is used well."""
    live.client.stats |= {"pages": 100.0, "pages_available": available, "waiting": waiting}
    assert told(http, "/health/ready")[2] == reason


def test_a_queue_at_its_limit() -> None:
    for server in serve(make_state(ServerConfig(max_queued_requests=10))):
        queue, load = server.state.limits.admission.queue_limits, Load("", Priority.INTERACTIVE, 1, 1)
        work = Work(sequences=1, tokens=1)
        with server.http() as http:
            for _ in range(8):
                queue.join(load, work)
            assert told(http, "/health/ready")[2] is None, "nine of ten places are for interactive requests"
            queue.join(load, work)
            assert told(http, "/health/ready") == (503, "not_ready", "max_queued_requests")
            queue.leave(load, work, begun=False)
            assert told(http, "/health/ready")[2] is None


def test_a_lost_device(live: Live, http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        async def answers(self) -> bool:
            return False

    found: Any = Lost()
    monkeypatch.setattr(live.state.observers, "gpus", found)
    assert told(http, "/health/ready") == (503, "not_ready", "device_lost")
    assert told(http, "/health/live") == (200, "live", None)
