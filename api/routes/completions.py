"""``POST /v1/completions``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ..collect import collect
from ..completions import completion_body, completion_events
from ..prepare import completion_requests, echoed_prompts
from ..promise import asked_promise
from ..protocol.completions import CompletionRequest
from ..reply import ReplyHead, json_response
from ..sse import EventStream
from ..streams import generate, while_connected
from ..usage import UsageCount
from .body import JsonRoute
from .shared import CallerOf, State

router = APIRouter(route_class=JsonRoute, tags=["generation"])


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Continue one or more prompts."""
    name, adapter = state.resolve(body.model, caller)
    frontend = state.serving()
    promise = asked_promise(body)
    grammar = None if promise is None else promise.spec
    prepared = await completion_requests(frontend, body, grammar, adapter, caller)
    prompts = echoed_prompts(frontend, body, prepared)
    num_prompt = sum(len(one.tokens) for one in prepared)
    caller.facts.update(model=name, prompt_tokens=num_prompt, n=body.n, stream=body.stream)
    deltas = generate(state, prepared, caller, promise, drop_completion=body.max_tokens == 0)
    head = ReplyHead.new("cmpl", "text_completion", name, state.fingerprint)
    caller.facts["response_id"] = head.id
    if body.stream:
        return EventStream(completion_events(body, head, prompts, deltas))
    usage = UsageCount(drop_completion=body.max_tokens == 0)
    answers = await while_connected(request.receive, collect(deltas, usage))
    return json_response(completion_body(body, head, prompts, answers, usage))
