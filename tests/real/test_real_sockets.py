"""WebSockets on the real model: tokens as over HTTP, turns on cached KV, cancelled rows freed, streams resumed."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from support.api.real_server import QUESTION, RealServer
from support.api.socket_asks import connect_to, hear, hear_ends, tell
from support.machine.waits import wait_until

pytestmark = pytest.mark.heavy
_ASKED: dict[str, Any] = {"model": "small", "messages": QUESTION, "max_tokens": 48, "temperature": 0}


def _metric(server: RealServer, name: str) -> float:
    lines = [line for line in server.http.get("/metrics").text.splitlines() if line.startswith(f"rootgraft:{name}{{")]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_a_conversation_of_two_turns(real_server: RealServer) -> None:
    second = [{"role": "user", "content": "Say more about the first one."}]
    with connect_to(real_server.url, "/v1/stream") as sock:
        tell(sock, {"type": "generate", "id": "a", **_ASKED})
        tell(sock, {"type": "generate", "id": "b", "after": "a", **_ASKED, "messages": second})
        found = hear_ends(sock, 2)
    texts = {name: "".join(e.get("text", "") for e in found if e["id"] == name) for name in "ab"}
    ids = {name: [t for e in found if e["id"] == name for t in e.get("token_ids", ())] for name in "ab"}
    first, last = (each for each in found if each["type"] == "done")
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] >= first["usage"]["total_tokens"] - 32
    history = [*QUESTION, {"role": "assistant", "content": texts["a"]}, *second]
    for name, messages in (("a", QUESTION), ("b", history)):
        body = {**_ASKED, "messages": messages, "return_token_ids": True}
        assert real_server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["token_ids"] == ids[name]


def test_a_cancelled_request_frees_its_row(real_server: RealServer) -> None:
    wait_until(lambda: _metric(real_server, "num_requests_running") == 0, pause=0.05)
    before = _metric(real_server, "generation_tokens_total")
    with connect_to(real_server.url, "/v1/stream") as sock:
        tell(sock, {"type": "generate", "id": "a", **_ASKED, "max_tokens": 1500, "ignore_eos": True})
        found = [hear(sock) for _ in range(8)]
        tell(sock, {"type": "cancel", "id": "a"})
        found += hear_ends(sock, 1)
        assert found[-1]["finish_reason"] == "cancelled"
        heard = sum(len(each.get("token_ids", ())) for each in found)
        # The metrics are those of the last heartbeat, which may be older than the request.
        wait_until(lambda: _metric(real_server, "generation_tokens_total") - before >= heard, pause=0.05)
        wait_until(lambda: _metric(real_server, "num_requests_running") == 0, pause=0.05)
        assert _metric(real_server, "generation_tokens_total") - before < 1500


def test_responses_over_websocket_and_resumed(real_server: RealServer) -> None:
    asked: Any = {"model": "small", "input": "Name three colours.", "max_output_tokens": 24, "temperature": 0}
    with openai.OpenAI(base_url=f"{real_server.url}/v1", api_key="none") as client:
        with client.responses.connect() as connection:
            connection.response.create(**asked)
            ends = ("response.completed", "response.incomplete")
            last = next(event for event in connection if event.type in ends)
        whole = client.responses.create(**asked)
        assert last.response.output_text == whole.output_text  # type: ignore[union-attr]
        stream = client.responses.create(**asked, background=True, stream=True)
        first = next(stream)
        stream.close()
        rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=0))  # type: ignore
    assert "".join(e.delta for e in rest if e.type == "response.output_text.delta") == whole.output_text
    assert [event.sequence_number for event in rest] == list(range(1, 1 + len(rest)))
