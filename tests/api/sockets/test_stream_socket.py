"""``/v1/stream``: requests by id, the same tokens as over HTTP, cancelling, turns, limits, slow readers."""

from __future__ import annotations

import asyncio
import socket as sockets
from typing import Any

import pytest
from support.api.api_live import Live
from support.api.responses_asks import rendered
from support.api.socket_asks import hear, hear_ends, socket_of, tell
from support.api.tool_asks import TWO
from support.machine.waits import wait_until

from rootgraft.engine.errors import EngineDead

PATH = "/v1/stream"
HI = [{"role": "user", "content": "hi"}]


def _generate(request_id: str, **fields: Any) -> dict[str, Any]:
    what = {} if "prompt" in fields else {"messages": HI}
    return {"type": "generate", "id": request_id, "model": "tiny", **what, **fields}


def _of(found: list[dict[str, Any]], request_id: str) -> tuple[str, list[int], dict[str, Any]]:
    """Text, token ids and the last message of a request."""
    own = [each for each in found if each["id"] == request_id]
    assert [each["type"] for each in own[:-1]] == ["token"] * (len(own) - 1)
    ids = [token for each in own for token in each.get("token_ids", ())]
    return "".join(each.get("text", "") for each in own), ids, own[-1]


def test_many_requests_have_the_tokens_of_http(live: Live) -> None:
    live.async_engine.say = lambda request, index: f"answer to {len(request.tokens)}"
    asked = {f"chat-{n}": {"messages": [{"role": "user", "content": "x" * n}]} for n in range(5)}
    asked |= {f"text-{n}": {"prompt": "y" * n, "max_tokens": 99} for n in range(1, 5)}
    with socket_of(live, PATH) as socket, live.http() as http:
        for request_id, fields in asked.items():
            tell(socket, _generate(request_id, **fields))
        found = hear_ends(socket, len(asked))
        for request_id, fields in asked.items():
            path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
            reply = http.post(path, json={"model": "tiny", "return_token_ids": True, **fields}).json()
            choice = reply["choices"][0]
            text, ids, last = _of(found, request_id)
            assert text == (choice["text"] if "prompt" in fields else choice["message"]["content"])
            assert ids == choice["token_ids"]
            assert (last["type"], last["finish_reason"]) == ("done", choice["finish_reason"])
            assert last["usage"] == reply["usage"] and last["response_id"]
    assert len({tuple(request.tokens) for request in live.async_engine.seen}) == len(asked)


def test_a_request_is_cancelled_by_its_id_alone(live: Live) -> None:
    live.async_engine.gate = gate = asyncio.Event()
    with socket_of(live, PATH) as socket:
        for request_id in ("a", "b"):
            tell(socket, _generate(request_id))
        wait_until(lambda: len(live.async_engine.seen) == 2)
        tell(socket, {"type": "cancel", "id": "a"})
        tell(socket, {"type": "cancel", "id": "a"})
        last = hear(socket)
        assert (last["type"], last["id"], last["finish_reason"]) == ("done", "a", "cancelled")
        wait_until(lambda: len(live.async_engine.aborted) == 1 and live.state.limits.active == 1)
        live.loop.call_soon_threadsafe(gate.set)
        found = hear_ends(socket, 1, ("done",))
    assert _of([each for each in found if each["id"] == "b"], "b")[0] == "answer 0"


def test_a_request_that_is_cancelled_in_the_same_breath_ends_once(live: Live) -> None:
    with socket_of(live, PATH) as socket:
        for number in range(20):
            tell(socket, _generate(str(number)))
            tell(socket, {"type": "cancel", "id": str(number)})
        found = hear_ends(socket, 20, ("done",))
        tell(socket, _generate("last"))
        found += hear_ends(socket, 1, ("done",))
    ends = [each["id"] for each in found if each["type"] == "done"]
    assert sorted(ends) == sorted([*map(str, range(20)), "last"])
    assert live.state.limits.active == 0


