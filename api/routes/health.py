"""``/health``, ``/ready``, ``/version`` and ``/metrics``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ..errors import ErrorReply, reply_to
from ..generate.envelope import json_response
from .dependencies import State

router = APIRouter(tags=["operation"])


@router.get("/health")
@router.get("/ping", include_in_schema=False)
async def health(state: State) -> Response:
    """200 as long as the engine runs and does not hang, also while the server finishes its last requests."""
    if state.is_healthy:
        return json_response({"status": "draining" if state.draining else "ok"})
    if state.async_engine is None:
        return ErrorReply(503, "The model is still being loaded.", code="loading").response()
    return reply_to(state.death()).response()


@router.get("/ready")
async def ready(state: State) -> Response:
    """200 while new requests are taken: not before the model is loaded, not once the server is shutting down."""
    if state.is_ready:
        return json_response({"status": "ready"})
    if state.draining:
        return ErrorReply(503, "The server is shutting down.", code="shutting_down").response()
    return await health(state)


@router.get("/version")
async def version(state: State) -> Response:
    """The server's version."""
    return json_response({"version": state.version})


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, state: State) -> Response:
    """All metrics for Prometheus."""
    body, content_type = state.metrics.exposition(request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
