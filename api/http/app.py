"""The FastAPI application: connects routes, middleware and error handlers with a server state."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from ..access.rate_limits import LIMIT_HEADERS
from ..batches.internal_client import InternalClient
from ..error_responses import HANDLED, handle
from ..generate.model_router import ModelRouter
from ..generate.server_state import ServerState
from ..generate.streams import ClientGone
from ..routes.routers import DIRECT, ROUTERS
from ..routes.unknown_fields import IGNORED_HEADER, LEFT_OUT_HEADER
from .direct_routes import DirectRoutes
from .guard import Guard, Identify
from .model_fallback import ROUTED_HEADER, ModelFallback
from .socket_routes import SocketRoutes


class ErrorInfo(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Body of every error response."""

    error: ErrorInfo


class StripRootPath:
    """Middleware for ``--root-path``: removes a proxy's path prefix from request paths if the proxy has not done so."""

    def __init__(self, app: ASGIApp, *, root_path: str) -> None:
        self._app = app
        self._root = root_path
        self._raw = root_path.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket") and scope["path"].startswith(f"{self._root}/"):
            raw = scope.get("raw_path") or b""
            scope = {**scope, "path": scope["path"].removeprefix(self._root), "raw_path": raw.removeprefix(self._raw)}
        await self._app(scope, receive, send)


async def _client_gone(_request: Request, _error: Exception) -> Response:
    # The client has left, so only the log sees this status.
    return Response(status_code=499)


def create_app(served: ServerState | ModelRouter) -> FastAPI:
    """Build the application for one model or several. Also sets ``internal_client`` of the main state."""
    router = served if isinstance(served, ModelRouter) else ModelRouter([served])
    state = router.main
    app = FastAPI(
        title="rootgraft",
        version=state.version,
        docs_url=None,
        redoc_url=None,
        responses={"default": {"model": ErrorBody, "description": "Error"}},
        redirect_slashes=False,
        servers=[{"url": state.options.root_path.rstrip("/")}] if state.options.root_path.rstrip("/") else None,
    )
    app.state.models = router
    for routes in ROUTERS:
        app.include_router(routes)
    for kind in HANDLED:
        app.add_exception_handler(kind, handle)
    for left in (ClientGone, ClientDisconnect):
        app.add_exception_handler(left, _client_gone)
    state.stores.internal_client = InternalClient(
        app.build_middleware_stack(), app
    )  # The application without the middleware that is added below.
    # The middleware that is added last is the outermost one.
    app.add_middleware(DirectRoutes, routes=[route for routes in DIRECT for route in routes.routes])
    app.add_middleware(SocketRoutes, state=state)
    app.add_middleware(ModelFallback, router=router)
    app.add_middleware(Guard, state=state)
    origins = state.options.allowed_origins
    if origins:
        # CORS is outside of the guard, because a browser's preflight request has no API key.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=state.options.allowed_methods,
            allow_headers=state.options.allowed_headers,
            allow_credentials=state.options.allow_credentials,
            expose_headers=[
                "x-request-id",
                "request-id",
                "retry-after",
                IGNORED_HEADER,
                LEFT_OUT_HEADER,
                ROUTED_HEADER,
                *LIMIT_HEADERS,
            ],
        )
    app.add_middleware(Identify, state=state)
    if root_path := state.options.root_path.rstrip("/"):
        app.add_middleware(StripRootPath, root_path=root_path)
    return app
