"""``/v1/admin/models``: versions of models by content digest; add, promote, canary, rollback and remove."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter

from ...engine.errors import RequestError
from ...fleet.catalog.model_catalog import ModelVersion, VersionState
from ...fleet.catalog.model_versions import ModelVersions
from ...fleet.catalog.traffic_split import FULL_WEIGHT
from ..generate.server_state import ServerState
from ..protocol.adapters import AddVersionRequest, CanaryRequest, PromoteRequest, RemoveRequest, RollbackRequest
from .adapters import check_base_model
from .dependencies import CallerOf, JsonRoute, Models, State

router = APIRouter(route_class=JsonRoute, tags=["models"], prefix="/v1/admin/models")


def _versions(state: ServerState) -> ModelVersions:
    """Return the model versions of the server. Raises CapacityError or EngineDead if it accepts no new work."""
    state.engine.serving()
    if state.models.versions is None:
        raise RequestError(
            "This server has no model catalogue: start it with --model-catalog FILE and --enable-lora.",
            code="no_model_catalog",
        )
    return state.models.versions


def _shown(versions: ModelVersions, name: str, base: str) -> dict[str, Any]:
    catalog = versions.catalog
    history = [{**asdict(each), "weights": dict(each.weights)} for each in catalog.history(name)[:20]]
    return {
        "id": name,
        "object": "model.versions",
        "parent": base,
        "weights": catalog.weights(name),
        "versions": [asdict(each) for each in catalog.versions(name)],
        "history": history,
    }


def _base(state: ServerState) -> dict[str, Any]:
    """Return a base model in the form of a catalogue name with one version."""
    name, digest = state.models.names[0], state.engine.base_digest
    version = ModelVersion(name, digest, "base model", VersionState.READY, state.started, FULL_WEIGHT)
    return {
        "id": name,
        "object": "model.versions",
        "parent": None,
        "weights": {digest: FULL_WEIGHT},
        "versions": [asdict(version)],
        "history": [],
    }


@router.get("")
async def list_model_versions(models: Models) -> dict[str, Any]:
    """List the base models, and all names of the catalogue with their versions, weights and last changes."""
    data = []
    for state in models.states:
        data.append(_base(state))
        if (versions := state.models.versions) is not None:
            data += [_shown(versions, name, state.models.names[0]) for name in versions.catalog.names()]
    return {"object": "list", "data": data}


@router.post("")
async def add_model_version(body: AddVersionRequest, state: State, models: Models) -> dict[str, Any]:
    """Fetch a version, verify its content and load it. It gets no requests before a promote or a canary."""
    versions = _versions(state)
    check_base_model(models, state, body.model, body.name, ("model", "name"))
    if body.name in state.models.names:
        raise RequestError("The base model has that name.", param="name")
    if state.models.remote is None:
        raise RequestError("This server does not serve adapters: start it with --enable-lora.", param="name")
    source = state.models.remote.source_of(body.source)
    if source is None:
        raise RequestError(
            "'source' must be hf://org/name@revision, s3://bucket/folder, https://host/folder or file:///folder, and "
            "allowed by --adapter-sources.",
            param="source",
            code="adapter_source_not_allowed",
        )
    await versions.add(body.name, source, body.digest)
    return _shown(versions, body.name, state.models.names[0])


@router.post("/{name:path}/promote")
async def promote_model_version(name: str, body: PromoteRequest, models: Models, caller: CallerOf) -> dict[str, Any]:
    """Send all new requests of a name to a version. Running requests keep their version."""
    state = models.of(name)
    versions = _versions(state)
    versions.promote(name, body.version, caller.key.name)
    return _shown(versions, name, state.models.names[0])


@router.post("/{name:path}/canary")
async def canary_model_version(name: str, body: CanaryRequest, models: Models, caller: CallerOf) -> dict[str, Any]:
    """Send a percentage of a name's new requests to a version."""
    state = models.of(name)
    versions = _versions(state)
    versions.canary(name, body.version, body.weight, caller.key.name)
    return _shown(versions, name, state.models.names[0])


@router.post("/{name:path}/rollback")
async def rollback_model(name: str, body: RollbackRequest, models: Models, caller: CallerOf) -> dict[str, Any]:
    """Undo the last promote or canary of a name."""
    state = models.of(name)
    versions = _versions(state)
    versions.rollback(name, caller.key.name)
    return _shown(versions, name, state.models.names[0])


@router.post("/{name:path}/remove")
async def remove_model(name: str, body: RemoveRequest, models: Models, caller: CallerOf) -> dict[str, Any]:
    """Remove a version that gets no requests, a name with all its versions, or a base model.

    Running requests are finished unchanged.
    """
    state = models.of(name)
    if name in state.models.names and body.version in (None, state.engine.base_digest):
        removed = [models.remove(name).engine.base_digest]
    else:
        removed = list(_versions(state).remove(name, body.version, caller.key.name))
    return {"id": name, "object": "model.versions", "removed": removed}
