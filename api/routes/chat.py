"""``POST /v1/chat/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ..generate.build_request import chat_request
from ..generate.chat_answers import chat_body, chat_events
from ..generate.collect import collect
from ..generate.envelope import Envelope, json_response
from ..generate.sse import EventStream
from ..generate.streams import generate, silenced, while_connected
from ..observe.token_usage import UsageCount
from ..protocol.chat import ChatRequest
from .dependencies import CallerOf, State
from .request_body import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Answer a conversation."""
    name, adapter = state.resolve(body.model, caller)
    prepared, output_format = await chat_request(state.serving(), state.dialect(), body, adapter, caller)
    caller.facts.update(model=name, prompt_tokens=len(prepared.tokens), n=body.n, stream=body.stream)
    deltas = generate(state, [prepared], caller, output_format, drop_completion=body.is_prefill_only)
    if body.is_prefill_only:
        deltas = silenced(deltas)
    plan = None if output_format is None else output_format.tools
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    head = Envelope.new("chatcmpl", kind, name, state.fingerprint)
    caller.facts["response_id"] = head.id
    if body.stream:
        return EventStream(chat_events(body, head, deltas, len(prepared.tokens), plan))
    usage = UsageCount(drop_completion=body.is_prefill_only)
    answers = await while_connected(request.receive, collect(deltas, usage))
    return json_response(chat_body(body, head, answers, usage, plan))
