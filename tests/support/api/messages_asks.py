"""Requests of Anthropic's protocol, its client on a server of the tests, and its streams event by event."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httpx

from support.api.api_live import Live
from support.api.tool_asks import CITY

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HI}
WEATHER = {"name": "weather", "description": "Of a city.", "input_schema": CITY}
PING = {"name": "ping", "input_schema": {"type": "object", "properties": {}, "additionalProperties": False}}
TOOLS = [WEATHER, PING]


def client_of(url: str, **options: Any) -> anthropic.Anthropic:
    """Anthropic's client; use it in a ``with``."""
    settings = {"api_key": "none", "max_retries": 0, "http_client": anthropic.DefaultHttpxClient(trust_env=False)}
    return anthropic.Anthropic(base_url=url, **{**settings, **options})


def say(live: Live, text: str) -> None:
    live.async_engine.say = lambda request, index: text


def prompt(live: Live, number: int = -1) -> str:
    return str(live.async_engine.tokenizer.decode(live.async_engine.seen[number].tokens))


def post(live: Live, status: int = 200, path: str = PATH, **fields: Any) -> dict[str, Any]:
    asked = {name: value for name, value in ASKED.items() if path == PATH or name != "max_tokens"}
    with live.http() as http:
        reply = http.post(path, json={**asked, **fields})
    assert reply.status_code == status, reply.text
    return dict(reply.json())


def events_of(live: Live, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; each has its type as its name too."""
    with live.http() as http:
        reply = http.post(PATH, json={**ASKED, "stream": True, **fields})
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply.text
    found = []
    for event in reply.text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def error_of(reply: httpx.Response, status: int, kind: str) -> str:
    """Check the whole shape of an error; its message."""
    assert reply.status_code == status, reply.text
    body = reply.json()
    assert body.keys() == {"type", "error", "request_id"} and body["type"] == "error"
    assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert body["error"].keys() == {"type", "message"} and body["error"]["type"] == kind, body
    return str(body["error"]["message"])
