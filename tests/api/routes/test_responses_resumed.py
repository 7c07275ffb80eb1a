"""Streams of /v1/responses that are resumed by number, with OpenAI's own clients, and background streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
from support.api.api_live import Live
from support.api.responses_asks import ASKED, PATH, events_of, parse_events
from support.machine.waits import wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.engine.errors import EngineDead


def _get(live: Live, response_id: str, headers: dict[str, str] | None = None, **query: Any) -> httpx.Response:
    with live.http() as http:
        return http.get(f"{PATH}/{response_id}", params={"stream": True, **query}, headers=headers)


def test_a_stored_stream_is_resumed_behind_each_event(live: Live) -> None:
    made = events_of(live)
    response_id = made[0][1]["response"]["id"]
    assert parse_events(_get(live, response_id).text) == made
    for number in range(len(made)):
        rest = made[number + 1 :]
        assert parse_events(_get(live, response_id, starting_after=number).text) == rest
        header = {"Last-Event-ID": str(number)}
        assert parse_events(_get(live, response_id, header, starting_after=0).text) == rest


def test_only_stored_events_have_ids(live: Live) -> None:
    with live.http() as http:
        texts = [http.post(PATH, json={**ASKED, "stream": True, "store": store}).text for store in (True, False)]
    assert "\nid: 0\n" in texts[0] and "\nid: " not in texts[1]


def test_what_cannot_be_resumed(live: Live) -> None:
    made = events_of(live)
    response_id = made[0][1]["response"]["id"]
    for query, field in (
        ({"starting_after": len(made)}, "starting_after"),
        ({"starting_after": -1}, "starting_after"),
        ({"starting_after": (1 << 53) + 1}, "starting_after"),
        ({"starting_after": "x"}, "starting_after"),
        ({"starting_after": 1, "stream": False}, "starting_after"),
    ):
        reply = _get(live, response_id, **query)
        assert reply.status_code == 400 and reply.json()["error"]["param"] == field, reply.text
    for value in ("-1", "x", "1.0", "9" * 16, "9" * 5000, "1 2"):
        reply = _get(live, response_id, {"Last-Event-ID": value})
        assert reply.status_code == 400 and "Last-Event-ID" in reply.json()["error"]["message"], reply.text
    assert _get(live, "resp_none").status_code == 404
    live.state.stores.events.drop(response_id)
    assert _get(live, response_id).status_code == 410


def test_a_background_stream_loses_nothing_when_its_client_leaves(live: Live) -> None:
    live.async_engine.gate = gate = asyncio.Event()
    with live.openai() as client:
        stream = client.responses.create(**ASKED, background=True, stream=True)
        seen = [next(stream), next(stream)]
        stream.close()
        assert [event.type for event in seen] == ["response.created", "response.queued"]
        response_id = seen[0].response.id  # type: ignore[union-attr]
        live.loop.call_soon_threadsafe(gate.set)
        resumed = list(client.responses.retrieve(response_id, stream=True, starting_after=1))
        assert [event.sequence_number for event in resumed] == list(range(2, 2 + len(resumed)))
        assert resumed[0].type == "response.in_progress"
        assert "".join(e.delta for e in resumed if e.type == "response.output_text.delta") == "answer 0"
        last = resumed[-1]
        assert last.type == "response.completed"
        assert client.responses.retrieve(response_id).model_dump() == last.response.model_dump()
        wait_until(lambda: live.state.limits.active == live.state.stores.responses.jobs.total == 0)
    assert not live.async_engine.aborted


def test_a_background_response_that_was_not_streamed_has_events_too(live: Live) -> None:
    with live.openai() as client:
        begun = client.responses.create(**ASKED, background=True)
        types = [event.type for event in client.responses.retrieve(begun.id, stream=True)]
    assert types[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert types[-1] == "response.completed"


def test_the_helper_of_the_client_resumes(live: Live) -> None:
    with live.openai() as client:
        with client.responses.stream(**ASKED, background=True) as events:
            response_id = next(event.response.id for event in events if event.type == "response.created")
        wait_until(lambda: client.responses.retrieve(response_id).status == "completed")
        with client.responses.stream(response_id=response_id) as again:
            types = [event.type for event in again]
            final = again.get_final_response()
        with client.responses.stream(response_id=response_id, starting_after=4) as rest:
            assert [event.type for event in rest] == types[5:]
    assert final.output_text == "answer 0"


def test_the_async_client_resumes(live: Live) -> None:
    live.async_engine.gate = gate = asyncio.Event()

    async def run() -> tuple[list[int], str]:
        client = openai.AsyncOpenAI(
            base_url=f"{live.url}/v1", api_key="none", http_client=httpx.AsyncClient(trust_env=False), max_retries=0
        )
        async with client:
            numbers = []
            async with await client.responses.create(**ASKED, background=True, stream=True) as stream:
                async for event in stream:
                    numbers.append(event.sequence_number)
                    response_id = event.response.id  # type: ignore[union-attr]
                    if event.type == "response.queued":
                        break
            live.loop.call_soon_threadsafe(gate.set)
            async for event in await client.responses.retrieve(response_id, stream=True, starting_after=numbers[-1]):
                numbers.append(event.sequence_number)
            return numbers, event.type

    numbers, last = asyncio.run(run())
    assert numbers == list(range(len(numbers))) and last == "response.completed"


def test_a_cancelled_background_stream_ends(live: Live) -> None:
    live.async_engine.gate = asyncio.Event()
    with live.openai() as client:
        stream = client.responses.create(**ASKED, background=True, stream=True)
        response_id = next(stream).response.id  # type: ignore[union-attr]
        wait_until(lambda: bool(live.async_engine.seen))
        assert client.responses.cancel(response_id).status == "cancelled"
        assert [event.type for event in stream][-1] == "response.cancelled"


def test_a_background_stream_that_fails(live: Live) -> None:
    live.async_engine.fail_after = (1, EngineDead("The engine is not running."))
    with live.openai() as client:
        response_id = client.responses.create(**ASKED, background=True).id
        wait_until(lambda: client.responses.retrieve(response_id).status == "failed")
    found = parse_events(_get(live, response_id).text)
    assert [name for name, _ in found][-2:] == ["error", "response.failed"]
    assert found[-2][1]["message"] == found[-1][1]["response"]["error"]["message"] == "The engine is not running."


def test_a_deleted_response_has_no_events(live: Live) -> None:
    response_id = events_of(live)[0][1]["response"]["id"]
    with live.openai() as client:
        client.responses.delete(response_id)
    assert _get(live, response_id).status_code == 404 and len(live.state.stores.events) == 0


def test_events_belong_to_the_key_of_their_response(serve_with: Any) -> None:
    live = serve_with(ServerConfig(api_key=("one", "two")))
    with live.openai(api_key="one") as mine, live.openai(api_key="two") as theirs:
        made = list(mine.responses.create(**ASKED, stream=True))
        response_id = made[0].response.id  # type: ignore[union-attr]
        assert list(mine.responses.retrieve(response_id, stream=True))
        with pytest.raises(openai.NotFoundError):
            theirs.responses.retrieve(response_id, stream=True)


def test_a_server_that_keeps_no_events(serve_with: Any) -> None:
    live = serve_with(ServerConfig(max_stored_event_bytes=0))
    made = events_of(live)
    assert _get(live, made[0][1]["response"]["id"]).status_code == 410
    with live.http() as http:
        reply = http.post(PATH, json={**ASKED, "background": True, "stream": True})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == "stream"
    assert live.state.limits.active == live.state.stores.responses.jobs.total == 0


def test_a_background_stream_over_its_size_says_which_events_are_gone(serve_with: Any) -> None:
    live = serve_with(ServerConfig(max_stored_event_bytes=8192))
    live.async_engine.say = lambda request, index: "x" * 200
    with live.openai() as client:
        response_id = client.responses.create(**ASKED, background=True).id
        wait_until(lambda: client.responses.retrieve(response_id).status == "completed")
    reply = _get(live, response_id)
    assert reply.status_code == 410 and reply.json()["error"]["code"] == "events_not_kept"
    first = live.state.stores.events.get("", response_id).first
    rest = parse_events(_get(live, response_id, starting_after=first - 1).text)
    assert rest[0][1]["sequence_number"] == first and json.loads(json.dumps(rest[-1][1]))["response"]["output"]
