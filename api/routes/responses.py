"""``/v1/responses``: create, get, list input items of, cancel and delete responses; count input tokens."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import partial
from typing import Annotated, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response

from ...engine.errors import CapacityError, RequestError
from ..access.caller import Caller
from ..errors import ErrorReply, HTTPError
from ..generate.build_request import chat_request, chat_tokens
from ..generate.envelope import json_response
from ..generate.server_state import ServerState
from ..generate.socket_scope import CONNECTION_HEADER
from ..generate.sse import EventStream
from ..generate.streams import Deltas, at_intervals, generate, silenced, take_all, while_connected
from ..large_bodies import beside_loop
from ..protocol.chat import ChatRequest
from ..protocol.responses import CountInputTokensRequest, ResponsePrompt, ResponseRequest
from ..responses.chat_translation import FIELD_NAMES, chat_request_of
from ..responses.conversation import Conversation, load_conversation
from ..responses.response_reply import EventWriter, ResponseReply, error_event, response_events, write_in_background
from ..storage.event_store import EventLog, not_kept
from ..storage.response_store import StoredResponse, packed
from .dependencies import CallerOf, JsonRoute, State, page, set_facts

MAX_EVENT_NUMBER = 1 << 53
"""Largest number of an event. Numbers in JavaScript are exact up to it."""
_CONNECTION = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9]{1,16}")

router = APIRouter(route_class=JsonRoute, tags=["responses"])


@router.post("/v1/responses")
async def create_response(body: ResponseRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Answer an input, and store the response unless ``store`` is false."""
    owner = caller.key.tenant
    target = await state.models.find(body.asked_model, caller, session=body.prompt_cache_key)
    connection = _connection(request)
    conversation = await load_conversation(body, state.stores.responses, owner, connection)
    with FIELD_NAMES.naming_errors():
        chat = await beside_loop(partial(_as_chat, body, conversation))
        prepared, output_format, thought = await chat_request(
            target, chat, caller, strict=state.options.strict_max_tokens
        )
    output_format = FIELD_NAMES.of_format(output_format)
    stored = body.store and state.stores.responses.is_on
    reply = ResponseReply(body, prepared.params, target.name, output_format, stored=stored, thinks=thought is not None)
    set_facts(caller, [prepared], model=target.name, stream=body.stream, response_id=reply.id)

    def keep(ended: ResponseReply) -> None:
        if body.store or connection:
            record = _record(ended, owner, conversation)
            record.connection = "" if body.store else connection
            state.stores.responses.put(record)

    deltas = generate(state, target.engine, [prepared], caller, output_format, thought=thought)
    if not body.generate:
        deltas = silenced(deltas)
    if body.background:
        return _begin(state, reply, at_intervals(deltas, state.options.stream_interval), owner, conversation, body)
    if body.stream:
        return _streamed(state, reply, at_intervals(deltas, state.options.stream_interval), keep, owner)
    await while_connected(request.receive, take_all(deltas, reply.take))
    keep(reply)
    return json_response(reply.body())


def _as_chat(body: ResponsePrompt, conversation: Conversation) -> ChatRequest:
    return chat_request_of(body, conversation.messages(body.instructions))


def _streamed(
    state: ServerState, reply: ResponseReply, deltas: Deltas, keep: Callable[[ResponseReply], None], owner: str
) -> Response:
    """Stream a response. If it is stored, its events are stored too."""
    log = _open_log(state, reply, owner)

    async def events() -> AsyncGenerator[bytes, None]:
        try:
            async with aclosing(response_events(reply, deltas, keep, log)) as stream:
                async for event in stream:
                    yield event
        finally:
            if log is not None and log.ended_at is None:
                state.stores.events.drop(reply.id)

    return _event_stream(state, events())


def _open_log(state: ServerState, reply: ResponseReply, owner: str) -> EventLog | None:
    is_kept = reply.is_stored and state.options.max_stored_event_bytes > 0
    return state.stores.events.open(reply.id, owner) if is_kept else None


class _NumberedStream(EventStream):
    """A stream of events with ids. Its heartbeats are comments without the empty line that ends an event.

    OpenAI's Python client keeps the last id, and would treat every later empty line as an event whose data is missing.
    """

    heartbeat_piece = b": ping\n"


def _event_stream(state: ServerState, events: AsyncGenerator[bytes, None]) -> Response:
    return _NumberedStream(events, state.options.stream_heartbeat, _error_of_stream)


def _error_of_stream(failure: ErrorReply) -> bytes:
    """Serialize an error that occurs before the first event, after a heartbeat has already sent the status."""
    return EventWriter(None).write([error_event(failure)])


@router.post("/v1/responses/input_tokens")
async def count_input_tokens(body: CountInputTokensRequest, state: State, caller: CallerOf) -> Response:
    """Count the tokens of a response's input. The response's usage will report the same number."""
    target = await state.models.locate(body.asked_model, caller, session=body.prompt_cache_key)
    conversation = await load_conversation(body, state.stores.responses, caller.key.tenant)
    with FIELD_NAMES.naming_errors():
        chat = await beside_loop(partial(_as_chat, body, conversation))
        tokens = await chat_tokens(target, chat, caller)
    return json_response({"object": "response.input_tokens", "input_tokens": len(tokens)})


@router.post("/v1/responses/compact", include_in_schema=False)
async def compact_response() -> Response:
    """Refuse the request, because this server never shortens conversations."""
    reason = "the server never shortens a conversation. Send a shorter one, or continue a response"
    raise HTTPError(404, f"Conversations are not compacted: {reason}.", code="unknown_url")


