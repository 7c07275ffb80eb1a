"""Heartbeats of event streams: comments while nothing is sent, in every door that streams, and errors behind them."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import ollama
import openai
import pytest
from support.api.api_live import Live
from support.api.messages_asks import client_of

from rootgraft.api.config import ServerConfig
from rootgraft.engine.errors import ConfigError, EngineDead

_CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 64}
_BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": _CHAT,
    "/v1/completions": {"model": "tiny", "prompt": "hi", "max_tokens": 64},
    "/v1/messages": _CHAT,
    "/v1/responses": {"model": "tiny", "input": "hi"},
    "/generate_stream": {"inputs": "hi"},
}
PING = ": ping"


@pytest.fixture
def beating(serve_with: Any) -> Live:
    live: Live = serve_with(ServerConfig(stream_heartbeat=0.01))
    live.async_engine.gate = asyncio.Event()
    return live


def _streamed(path: str) -> dict[str, Any]:
    return _BODIES[path] if path == "/generate_stream" else {**_BODIES[path], "stream": True}


def _lines(live: Live, path: str, num_pings: int) -> list[str]:
    """The lines of a stream whose engine waits until so many heartbeats have come."""
    found = []
    with live.http() as http, http.stream("POST", path, json=_streamed(path)) as reply:
        assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream")
        for line in reply.iter_lines():
            found.append(line)
            if found.count(PING) == num_pings:
                live.loop.call_soon_threadsafe(live.async_engine.gate.set)
    return found


@pytest.mark.parametrize("path", _BODIES)
def test_comments_are_sent_while_a_prompt_is_computed(beating: Live, path: str) -> None:
    found = _lines(beating, path, 3)
    # Events of a response have ids, behind which an empty line would be an event of its own to OpenAI's client.
    assert found.count(PING) >= 3 and found[0] == PING and found[1] == (PING if path == "/v1/responses" else "")
    data = [line for line in found if line.startswith("data: ")]
    assert "answer 0" in "".join(data) or len(data) > 8


@pytest.mark.parametrize("path", _BODIES)
def test_an_error_behind_a_heartbeat_is_an_event_of_its_protocol(beating: Live, path: str) -> None:
    beating.async_engine.fail_after = (0, EngineDead("The engine is not running."))
    found = _lines(beating, path, 2)
    event = json.loads(next(line for line in found if line.startswith("data: ")).removeprefix("data: "))
    if path == "/v1/messages":
        assert "event: error" in found and (event["type"], event["error"]["type"]) == ("error", "overloaded_error")
    elif path == "/v1/responses":
        assert "event: error" in found and (event["type"], event["code"]) == ("error", "engine_dead")
    elif path == "/generate_stream":
        assert "not running" in event["error"]
    else:
        assert event["error"]["code"] == "engine_dead"
    assert beating.state.limits.active == 0


def _open_gate_later(live: Live) -> None:
    live.loop.call_soon_threadsafe(live.loop.call_later, 0.05, live.async_engine.gate.set)


def test_clients_pass_over_heartbeats(beating: Live) -> None:
    with beating.openai() as client:
        _open_gate_later(beating)
        chunks = list(client.chat.completions.create(**_CHAT, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "answer 0"
    beating.async_engine.gate = asyncio.Event()
    with (
        client_of(beating.url) as other,
        other.messages.stream(**_CHAT) as messages,
    ):
        _open_gate_later(beating)
        assert messages.get_final_text() == "answer 0"


@pytest.mark.parametrize("kind", ["stored", "not stored", "in the background", "resumed"])
def test_openais_client_passes_over_heartbeats_behind_events_with_ids(beating: Live, kind: str) -> None:
    """Heartbeats come before the first event, between events and, as there are many, at any place."""
    asked: dict[str, Any] = {"model": "tiny", "input": "hi", "store": kind != "not stored"}
    if kind in ("in the background", "resumed"):
        asked["background"] = True
    beating.async_engine.gate = _Pulse(0.02)
    with beating.openai() as client:
        events: Any = list(client.responses.create(**asked, stream=True))
        if kind == "resumed":
            begun = next(iter(client.responses.create(**asked, stream=True)))
            events = list(client.responses.retrieve(begun.response.id, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == "answer 0"


class _Pulse(asyncio.Event):
    """Lets each frame of the engine through after so many seconds, in which heartbeats are sent."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    async def wait(self) -> Literal[True]:
        await asyncio.sleep(self._seconds)
        return True


def test_clients_raise_an_error_behind_a_heartbeat(beating: Live) -> None:
    beating.async_engine.fail_after = (0, EngineDead("The engine is not running."))
    with beating.openai() as client:
        _open_gate_later(beating)
        with pytest.raises(openai.APIError, match="not running"):
            list(client.chat.completions.create(**_CHAT, stream=True))


@pytest.mark.parametrize("path", ["/api/chat", "/api/generate"])
def test_streams_of_lines_get_spaces_that_the_client_passes_over(beating: Live, path: str) -> None:
    asked = {"prompt": "hi"} if path == "/api/generate" else {"messages": [{"role": "user", "content": "hi"}]}
    for fault in (None, EngineDead("The engine is not running.")):
        beating.async_engine.gate = asyncio.Event()
        beating.async_engine.fail_after = None if fault is None else (0, fault)
        with beating.http() as http, http.stream("POST", path, json={"model": "tiny", **asked}) as reply:
            pieces = b""
            for piece in reply.iter_raw():
                pieces += piece
                if pieces == b"  ":
                    beating.loop.call_soon_threadsafe(beating.async_engine.gate.set)
        found = [json.loads(line) for line in pieces.decode().splitlines()]
        assert pieces.startswith(b"  ") and pieces.endswith(b"}\n")
        assert found[-1]["done"] if fault is None else found == [found[0]] and "not running" in found[0]["error"]
    client = ollama.Client(beating.url, trust_env=False)
    beating.async_engine.gate, beating.async_engine.fail_after = asyncio.Event(), None
    _open_gate_later(beating)
    answer = client.chat("tiny", [{"role": "user", "content": "hi"}], stream=True)
    assert "".join(part.message.content or "" for part in answer) == "answer 0"
    client._client.close()


def test_a_refusal_before_the_first_heartbeat_keeps_its_status(live: Live) -> None:
    live.async_engine.fail_after = (0, EngineDead("The engine is not running."))
    for path in _BODIES:
        with live.http() as http:
            assert http.post(path, json=_streamed(path)).status_code == 503


def test_no_comments_without_heartbeats(serve_with: Any) -> None:
    live = serve_with(ServerConfig(stream_heartbeat=0))
    live.async_engine.gate = asyncio.Event()
    _open_gate_later(live)
    assert PING not in _lines(live, "/v1/chat/completions", -1)


def test_the_bounds_of_the_option() -> None:
    for value in (0, 3600):
        assert ServerConfig(stream_heartbeat=value).stream_heartbeat == value
    for value in (-1, 3600.5):
        with pytest.raises(ConfigError, match="stream-heartbeat"):
            ServerConfig(stream_heartbeat=value)
