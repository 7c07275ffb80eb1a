"""Socket limits: number of WebSocket connections, and the resources that each of them may use."""

from __future__ import annotations

from dataclasses import dataclass

from ...tenancy.tenant_shares import TenantShares

MAX_REQUESTS = 64
MAX_ID = 64
"""Largest number of characters of the name of a request or of a lane."""
CONVERSATION_BYTES = 1 << 20
SEND_SECONDS = 30.0


@dataclass(slots=True)
class SocketLimits:
    """Limits of WebSocket connections.

    Attributes:
        connections: open connections, counted by tenant.
        requests: limit of requests that run or wait on one connection.
        conversation_bytes: limit of the bytes of past conversations that one connection may continue.
        send_seconds: seconds within which a client must receive a message; after that its connection is closed.
    """

    connections: TenantShares
    requests: int = MAX_REQUESTS
    conversation_bytes: int = CONVERSATION_BYTES
    send_seconds: float = SEND_SECONDS
