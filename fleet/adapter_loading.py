"""Adapter loading in a fleet: a version is loaded on all replicas or on none. Replicas that join later load it too.

A version is identified by its content. If a replica's folder is missing or has other content, the replica does not load
the version.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping

from ..engine.errors import EngineDead, RequestError
from .adapter_versions import LoadedVersion
from .replica_client import ReplicaClient

logger = logging.getLogger("rootgraft.fleet")


async def load(client: ReplicaClient, loaded: LoadedVersion) -> None:
    """Load a version on a replica. Raises as ``EngineClient.load_adapter``."""
    trusted, num_tokens = loaded.trusted, loaded.num_tokens
    await client.load_adapter(loaded.version, loaded.path, trusted=trusted, num_tokens=num_tokens, of=loaded.name)


async def load_on_all(clients: Callable[[], Iterable[ReplicaClient]], loaded: LoadedVersion) -> str:
    """Load a version on all replicas, or on none if one refuses it. Returns the digest of its content.

    Args:
        clients: returns the replicas, which may change while the version loads.

    Raises:
        RequestError: a replica refuses the version, or its content differs between replicas.
        EngineDead: all replicas are dead.
    """
    asked: list[ReplicaClient] = []
    done: list[ReplicaClient] = []
    while missing := [client for client in clients() if client not in asked]:
        asked += missing
        outcomes = await asyncio.gather(*(load(client, loaded) for client in missing), return_exceptions=True)
        done += [client for client, outcome in zip(missing, outcomes, strict=True) if outcome is None]
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, EngineDead):
                await _unload(done, loaded.version)
                raise outcome
    if not done:
        raise EngineDead("No replica of the engine is running.")
    digests = {client.adapters[loaded.version].digest for client in done if loaded.version in client.adapters}
    if len(digests) > 1:
        await _unload(done, loaded.version)
        raise RequestError("The adapter's files changed while it was being loaded: load it again.", param="path")
    return digests.pop() if digests else ""


async def load_others(client: ReplicaClient, wanted: Callable[[], Mapping[str, LoadedVersion]]) -> frozenset[str]:
    """Load on a replica the versions that the other replicas have.

    Args:
        wanted: returns these versions, which may change meanwhile.

    Returns:
        The versions that the replica cannot load, because their files are missing or have changed.

    Raises:
        EngineDead: the replica is dead.
    """
    lacking: set[str] = set()
    while True:
        versions = wanted()
        kept = {name for name, info in client.adapters.items() if _is_same(versions.get(name), info.digest)}
        if extra := client.adapters.keys() - kept:
            lacking |= extra & versions.keys()
            await client.unload_adapter(min(extra))
        elif missing := versions.keys() - kept - lacking:
            version = min(missing)
            try:
                await load(client, versions[version])
            except RequestError as error:
                logger.warning("a replica continues without the adapter %s: %s", version, error)
                lacking.add(version)
        else:
            return frozenset(lacking & versions.keys())


def _is_same(loaded: LoadedVersion | None, digest: str) -> bool:
    return loaded is not None and loaded.digest in ("", digest)


async def _unload(clients: Iterable[ReplicaClient], version: str) -> None:
    await asyncio.gather(*(client.unload_adapter(version) for client in clients), return_exceptions=True)