def test_a_turn_is_added_to_a_chat_that_still_runs(live: Live) -> None:
    live.async_engine.gate = gate = asyncio.Event()
    with socket_of(live, PATH) as socket:
        tell(socket, _generate("one"))
        tell(socket, {"type": "generate", "id": "two", "after": "one", "messages": [{"role": "user", "content": "b"}]})
        wait_until(lambda: bool(live.async_engine.seen))
        live.loop.call_soon_threadsafe(gate.set)
        found = hear_ends(socket, 2)
        assert [each["id"] for each in found if each["type"] == "done"] == ["one", "two"]
        tell(socket, {"type": "generate", "id": "three", "after": "two", "messages": HI, "temperature": 0})
        hear_ends(socket, 1)
    said = [each["content"] for each in rendered(live)]
    assert said == ["hi", "answer 0", "b", "answer 0", "hi"]
    first, second = live.async_engine.seen[:2]
    whole = [*first.tokens, *b"answer 0"]
    assert list(second.tokens)[: len(whole)] == whole


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("content", ["Well, ", [{"type": "text", "text": "We"}, {"type": "text", "text": "ll, "}]])
def test_an_answer_that_continues_a_message_is_a_part_of_it(live: Live, content: Any, echo: bool) -> None:
    begun = [*HI, {"role": "assistant", "content": content}]
    with socket_of(live, PATH) as socket:
        tell(socket, _generate("one", messages=begun, continue_final_message=True, echo=echo))
        text, _, _ = _of(hear_ends(socket, 1), "one")
        tell(socket, {"type": "generate", "id": "two", "after": "one", "messages": HI})
        hear_ends(socket, 1)
    assert text == ("Well, answer 0" if echo else "answer 0")
    assert [each["content"] for each in rendered(live)] == ["hi", "Well, answer 0", "hi"]


def test_a_turn_after_one_that_was_cancelled_has_its_text(live: Live) -> None:
    live.async_engine.say = lambda request, index: "y" * 5000 if len(request.tokens) < 25 else "end"
    with socket_of(live, PATH) as socket:
        tell(socket, _generate("one", max_tokens=1900))
        begun = hear(socket)
        tell(socket, {"type": "cancel", "id": "one"})
        found = [begun, *hear_ends(socket, 1)]
        text, _, last = _of(found, "one")
        tell(socket, {"type": "generate", "id": "two", "after": "one", "messages": HI})
        hear_ends(socket, 1)
    assert last["finish_reason"] in ("cancelled", "length") and text
    assert [each["content"] for each in rendered(live)] == ["hi", text, "hi"]


def test_a_turn_after_calls_has_them(live: Live) -> None:
    live.async_engine.say = lambda request, index: "Well. " + TWO
    tools = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in ("weather", "ping")]
    with socket_of(live, PATH) as socket:
        tell(socket, _generate("one", tools=tools))
        found = hear_ends(socket, 1)
        assert found[-1]["finish_reason"] == "tool_calls"
        ids = [call["id"] for each in found for call in each.get("tool_calls", ()) if "id" in call]
        results = [{"role": "tool", "tool_call_id": one, "content": "ok"} for one in ids]
        tell(socket, {"type": "generate", "id": "two", "after": "one", "messages": results})
        assert hear_ends(socket, 1)[-1]["type"] == "done"
    message = rendered(live)[1]
    assert [call["id"] for call in message["tool_calls"]] == ids and len(ids) == 2


def test_errors_name_the_request_and_the_field(live: Live) -> None:
    cases: list[tuple[Any, str | None, int, str | None, str]] = [
        ("{", None, 400, None, "invalid_json"),
        (b"\xff", None, 400, None, "invalid_json"),
        (b"[" * 1030 + b"1" * 20 + b"]" * 1030, None, 400, None, "invalid_json"),
        ("3", None, 400, None, "invalid_type"),
        ({"type": "token", "id": "a"}, "a", 400, "type", "invalid_value"),
        ({"type": "generate", "messages": HI}, None, 400, "id", "invalid_value"),
        (_generate(""), None, 400, "id", "invalid_value"),
        (_generate("x" * 65), "x" * 64, 400, "id", "invalid_value"),
        ({"type": "generate", "id": "a"}, "a", 400, "messages", "invalid_value"),
        (_generate("a", prompt="x", messages=HI), "a", 400, "messages", "invalid_value"),
        (_generate("a", stream=False), "a", 400, "stream", "invalid_value"),
        (_generate("a", stream_options={}), "a", 400, "stream_options", "unsupported_parameter"),
        (_generate("a", after="b"), "a", 400, "after", "conversation_not_found"),
        (_generate("a", after=3), "a", 400, "after", "conversation_not_found"),
        (_generate("a", prompt="x", after="b"), "a", 400, "after", "invalid_value"),
        (_generate("a", temperature=9), "a", 400, "temperature", "invalid_value"),
        (_generate("a", model="none"), "a", 404, "model", "model_not_found"),
        ({"type": "cancel", "id": "none"}, "none", 400, "id", "request_not_found"),
        ({"type": "cancel", "id": "none", "more": 1}, "none", 400, None, "unknown_parameter"),
    ]
    with socket_of(live, PATH) as socket:
        for message, request_id, status, param, code in cases:
            tell(socket, message)
            found = hear(socket)
            assert (found["type"], found["id"], found["status"]) == ("error", request_id, status), found
            assert (found["error"]["param"], found["error"]["code"]) == (param, code), found
        tell(socket, _generate("x" * 64))
        assert hear_ends(socket, 1)[-1]["type"] == "done"


