"""Limited body: reads a request's body within limits on its size, its time and the memory of all bodies together."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive

from ...tenancy.tenant_shares import TenantShares
from ..errors import HTTPError

MOST_BODY_BYTES = 512 << 20
"""Limit on the bytes of the bodies of all requests that have not ended. Each tenant may use a share of it."""
CLOSE = {"connection": "close"}
_RETRY = {**CLOSE, "retry-after": "5"}


def body_room(longest: int) -> TenantShares:
    """Return the shares of the memory for bodies.

    Its size is at least four times the size of the longest allowed body.
    """
    return TenantShares(max(MOST_BODY_BYTES, 4 * longest))


def too_large(limit: int) -> HTTPError:
    """Return the error response for a body that is longer than ``limit`` bytes."""
    return HTTPError(413, f"The body is too large: the limit is {limit} bytes.", headers=CLOSE)


class LimitedBody:
    """ASGI ``receive`` that refuses a body that is too large (413), too slow (408), or beyond its share (429, 503).

    Args:
        room: shares of the memory for bodies, by tenant; None if this body is not kept in memory.
        tenant: tenant of the request.
        max_body: largest size of the body in bytes.
        seconds: seconds within which the whole body must have arrived.
    """

    def __init__(self, receive: Receive, room: TenantShares | None, tenant: str, max_body: int, seconds: float) -> None:
        self._receive = receive
        self._room = room
        self._tenant = tenant
        self._held = 0
        self._left = max_body
        self._max_body = max_body
        self._seconds = seconds
        self._deadline = asyncio.get_running_loop().time() + seconds
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            text = f"The body did not arrive within {self._seconds:.0f} seconds."
            raise HTTPError(408, text, headers=CLOSE) from None
        size = len(message.get("body", b""))
        self._left -= size
        if self._left < 0:
            raise too_large(self._max_body)
        if self._room is not None:
            self._take(self._room, size)
        self._complete = not message.get("more_body", False)
        return message

    def give_back(self) -> None:
        """Release the body's share of the memory, because the request has ended."""
        if self._room is not None and self._held:
            self._room.give_back(self._tenant, self._held)
            self._held = 0

    def _take(self, room: TenantShares, size: int) -> None:
        if size > room.most - room.total:
            text = f"Request bodies in memory have {room.total} bytes; the limit is {room.most}: try again later."
            raise HTTPError(503, text, code="server_overloaded", headers=_RETRY)
        if size > room.left_for(self._tenant):
            text = (
                f"Request bodies of your tenant have {room.held(self._tenant)} bytes: wait until some of these "
                "requests end."
            )
            raise HTTPError(429, text, code="rate_limit_exceeded", headers=_RETRY)
        room.take(self._tenant, size)
        self._held += size
