"""Ollama's routes below ``/api``: chats, prompts, embeddings, and lists of the models."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import APIRouter, Request, Response

from ...engine.errors import UnknownModel
from ...engine.serving.pooled_values import embedding, prompt_of
from ..access.caller import Caller
from ..error_responses import TextErrorBody
from ..generate.build_request import PreparedChat, chat_request, completion_requests
from ..generate.envelope import json_response
from ..generate.field_names import FieldNames
from ..generate.model_directory import ModelTarget
from ..generate.pooled_reads import PooledReader, plan_pooled
from ..generate.server_state import ServerState
from ..generate.streams import at_intervals, collect, generate, take_all, while_connected
from ..large_bodies import beside_loop
from ..observe.token_usage import UsageCount
from ..ollama.ollama_chat import as_chat, as_completion, field_names
from ..ollama.ollama_reply import LineStream, OllamaReply, error_line, one_line, reply_lines
from ..ollama.ollama_request import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaFields,
    OllamaGenerateRequest,
    OllamaShowRequest,
)
from ..protocol.pooled import EmbeddingRequest
from ..structured.output_format import checked_format
from .dependencies import CallerOf, JsonRoute, Models, State, set_facts
from .models import folders_for, names_for

OLLAMA_VERSION = "0.12.11"
"""The version of Ollama whose fields these routes accept. Clients compare it with the version that they need."""
_LATEST = ":latest"
_NEVER = "9999-12-31T23:59:59Z"
# Names of the fields with the texts to embed.
_EMBED = FieldNames(parts={})
_EMBED_ONE = FieldNames((r"^input\[0\]$", "input"), parts={})
_EMBEDDINGS = FieldNames((r"^input(\[0\])?$", "prompt"), parts={"input": "prompt"})


router = APIRouter(
    route_class=JsonRoute,
    tags=["Ollama"],
    responses={"default": {"model": TextErrorBody, "description": "Error"}},
)


def _name(state: ServerState, model: str | None) -> str | None:
    """Return a model's name without ``:latest``, which Ollama's clients add to names without a tag."""
    if model is None or not model.endswith(_LATEST) or state.models.has(model):
        return model
    return model.removesuffix(_LATEST)


@router.post("/api/chat")
async def ollama_chat(body: OllamaChatRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Answer a conversation in Ollama's protocol."""
    return await _generate(body, request, state, caller, is_empty=not body.messages)


