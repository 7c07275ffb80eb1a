"""Open Inference Protocol, version 2, below ``/v2``: health, metadata, inference, and the repository of adapters."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Path, Request, Response

from ...engine.errors import UnknownModel
from ..access.caller import Caller
from ..error_responses import TextErrorBody
from ..generate.build_request import completion_requests, echoed_prompts
from ..generate.completion_answers import completion_body
from ..generate.envelope import Envelope, json_response
from ..generate.field_names import FieldNames
from ..generate.model_router import ModelRouter
from ..generate.readiness import is_live, ready_fault
from ..generate.server_state import ServerState
from ..generate.streams import collect, generate, while_connected
from ..large_bodies import beside_loop
from ..observe.token_usage import UsageCount
from ..protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from ..protocol.completions import CompletionRequest
from ..protocol.infer_tensors import INPUTS, OUTPUTS, InferRequest, RepositoryLoadRequest, RepositoryRequest
from ..structured.output_format import checked_format
from .adapters import load_lora_adapter, unload_lora_adapter
from .dependencies import CallerOf, JsonRoute, Models
from .models import folders_for, names_for

EXTENSIONS = ("model_repository",)
NAMES = FieldNames(parts={})
router = APIRouter(
    route_class=JsonRoute,
    tags=["Open Inference Protocol"],
    responses={"default": {"model": TextErrorBody, "description": "Error"}},
)

Name = Annotated[str, Path(max_length=256)]


@router.get("/v2")
async def server_metadata(models: Models, _caller: CallerOf) -> Response:
    """Get name, version and extensions of the server."""
    return json_response({"name": "rootgraft", "version": models.main.version, "extensions": list(EXTENSIONS)})


@router.get("/v2/health/live")
async def server_live(models: Models) -> Response:
    """Return 200 if the engines run."""
    live = all(is_live(state) for state in models.states)
    return _flag("live", live)


@router.get("/v2/health/ready")
async def server_ready(models: Models) -> Response:
    """Return 200 if a new request would start soon."""
    return _flag("ready", await ready_fault(models) is None)


@router.get("/v2/models/{name}/ready")
async def model_ready(name: Name, models: Models, caller: CallerOf) -> Response:
    """Return 200 if a model or an adapter is loaded and serves requests."""
    state = await _state(models, name, caller)
    return _flag("ready", state.is_ready and name in names_for(state, caller))


@router.get("/v2/models/{name}")
async def model_metadata(name: Name, models: Models, caller: CallerOf) -> Response:
    """Describe the tensors of a model. They are the same for all models."""
    await _state(models, name, caller)
    return json_response(
        {
            "name": name,
            "versions": ["1"],
            "platform": "rootgraft",
            "inputs": _tensors(INPUTS),
            "outputs": _tensors(OUTPUTS),
        }
    )


@router.post("/v2/models/{name}/infer")
async def model_infer(name: Name, body: InferRequest, request: Request, models: Models, caller: CallerOf) -> Response:
    """Generate continuations of the texts in the input tensor."""
    state = models.of(name)
    completion = await beside_loop(partial(as_completion, body, name))
    target = await state.models.find(name, caller)
    output_format = await checked_format(completion)
    grammar = None if output_format is None else output_format.spec
    strict = state.options.strict_max_tokens
    prepared = await completion_requests(target, completion, grammar, caller, strict=strict)
    prompts = echoed_prompts(target.engine, completion, prepared)
    usage = UsageCount()
    deltas = generate(state, target.engine, prepared, caller, output_format, usage)
    outputs = await while_connected(request.receive, collect(deltas))
    envelope = Envelope.new("infer", "infer", target.name, state.fingerprint_of(caller.facts.version))
    choices = completion_body(completion, envelope, prompts, outputs, usage)["choices"]
    told: dict[str, list[Any]] = {
        "text_output": [choice["text"] for choice in choices],
        "finish_reason": [choice["finish_reason"] for choice in choices],
        "num_input_tokens": [len(each.tokens) for each in prepared],
        "num_output_tokens": [len(outputs[number, 0].token_ids) for number in range(len(prepared))],
    }
    return json_response(
        {
            "model_name": target.name,
            "model_version": "1",
            "id": body.id,
            "outputs": [
                {"name": each, "datatype": OUTPUTS[each][0], "shape": [len(told[each])], "data": told[each]}
                for each in body.wanted
            ],
        }
    )


def as_completion(body: InferRequest, model: str) -> CompletionRequest:
    """Convert the request to a completion. Raises RequestValidationError."""
    with NAMES.naming_invalid():
        return CompletionRequest.model_validate(body.completion_fields(model))


@router.post("/v2/repository/index")
async def repository_index(body: RepositoryRequest, models: Models, caller: CallerOf) -> Response:
    """List the base models and adapters, both the loaded ones and those in ``--lora-dir``."""
    found = []
    for state in models.states:
        loaded = names_for(state, caller)
        found += [{"name": name, "version": "1", "state": "READY", "reason": ""} for name in loaded]
        if not body.ready and models.is_single:
            folders = await folders_for(state, caller)
            found += [{"name": name, "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"} for name in folders]
    return json_response(found)


@router.post("/v2/repository/models/{name}/load")
async def repository_load(name: Name, body: RepositoryLoadRequest, models: Models) -> Response:
    """Load an adapter, like ``/v1/load_lora_adapter``."""
    path = body.parameters.get("lora_path", name)
    fields = {"lora_name": name, "lora_path": path, "load_inplace": name in models.of(name).models.adapters}
    await load_lora_adapter(_validated(LoadAdapterRequest, fields), models.of(name), models)
    return json_response({})


@router.post("/v2/repository/models/{name}/unload")
async def repository_unload(name: Name, models: Models) -> Response:
    """Unload an adapter, like ``/v1/unload_lora_adapter``."""
    await unload_lora_adapter(_validated(UnloadAdapterRequest, {"lora_name": name}), models.of(name))
    return json_response({})


def _validated(kind: Any, fields: dict[str, Any]) -> Any:
    with NAMES.naming_invalid():
        return kind.model_validate(fields)


async def _state(models: ModelRouter, name: str, caller: Caller) -> ServerState:
    """Return the state that serves a name. Raises UnknownModel for a name that the caller may not use."""
    state = models.of(name)
    if name not in names_for(state, caller) and name not in await folders_for(state, caller):
        raise UnknownModel(name)
    return state


def _flag(name: str, value: bool) -> Response:
    response = json_response({name: value})
    response.status_code = 200 if value else 503
    return response


def _tensors(tensors: dict[str, tuple[str, list[int]]]) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": kind, "shape": shape} for name, (kind, shape) in tensors.items()]
