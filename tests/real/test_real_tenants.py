"""Two tenants on a whole server: what one is told of the cache depends on nothing that the other has sent."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from support.api.real_server import RealServer, start

pytestmark = pytest.mark.heavy

SECRET = "The account of the client in question has the number 4711 and is closed since the spring of last year."
MESSAGES = [{"role": "user", "content": SECRET}]
ASKED: dict[str, tuple[str, dict[str, Any], str]] = {
    "completions": ("/v1/completions", {"prompt": SECRET, "max_tokens": 1}, "prompt_tokens_details"),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}, "prompt_tokens_details"),
    "responses": ("/v1/responses", {"input": SECRET, "max_output_tokens": 1}, "input_tokens_details"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    file = tmp_path_factory.mktemp("keys") / "keys.json"
    tenants = {"victim": "victim", "colleague": "victim", "attacker": "attacker"}
    keys = [
        {"name": name, "tenant": tenant, "sha256": hashlib.sha256(name.encode()).hexdigest()}
        for name, tenant in tenants.items()
    ]
    file.write_bytes(orjson.dumps({"keys": keys}))
    running = start("--api-key-file", str(file))
    yield running
    running.close()


@pytest.mark.parametrize("route", ASKED)
def test_cached_tokens_tell_nothing_of_another_tenant(server: RealServer, route: str) -> None:
    path, body, details = ASKED[route]

    def told(key: str, **more: Any) -> dict[str, int]:
        headers = {"authorization": f"Bearer {key}"}
        reply = server.http.post(path, json={**body, **more}, headers=headers)
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"][details]  # type: ignore[no-any-return]

    named = {"cache_salt": f"of {route}"}  # a cache of its own for each route: their prompts may begin alike
    assert told("victim", **named)["cached_tokens"] == 0
    assert told("colleague", **named)["cached_tokens"] > 0
    assert set(told("attacker", **named).values()) == {0}
    assert set(told("attacker", cache_salt=f"{route} without a victim").values()) == {0}
