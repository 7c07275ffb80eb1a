"""Replica launcher: starts and stops the replicas of a fleet, as processes of this machine or elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...engine.messages import Ready
from .replica_client import ReplicaClient


class ReplicaLauncher(Protocol):
    """Where a fleet's replicas come from."""

    async def launch(self) -> tuple[ReplicaClient, Ready]:
        """Start a replica. Returns its client and the first message of its engine.

        A launch that fails or is cancelled leaves nothing behind.

        Raises:
            ModelError, ConfigError: the engine's reason, if model or options are wrong.
            EngineDead: it has ended while it was starting, or there was no place for it.
        """
        ...

    async def stop(self, client: ReplicaClient) -> None:
        """End a replica that ``launch`` has returned, and wait for its end. One that was killed is cleared away."""
        ...


class ProcessLauncher:
    """Launches replicas as engine processes of this machine.

    Args:
        make: makes the client of a replica, which is not started.
    """

    def __init__(self, make: Callable[[], ReplicaClient]) -> None:
        self._make = make

    async def launch(self) -> tuple[ReplicaClient, Ready]:
        """Start a process and wait until its model is loaded. Raises as ``EngineClient.start``."""
        client = self._make()
        try:
            ready = await client.start()
        except BaseException:
            await client.close()
            raise
        return client, ready

    async def stop(self, client: ReplicaClient) -> None:
        """Shut the process down and wait for its end."""
        await client.close()
