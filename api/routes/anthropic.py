"""``POST /v1/messages`` and ``POST /v1/messages/count_tokens``: Anthropic's protocol."""

from __future__ import annotations

from functools import partial
from typing import Literal

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ..anthropic.chat_conversion import as_chat, field_names
from ..anthropic.message_reply import MessageReply, error_event, message_events
from ..anthropic.message_request import CountTokensRequest, MessagesRequest, PromptFields
from ..error_responses import MESSAGES_PATH
from ..generate.build_request import chat_request, chat_tokens
from ..generate.envelope import json_response
from ..generate.field_names import FieldNames
from ..generate.sse import EventStream
from ..generate.streams import at_intervals, generate, silenced, take_all, while_connected
from ..large_bodies import beside_loop
from ..observe.token_usage import UsageCount
from ..protocol.chat import ChatRequest
from .dependencies import CallerOf, JsonRoute, State, set_facts


class MessageErrorInfo(BaseModel):
    """Anthropic's error object."""

    type: str
    message: str


class MessageErrorBody(BaseModel):
    """Body of every error response of the routes of Anthropic's protocol."""

    type: Literal["error"]
    error: MessageErrorInfo
    request_id: str


router = APIRouter(
    route_class=JsonRoute,
    tags=["generation"],
    responses={"default": {"model": MessageErrorBody, "description": "Error"}},
)


@router.post(MESSAGES_PATH)
async def create_message(body: MessagesRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Answer a conversation in Anthropic's protocol."""
    target = await state.models.find(body.model, caller, session=body.prompt_cache_key)
    names, chat = await beside_loop(partial(_as_chat, body))
    with names.naming_errors():
        prepared, output_format, thought = await chat_request(
            target, chat, caller, strict=state.options.strict_max_tokens
        )
    output_format = names.of_format(output_format)
    reply = MessageReply(body, prepared, target.name, output_format)
    set_facts(caller, [prepared], model=target.name, stream=body.stream, response_id=reply.id)
    usage = UsageCount(drop_completion=chat.is_prefill_only)
    deltas = generate(state, target.engine, [prepared], caller, output_format, usage, thought)
    if chat.is_prefill_only:
        deltas = silenced(deltas)
    if body.stream:
        deltas = at_intervals(deltas, state.options.stream_interval)
        request_id = request.state.request_id
        return EventStream(
            message_events(reply, deltas, request_id),
            state.options.stream_heartbeat,
            partial(error_event, request_id=request_id),
        )
    await while_connected(request.receive, take_all(deltas, reply.take))
    return json_response(reply.body())


@router.post(MESSAGES_PATH + "/count_tokens")
async def count_message_tokens(body: CountTokensRequest, state: State, caller: CallerOf) -> Response:
    """Count the tokens of a message's prompt. The message's usage will report the same number."""
    target = await state.models.locate(body.model, caller)
    names, chat = await beside_loop(partial(_as_chat, body))
    with names.naming_errors():
        tokens = await chat_tokens(target, chat, caller)
    return json_response({"input_tokens": len(tokens)})


def _as_chat(body: PromptFields) -> tuple[FieldNames, ChatRequest]:
    return field_names(body), as_chat(body)
