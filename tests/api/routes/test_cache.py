"""Routes of sessions between their calls: what reaches the engine, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from support.api.api_live import Live


def test_a_session_is_released_exported_and_imported(live: Live) -> None:
    client: Any = live.state.engine.client
    client.sessions[("", "chat")] = b"known"
    with live.http() as http:
        reply = http.post("/v1/cache/sessions/export", json={"prompt_cache_key": "chat"})
        assert (reply.status_code, reply.content, reply.headers["x-session-tokens"]) == (200, b"known", "5")
        taken = [http.post("/v1/cache/sessions/import", content=data).json() for data in (reply.content, b"other")]
        assert [body["cached_tokens"] for body in taken] == [16, 0]
        for released in (True, False):
            answer = http.post("/v1/sessions/release", json={"prompt_cache_key": "chat"}).json()
            assert answer == {"object": "session.release", "prompt_cache_key": "chat", "released": released}
        assert http.post("/v1/cache/sessions/export", json={"prompt_cache_key": "chat"}).status_code == 404


@pytest.mark.parametrize("path", ["/v1/sessions/release", "/v1/cache/sessions/export"])
def test_names_of_sessions_have_bounds(live: Live, path: str) -> None:
    with live.http() as http:
        assert http.post(path, json={"prompt_cache_key": "k" * 256}).status_code in (200, 404)
        for body in ({}, {"prompt_cache_key": ""}, {"prompt_cache_key": "k" * 257}, {"prompt_cache_key": 1}):
            reply = http.post(path, json=body)
            assert reply.status_code == 400, reply.text
            assert "prompt_cache_key" in reply.json()["error"]["message"]


def test_files_have_bounds(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from rootgraft.api.http import guard

    monkeypatch.setattr(guard, "MAX_IMPORT_BYTES", 100)
    with live.http() as http:
        assert [http.post("/v1/cache/sessions/import", content=b"x" * size).status_code for size in (0, 100, 101)] == [
            *(400, 200, 413)
        ]
