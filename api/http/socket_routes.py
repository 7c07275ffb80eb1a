"""WebSocket routes: ASGI middleware inside of the guard that answers WebSocket connections, up to a limit."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from ..access.socket_limits import SocketLimits
from ..error_responses import error_response
from ..errors import ErrorReply
from ..generate.server_state import ServerState
from ..sockets.response_socket import serve_responses
from ..sockets.stream_socket import serve_stream

Serve = Callable[[Scope, Receive, Send, SocketLimits], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _SocketRoute:
    """A path, in the form for the log and the metrics, and the function that serves its connections."""

    path: str
    serve: Serve


_ROUTES = {
    route.path: route
    for route in (_SocketRoute("/v1/responses", serve_responses), _SocketRoute("/v1/stream", serve_stream))
}


class SocketRoutes:
    """Middleware that answers WebSocket connections whose API key is valid, within the tenant's limit."""

    def __init__(self, app: ASGIApp, *, state: ServerState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        route = _ROUTES.get(scope["path"])
        if route is None:
            reply = ErrorReply(404, f"There is no WebSocket at {scope['path'][:100]}.", code="unknown_url")
            await error_response(reply, scope)(scope, receive, send)
            return
        scope["route"] = route
        limits, tenant = self._state.sockets, scope["state"]["caller"].key.tenant
        if limits.connections.left_for(tenant) < 1:
            text = f"Your tenant already has {limits.connections.held(tenant)} open WebSockets: close one of them."
            reply = ErrorReply(429, text, code="rate_limit_exceeded", headers={"retry-after": "5"})
            await error_response(reply, scope)(scope, receive, send)
            return
        limits.connections.take(tenant)
        try:
            await route.serve(scope, receive, send, limits)
        finally:
            limits.connections.give_back(tenant)
