"""Routes of Text Generation Inference: ``/generate``, ``/generate_stream``, both in one at ``/``, and ``/info``."""

from __future__ import annotations

from functools import partial

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel

from ...engine.errors import UnknownModel
from ...engine.text.prompt_cache import Owner
from ..access.caller import Caller
from ..generate.build_request import completion_requests
from ..generate.envelope import json_response
from ..generate.model_directory import ModelTarget
from ..generate.server_state import ServerState
from ..generate.sse import EventStream
from ..generate.streams import generate, take_all, while_connected
from ..large_bodies import beside_loop
from ..observe.token_usage import UsageCount
from ..structured.output_format import checked_format
from ..tgi.tgi_reply import TgiReply, tgi_error, tgi_events
from ..tgi.tgi_request import NAMES, TgiRequest
from .dependencies import CallerOf, JsonRoute, State, set_facts


class TgiErrorBody(BaseModel):
    """Body of every error response of the routes of Text Generation Inference."""

    error: str
    error_type: str


router = APIRouter(
    route_class=JsonRoute,
    tags=["Text Generation Inference"],
    responses={"default": {"model": TgiErrorBody, "description": "Error"}},
)


@router.post("/generate")
async def tgi_generate(body: TgiRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Continue a prompt."""
    return await _generate(body, request, state, caller, stream=False)


@router.post("/generate_stream")
async def tgi_generate_stream(body: TgiRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Continue a prompt, and stream an event for each token."""
    return await _generate(body, request, state, caller, stream=True)


@router.post("/")
async def tgi_root(body: TgiRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Continue a prompt, as a stream if the body requests it. For clients that know only the server's address."""
    return await _generate(body, request, state, caller, stream=body.stream)


@router.get("/info")
async def tgi_info(state: State, _caller: CallerOf) -> Response:
    """Get the model, its context length, and the server's version."""
    engine = state.engine.serving()
    return json_response(
        {
            "model_id": state.models.names[0],
            "max_total_tokens": engine.max_model_len,
            "max_input_tokens": engine.max_model_len - 1,
            "max_stop_sequences": 128,
            "max_best_of": 1,
            "router": "rootgraft",
            "version": state.version,
        }
    )


async def _generate(
    body: TgiRequest, request: Request, state: ServerState, caller: Caller, *, stream: bool
) -> Response:
    try:
        target = await state.models.find(body.parameters.adapter_id, caller)
    except UnknownModel as error:
        error.param = "parameters.adapter_id"
        raise
    with NAMES.naming_errors():
        prompt = await _prompt(body, target, caller)
        completion = await beside_loop(partial(body.as_completion, prompt, stream=stream))
        output_format = NAMES.of_format(await checked_format(completion))
        grammar = None if output_format is None else output_format.spec
        strict = state.options.strict_max_tokens
        (prepared,) = await completion_requests(target, completion, grammar, caller, strict=strict)
    set_facts(caller, [prepared], model=target.name, stream=stream, response_id=request.state.request_id)
    reply = TgiReply(body, target.engine.tokenizer.special_ids)
    deltas = generate(state, target.engine, [prepared], caller, output_format, UsageCount())
    if stream:
        return EventStream(tgi_events(reply, deltas), state.options.stream_heartbeat, tgi_error)
    await while_connected(request.receive, take_all(deltas, reply.take))
    return json_response(reply.body())


async def _prompt(body: TgiRequest, target: ModelTarget, caller: Caller) -> str | list[int]:
    """Return the prompt, or its last tokens if the request truncates it."""
    most = body.parameters.truncate
    if most is None:
        return body.inputs
    owner = Owner(caller.cache_tenant)
    tokens = await target.engine.encode(body.inputs, add_special_tokens=True, owner=owner)
    return body.inputs if len(tokens) <= most else tokens[-most:].tolist()
