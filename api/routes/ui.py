"""``GET /ui``, the live page; ``GET /ui/state``, its data; and ``GET /``, which redirects browsers to it."""

from __future__ import annotations

from typing import Annotated

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import RedirectResponse

from ...engine.errors import CapacityError
from ...engine.serving.replica_status import ReplicaOwner
from ..generate.envelope import json_response
from ..observe.live_page import FILES, HEADERS, INDEX, PATHS, content_type
from ..observe.replica_view import fleet_json
from .dependencies import Models, State

router = APIRouter(tags=["operation"])


@router.get("/ui/state")
async def ui_state(state: State, models: Models, since: Annotated[float, Query(ge=-1)] = -1) -> Response:
    """Get a snapshot of the engine of at most half a second ago, points of the curves, and the last requests.

    The points are those after ``since``. If no snapshot arrives in time, for example during a long step, ``engine`` is
    null and ``waiting`` has the reason; all other fields are set.

    Raises:
        CapacityError: the model is loading.
        EngineDead: the engine is gone.
    """
    if state.engine.client is None or state.engine.async_engine is None:
        raise CapacityError("The model is still loading.")
    if not state.engine.is_healthy:
        raise state.engine.death()
    # The snapshot describes an engine that is a single process completely, so ``fleet`` is null for it.
    fleet = fleet_json(state.engine.client.status()) if isinstance(state.engine.client, ReplicaOwner) else None
    is_empty = fleet is not None and not fleet["data"]
    engine, waiting = b"null", None
    try:
        engine = engine if is_empty else await state.observers.watch.snapshot(state.engine.client)
    except CapacityError as error:
        waiting = str(error)
    server = {
        "version": state.version,
        "started": state.started,
        "model": state.models.names[0],
        "max_model_len": state.engine.async_engine.max_model_len,
        "draining": state.engine.draining,
    }
    history = list(state.observers.metrics.history.since(since))
    return json_response(
        {
            "server": server,
            "history": history,
            "requests": models.main.observers.recent.state(),
            "fleet": fleet,
            "engine": orjson.Fragment(engine),
            "waiting": waiting,
        }
    )


async def _file(request: Request) -> Response:
    name = request.url.path.rpartition("/ui")[2].lstrip("/") or INDEX
    return Response(FILES[name], headers={**HEADERS, "content-type": content_type(name)})


async def _to_page(_request: Request) -> Response:
    """Redirect to ``/ui``, because the page's links are relative to that path."""
    return RedirectResponse("../ui", 308)


async def _root(request: Request) -> Response:
    """Redirect a browser to the live page. Other clients get the relative paths of the server's interfaces."""
    if "text/html" in request.headers.get("accept", ""):
        return RedirectResponse("ui", 307)
    return json_response({"server": "rootgraft", "openai": "v1", "health": "health", "page": "ui"})


_HANDLERS = {"/": _root, "/ui/": _to_page}
# The paths are added as plain routes, because OpenAPI should not describe files.
for path in sorted(PATHS):
    router.add_route(path, _HANDLERS.get(path, _file), methods=["GET"])
