"""Call shares: limits the open gRPC calls of all connections, and gives each tenant a share of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import grpc

from ...tenancy.tenant_shares import TenantShares
from ..access.api_keys import KeyRing

MAX_CALLS = 2000
"""Largest number of open calls of all connections, including calls whose first message has not arrived."""
_NOBODY = "?"
"""Tenant of calls without a valid key, such as health checks, if keys are in use. No key can have this name."""
_RETRY = (("retry-after", "5"),)

Continuation = Callable[[Any], Awaitable[Any]]


class CallShares(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpcio has no types
    """Counts open calls by tenant. Belongs to one event loop.

    Args:
        keys: returns the server's keys.

    Attributes:
        calls: shares of the open calls, by tenant.
    """

    def __init__(self, keys: Callable[[], KeyRing]) -> None:
        self.calls = TenantShares(MAX_CALLS)
        self._keys = keys

    async def intercept_service(self, continuation: Continuation, handler_call_details: Any) -> Any:
        """Return a call's handler, or a handler that refuses with RESOURCE_EXHAUSTED beyond the tenant's share."""
        tenant = self._tenant(handler_call_details.invocation_metadata or ())
        if self.calls.left_for(tenant) < 1:
            return _refusing(f"You already have {self.calls.held(tenant)} open calls: end one of them.")
        task = asyncio.current_task()
        assert task is not None
        # From here on, a call is one task until its end, however it ends.
        self.calls.take(tenant)
        task.add_done_callback(lambda _: self.calls.give_back(tenant))
        return await continuation(handler_call_details)

    def _tenant(self, metadata: Iterable[tuple[str, str | bytes]]) -> str:
        keys, found = self._keys(), None
        given = {name: value for name, value in metadata if isinstance(value, str)}
        scheme, _, token = given.get("authorization", "").partition(" ")
        for text in (token if scheme.lower() == "bearer" else "", given.get("x-api-key", "")):
            found = found or keys.find(text.strip().encode("latin-1", "replace"))
        return _NOBODY if found is None else found.tenant


def _refusing(text: str) -> Any:
    async def refuse(_messages: AsyncIterator[bytes], context: Any) -> None:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text, _RETRY)

    # This kind of handler answers without waiting for a message.
    return grpc.stream_unary_rpc_method_handler(refuse)
