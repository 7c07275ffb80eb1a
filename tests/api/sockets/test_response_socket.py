"""``responses.connect()`` of OpenAI's SDK: events, lanes, conversations, errors, keys, ends."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from support.api.api_live import Live
from support.api.responses_asks import ASKED, events_of, rendered
from support.api.socket_asks import hear, hear_ends, socket_of, tell
from support.machine.waits import wait_until
from websockets.exceptions import InvalidStatus

from rootgraft.api.config import ServerConfig
from rootgraft.engine.errors import EngineDead

PATH = "/v1/responses"
_ENDS = ("response.completed", "response.failed", "response.incomplete", "error")


def _create(**fields: Any) -> dict[str, Any]:
    return {"type": "response.create", **ASKED, **fields}


def _without_ids(event: dict[str, Any]) -> dict[str, Any]:
    """An event without what differs from response to response: ids and times."""
    text = json.dumps(event)
    for name in ("item_id", "id", "created_at", "completed_at"):
        text = _blanked(text, name)
    return json.loads(text)  # type: ignore[no-any-return]


def _blanked(text: str, name: str) -> str:
    value = json.loads(text)

    def blank(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: None if key == name else blank(each) for key, each in part.items()}
        return [blank(each) for each in part] if isinstance(part, list) else part

    return json.dumps(blank(value))


def test_the_client_of_openai_connects(live: Live) -> None:
    with live.openai() as client, client.responses.connect() as connection:
        connection.response.create(model="tiny", input="hi")
        texts, last = "", None
        for event in connection:
            if event.type == "response.output_text.delta":
                texts += event.delta
            if event.type == "response.completed":
                last = event.response
                break
        assert last is not None and texts == last.output_text == "answer 0"
        assert client.responses.retrieve(last.id).output_text == "answer 0"
        connection.response.create(model="tiny", input="more", previous_response_id=last.id)
        next(event for event in connection if event.type == "response.completed")
    assert [each["content"] for each in rendered(live)] == ["hi", "answer 0", "more"]


def test_the_async_client_connects(live: Live) -> None:
    async def run() -> str:
        client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none")
        async with client, client.responses.connect() as connection:
            await connection.response.create(model="tiny", input="hi")
            async for event in connection:
                if event.type == "response.completed":
                    return event.response.output_text
        return ""

    assert asyncio.run(run()) == "answer 0"


def test_the_events_are_those_of_http(live: Live) -> None:
    over_http = [event for _, event in events_of(live)]
    with socket_of(live, PATH) as socket:
        tell(socket, _create())
        found = hear_ends(socket, 1, _ENDS)
    assert [_without_ids(event) for event in found] == [_without_ids(event) for event in over_http]
    assert live.async_engine.seen[0].tokens == live.async_engine.seen[1].tokens
    assert live.async_engine.seen[0].params == live.async_engine.seen[1].params


def test_a_lane_is_answered_in_order_and_beside_others(live: Live) -> None:
    live.async_engine.gate = gate = asyncio.Event()
    with socket_of(live, PATH) as socket:
        for lane, text in (("a", "1"), ("a", "2"), ("b", "3"), (None, "4")):
            tell(socket, _create(input=text, **({} if lane is None else {"stream_id": lane})))
        wait_until(lambda: len(live.async_engine.seen) == 3)
        live.loop.call_soon_threadsafe(gate.set)
        found = hear_ends(socket, 4, _ENDS)
    lanes = {lane: [e for e in found if e.get("stream_id") == lane] for lane in ("a", "b", None)}
    assert [len([e for e in events if e["type"] == "response.completed"]) for events in lanes.values()] == [2, 1, 1]
    kinds = [event["type"] for event in lanes["a"]]
    assert kinds.index("response.completed") < len(kinds) - 1 - kinds[::-1].index("response.created")
    numbers = [event["sequence_number"] for event in lanes["b"]]
    assert numbers == list(range(len(numbers)))


def test_a_connection_goes_on_from_responses_of_its_own_that_are_not_stored(live: Live) -> None:
    with socket_of(live, PATH) as socket, socket_of(live, PATH) as other:
        tell(socket, _create(store=False))
        response = hear_ends(socket, 1, _ENDS)[-1]["response"]
        assert response["store"] is False
        with live.openai() as client, pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response["id"])
        tell(other, _create(previous_response_id=response["id"]))
        assert hear(other)["error"]["code"] == "previous_response_not_found"
        tell(socket, _create(input="more", store=False, previous_response_id=response["id"]))
        assert hear_ends(socket, 1, _ENDS)[-1]["type"] == "response.completed"
        assert [each["content"] for each in rendered(live)] == ["hi", "answer 0", "more"]
        assert len(live.state.stores.responses) == 2
    wait_until(lambda: len(live.state.stores.responses) == 0)


def test_errors_are_told_and_the_connection_goes_on(live: Live) -> None:
    cases: list[tuple[Any, int, str | None, str]] = [
        ("{", 400, None, "invalid_json"),
        ("[]", 400, None, "invalid_type"),
        ({"type": "response.cancel"}, 400, "type", "invalid_value"),
        (_create(stream=False), 400, "stream", "invalid_value"),
        (_create(background=True), 400, "background", "unsupported_parameter"),
        (_create(generate=0), 400, "generate", "invalid_type"),
        (_create(stream_id=""), 400, "stream_id", "invalid_value"),
        (_create(stream_id="x" * 65), 400, "stream_id", "invalid_value"),
        (_create(temperature=9), 400, "temperature", "invalid_value"),
        (_create(model="none"), 404, "model", "model_not_found"),
        (_create(previous_response_id="resp_0"), 400, "previous_response_id", "previous_response_not_found"),
        (_create(nonsense=1), 400, "nonsense", "unknown_parameter"),
    ]
    with socket_of(live, PATH) as socket:
        for message, status, param, code in cases:
            tell(socket, message)
            found = hear(socket)
            assert (found["type"], found["status"]) == ("error", status), found
            assert (found["error"]["param"], found["error"]["code"]) == (param, code), found
        tell(socket, _create(stream_id="x" * 64, temperature=9))
        assert hear(socket)["stream_id"] == "x" * 64
        tell(socket, _create())
        assert hear_ends(socket, 1, _ENDS)[-1]["type"] == "response.completed"


def test_a_response_that_is_prepared_without_output(live: Live) -> None:
    """As Codex does before its first request: the prompt is computed, and the response can be gone on from."""
    with live.openai() as client, client.responses.connect() as connection:
        connection.response.create(model="tiny", input="hi", generate=False, store=False)
        events = []
        while not events or events[-1].type != "response.completed":
            events.append(connection.recv())
        assert [event.type for event in events] == ["response.created", "response.in_progress", "response.completed"]
        prepared = events[-1].response  # type: ignore[union-attr]
        assert prepared.output == [] and prepared.status == "completed"
        assert prepared.usage is not None and prepared.usage.output_tokens == 0 and prepared.usage.input_tokens > 0
        connection.response.create(model="tiny", input="more", previous_response_id=prepared.id)
        next(event for event in connection if event.type == "response.completed")
    first, second = live.async_engine.seen
    assert (first.params.max_tokens, first.grammar) == (1, None)
    assert [each["content"] for each in rendered(live)] == ["hi", "more"] and len(second.tokens) > len(first.tokens)


def test_a_steer_is_refused_as_the_sdk_reads_it(live: Live) -> None:
    with live.openai() as client, client.responses.connect() as connection:
        connection.response.steer(input="stop", previous_response_id="resp_0")
        event = connection.recv()
        # Any JSON comes back, also an integer beyond 64 bits.
        steer: Any = {"type": "response.steer", "input": [10**30]}
        connection.send(steer)
        assert json.loads(connection.recv_bytes())["steer"]["input"] == [10**30]
    assert event.type == "response.steer.failed" and event.error.code == "steering_not_supported"
    assert event.steer.input == "stop" and event.steer.previous_response_id == "resp_0"


def test_a_failure_in_the_middle(live: Live) -> None:
    live.async_engine.fail_after = (2, EngineDead("The engine is not running."))
    with socket_of(live, PATH) as socket:
        tell(socket, _create())
        error, failed = hear_ends(socket, 1, ("response.failed",))[-2:]
    assert (error["type"], error["error"]["code"]) == ("error", "engine_dead")
    assert failed["response"]["status"] == "failed"


def test_who_leaves_has_its_requests_aborted(live: Live) -> None:
    live.async_engine.gate = asyncio.Event()
    with socket_of(live, PATH) as socket:
        for lane in ("a", "b"):
            tell(socket, _create(stream_id=lane))
        wait_until(lambda: len(live.async_engine.seen) == 2)
    wait_until(lambda: len(live.async_engine.aborted) == 2 and live.state.limits.active == 0)
    wait_until(lambda: live.state.sockets.connections.total == 0)
    assert len(live.state.stores.responses) == 0


def test_more_requests_than_a_connection_may_have(live: Live) -> None:
    live.async_engine.gate = gate = asyncio.Event()
    live.state.sockets.requests = 3
    with socket_of(live, PATH) as socket:
        for number in range(4):
            tell(socket, _create(stream_id=str(number % 2)))
        refused = hear(socket)
        assert (refused["error"]["code"], refused["stream_id"]) == ("rate_limit_exceeded", "1")
        live.loop.call_soon_threadsafe(gate.set)
        assert len([e for e in hear_ends(socket, 3, _ENDS) if e["type"] == "response.completed"]) == 3


def test_keys_and_their_shares_of_connections(serve_with: Any) -> None:
    live = serve_with(ServerConfig(api_key=("one", "two"), max_websockets=3))
    with pytest.raises(InvalidStatus) as caught:
        socket_of(live, PATH, key="three")
    assert caught.value.response.status_code == 401
    assert json.loads(caught.value.response.body or b"")["error"]["code"] == "invalid_api_key"
    with socket_of(live, PATH, key="one"), socket_of(live, PATH, key="one") as second:
        with pytest.raises(InvalidStatus) as caught:
            socket_of(live, PATH, key="one")
        assert caught.value.response.status_code == 429
        with socket_of(live, PATH, key="two") as other:
            tell(second, _create())
            made = hear_ends(second, 1, _ENDS)[-1]["response"]["id"]
            tell(other, _create(previous_response_id=made))
            assert hear(other)["error"]["code"] == "previous_response_not_found"
    wait_until(lambda: live.state.sockets.connections.total == 0)


@pytest.mark.parametrize("headers", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}, {"Origin": "null"}])
def test_foreign_pages_are_refused_as_over_http(live: Live, headers: dict[str, str]) -> None:
    with live.http() as http:
        over_http = http.post(PATH, json=ASKED, headers=headers)
    try:
        with socket_of(live, PATH, headers=headers):
            status = 101
    except InvalidStatus as error:
        status = error.response.status_code
        assert json.loads(error.response.body or b"")["error"]["code"] == "host_not_allowed"
    assert (status == 101) == (over_http.status_code == 200)
    assert (status == 403) == (over_http.status_code == 403)


def test_a_path_without_a_socket(live: Live) -> None:
    for path in ("/v1/nothing", "/v1/chat/completions"):
        with pytest.raises(InvalidStatus) as caught:
            socket_of(live, path)
        assert caught.value.response.status_code in (404, 405)
    with live.http() as http:
        assert http.get(PATH).status_code == 405


def test_a_proxys_path_is_taken_off(serve_with: Any) -> None:
    live = serve_with(ServerConfig(root_path="/llm"))
    with socket_of(live, "/llm" + PATH) as socket:
        tell(socket, _create())
        assert hear_ends(socket, 1, _ENDS)[-1]["type"] == "response.completed"
