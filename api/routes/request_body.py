"""How bodies are read: as JSON in the strict sense, whatever the rest of the framework would let through."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Coroutine
from typing import Any

import orjson
from fastapi import Request, Response
from fastapi.routing import APIRoute

from ..errors import HTTPError

_WITH_SCHEMAS = frozenset(("response_format", "structured_outputs", "guided_json", "tools"))
_LONG_INTEGER = re.compile(rb"[0-9]{19}")


class _StrictRequest(Request):
    async def json(self) -> Any:
        """The body, without NaN, infinities or lone surrogates. Of keys that repeat, the last one counts.

        Integers beyond 64 bits are exact in the fields that hold schemas, and floats elsewhere.
        """
        body = await self.body()
        value = orjson.loads(body)
        if isinstance(value, dict) and not value.keys().isdisjoint(_WITH_SCHEMAS) and _LONG_INTEGER.search(body):
            # orjson has found it to be correct, and every number to be within a double's range.
            value |= {name: part for name, part in json.loads(body).items() if name in _WITH_SCHEMAS}
        return value


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
