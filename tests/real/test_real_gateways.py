"""The whole server with two gateways on the real model: adapters and versions that come through one hold in both."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from support.api.real_server import QUESTION, RealServer, start
from support.machine.waits import HANG_SECONDS, wait_until

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    catalog = tmp_path_factory.mktemp("catalog") / "models.sqlite"
    adapters = ["--enable-lora", "--lora-dir", str(ADAPTERS), "--adapter-sources", f"file://{ADAPTERS}"]
    fleet = ["--gateways", "2", "--replicas", "2", "--threads", "1", "--kv-cache-memory", "0.25"]
    server = start(*adapters, *fleet, "--model-catalog", str(catalog), "--log-level", "warning")
    try:
        wait_until(lambda: states(server) == ["serving", "serving"], pause=0.1)
        yield server
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(HANG_SECONDS) == 0
    finally:
        server.close()


def gateways(server: RealServer) -> list[dict[str, Any]]:
    """Ask over a connection of its own: one that is kept may be with a gateway that was killed."""
    with httpx.Client(base_url=server.http.base_url, timeout=HANG_SECONDS, trust_env=False) as http:
        return list(http.get("/v1/fleet").json()["gateways"]["data"])


def states(server: RealServer) -> list[str]:
    return [each["state"] for each in gateways(server)]


def pids(server: RealServer) -> set[int]:
    return {int(each["place"].removeprefix("process ")) for each in gateways(server)}


@contextmanager
def only(server: RealServer, number: int) -> Iterator[httpx.Client]:
    """Yield a client with one connection, to one of the gateways: the other one is stopped until it is open.

    It is not stopped for longer, as a gateway that gives no sign of life for ten seconds is taken for hanging.
    """
    stopped = psutil.Process(sorted(pids(server))[1 - number])
    limits = httpx.Limits(max_connections=1, keepalive_expiry=HANG_SECONDS)
    with httpx.Client(base_url=server.http.base_url, timeout=HANG_SECONDS, trust_env=False, limits=limits) as http:
        stopped.suspend()
        try:
            wait_until(lambda: stopped.status() == psutil.STATUS_STOPPED)
            assert http.get("/version").status_code == 200
        finally:
            stopped.resume()
        yield http


def ask(http: httpx.Client, model: str) -> httpx.Response:
    body = {"model": model, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    return http.post("/v1/chat/completions", json=body)


def text(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    content: str = reply.json()["choices"][0]["message"]["content"]
    return content


@pytest.mark.heavy
@pytest.mark.timeout(600)
def test_what_comes_through_one_holds_in_both(server: RealServer) -> None:
    def post(http: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        return dict(reply.json()) if reply.headers["content-type"] == "application/json" else {}

    with only(server, 0) as http:
        base = text(ask(http, "small"))
        assert ask(http, "arr").status_code == 404
        post(http, "/v1/load_lora_adapter", lora_name="arr", lora_path="pirate")
        adapted = text(ask(http, "arr"))
        assert adapted != base
        post(http, "/v1/admin/models", name="persona", source=f"file://{ADAPTERS}/pirate")
        [version] = http.get("/v1/admin/models").json()["data"][1]["versions"]
        assert ask(http, "persona").status_code == 404  # no request gets it yet
    with only(server, 1) as http:
        assert text(ask(http, "arr")) == adapted and text(ask(http, "small")) == base
        post(http, "/v1/admin/models/persona/promote", version=version["digest"])
        first = ask(http, "persona")
    with only(server, 0) as http:
        second = ask(http, "persona")
        assert text(first) == text(second) == adapted
        assert first.headers["x-model-version"] == second.headers["x-model-version"] == version["digest"]
        assert first.json()["system_fingerprint"] == second.json()["system_fingerprint"]
        post(http, "/v1/unload_lora_adapter", lora_name="arr")
    with only(server, 1) as http:
        assert ask(http, "arr").status_code == 404
        schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
        form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
        body = {"model": "persona", "messages": QUESTION, "max_tokens": 24, "response_format": form}
        assert '"n"' in text(http.post("/v1/chat/completions", json=body))
        assert http.get("/v1/models").json()["data"][0]["id"] == "small"


@pytest.mark.heavy
def test_they_are_forked_from_one_that_has_imported_all(server: RealServer) -> None:
    before = pids(server)
    killed = min(before)
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: killed not in pids(server) and states(server) == ["serving", "serving"], pause=0.1)
    [template] = {psutil.Process(pid).ppid() for pid in before - {killed} | pids(server)}
    assert psutil.Process(template).ppid() == server.process.pid
    with httpx.Client(base_url=server.http.base_url, timeout=HANG_SECONDS, trust_env=False) as http:
        assert text(ask(http, "small"))
