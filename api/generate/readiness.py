"""Readiness: determines whether a server should get new requests, and builds the body of its health routes."""

from __future__ import annotations

from typing import Any

from ...engine.metric_tables import kv_usage
from ...engine.types import Priority
from ..access.overload import Load
from ..errors import Rejection
from .model_router import ModelRouter
from .server_state import ServerState

SILENT_SECONDS = 2.0
"""Seconds without a sign of life after which the engine counts as silent.

Normally it gives four signs of life a second.
"""
KV_FULL = 0.98
"""Fraction of the KV pool. If running sequences hold at least this much, waiting sequences find no room."""

_ONE_MORE = Load("", Priority.INTERACTIVE, 1, 1)


def is_live(state: ServerState) -> bool:
    """Return whether a model's engine runs or is still being started.

    A dead engine requires a restart of the server.
    """
    engine = state.engine
    if engine.async_engine is None:
        return engine.client is None or engine.client.death is None
    return engine.is_healthy


async def ready_fault(models: ModelRouter) -> str | None:
    """Return the name of the reason for which new requests would not be answered soon; None if there is none.

    The reason is ``loading``, ``shutting_down``, ``engine_dead``, ``engine_silent``, ``device_lost``, ``kv_full``, or a
    reason of ``Rejection`` with which the queue would refuse a short interactive request.
    """
    if models.main.engine.draining:
        return "shutting_down"
    for state in models.states:
        if (fault := _model_fault(state)) is not None:
            return fault
    gpus = models.main.observers.gpus
    return "device_lost" if gpus is not None and not await gpus.answers() else None


def _model_fault(state: ServerState) -> str | None:
    engine = state.engine
    if not is_live(state):
        return "engine_dead"
    if not state.is_ready:
        return "loading"
    if engine.client is not None and engine.client.silent_seconds > SILENT_SECONDS:
        return "engine_silent"
    stats = engine.stats()
    if stats.get("waiting", 0.0) and kv_usage(stats) >= KV_FULL:
        return "kv_full"
    try:
        state.limits.admission.queue_limits.check(_ONE_MORE)
    except Rejection as rejection:
        return rejection.reason
    return None


def health_body(models: ModelRouter, status: str) -> dict[str, Any]:
    """Return the body of the health routes.

    ``avg_latency_ms`` is the mean time of the answers since the start that have ended by themselves, null before the
    first one; ``requests_served`` is their number.
    """
    served = [state.observers.metrics.served() for state in models.states]
    count = sum(number for number, _ in served)
    seconds = sum(total for _, total in served)
    return {
        "status": status,
        "model_loaded": all(state.engine.async_engine is not None for state in models.states),
        "avg_latency_ms": round(1000 * seconds / count, 1) if count else None,
        "requests_served": count,
    }
