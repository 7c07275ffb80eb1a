"""Health routes: ``/health``, ``/health/live``, ``/health/ready``, ``/ready``, ``/version`` and ``/metrics``."""

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
    """Return 200 while all engines run, even if the server only finishes its last requests; otherwise 503."""
    sick = next((state for state in models.states if not state.engine.is_healthy), None)
    if sick is None:
        return json_response(health_body(models, "draining" if models.main.engine.draining else "ok"))
    if sick.engine.async_engine is None:
        return _loading()
    return reply_to(sick.engine.death()).response()


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(models: Models) -> Response:
    """Return 200 while new requests are accepted, after the models are loaded and before the shutdown; else 503."""
    if all(state.is_ready for state in models.states):
        return json_response({"status": "ready"})
    if models.main.engine.draining:
        return ErrorReply(503, "The server is shutting down.", code="shutting_down").response()
    answer = await health(models)
    # This is reached if a gateway asks. Gateways report their own readiness, each after it has loaded its tokenizer.
    return answer if answer.status_code != 200 else _loading()


@router.get("/health/live")
@router.head("/health/live", include_in_schema=False)
async def health_live(models: Models) -> Response:
    """Return 200 unless an engine has ended or hangs, which requires a restart. A model may still be loading."""
    sick = next((state for state in models.states if not is_live(state)), None)
    if sick is not None:
        return _unhealthy(models, "dead", reply_to(sick.engine.death()))
    return json_response(health_body(models, "draining" if models.main.engine.draining else "live"))


@router.get("/health/ready")
@router.head("/health/ready", include_in_schema=False)
async def health_ready(models: Models) -> Response:
    """Return 200 while a new request would start soon, otherwise 503 with the name of the reason."""
    reason = await ready_fault(models)
    if reason is None:
        return json_response(health_body(models, "ready"))
    return _unhealthy(models, "not_ready", ErrorReply(503, f"The server is not ready: {reason}.", code=reason))


def _unhealthy(models: Models, status: str, reply: ErrorReply) -> Response:
    """Return the health body with the name of the reason, and the error in the format of all routes."""
    error = {"message": reply.message, "type": reply.type, "param": None, "code": reply.code}
    response = json_response({**health_body(models, status), "reason": reply.code, "error": error})
    response.status_code = reply.status
    return response


def _loading() -> Response:
    return ErrorReply(503, "The model is still loading.", code="loading").response()


@router.get("/version")
async def version(state: State) -> Response:
    """Get the server's version."""
    return json_response({"version": state.version})


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, models: Models) -> Response:
    """Get all metrics in the format of Prometheus."""
    parts = [state.observers.metrics for state in models.states]
    body, content_type = exposition(models.main.observers.metrics, parts, request.headers.get("accept", ""))
    return Response(body, headers={"content-type": content_type})
