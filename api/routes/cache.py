"""``GET /v1/cache`` and ``POST /v1/cache/reset``: what is cached of KV, by tier, and its removal."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from ...engine.errors import CapacityError
from ...engine.serving.engine_like import EngineLike
from ..generate.server_state import ServerState
from ..observe.metric_tables import KV_TIER_COUNTERS, KV_TIER_GAUGES, KV_TIERS
from .dependencies import State

router = APIRouter(tags=["operation"])

_DEVICE = {"pages": "pages", "pages_cached": "pages_cached", "pages_free": "pages_free"}


def _client(state: ServerState) -> EngineLike:
    """Return the engine's client. Raises CapacityError while the model is loaded, EngineDead if the engine is gone."""
    state.engine.serving()
    if state.engine.client is None:
        raise CapacityError("The model is still being loaded.")
    return state.engine.client


@router.get("/v1/cache")
async def cache(state: State) -> dict[str, Any]:
    """Pages of the KV pool (``device``), and what the tiers beside it hold and have counted, of all replicas."""
    stats = _client(state).stats
    tiers: dict[str, dict[str, float]] = {"device": {name: stats.get(key, 0.0) for name, key in _DEVICE.items()}}
    for tier in KV_TIERS:
        names = [key for key, _, _ in (*KV_TIER_GAUGES, *KV_TIER_COUNTERS)]
        if found := {key.removeprefix("kv_"): stats[f"{key}_{tier}"] for key in names if f"{key}_{tier}" in stats}:
            tiers[tier] = found
    return {"object": "cache", "model": state.models.names[0], "tiers": tiers}


@router.post("/v1/cache/reset")
async def reset(state: State) -> dict[str, Any]:
    """Remove all cached KV that no running request uses, of all tenants, replicas and tiers. No answer changes."""
    await _client(state).reset_cache()
    return {"object": "cache.reset", "model": state.models.names[0]}
