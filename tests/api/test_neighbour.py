"""All wrong requests at once beside an honest client of a real server: nothing dies, leaks or changes its answers."""

from __future__ import annotations

import threading
from typing import Any

import bad_fields
import bad_inputs
import httpx
import psutil
import pytest
from api_live import wait_until
from prometheus_client.parser import text_string_to_metric_families
from test_bad_inputs import complete
from test_real_server import QUESTION, start

pytestmark = pytest.mark.heavy

ASKED: dict[str, Any] = {"messages": QUESTION, "max_tokens": 24, "temperature": 0}


def answer(http: httpx.Client) -> str:
    reply = http.post("/v1/chat/completions", json=ASKED)
    return str(reply.json()["choices"][0]["message"]["content"])


def gauges(http: httpx.Client) -> dict[str, float]:
    families = text_string_to_metric_families(http.get("/metrics").text)
    return {family.name: family.samples[0].value for family in families if family.type == "gauge"}


def test_wrong_requests_beside_an_honest_client() -> None:
    server = start()
    try:
        server.wait_ready()
        [engine] = [
            child for child in psutil.Process(server.process.pid).children() if "engine.loop" in child.cmdline()
        ]
        alone = answer(server.http)
        heard: list[str] = []
        over = threading.Event()

        def neighbour() -> None:
            with httpx.Client(base_url=server.http.base_url, timeout=120, trust_env=False) as http:
                while not over.is_set():
                    heard.append(answer(http))

        thread = threading.Thread(target=neighbour)
        thread.start()
        bodies = [(path, {**bad_fields.GOOD[path], **fields}) for path, fields, _, _ in bad_fields.CASES]
        bodies += [(path, complete(path, fields)) for path, fields, _, _ in bad_inputs.CASES]
        try:
            for path, body in bodies:
                reply = server.http.post(path, json={"max_tokens": 1, **body} if path.startswith("/v1/c") else body)
                assert reply.status_code < 500, (path, str(body)[:200], reply.text)
            for body in bad_inputs.RAW:
                for path in bad_fields.GOOD:
                    headers = {"content-type": "application/json"}
                    assert server.http.post(path, content=body[0], headers=headers).status_code == 400
        finally:
            over.set()
            thread.join(120)
        assert heard and set(heard) == {alone}
        assert engine.is_running() and server.process.poll() is None

        def idle() -> bool:
            now = gauges(server.http)
            held = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return not any(now[f"rootgraft:{name}"] for name in held)

        wait_until(idle)
    finally:
        server.close()
