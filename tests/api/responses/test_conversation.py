"""Responses that are kept: going on from them, asking for them, making them in the background, whose they are."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import openai
import pytest
from support.api.api_live import Live
from support.api.reply_checks import check_error
from support.api.responses_asks import ASKED, TOOLS, events_of, rendered, say
from support.api.tool_asks import FORCED
from support.machine.waits import wait_until

from rootgraft.api.config import ServerConfig
from rootgraft.engine.errors import EngineDead
from rootgraft.tenancy.tenant_shares import TenantShares


def test_going_on_from_a_response(live: Live) -> None:
    with live.openai() as client:
        first = client.responses.create(**ASKED, instructions="Once.")
        second = client.responses.create(model="tiny", input="more", previous_response_id=first.id)
        client.responses.create(model="tiny", input="end", previous_response_id=second.id)
        contents = [message["content"] for message in rendered(live)]
        assert contents == ["hi", "answer 0", "more", "answer 0", "end"]
        assert second.previous_response_id == first.id
        client.responses.delete(first.id)
        client.responses.create(model="tiny", input="end", previous_response_id=second.id)
        assert [message["content"] for message in rendered(live)] == contents
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input="x", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found" and caught.value.param == "previous_response_id"


def test_input_tokens_are_counted_as_usage_says(live: Live) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "é" * 9}]},
        {"type": "function_call", "call_id": "c1", "name": "ping", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "pong"},
    ]
    asks: list[dict[str, Any]] = [
        {"input": "hi"},
        {"input": items, "instructions": "Be brief.", "tools": TOOLS, "truncation": "disabled"},
        {"input": "hi", "tools": TOOLS, "tool_choice": {"type": "function", "name": "ping"}},
        {"input": "hi", "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"input": [], "instructions": "Be brief."},
        {"input": "hi", "text": {"format": {"type": "json_schema", "name": "n", "schema": schema}}},
    ]
    with live.openai() as client:
        for thinks in (None, "qwen3", "gemma4"):
            live.async_engine.tokenizer.thinks = thinks
            said: Any = None
            for fields in asks + ([] if thinks is None else [{"input": "hi", "reasoning": {"effort": "high"}}]):
                for earlier in (None, said and said.id):
                    fields = {"model": "tiny", "previous_response_id": earlier, **fields}
                    count = client.responses.input_tokens.count(**fields)
                    num_seen = len(live.async_engine.seen)
                    said = client.responses.create(max_output_tokens=20, **fields)
                    assert count.object == "response.input_tokens" and count.input_tokens == said.usage.input_tokens > 0
                    assert len(live.async_engine.seen) == num_seen + 1, "nothing is generated to count"
        live.async_engine.tokenizer.thinks = None
        whole = client.responses.input_tokens.count(model="tiny", instructions="Be brief.")
        said = client.responses.create(model="tiny", input=[], instructions="Be brief.")
        assert whole.input_tokens == said.usage.input_tokens
        longer = client.responses.input_tokens.count(model="tiny", input="x" * 5000)
        assert longer.input_tokens > 5000, "more than the model's length"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.input_tokens.count(model="tiny", input="x", previous_response_id="resp_none")
        assert caught.value.code == "previous_response_not_found"


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({}, "input", "invalid_value"),
        ({"input": "x", "truncation": "middle"}, "truncation", "invalid_value"),
        ({"input": "x", "conversation": "conv_1"}, "conversation", "unsupported_parameter"),
        ({"input": "x", "personality": "friendly"}, "personality", "unsupported_parameter"),
        ({"input": "x", "max_output_tokens": 5}, "max_output_tokens", "unknown_parameter"),
        ({"input": "x", "tools": [{"type": 5}]}, "tools[0].type", "invalid_value"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools[0].name", "invalid_value"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice", "invalid_value"),
    ],
)
def test_what_is_wrong_with_a_count_is_said(live: Live, fields: dict[str, Any], param: str, code: str) -> None:
    with live.http() as http:
        check_error(http.post("/v1/responses/input_tokens", json={"model": "tiny", **fields}), 400, param, code)


def test_conversations_are_not_compacted(live: Live) -> None:
    with live.openai() as client, pytest.raises(openai.NotFoundError, match="never shortens") as caught:
        client.responses.compact(model="tiny", input="hi")
    assert caught.value.code == "unknown_url"


def test_what_is_kept_takes_no_more_memory_than_is_counted(live: Live) -> None:
    def post(text: str) -> None:
        http.post("/v1/responses", json={"model": "tiny", "input": text}).raise_for_status()

    with live.http() as http:
        post("what is made when it is first needed")
        before = live.state.stores.responses.num_bytes
        tracemalloc.start()
        try:
            for number in range(30):
                post(f"{number} " * 100)
            taken = sum(trace.size for trace in tracemalloc.take_snapshot().traces if _is_of_responses(trace))
        finally:
            tracemalloc.stop()
    assert 0 < taken < live.state.stores.responses.num_bytes - before


def _is_of_responses(trace: tracemalloc.Trace) -> bool:
    """Whether it was allocated by code of responses, on whose behalf ever."""
    return "responses" in trace.traceback[0].filename and "tests" not in trace.traceback[0].filename


def test_outputs_alone_after_a_response_with_calls(live: Live) -> None:
    say(live, FORCED)
    with live.openai() as client:
        first = client.responses.create(**ASKED, tools=TOOLS, tool_choice="required")
        outputs: Any = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "ok"}  # type: ignore[union-attr]
            for item in first.output
        ]
        say(live, "Done.")
        last = client.responses.create(model="tiny", input=outputs, previous_response_id=first.id)
        assert last.output_text == "Done."
        with pytest.raises(openai.BadRequestError, match="'c9', but there is no such call before it"):
            client.responses.create(
                model="tiny", input=[{"type": "function_call_output", "call_id": "c9", "output": "x"}]
            )


def test_references_to_items(live: Live) -> None:
    with live.openai() as client:
        first = client.responses.create(**ASKED)
        sent: Any = [{"type": "item_reference", "id": first.output[0].id}, {"role": "user", "content": "b"}]
        client.responses.create(model="tiny", input=sent)
        assert [message["content"] for message in rendered(live)] == ["answer 0", "b"]
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="tiny", input=[{"id": "msg_none"}])  # type: ignore
    assert caught.value.param == "input[0].id"


def test_asking_for_a_response_and_deleting_it(live: Live) -> None:
    with live.openai() as client:
        made = client.responses.create(**ASKED)
        assert client.responses.retrieve(made.id).model_dump() == made.model_dump()
        client.responses.delete(made.id)
        for ask in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="not found"):
                ask(made.id)
        unstored = client.responses.create(**ASKED, store=False)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unstored.id)
        streamed = events_of(live)[-1][1]["response"]
        assert client.responses.retrieve(streamed["id"]).output_text == "answer 0"


def test_what_a_stored_response_cannot_be_asked_for(live: Live) -> None:
    with live.openai() as client:
        made = client.responses.create(**ASKED)
        for ask in (client.responses.retrieve, client.responses.input_items.list):
            with pytest.raises(openai.BadRequestError, match="fixed when the response is created") as caught:
                ask(made.id, include=["message.output_text.logprobs"])
            assert (caught.value.param, caught.value.code) == ("include", "unsupported_parameter")
        with pytest.raises(openai.APIStatusError, match="are not stored") as lost:
            client.responses.retrieve(made.id, stream=True)
        assert (lost.value.status_code, lost.value.code) == (410, "events_not_kept")


def test_the_items_of_a_response_page_by_page(live: Live) -> None:
    with live.openai() as client:
        first = client.responses.create(model="tiny", input=[{"role": "user", "content": str(n)} for n in range(5)])
        second = client.responses.create(model="tiny", input="5", previous_response_id=first.id)
        pages = client.responses.input_items.list(second.id, limit=2, order="asc")
        items = list(pages)
        texts = [item.content[0].text for item in items]  # type: ignore
        assert texts == ["0", "1", "2", "3", "4", "answer 0", "5"] and pages.has_more
        latest = client.responses.input_items.list(second.id, limit=3)
        assert [item.id for item in latest.data] == [item.id for item in reversed(items[-3:])]
        assert [item.type for item in items] == ["message"] * 7
        with pytest.raises(openai.BadRequestError, match="must be the id of an item"):
            client.responses.input_items.list(second.id, after="msg_none")


def test_a_background_response_is_made_and_found(live: Live) -> None:
    live.async_engine.gate = gate = asyncio.Event()
    with live.openai() as client:
        begun = client.responses.create(**ASKED, background=True)
        assert (begun.status, begun.output, begun.background) == ("queued", [], True)
        wait_until(lambda: bool(live.async_engine.seen))
        assert client.responses.retrieve(begun.id).status == "queued"
        with pytest.raises(openai.BadRequestError, match="not finished yet"):
            client.responses.create(**ASKED, previous_response_id=begun.id)
        live.loop.call_soon_threadsafe(gate.set)
        wait_until(lambda: client.responses.retrieve(begun.id).status == "completed")
        assert client.responses.retrieve(begun.id).output_text == "answer 0"
        assert client.responses.cancel(begun.id).status == "completed"
        wait_until(lambda: live.state.limits.active == live.state.stores.responses.jobs.total == 0)


def test_a_background_response_is_cancelled_or_deleted(live: Live) -> None:
    live.async_engine.gate = asyncio.Event()
    with live.openai() as client:
        first, second = (client.responses.create(**ASKED, background=True) for _ in range(2))
        wait_until(lambda: len(live.async_engine.seen) == 2)
        assert client.responses.cancel(first.id).status == "cancelled"
        assert client.responses.cancel(first.id).status == client.responses.retrieve(first.id).status == "cancelled"
        client.responses.delete(second.id)
        wait_until(lambda: len(live.async_engine.aborted) == 2)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(second.id)
        live.async_engine.gate = None
        foreground = client.responses.create(**ASKED)
        with pytest.raises(openai.BadRequestError, match="'background'"):
            client.responses.cancel(foreground.id)


def test_background_responses_of_a_tenant_leave_places_to_others(serve_with: Any) -> None:
    live = serve_with(ServerConfig(api_key=("first", "second")))
    live.state.stores.responses.jobs = TenantShares(3)
    live.async_engine.gate = asyncio.Event()
    with live.openai(api_key="first") as first, live.openai(api_key="second") as second:
        made = [client.responses.create(**ASKED, background=True) for client in (first, second)]
        with pytest.raises(openai.RateLimitError, match="Your tenant already has 1 running background responses"):
            second.responses.create(**ASKED, background=True)
        live.state.stores.responses.jobs.most = 2
        with pytest.raises(openai.InternalServerError, match="2 background responses are already running"):
            first.responses.create(**ASKED, background=True)
        first.responses.cancel(made[0].id)
        assert second.responses.retrieve(made[1].id).status == "queued"
        assert first.responses.create(**ASKED, background=True).status == "queued"


def test_a_background_response_that_fails(live: Live) -> None:
    live.async_engine.fail_after = (1, EngineDead("The engine is not running."))
    with live.openai() as client:
        begun = client.responses.create(**ASKED, background=True)
        wait_until(lambda: client.responses.retrieve(begun.id).status == "failed")
        error = client.responses.retrieve(begun.id).error
    assert error is not None and error.message == "The engine is not running."


def test_a_response_belongs_to_its_key(serve_with: Any) -> None:
    live = serve_with(ServerConfig(api_key=("one", "two")))
    with live.openai(api_key="one") as mine, live.openai(api_key="two") as theirs:
        made = mine.responses.create(**ASKED)
        assert mine.responses.retrieve(made.id).id == made.id
        for ask in (theirs.responses.retrieve, theirs.responses.delete, theirs.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                ask(made.id)
        with pytest.raises(openai.BadRequestError):
            theirs.responses.create(**ASKED, previous_response_id=made.id)
        reference: Any = [{"type": "item_reference", "id": made.output[0].id}]
        with pytest.raises(openai.BadRequestError):
            theirs.responses.create(model="tiny", input=reference)


def test_a_server_that_stores_nothing(serve_with: Any) -> None:
    live = serve_with(ServerConfig(max_stored_response_bytes=0))
    with live.openai() as client:
        made = client.responses.create(**ASKED)
        assert made.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.create(**ASKED, background=True)
    assert live.state.limits.active == 0
