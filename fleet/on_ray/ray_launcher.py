"""Ray launcher: starts each replica of a fleet as a Ray actor, on any machine with room for it."""

from __future__ import annotations

import asyncio
import json
import secrets
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...engine.config import EngineConfig
from ...engine.errors import EngineDead
from ...engine.messages import Ready
from ..replica_client import ReplicaClient
from .cluster_room import ReplicaResources
from .handover import TOKEN_BYTES
from .ray_cluster import RayCluster
from .ray_replica import HostAddress, RayReplica
from .replica_actor import ReplicaActor

PLACEMENT_SECONDS = 150.0
"""Longest time in seconds for Ray to find a place for a replica and start its actor. A busy machine needs up to
``ray_services.START_SECONDS``."""


class RayLauncher:
    """Launches replicas as actors. Ray places them; the fleet counts, replaces and routes.

    Args:
        cluster: the cluster, which is started with the first replica.
        config, model_path: options and model of each engine; the path must lead to the same model on every machine.
        resources: resources that each replica needs.
        heartbeat_timeout, watchdog_timeout: as in ``EngineClient``.
    """

    def __init__(
        self,
        cluster: RayCluster,
        config: EngineConfig,
        model_path: Path,
        resources: ReplicaResources,
        *,
        heartbeat_timeout: float,
        watchdog_timeout: float,
    ) -> None:
        self._cluster = cluster
        self._config = config
        self._model_path = model_path
        self._resources = resources
        self._timeouts = {"heartbeat_timeout": heartbeat_timeout, "watchdog_timeout": watchdog_timeout}

    async def launch(self) -> tuple[ReplicaClient, Ready]:
        """Start an actor and its engine process, and wait until its model is loaded.

        Raises:
            ConfigError: Ray is not installed, cannot be reached, or has no room for the replicas.
            ModelError: as for ``EngineClient.start``.
            EngineDead: as for ``EngineClient.start``, or no machine had room for the replica.
        """
        await self._cluster.start()
        ray = self._cluster.ray
        token = secrets.token_bytes(TOKEN_BYTES)
        actor = ray.remote(ReplicaActor).options(**self._resources.as_options()).remote(token)
        client: RayReplica | None = None
        try:
            address = HostAddress(*await self._place(actor), token)
            actor.run.remote(str(self._model_path), json.dumps(asdict(self._config)))
            client = RayReplica(self._config, self._model_path, address, lambda: _kill(ray, actor), **self._timeouts)
            ready = await client.start()
        except BaseException:
            await (client.close() if client is not None else asyncio.to_thread(_kill, ray, actor))
            raise
        return client, ready

    async def stop(self, client: ReplicaClient) -> None:
        """Shut the engine down and end its actor."""
        await client.close()

    async def close(self) -> None:
        """Leave the cluster; a cluster that was started here ends."""
        await self._cluster.close()

    async def _place(self, actor: Any) -> tuple[str, int]:
        try:
            async with asyncio.timeout(PLACEMENT_SECONDS):
                host, port = await actor.address.remote()
        except TimeoutError as error:
            raise EngineDead(
                f"Ray found no machine with room for a replica ({self._resources}) within {PLACEMENT_SECONDS:g} "
                "seconds."
            ) from error
        except self._cluster.ray.exceptions.RayError as error:
            raise EngineDead(f"Ray could not start a replica: {' '.join(str(error).split())[:300]}") from error
        return host, port


def _kill(ray: Any, actor: Any) -> None:
    """End an actor, which may have ended already; Ray itself may have ended, too."""
    with suppress(Exception):
        ray.kill(actor)
