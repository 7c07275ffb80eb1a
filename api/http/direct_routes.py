"""Direct routes: ASGI middleware that dispatches the busiest routes itself, without the framework's routing."""

from __future__ import annotations

from collections.abc import Iterable

from fastapi import Request, Response
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Receive, Scope, Send

from ..error_responses import HANDLED, handle
from ..generate.streams import ClientGone
from ..routes.dependencies import JsonRoute


class DirectRoutes:
    """Innermost middleware: passes a request to the direct handler of its route, or to the application if there is
    none.

    This saves time. The framework tries routes one after another, each twice, and makes a dozen nested calls and
    wrappers of ``send``, through which every chunk of a stream passes.

    Args:
        app: application that handles the other requests, and answers them with the same errors.
    """

    def __init__(self, app: ASGIApp, *, routes: Iterable[BaseRoute]) -> None:
        self._app = app
        self._routes = {
            (method, route.path): (route, direct)
            for route in routes
            if isinstance(route, JsonRoute) and (direct := route.direct_handler()) is not None
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._routes.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        if found is None:
            await self._app(scope, receive, send)
            return
        scope["route"], answer = found
        request = Request(scope, receive)
        try:
            response = await answer(request)
        except (ClientGone, ClientDisconnect):
            # The client has left, so only the log sees this status.
            response = Response(status_code=499)
        except HANDLED as error:
            response = await handle(request, error)
        await response(scope, receive, send)
