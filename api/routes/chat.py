"""``POST /v1/chat/completions``."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from ...engine.errors import RequestError
from ..generate.beam_reads import BeamReader
from ..generate.build_request import chat_request
from ..generate.chat_answers import ChatChunks, chat_body
from ..generate.envelope import Envelope, chunk_events, long_response
from ..generate.sse import EventStream
from ..generate.streams import at_intervals, collect, generate, silenced, while_connected
from ..observe.token_usage import UsageCount
from ..protocol.chat import ChatRequest
from .dependencies import CallerOf, JsonRoute, State, set_facts

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Answer a conversation."""
    target = await state.models.find(body.asked_model, caller, body.lora_path, body.session or None)
    prepared, output_format, thought = await chat_request(target, body, caller, strict=state.options.strict_max_tokens)
    plan = None if output_format is None else output_format.tools
    kind = "chat.completion.chunk" if body.stream else "chat.completion"
    envelope = Envelope.new("chatcmpl", kind, target.name, state.fingerprint_of(caller.facts.version))
    set_facts(caller, [prepared], model=target.name, stream=body.stream, response_id=envelope.id)
    usage = UsageCount(drop_completion=body.is_prefill_only)
    if body.use_beam_search and thought is not None:
        raise RequestError("'use_beam_search' is not supported for a reasoning model.", param="use_beam_search")
    source = BeamReader(target.engine, caller, body.length_penalty) if body.use_beam_search else target.engine
    deltas = generate(state, source, [prepared], caller, output_format, usage, thought)
    if body.is_prefill_only:
        deltas = silenced(deltas)
    if body.stream:
        chunks = ChatChunks(body, envelope, prepared.tokens, plan)
        events = chunk_events(at_intervals(deltas, state.options.stream_interval), chunks, usage)
        return EventStream(events, state.options.stream_heartbeat)
    outputs = await while_connected(request.receive, collect(deltas))
    build = partial(chat_body, body, envelope, outputs, usage, plan, prepared.tokens)
    return await long_response(build, outputs.values())
