"""``GET /v1/fleet``: the replicas of the engine, their load, and counts of their starts, losses and ends."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter

from ...engine.errors import CapacityError
from ...engine.serving.replica_status import fleet_status
from ..observe.replica_view import fleet_json
from .dependencies import State

router = APIRouter(tags=["operation"])


@router.get("/v1/fleet")
async def fleet(state: State) -> dict[str, Any]:
    """List all replicas, including those that drain, and the gateways. A single process counts as a fleet of one.

    Raises:
        CapacityError: the model is loading.
    """
    if state.engine.client is None or state.engine.async_engine is None:
        raise CapacityError("The model is still loading.")
    gateways = None if state.observers.gateways is None else state.observers.gateways()
    return fleet_json(fleet_status(state.engine.client, max(0.0, time.time() - state.started)), gateways)
