"""The last requests and the sums of their callers, bounded and without texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.api.api_live import Live
from support.api.key_files import entry, write
from support.machine.waits import wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.api.observe.recent_requests import MOST_CALLERS, MOST_REQUESTS, RecentRequests

ENDED = {"request_id": "r", "method": "POST", "path": "/v1/completions", "status": 200, "seconds": 0.5}


def test_failures_are_kept_however_much_succeeds() -> None:
    recent = RecentRequests(clock=lambda: 7.0)
    recent.add({**ENDED, "status": 503, "error": "server_overloaded"})
    recent.add({**ENDED, "error": "engine_dead", "finished": {"error": 1}})
    recent.add({**ENDED, "status": 0})
    for _ in range(2 * MOST_REQUESTS):
        recent.add({**ENDED, "finished": {"stop": 1}})
    told = recent.state()
    assert (told["now"], told["count"], told["failed"]) == (7.0, 2 * MOST_REQUESTS + 3, 3)
    assert len(told["last"]) == MOST_REQUESTS and all("error" not in each for each in told["last"])
    assert [(each["status"], each.get("error")) for each in told["failures"]] == [
        (0, None),
        (200, "engine_dead"),
        (503, "server_overloaded"),
    ]


def test_callers_are_summed_and_the_latest_are_kept() -> None:
    recent = RecentRequests()
    for number in range(MOST_CALLERS + 1):
        recent.add({**ENDED, "key": f"k{number}", "tenant": "t", "prompt_tokens": 5, "cached_tokens": 4})
    recent.add({**ENDED, "key": "k1", "tenant": "t", "prompt_tokens": 5, "completion_tokens": 2, "status": 429})
    callers = recent.state()["callers"]
    assert len(callers) == MOST_CALLERS and {each.key for each in callers}.isdisjoint({"k0"})
    first = callers[0]
    assert (first.key, first.requests, first.failed, first.prompt_tokens) == ("k1", 2, 1, 10)
    assert (first.cached_tokens, first.completion_tokens) == (4, 2)


def test_a_path_that_a_client_made_up_is_cut() -> None:
    recent = RecentRequests()
    recent.add({**ENDED, "path": "/" + "x" * 5000, "status": 404})
    assert len(recent.state()["last"][0]["path"]) == 80


def test_requests_over_http_are_told_without_their_texts(serve_with: Callable[..., Live], tmp_path: Path) -> None:
    write(tmp_path / "keys.json", entry("user", tenant="acme"), entry("boss", scopes=["admin"]))
    live = serve_with(ServerConfig(api_key_file=str(tmp_path / "keys.json")))
    with live.http(headers={"authorization": "Bearer user"}) as http:
        body: dict[str, Any] = {"model": "tiny", "prompt": "a secret word", "max_tokens": 2}
        assert http.post("/v1/completions", json=body).status_code == 200
        assert http.post("/v1/completions", json=body | {"temperature": 99}).status_code == 400
        assert http.get("/health").status_code == 200
    with live.http(headers={"authorization": "Bearer boss"}) as http:
        wait_until(lambda: http.get("/ui/state").json()["requests"]["count"] == 2)
        reply = http.get("/ui/state")
    told = reply.json()["requests"]
    assert [(each["status"], each["key"], each["tenant"]) for each in told["last"]] == [
        (400, "user", "acme"),
        (200, "user", "acme"),
    ]
    assert told["last"][1]["completion_tokens"] > 0 and told["last"][1]["model"] == "tiny"
    assert [each["requests"] for each in told["callers"]] == [2]
    assert "secret" not in reply.text
