"""Wrong and odd requests beside an honest client of a real server: nothing dies, leaks or changes its answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from prometheus_client.parser import text_string_to_metric_families
from schemathesis import GenerationMode
from support.api.api_fakes import MAX_LEN
from support.api.bad import bad_fields, bad_inputs
from support.api.real_server import QUESTION, RealServer, start
from support.api.reply_checks import complete
from support.machine.waits import HANG_SECONDS, wait_until

pytestmark = pytest.mark.heavy

ASKED: dict[str, Any] = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}


def answer(http: httpx.Client) -> str:
    reply = http.post("/v1/chat/completions", json=ASKED)
    return str(reply.json()["choices"][0]["message"]["content"])


def gauges(http: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {family.name: family.samples[0].value for family in families if family.type == "gauge"}


@contextmanager
def honest_client(server: RealServer) -> Iterator[None]:
    """Asks the same all the while. At the end every answer was the same, both processes live, and nothing is held."""
    [engine] = [
        child
        for child in psutil.Process(server.process.pid).children()
        if "rootgraft.engine.core.engine_process" in child.cmdline()
    ]
    alone = answer(server.http)
    heard: list[str] = []
    over = threading.Event()

    def neighbour() -> None:
        with httpx.Client(base_url=server.http.base_url, timeout=HANG_SECONDS, trust_env=False) as http:
            while not over.is_set():
                heard.append(answer(http))

    thread = threading.Thread(target=neighbour)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(HANG_SECONDS)
    assert heard and set(heard) == {alone}
    assert engine.is_running() and server.process.poll() is None

    def idle() -> bool:
        now = gauges(server.http)
        held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return not any(now[f"rootgraft:{name}"] for name in held)

    wait_until(idle)


@pytest.fixture(scope="module")
def server() -> Iterator[RealServer]:
    running = start()
    yield running
    running.close()


def test_wrong_requests_beside_an_honest_client(server: RealServer) -> None:
    bodies = [(path, {**bad_fields.GOOD[path], **fields}) for path, fields, _, _ in bad_fields.CASES]
    bodies += [(path, complete(path, fields)) for path, fields, _, _ in bad_inputs.CASES]
    with honest_client(server):
        for path, body in bodies:
            if body.get("max_tokens") == MAX_LEN:
                continue  # too long for the fake model of other tests; here it would just be long
            reply = server.http.post(path, json={"max_tokens": 1, **body} if path.startswith("/v1/c") else body)
            assert reply.status_code < 500, (path, str(body)[:200], reply.text)
        for body in bad_inputs.RAW:
            for path in bad_fields.GOOD:
                headers = {"content-type": "application/json"}
                assert server.http.post(path, content=body[0], headers=headers).status_code == 400


def test_what_schemathesis_makes_of_the_document_beside_an_honest_client(server: RealServer) -> None:
    """Its requests may be right and long, so each has a second: of all above 500 only 503, 504 and 529 are declared."""
    document = schemathesis.openapi.from_url(f"{server.http.base_url}/openapi.json")
    document.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
    asked: set[str] = set()

    def ask(case: Any) -> None:
        reply = case.call(base_url=str(server.http.base_url), headers={"x-request-timeout": "1"}, timeout=HANG_SECONDS)
        assert reply.status_code < 500 or reply.status_code in (503, 504, 529), (reply.status_code, reply.text)
        asked.add(f"{case.method} {case.path}")

    quiet = settings(
        max_examples=4,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
        deadline=None,
    )
    with honest_client(server):
        for operation in document.get_all_operations():
            quiet(given(case=operation.ok().as_strategy())(ask))()
    assert len(asked) >= 18
