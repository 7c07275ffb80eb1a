"""Local fleet: replicas as engine processes of this machine, which share its cores and its memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ...engine.config import EngineConfig
from ...engine.machine.resources import cores
from ...engine.serving.engine_client import EngineClient
from ..config import ServerConfig
from .dispatcher import DispatcherLimits
from .fleet import Fleet
from .replica_launcher import ProcessLauncher

LEAST_UTILIZATION = 0.05
"""Lower bound of ``--gpu-memory-utilization``."""


def local_fleet(config: EngineConfig, path: Path, options: ServerConfig, num_engines: int) -> Fleet:
    """Return a fleet of ``options.replicas`` processes, which is not started.

    Args:
        num_engines: engine processes that share the machine, those of other fleets included.
    """
    make = partial(
        EngineClient,
        shared_config(config, num_engines, cores().usable),
        path,
        heartbeat_timeout=options.silence_seconds,
        watchdog_timeout=options.watchdog_timeout,
    )
    return Fleet(ProcessLauncher(make), options.replicas, limits_of(config, options), seed=config.seed)


def limits_of(config: EngineConfig, options: ServerConfig) -> DispatcherLimits:
    """Return the dispatcher's limits for the replicas of a server."""
    return DispatcherLimits(
        most_replicas=2 * options.replicas,  # with those that take the place of others that drain
        heartbeat_seconds=options.silence_seconds,
        adapter_slots=config.max_loras,
    )


def shared_config(config: EngineConfig, replicas: int, num_cores: int) -> EngineConfig:
    """Return the options of one of ``replicas`` replicas of a machine.

    Its threads are a share of the cores, and its memory a share of ``--gpu-memory-utilization``; what ``--threads`` and
    ``--kv-cache-memory`` say is for each replica.
    """
    return replace(
        config,
        threads=config.threads or max(1, num_cores // replicas),
        gpu_memory_utilization=max(LEAST_UTILIZATION, config.gpu_memory_utilization / replicas),
    )
