"""Adapter loading in a fleet: a version on all replicas or on none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from ...engine.errors import EngineDead
from .adapter_versions import LoadedVersion
from .replica_client import ReplicaClient


async def load(client: ReplicaClient, loaded: LoadedVersion) -> None:
    """Load a version on a replica. Raises as ``EngineClient.load_adapter``."""
    await client.load_adapter(loaded.version, loaded.path, trusted=loaded.trusted)


async def load_on_all(clients: Callable[[], Iterable[ReplicaClient]], loaded: LoadedVersion) -> None:
    """Load a version on all replicas, on none if one refuses it.

    Args:
        clients: returns the replicas; one may join meanwhile.

    Raises:
        RequestError: a replica refuses it.
        EngineDead: all are dead.
    """
    asked: list[ReplicaClient] = []
    done: list[ReplicaClient] = []
    while missing := [client for client in clients() if client not in asked]:
        asked += missing
        outcomes = await asyncio.gather(*(load(client, loaded) for client in missing), return_exceptions=True)
        done += [client for client, outcome in zip(missing, outcomes, strict=True) if outcome is None]
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineDead):
                unloads = (client.unload_adapter(loaded.version) for client in done)
                await asyncio.gather(*unloads, return_exceptions=True)
                raise outcome
    if not done:
        raise EngineDead("No replica of the engine is running.")
