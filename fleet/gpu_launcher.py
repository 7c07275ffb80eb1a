"""GPU launcher: starts each replica on a GPU of its own, and releases the GPU when the replica has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from ..engine.config import EngineConfig
from ..engine.errors import ConfigError, EngineDead
from ..engine.machine.visible_gpus import VARIABLE, torch_takes_gpus, visible_gpus
from ..engine.messages import Ready
from .fleet_options import FleetOptions
from .replica_client import ReplicaClient
from .replica_launcher import ReplicaLauncher

FREE_SECONDS = 60.0
"""Longest time in seconds that a new replica waits for the GPU of one that is ending."""


class GpuLauncher:
    """Launches at most as many replicas at a time as there are GPUs.

    Args:
        launchers: launchers by GPU, in the order in which the GPUs are used.
    """

    def __init__(self, launchers: Mapping[str, ReplicaLauncher]) -> None:
        self._launchers = launchers
        self._free: asyncio.Queue[str] = asyncio.Queue()
        self._used: dict[ReplicaClient, str] = {}
        for gpu in launchers:
            self._free.put_nowait(gpu)

    async def launch(self) -> tuple[ReplicaClient, Ready]:
        """Start a replica on a free GPU. Raises as ``ReplicaLauncher``, and EngineDead if none becomes free."""
        try:
            async with asyncio.timeout(FREE_SECONDS):
                gpu = await self._free.get()
        except TimeoutError as error:
            raise EngineDead(
                f"All {len(self._launchers)} GPUs are in use: there is none for another replica."
            ) from error
        try:
            client, ready = await self._launchers[gpu].launch()
        except BaseException:
            self._free.put_nowait(gpu)
            raise
        self._used[client] = gpu
        return client, ready

    async def stop(self, client: ReplicaClient) -> None:
        """End a replica, and release its GPU for another one."""
        gpu = self._used.pop(client)
        try:
            await self._launchers[gpu].stop(client)
        finally:
            self._free.put_nowait(gpu)

    async def close(self) -> None:
        """Release the means with which replicas were started, once all have ended."""
        await asyncio.gather(*(launcher.close() for launcher in self._launchers.values()))


def gpus_of(config: EngineConfig, options: FleetOptions, num_engines: int) -> tuple[str, ...]:
    """Return the GPU of each replica, or all GPUs of its ranks, joined by commas ("0,1").

    The result is empty on a CPU, and if a server has several models, which all share the first GPU.

    Raises:
        ConfigError: there are fewer GPUs than replicas.
    """
    gpus = visible_gpus()
    if config.device == "cpu" or not gpus or num_engines > options.most_replicas:
        return ()
    if config.device == "auto" and not torch_takes_gpus():
        return ()
    ranks = config.num_ranks
    if len(gpus) < options.most_replicas * ranks:
        bounds = options.autoscale_bounds
        named = f"--replicas {options.replicas}" if bounds is None else f"--autoscale {bounds[0]}:{bounds[1]}"
        each = "a GPU" if ranks == 1 else f"{ranks} GPUs"
        raise ConfigError(
            f"{named}: each replica needs {each} of its own, but {len(gpus)} can be seen ({VARIABLE} may hide "
            f"others): use at most {len(gpus) // ranks}, or --device cpu."
        )
    return tuple(",".join(gpus[first : first + ranks]) for first in range(0, options.most_replicas * ranks, ranks))
