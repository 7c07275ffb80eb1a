"""How bodies are read: as JSON in the strict sense, whatever the rest of the framework would let through."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

from api.errors import HTTPError


class _StrictRequest(Request):
    async def json(self) -> Any:
        """The body, without NaN, infinities or lone surrogates. Of keys that repeat, the last one counts."""
        return orjson.loads(await self.body())


class JsonRoute(APIRoute):
    """A route whose body must be declared as JSON."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The framework's handler, on a request that reads strictly."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
            if self.body_field is not None and kind != "application/json":
                raise HTTPError(415, "The body must be JSON: send it with Content-Type: application/json.")
            return await handle(_StrictRequest(request.scope, request.receive))

        return handle_strictly
