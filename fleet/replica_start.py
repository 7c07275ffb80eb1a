"""Replica start: launches a replica beside those that serve, with the adapters that they have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

from ..engine.errors import EngineDead
from ..engine.messages import Ready
from .adapter_loading import load_others
from .adapter_versions import LoadedVersion
from .replica_client import ReplicaClient
from .replica_launcher import ReplicaLauncher

logger = logging.getLogger("rootgraft.fleet")


async def start_beside(
    launcher: ReplicaLauncher, first: Ready, wanted: Callable[[], Mapping[str, LoadedVersion]]
) -> tuple[ReplicaClient, Ready, frozenset[str]]:
    """Start a replica that can go on with the sequences of others.

    Args:
        first: of the fleet's first replica.
        wanted: returns the adapters that it must have; others may be asked for meanwhile.

    Returns:
        Its client, its first message, and the adapters that it lacks as their files are gone or have changed.

    Raises:
        EngineError: it cannot be started. EngineDead also if it has another model: then it is ended again.
    """
    client, ready = await launcher.launch()
    try:
        if ready.max_model_len < first.max_model_len or ready.base_digest != first.base_digest:
            raise EngineDead("The replica has another model, or a shorter context than the others.")
        lacking = await load_others(client, wanted)
        logger.info("another replica has started: %s", client.place)
        return client, ready, lacking
    except BaseException:  # the fleet may be closed in the meantime
        client.kill()
        await launcher.stop(client)
        raise
