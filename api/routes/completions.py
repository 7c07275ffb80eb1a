"""``POST /v1/completions``."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response

from ..generate.beam_reads import BeamReader
from ..generate.build_request import completion_requests, echoed_prompts
from ..generate.completion_answers import CompletionChunks, completion_body
from ..generate.envelope import Envelope, chunk_events, long_response
from ..generate.sse import EventStream
from ..generate.streams import at_intervals, collect, generate, silenced, while_connected
from ..observe.token_usage import UsageCount
from ..protocol.completions import CompletionRequest
from ..structured.output_format import checked_format
from .dependencies import CallerOf, JsonRoute, State, set_facts

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Continue one or more prompts."""
    target = await state.models.find(body.asked_model, caller, body.lora_path, body.session or None)
    output_format = await checked_format(body)
    grammar = None if output_format is None else output_format.spec
    prepared = await completion_requests(target, body, grammar, caller, strict=state.options.strict_max_tokens)
    prompts = echoed_prompts(target.engine, body, prepared)
    envelope = Envelope.new("cmpl", "text_completion", target.name, state.fingerprint_of(caller.facts.version))
    set_facts(caller, prepared, model=target.name, stream=body.stream, response_id=envelope.id)
    usage = UsageCount(drop_completion=body.max_tokens == 0)
    source = BeamReader(target.engine, caller, body.length_penalty) if body.use_beam_search else target.engine
    deltas = generate(state, source, prepared, caller, output_format, usage)
    if body.max_tokens == 0:
        deltas = silenced(deltas)
    if body.stream:
        chunks = CompletionChunks(body, envelope, prompts)
        events = chunk_events(at_intervals(deltas, state.options.stream_interval), chunks, usage)
        return EventStream(events, state.options.stream_heartbeat)
    outputs = await while_connected(request.receive, collect(deltas))
    build = partial(completion_body, body, envelope, prompts, outputs, usage)
    return await long_response(build, outputs.values())
