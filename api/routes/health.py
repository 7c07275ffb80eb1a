"""``/health`` with ``/live`` and ``/ready`` below it, ``/ready``, ``/version`` and ``/metrics``."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from ..errors import ErrorReply, reply_to
from ..generate.envelope import json_response
from ..generate.readiness import health_body, is_live, ready_fault
from ..observe.merged_metrics import exposition
from .dependencies import Models, State

router = APIRouter(tags=["operation"])


@router.get("/health")
@router.head("/health", include_in_schema=False)
@router.get("/ping", include_in_schema=False)
@router.head("/ping", include_in_schema=False)
async def health(models: Models) -> Response:
    """200 as long as the engines run and do not hang, also while the server finishes its last requests."""
    sick = next((state for state in models.states if not state.engine.is_healthy), None)
    if sick is None:
        return json_response({"status": "draining" if models.main.engine.draining else "ok"})
    if sick.engine.async_engine is None:
        return _loading()
    return reply_to(sick.engine.death()).response()


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(models: Models) -> Response:
    """200 while new requests are taken: not before the models are loaded, not once the server is shutting down."""
    if all(state.is_ready for state in models.states):
        return json_response({"status": "ready"})
    if models.main.engine.draining:
        return ErrorReply(503, "The server is shutting down.", code="shutting_down").response()
    answer = await health(models)
    # Only gateways answer that they are ready, once each has loaded its tokenizer.
    return answer if answer.status_code != 200 else _loading()


@router.get("/health/live")
@router.head("/health/live", include_in_schema=False)
async def health_live(models: Models) -> Response:
    """200 unless an engine has ended or hangs, when a new start is what helps. A model may still be loading."""
    sick = next((state for state in models.states if not is_live(state)), None)
    if sick is not None:
        return _unhealthy(models, "dead", reply_to(sick.engine.death()))
    return json_response(health_body(models, "draining" if models.main.engine.draining else "live"))


@router.get("/health/ready")
@router.head("/health/ready", include_in_schema=False)
async def health_ready(models: Models) -> Response:
    """200 while a new request would begin soon, else 503 with the name of what is in its way."""
    reason = await ready_fault(models)
    if reason is None:
        return json_response(health_body(models, "ready"))
    return _unhealthy(models, "not_ready", ErrorReply(503, f"The server is not ready: {reason}.", code=reason))


def _unhealthy(models: Models, status: str, reply: ErrorReply) -> Response:
    """Return the health body with the reason's name, and the error as all routes tell it."""
    error = {"message": reply.message, "type": reply.type, "param": None, "code": reply.code}
    response = json_response({**health_body(models, status), "reason": reply.code, "error": error})
    response.status_code = reply.status
    return response


def _loading() -> Response:
    return ErrorReply(503, "The model is still being loaded.", code="loading").response()


@router.get("/version")
async def version(state: State) -> Response:
    """The server's version."""
    return json_response({"version": state.version})


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, models: Models) -> Response:
    """All metrics for Prometheus."""
    parts = [state.observers.metrics for state in models.states]
    body, content_type = exposition(models.main.observers.metrics, parts, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
