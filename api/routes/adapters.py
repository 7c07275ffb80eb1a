"""``POST /v1/load_lora_adapter``, ``POST /v1/unload_lora_adapter`` (vLLM's) and ``GET /v1/adapters``."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from ...engine.errors import RequestError, UnknownModel, quoted
from ...engine.serving.engine_like import EngineLike
from ..generate.model_router import ModelRouter
from ..generate.server_state import ServerState
from ..protocol.adapters import LoadAdapterRequest, UnloadAdapterRequest
from .dependencies import JsonRoute, Models, State, shown_path

router = APIRouter(route_class=JsonRoute, tags=["adapters"])

_FIELDS = {"name": "lora_name", "path": "lora_path", "model": "lora_path", "": "lora_path"}


def _client(state: ServerState) -> EngineLike:
    """Return the engine's client. Raises CapacityError or EngineDead if the server accepts no new work."""
    state.engine.serving()
    if state.engine.client is None:
        raise state.engine.death()
    return state.engine.client


def check_base_model(
    models: ModelRouter, state: ServerState, base: str | None, name: str, fields: tuple[str, str]
) -> None:
    """Check, on a server with several base models, that ``base`` is known and no other base model has the name.

    Args:
        fields: names of the request's fields for the base model and the adapter.

    Raises:
        RequestError: the base model is unknown, or the name belongs to an adapter of another base model.
    """
    if models.is_single:
        return
    if base is not None and base not in state.models.names:
        raise RequestError(f"No base model is named {quoted(base)}; GET /v1/models lists them.", param=fields[0])
    if models.owner(name) not in (None, state):
        raise RequestError(f"Another base model or one of its adapters has the name {quoted(name)}.", param=fields[1])


def _check_not_in_catalog(state: ServerState, name: str) -> None:
    versions = state.models.versions
    if versions is not None and (versions.public_name(name) is not None or name in versions.catalog.names()):
        raise RequestError(
            "That name is in the model catalogue: change it with /v1/admin/models (rootgraft models).",
            param="lora_name",
        )


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(body: LoadAdapterRequest, state: State, models: Models) -> PlainTextResponse:
    """Load an adapter. The response is sent when requests can name the adapter.

    The status is 400 if the adapter cannot be loaded or the name is in use. Only paths in ``--lora-dir`` and sources
    that ``--adapter-sources`` lists can be loaded, so that clients cannot make the server read other folders or contact
    other addresses.
    """
    client = _client(state)
    source = None if state.models.remote is None else state.models.remote.source_of(body.lora_path)
    if source is None and not state.engine.finds_adapters:
        raise RequestError(
            "This server loads adapters over HTTP only from --lora-dir and the sources in --adapter-sources, and "
            "this is neither. --lora-modules loads from anywhere at the start.",
            param="lora_path",
        )
    _check_not_in_catalog(state, body.lora_name)
    check_base_model(models, state, body.base_model_name, body.lora_name, ("base_model_name", "lora_name"))
    if body.lora_name in state.models.names:
        raise RequestError("The base model has that name.", param="lora_name")
    try:
        if state.models.remote is not None and source is not None:
            await state.models.remote.load(body.lora_name, source, replace=body.load_inplace)
        else:
            num_tokens = 0
            if (tokenizers := state.engine.tokenizers) is not None:
                num_tokens = await tokenizers.read_own_off_loop(body.lora_name, body.lora_path)
            await client.load_adapter(body.lora_name, body.lora_path, replace=body.load_inplace, num_tokens=num_tokens)
            if state.models.remote is not None:
                state.models.remote.forget(body.lora_name)
        await _check_tokenizer(state, body.lora_name)
    except UnknownModel as error:
        error.param = "lora_path"
        raise
    except RequestError as error:
        raise RequestError(str(error), param=_FIELDS.get(error.param or "", error.param), code=error.code) from None
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


async def _check_tokenizer(state: ServerState, name: str) -> None:
    """Load an adapter's own tokenizer. If its files have become invalid, unload the adapter and raise RequestError."""
    try:
        await state.engine.serving_adapter(name)
    except RequestError:
        await _client(state).unload_adapter(name)
        if state.models.remote is not None:
            state.models.remote.forget(name)
        raise


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(body: UnloadAdapterRequest, state: State) -> PlainTextResponse:
    """Unload an adapter. Requests that run with it continue. The status is 404 if no adapter has this name."""
    _check_not_in_catalog(state, body.lora_name)
    if body.lora_name in state.models.names:
        also = "" if body.lora_name == state.models.names[0] else f", also called {state.models.names[0]}"
        raise RequestError(
            f"{quoted(body.lora_name)} is the base model{also}, which cannot be unloaded like an adapter.",
            param="lora_name",
        )
    try:
        await _client(state).unload_adapter(body.lora_name)
    except UnknownModel as error:
        error.param = "lora_name"
        raise
    if state.models.remote is not None:
        state.models.remote.forget(body.lora_name)
        await state.models.remote.release_unused()
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.get("/v1/adapters")
async def list_adapters(state: State) -> dict[str, Any]:
    """List all adapters: those that are ready, loading or being downloaded, and unloaded ones still in use."""
    infos = await _client(state).list_adapters()
    loaded = [{**asdict(info), "path": shown_path(info, state.models.remote)} for info in infos]
    return {"object": "list", "data": loaded + ([] if state.models.remote is None else state.models.remote.downloads())}
