"""``/v1/admin/models``: versions of models by content digest; add, promote, canary, rollback and remove."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from ...engine.errors import RequestError
from ..generate.model_versions import ModelVersions
from ..generate.server_state import ServerState
from ..protocol.adapters import AddVersionRequest, CanaryRequest, PromoteRequest, RemoveRequest, RollbackRequest
from .dependencies import CallerOf, JsonRoute, State

router = APIRouter(route_class=JsonRoute, tags=["models"], prefix="/v1/admin/models")


def _versions(state: ServerState) -> ModelVersions:
    """Return the versions that are served. Raises CapacityError or EngineDead if no new work is taken."""
    state.serving()
    if state.versions is None:
        raise RequestError(
            "This server has no catalogue of models: start it with --model-catalog FILE and --enable-lora.",
            code="no_model_catalog",
        )
    return state.versions


def _shown(versions: ModelVersions, name: str) -> dict[str, Any]:
    catalog = versions.catalog
    history = [{**asdict(each), "weights": dict(each.weights)} for each in catalog.history(name)[:20]]
    return {
        "id": name,
        "object": "model.versions",
        "weights": catalog.weights(name),
        "versions": [asdict(each) for each in catalog.versions(name)],
        "history": history,
    }


@router.get("")
async def list_model_versions(state: State) -> dict[str, Any]:
    """All names of the catalogue with their versions, weights and last changes."""
    versions = _versions(state)
    return {"object": "list", "data": [_shown(versions, name) for name in versions.catalog.names()]}


@router.post("")
async def add_model_version(body: AddVersionRequest, state: State) -> dict[str, Any]:
    """Bring a version, verify its content and load it; no request gets it before a promote or canary."""
    versions = _versions(state)
    if body.name in state.names:
        raise RequestError("The base model has that name.", param="name")
    if state.remote is None:
        raise RequestError("This server has no adapters: start it with --enable-lora.", param="name")
    source = state.remote.source_of(body.source)
    if source is None:
        raise RequestError(
            "'source' is hf://org/name@revision, s3://bucket/folder, https://host/folder or file:///folder, as "
            "--adapter-sources lists it.",
            param="source",
            code="adapter_source_not_allowed",
        )
    await versions.add(body.name, source, body.digest)
    return _shown(versions, body.name)


@router.post("/{name}/promote")
async def promote_model_version(name: str, body: PromoteRequest, state: State, caller: CallerOf) -> dict[str, Any]:
    """Let a version get all new requests of a name; running ones keep theirs."""
    versions = _versions(state)
    versions.promote(name, body.version, caller.key.name)
    return _shown(versions, name)


@router.post("/{name}/canary")
async def canary_model_version(name: str, body: CanaryRequest, state: State, caller: CallerOf) -> dict[str, Any]:
    """Let a version get a percentage of new requests."""
    versions = _versions(state)
    versions.canary(name, body.version, body.weight, caller.key.name)
    return _shown(versions, name)


@router.post("/{name}/rollback")
async def rollback_model(name: str, body: RollbackRequest, state: State, caller: CallerOf) -> dict[str, Any]:
    """Undo the last promote or canary of a name."""
    versions = _versions(state)
    versions.rollback(name, caller.key.name)
    return _shown(versions, name)


@router.post("/{name}/remove")
async def remove_model(name: str, body: RemoveRequest, state: State, caller: CallerOf) -> dict[str, Any]:
    """Retire a version that gets no requests, or a name with all its versions; running requests end as they began."""
    removed = _versions(state).remove(name, body.version, caller.key.name)
    return {"id": name, "object": "model.versions", "removed": list(removed)}
