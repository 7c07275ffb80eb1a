"""``POST /v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ..generate.build_request import completion_requests, echoed_prompts
from ..generate.completion_answers import CompletionChunks, completion_body
from ..generate.envelope import Envelope, chunk_events, json_response
from ..generate.sse import EventStream
from ..generate.streams import at_intervals, collect, generate, while_connected
from ..observe.token_usage import UsageCount
from ..protocol.completions import CompletionRequest
from ..structured.output_format import requested_format
from .dependencies import CallerOf, JsonRoute, State, set_facts

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Continue one or more prompts."""
    name, adapter = await state.find_model(body.model, caller, body.lora_path, body.session or None)
    async_engine = await state.engine_for(adapter)
    output_format = requested_format(body)
    grammar = None if output_format is None else output_format.spec
    prepared = await completion_requests(
        async_engine, body, grammar, adapter, caller, strict=state.options.strict_max_tokens
    )
    prompts = echoed_prompts(async_engine, body, prepared)
    envelope = Envelope.new("cmpl", "text_completion", name, state.fingerprint_of(caller.facts.version))
    set_facts(caller, prepared, model=name, stream=body.stream, response_id=envelope.id)
    usage = UsageCount(drop_completion=body.max_tokens == 0)
    deltas = generate(state, async_engine, prepared, caller, output_format, usage)
    if body.stream:
        chunks = CompletionChunks(body, envelope, prompts)
        return EventStream(chunk_events(at_intervals(deltas, state.options.stream_interval), chunks, usage))
    outputs = await while_connected(request.receive, collect(deltas))
    return json_response(completion_body(body, envelope, prompts, outputs, usage))