@router.post("/api/generate")
async def ollama_generate(body: OllamaGenerateRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Answer or continue a prompt in Ollama's protocol."""
    return await _generate(body, request, state, caller, is_empty=not body.prompt)


async def _generate(
    body: OllamaChatRequest | OllamaGenerateRequest,
    request: Request,
    state: ServerState,
    caller: Caller,
    *,
    is_empty: bool,
) -> Response:
    target = await state.models.find(_name(state, body.model), caller)
    is_chat, facts = isinstance(body, OllamaChatRequest), caller.facts
    if is_empty:
        loaded = OllamaReply(target.name, is_chat=is_chat, facts=facts).loaded()
        return LineStream(one_line(loaded)) if body.stream else json_response(loaded)
    names = field_names(body)
    with names.naming_errors():
        prepared, output_format, thought = await _prepare(body, target, state, caller)
    output_format = names.of_format(output_format)
    reply = OllamaReply(
        target.name, is_chat=is_chat, facts=facts, output_format=output_format, num_logprobs=body.num_logprobs
    )
    set_facts(caller, [prepared], model=target.name, stream=body.stream, response_id=request.state.request_id)
    deltas = generate(state, target.engine, [prepared], caller, output_format, UsageCount(), thought)
    if body.stream:
        lines = reply_lines(reply, at_intervals(deltas, state.options.stream_interval))
        return LineStream(lines, state.options.stream_heartbeat, error_line)
    await while_connected(request.receive, take_all(deltas, reply.take))
    return json_response(reply.body())


async def _prepare(body: OllamaFields, target: ModelTarget, state: ServerState, caller: Caller) -> PreparedChat:
    """Build the engine's request: for a raw prompt like that of a completion, otherwise like that of a chat."""
    strict = state.options.strict_max_tokens
    if not isinstance(body, OllamaGenerateRequest) or not body.raw:
        assert isinstance(body, OllamaChatRequest | OllamaGenerateRequest)
        return await chat_request(target, await beside_loop(partial(as_chat, body)), caller, strict=strict)
    most = target.engine.defaults.max_tokens
    num_tokens = target.engine.max_model_len if most is None else most
    completion = await beside_loop(partial(as_completion, body, num_tokens))
    output_format = await checked_format(completion)
    grammar = None if output_format is None else output_format.spec
    is_named = body.options.num_predict > 0
    (prepared,) = await completion_requests(target, completion, grammar, caller, strict=strict and is_named)
    return PreparedChat(prepared, output_format, None)


@router.post("/api/embed")
async def ollama_embed(body: OllamaEmbedRequest, request: Request, state: State, caller: CallerOf) -> Response:
    """Embed texts as vectors of length 1."""
    began = time.perf_counter()
    target = await state.models.find(_name(state, body.model), caller)
    texts = ([body.input] if body.input else []) if isinstance(body.input, str) else body.input
    vectors, num_tokens = [], 0
    if texts:
        names = _EMBED if isinstance(body.input, list) else _EMBED_ONE
        reader = await _embed(target, texts, request, state, caller, truncate=body.truncate, names=names)
        pooled, num_tokens = reader.pooled, len(reader.request.tokens)
        vectors = [embedding(each, dimensions=body.dimensions or None, normalizes=True) for each in pooled]
    return json_response(
        {
            "model": target.name,
            "embeddings": [vector.tolist() for vector in vectors],
            "total_duration": round((time.perf_counter() - began) * 1e9),
            "load_duration": round((caller.facts.adapter_seconds or 0.0) * 1e9),
            "prompt_eval_count": num_tokens,
        }
    )


@router.post("/api/embeddings")
async def ollama_embeddings(
    body: OllamaEmbeddingsRequest, request: Request, state: State, caller: CallerOf
) -> Response:
    """Embed one text. The vector is scaled to length 1 only if the checkpoint specifies this."""
    target = await state.models.find(_name(state, body.model), caller)
    if not body.prompt:
        return json_response({"embedding": []})
    reader = await _embed(target, [body.prompt], request, state, caller, truncate=True, names=_EMBEDDINGS)
    vector = embedding(reader.pooled[0], dimensions=None, normalizes=target.engine.pooler.normalizes)
    return json_response({"embedding": vector.tolist()})


async def _embed(
    target: ModelTarget,
    texts: list[str],
    request: Request,
    state: ServerState,
    caller: Caller,
    *,
    truncate: bool,
    names: FieldNames,
) -> PooledReader:
    before = prompt_of(target.engine.pooler, None)
    with names.naming_invalid(), names.naming_errors():
        asked = EmbeddingRequest.model_validate({"input": texts})
        reader = await plan_pooled(target.engine, target.adapter, asked, caller, "embed", before, truncate=truncate)
    set_facts(caller, [reader.request], model=target.name, stream=False, response_id=request.state.request_id)
    deltas = generate(state, reader, [reader.request], caller, usage=UsageCount())
    await while_connected(request.receive, collect(deltas))
    return reader


@router.get("/api/version")
async def ollama_version() -> Response:
    """Get the version of Ollama whose fields are accepted."""
    return json_response({"version": OLLAMA_VERSION})


@router.get("/api/tags")
async def ollama_tags(models: Models, caller: CallerOf) -> Response:
    """List all names that the field ``model`` may have."""
    found = [_card(state, name) for state in models.states if state.is_named for name in names_for(state, caller)]
    for state in models.states if models.is_single else ():
        found += [_card(state, name) for name in await folders_for(state, caller)]
    return json_response({"models": found})


@router.get("/api/ps")
async def ollama_ps(models: Models, caller: CallerOf) -> Response:
    """List the loaded base models and adapters. None of them is unloaded after a period without use."""
    loaded = [state for state in models.states if state.engine.async_engine is not None]
    return json_response(
        {
            "models": [
                {**_card(state, name), "expires_at": _NEVER, "size_vram": 0, "context_length": _length(state)}
                for state in loaded
                for name in names_for(state, caller)
            ]
        }
    )


@router.post("/api/show")
async def ollama_show(body: OllamaShowRequest, state: State, caller: CallerOf) -> Response:
    """Get a model's template, context length and capabilities."""
    given = _name(state, body.model or body.name)
    if given and given not in (*names_for(state, caller), *await folders_for(state, caller)):
        raise UnknownModel(given)
    target = await state.models.locate(given, caller)
    tokenizer = target.engine.tokenizer
    abilities = ["completion", *(["tools"] if target.dialect.by_template else [])]
    abilities += ["thinking"] if target.reasoning is not None else []
    card = _card(state, target.name)
    return json_response(
        {
            "modelfile": f"FROM {target.name}\n",
            "parameters": "",
            "template": tokenizer.chat_template or "",
            "details": card["details"],
            "model_info": {
                "general.architecture": "rootgraft",
                "rootgraft.context_length": target.engine.max_model_len,
                "rootgraft.vocab_size": target.engine.vocab_size,
            },
            "capabilities": abilities,
            "modified_at": card["modified_at"],
        }
    )


def _length(state: ServerState) -> int:
    return 0 if state.engine.async_engine is None else state.engine.async_engine.max_model_len


def _card(state: ServerState, name: str) -> dict[str, Any]:
    """Return Ollama's description of a model. Fields that this server does not know are empty."""
    adapter = None if name in state.models.names else state.models.adapters.get(name)
    loaded = state.started if adapter is None or not adapter.loaded else adapter.loaded
    return {
        "name": name,
        "model": name,
        "modified_at": datetime.fromtimestamp(loaded, UTC).isoformat().replace("+00:00", "Z"),
        "size": 0 if adapter is None else adapter.bytes,
        "digest": state.engine.base_digest if adapter is None else adapter.digest,
        "details": {
            "parent_model": "" if name in state.models.names else state.models.names[0],
            "format": "",
            "family": "",
            "families": [],
            "parameter_size": "",
            "quantization_level": "",
        },
    }