def _record(
    reply: ResponseReply, owner: str, conversation: Conversation, job: asyncio.Task[None] | None = None
) -> StoredResponse:
    return StoredResponse(
        id=reply.id,
        owner=owner,
        body=packed(reply.body()),
        turns=conversation.turns,
        output=packed(reply.output()),
        item_ids=(*conversation.item_ids, *reply.item_ids()),
        job=job,
    )


def _begin(
    state: ServerState,
    reply: ResponseReply,
    deltas: Deltas,
    owner: str,
    conversation: Conversation,
    body: ResponseRequest,
) -> Response:
    """Return a background response at once. It is stored as unfinished now, and stored again when it ends."""
    if not state.stores.responses.is_on:
        raise RequestError(
            "'background' needs stored responses: start the server with --max-stored-response-bytes above 0.",
            param="background",
        )
    jobs = state.stores.responses.jobs
    if jobs.total >= jobs.most:
        raise CapacityError(f"{jobs.most} background responses are already running.")
    if jobs.left_for(owner) < 1:
        text = f"Your tenant already has {jobs.held(owner)} running background responses"
        text += f", and only {jobs.most - jobs.total} places are left."
        raise HTTPError(429, text, code="rate_limit_exceeded", headers={"retry-after": "5"})
    log = _open_log(state, reply, owner)
    if body.stream and log is None:
        raise RequestError(
            "'stream' of a background response needs stored events: start the server with --max-stored-event-bytes "
            "above 0.",
            param="stream",
        )

    def changed(now: ResponseReply) -> None:
        if now.id in state.stores.responses:
            running = job if now.status == "in_progress" else None
            state.stores.responses.put(_record(now, owner, conversation, running))

    job = asyncio.create_task(write_in_background(reply, deltas, changed, EventWriter(log)))
    state.stores.responses.put(_record(reply, owner, conversation, job))
    if body.stream and log is not None:
        return _event_stream(state, log.read(-1))
    return json_response(reply.body())


def _connection(request: Request) -> str:
    """Return the id of the request's WebSocket connection; "" if the request did not arrive on one."""
    given = request.headers.get(CONNECTION_HEADER, "")
    return given if _CONNECTION.fullmatch(given) else ""


def _find(state: ServerState, caller: Caller, response_id: str, connection: str = "") -> StoredResponse:
    record = state.stores.responses.get(caller.key.tenant, response_id, connection)
    if record is None:
        raise HTTPError(404, f"Response with id '{response_id[:128]}' not found.")
    return record


@router.get("/v1/responses/{response_id}")
async def get_response(
    response_id: str,
    request: Request,
    caller: CallerOf,
    state: State,
    stream: bool = False,
    starting_after: Annotated[int | None, Query(ge=0, le=MAX_EVENT_NUMBER)] = None,
) -> Response:
    """Get a stored response, or its events from the first one or after a given one."""
    _refuse_include(request)
    record = _find(state, caller, response_id)
    if not stream:
        if starting_after is not None:
            raise RequestError("'starting_after' is only allowed if 'stream' is true.", param="starting_after")
        return Response(record.body, media_type="application/json")
    log = state.stores.events.get(caller.key.tenant, response_id)
    if log is None:
        raise not_kept("events")
    after = _last_event_id(request, -1 if starting_after is None else starting_after)
    log.check(after)
    return _event_stream(state, log.read(after))


def _last_event_id(request: Request, default: int) -> int:
    """Return the number of the last event that a client has seen, from the header or else from the query."""
    given = request.headers.get("last-event-id", "")
    if not given:
        return default
    if not (_NUMBER.fullmatch(given) and int(given) <= MAX_EVENT_NUMBER):
        text = f"The header Last-Event-ID must be the number of an event, from 0 to {MAX_EVENT_NUMBER}."
        raise HTTPError(400, text, code="invalid_header")
    return int(given)


@router.delete("/v1/responses/{response_id}")
async def delete_response(response_id: str, request: Request, caller: CallerOf, state: State) -> Response:
    """Delete a stored response. If it is in progress, it is cancelled."""
    connection = _connection(request)
    _find(state, caller, response_id, connection)
    state.stores.responses.delete(caller.key.tenant, response_id, connection)
    state.stores.events.drop(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(response_id: str, caller: CallerOf, state: State) -> Response:
    """Cancel a background response. A response that has ended is not changed."""
    record = _find(state, caller, response_id)
    if not orjson.loads(record.body)["background"]:
        raise RequestError("Only a response that was made with 'background' can be cancelled.")
    if record.job is not None:
        record.job.cancel()
        await asyncio.wait([record.job])
        record = _find(state, caller, response_id)
    return Response(record.body, media_type="application/json")


@router.get("/v1/responses/{response_id}/input_items")
async def list_input_items(
    response_id: str,
    request: Request,
    caller: CallerOf,
    state: State,
    after: str | None = None,
    limit: Annotated[int, Query(ge=1, le=100)] = 20,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """List the input items of a response, including those of its previous responses."""
    _refuse_include(request)
    items = _find(state, caller, response_id).items()
    if order == "desc":
        items.reverse()
    return json_response(page(items, after, limit, "response"))


def _refuse_include(request: Request) -> None:
    if "include" in request.query_params or "include[]" in request.query_params:
        reason = "it is fixed when the response is created"
        raise RequestError(f"'include' is not supported: {reason}.", param="include", code="unsupported_parameter")
