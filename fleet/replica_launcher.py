"""Replica launcher: starts and stops the replicas of a fleet, as processes of this machine or elsewhere."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from ..engine.errors import EngineDead
from ..engine.messages import Ready
from ..engine.serving.template_client import EngineTemplate
from .adapter_loading import load_others
from .adapter_versions import LoadedVersion
from .replica_client import ReplicaClient

logger = logging.getLogger("rootgraft.fleet")


class ReplicaLauncher(Protocol):
    """Starts and stops a fleet's replicas."""

    async def launch(self) -> tuple[ReplicaClient, Ready]:
        """Start a replica. Returns its client and the first message of its engine.

        A launch that fails or is cancelled leaves no process or resource behind.

        Raises:
            ModelError, ConfigError: the engine's reason, if model or options are wrong.
            EngineDead: the engine has ended while it was starting, or there was no room for it.
        """
        ...

    async def stop(self, client: ReplicaClient) -> None:
        """End a replica from ``launch``, and wait for its end. Releases the resources of a killed replica, too."""
        ...

    async def close(self) -> None:
        """Release the means with which replicas were started, once all have ended."""
        ...


class ProcessLauncher:
    """Launches replicas as engine processes of this machine.

    Args:
        make: makes the client of a replica, not started yet.
        template: process from which ``make`` forks replicas; it is started before the first of them.
        keeps_template: whether to keep the template while there is no replica; otherwise its memory is released
            meanwhile.
    """

    def __init__(
        self,
        make: Callable[[], ReplicaClient],
        template: EngineTemplate | None = None,
        *,
        keeps_template: bool = True,
    ) -> None:
        self._make = make
        self._template = template
        self._keeps_template = keeps_template
        self._num_replicas = 0

    async def launch(self) -> tuple[ReplicaClient, Ready]:
        """Start a process and wait until its model is loaded. Raises as ``EngineClient.start``."""
        self._num_replicas += 1
        try:
            if self._template is not None:
                await self._template.start()
            client = self._make()
            try:
                ready = await client.start()
            except BaseException:
                await client.close()
                raise
        except BaseException:
            self._ended()
            raise
        return client, ready

    async def stop(self, client: ReplicaClient) -> None:
        """Shut the process down and wait for its end."""
        await client.close()
        self._ended()

    async def close(self) -> None:
        """End the template."""
        if self._template is not None:
            self._template.close()

    def _ended(self) -> None:
        self._num_replicas -= 1
        if self._template is not None and not self._num_replicas and not self._keeps_template:
            self._template.close()


async def start_beside(
    launcher: ReplicaLauncher, first: Ready, wanted: Callable[[], Mapping[str, LoadedVersion]]
) -> tuple[ReplicaClient, Ready, frozenset[str]]:
    """Start a replica that can continue the sequences of other replicas.

    Args:
        first: first message of the fleet's first replica.
        wanted: returns the adapters that the replica must have, which may change meanwhile.

    Returns:
        The replica's client, its first message, and the adapters that it lacks because their files are missing or have
        changed.

    Raises:
        EngineError: the replica cannot be started.
        EngineDead: also if the replica has another model or a shorter context than ``first``; it is ended again.
    """
    client, ready = await launcher.launch()
    try:
        if ready.max_model_len < first.max_model_len or ready.base_digest != first.base_digest:
            raise EngineDead("The replica has another model or a shorter context than the others.")
        lacking = await load_others(client, wanted)
        logger.info("another replica has started: %s", client.place)
        return client, ready, lacking
    except BaseException:  # the fleet may be closed in the meantime
        client.kill()
        await launcher.stop(client)
        raise
