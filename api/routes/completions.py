"""``POST /v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ..generate.build_request import completion_requests, echoed_prompts
from ..generate.collect import collect
from ..generate.completion_answers import completion_body, completion_events
from ..generate.envelope import Envelope, json_response
from ..generate.sse import EventStream
from ..generate.streams import generate, while_connected
from ..observe.token_usage import UsageCount
from ..protocol.completions import CompletionRequest
from ..structured.output_format import requested_format
from .dependencies import CallerOf, State
from .request_body import JsonRoute

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Continue one or more prompts."""
    name, adapter = state.resolve(body.model, caller)
    async_engine = state.serving()
    output_format = requested_format(body)
    grammar = None if output_format is None else output_format.spec
    prepared = await completion_requests(async_engine, body, grammar, adapter, caller)
    prompts = echoed_prompts(async_engine, body, prepared)
    num_prompt = sum(len(one.tokens) for one in prepared)
    caller.facts.update(model=name, prompt_tokens=num_prompt, n=body.n, stream=body.stream)
    deltas = generate(state, prepared, caller, output_format, drop_completion=body.max_tokens == 0)
    head = Envelope.new("cmpl", "text_completion", name, state.fingerprint)
    caller.facts["response_id"] = head.id
    if body.stream:
        return EventStream(completion_events(body, head, prompts, deltas))
    usage = UsageCount(drop_completion=body.max_tokens == 0)
    answers = await while_connected(request.receive, collect(deltas, usage))
    return json_response(completion_body(body, head, prompts, answers, usage))