def test_an_id_of_a_request_that_runs_is_refused(live: Live) -> None:
    live.async_engine.gate = gate = asyncio.Event()
    with socket_of(live, PATH) as socket:
        tell(socket, _generate("a"))
        tell(socket, _generate("a"))
        assert hear(socket)["error"]["param"] == "id"
        live.loop.call_soon_threadsafe(gate.set)
        assert hear_ends(socket, 1)[-1]["type"] == "done"
        tell(socket, _generate("a"))
        assert hear_ends(socket, 1)[-1]["type"] == "done"


def test_a_failure_in_the_middle_is_the_requests_error(live: Live) -> None:
    live.async_engine.fail_after = (2, EngineDead("The engine is not running."))
    with socket_of(live, PATH) as socket:
        tell(socket, _generate("a"))
        last = hear_ends(socket, 1)[-1]
        assert (last["type"], last["id"], last["error"]["code"]) == ("error", "a", "engine_dead")
        tell(socket, _generate("b", after="a"))
        assert hear(socket)["error"]["code"] == "conversation_not_found"


def test_requests_beyond_the_limit_of_a_connection(live: Live) -> None:
    live.async_engine.gate = gate = asyncio.Event()
    live.state.sockets.requests = 2
    with socket_of(live, PATH) as socket:
        for number in range(3):
            tell(socket, _generate(str(number)))
        refused = hear(socket)
        assert (refused["id"], refused["error"]["code"]) == ("2", "rate_limit_exceeded")
        live.loop.call_soon_threadsafe(gate.set)
        assert [each["type"] for each in hear_ends(socket, 2) if each["type"] != "token"] == ["done", "done"]


def test_past_chats_are_kept_within_a_limit(live: Live) -> None:
    live.state.sockets.conversation_bytes = 400
    with socket_of(live, PATH) as socket:
        for number in range(5):
            tell(socket, _generate(str(number)))
            hear_ends(socket, 1)
        tell(socket, _generate("new", after="4"))
        assert hear_ends(socket, 1)[-1]["type"] == "done"
        tell(socket, _generate("new", after="0"))
        assert hear(socket)["error"]["code"] == "conversation_not_found"


def test_who_leaves_has_all_requests_aborted(live: Live) -> None:
    live.async_engine.gate = asyncio.Event()
    with socket_of(live, PATH) as socket:
        for number in range(6):
            tell(socket, _generate(str(number)))
        wait_until(lambda: len(live.async_engine.seen) == 6)
        socket.socket.shutdown(sockets.SHUT_RDWR)
    wait_until(lambda: len(live.async_engine.aborted) == 6 and live.state.limits.active == 0)


def test_a_reader_that_stops_is_paused_and_then_disconnected(live: Live) -> None:
    live.state.sockets.send_seconds = 0.2
    live.async_engine.say = lambda request, index: "z" * (1900 if request.params.logprobs else 200)
    with socket_of(live, PATH, max_queue=1, close_timeout=0.1) as slow:
        for number in range(8):
            tell(slow, _generate(str(number), max_tokens=1900, logprobs=True, top_logprobs=20))
        with socket_of(live, PATH) as other:
            tell(other, _generate("a"))
            assert _of(hear_ends(other, 1), "a")[0] == "z" * 200
        wait_until(lambda: live.state.sockets.connections.total == 0)
        assert live.state.limits.active == 0 and live.async_engine.aborted


def test_each_request_is_counted_as_over_http(live: Live) -> None:
    def counted() -> float:
        with live.http() as http:
            text = http.get("/metrics").text
        lines = [line for line in text.splitlines() if "http_requests" in line and "/v1/chat/completions" in line]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)

    before = counted()
    with socket_of(live, PATH) as socket:
        for number in range(3):
            tell(socket, _generate(str(number)))
        hear_ends(socket, 3)
    wait_until(lambda: counted() == before + 3)
