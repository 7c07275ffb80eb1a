"""Socket limits: limits on the number of WebSocket connections, and on the resources of each connection."""

from __future__ import annotations

from dataclasses import dataclass

from ...tenancy.tenant_shares import TenantShares

MAX_REQUESTS = 64
MAX_ID = 64
"""Largest number of characters of the id of a request or of a lane (requests in order on one connection)."""
CONVERSATION_BYTES = 1 << 20
SEND_SECONDS = 30.0


@dataclass(slots=True)
class SocketLimits:
    """Limits of WebSocket connections.

    Attributes:
        connections: shares of the open connections, by tenant.
        requests: largest number of requests that run or wait on one connection.
        conversation_bytes: largest size in bytes of the past conversations that one connection may continue.
        send_seconds: seconds within which a client must receive a message; afterwards its connection is closed.
    """

    connections: TenantShares
    requests: int = MAX_REQUESTS
    conversation_bytes: int = CONVERSATION_BYTES
    send_seconds: float = SEND_SECONDS
