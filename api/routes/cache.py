"""Cache routes: the content of the KV caches by tier, their removal, and the export and import of sessions."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from ...engine.errors import CapacityError, RequestError
from ...engine.metric_tables import KV_TIER_COUNTERS, KV_TIER_GAUGES, KV_TIERS
from ...engine.serving.engine_like import EngineLike
from ..errors import HTTPError
from ..generate.server_state import ServerState
from ..protocol.session_bodies import ExportSessionRequest, ReleaseSessionRequest
from .dependencies import CallerOf, JsonRoute, State

router = APIRouter(route_class=JsonRoute, tags=["operation"])

_DEVICE = {"pages": "pages", "pages_cached": "pages_cached", "pages_free": "pages_free"}


def client_of(state: ServerState) -> EngineLike:
    """Return the engine's client. Raises CapacityError while the model is loading, EngineDead if the engine is gone."""
    state.engine.serving()
    if state.engine.client is None:
        raise CapacityError("The model is still loading.")
    return state.engine.client


@router.get("/v1/cache")
async def cache(state: State) -> dict[str, Any]:
    """Show the pages of the KV pool (``device``), and the content and counters of the other tiers, for all replicas."""
    stats = client_of(state).stats
    tiers: dict[str, dict[str, float]] = {"device": {name: stats.get(key, 0.0) for name, key in _DEVICE.items()}}
    for tier in KV_TIERS:
        names = [key for key, _, _ in (*KV_TIER_GAUGES, *KV_TIER_COUNTERS)]
        if found := {key.removeprefix("kv_"): stats[f"{key}_{tier}"] for key in names if f"{key}_{tier}" in stats}:
            tiers[tier] = found
    return {"object": "cache", "model": state.models.names[0], "tiers": tiers}


@router.post("/v1/cache/reset")
async def reset(state: State) -> dict[str, Any]:
    """Remove all cached KV that no running request uses, of all tenants, replicas and tiers. No answer changes."""
    await client_of(state).reset_cache()
    return {"object": "cache.reset", "model": state.models.names[0]}


@router.post("/v1/sessions/release")
async def release(body: ReleaseSessionRequest, state: State, caller: CallerOf) -> dict[str, Any]:
    """End a session of the caller. KV that only this session has used is then evicted first."""
    released = await client_of(state).release_session(caller.key.tenant, body.prompt_cache_key)
    return {"object": "session.release", "prompt_cache_key": body.prompt_cache_key, "released": released}


@router.post("/v1/cache/sessions/export", response_class=Response)
async def export(body: ExportSessionRequest, state: State) -> Response:
    """Return a session's KV as a file for ``import`` on another server. The status is 404 without cached KV."""
    tokens, data = await client_of(state).export_session(body.tenant, body.prompt_cache_key)
    if not tokens:
        raise HTTPError(
            404, "No KV of this session is cached: its last request was too long ago, or came from another tenant."
        )
    return Response(data, media_type="application/octet-stream", headers={"x-session-tokens": str(tokens)})


@router.post("/v1/cache/sessions/import")
async def import_file(request: Request, state: State) -> dict[str, Any]:
    """Import a session from the request's body, a file of ``export``. If it does not fit, ``cached_tokens`` is 0."""
    data = await request.body()
    if not data:
        raise RequestError("The body is empty; it must be a file from /v1/cache/sessions/export.")
    return {"object": "session.import", "cached_tokens": await client_of(state).import_session(data)}
