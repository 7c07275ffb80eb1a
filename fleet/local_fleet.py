"""Local fleet: replicas as engine processes of this machine, which share its cores and its memory."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from ..engine.config import MOST_GPU_SEQS, EngineConfig
from ..engine.errors import ConfigError
from ..engine.machine.resources import cores
from ..engine.machine.visible_gpus import takes_gpu
from ..engine.serving.engine_client import EngineClient
from ..engine.serving.engine_spawn import spawn_engine
from ..engine.serving.template_client import EngineTemplate
from .dispatcher import DispatcherLimits
from .fleet import Fleet
from .fleet_options import FleetOptions
from .gpu_launcher import GpuLauncher, gpus_of
from .replica_launcher import ProcessLauncher, ReplicaLauncher
from .scaling.autoscaling import AutoscalePolicy

LEAST_UTILIZATION = 0.05
"""Lower bound of ``--gpu-memory-utilization``."""

PEER_GIB = 0.5
"""GiB for KV from other replicas that a replica holds by default; ``--kv-peer-gib`` sets another size."""

START_SECONDS = 600.0
"""Longest time in seconds that sequences wait for a replica; one that is starting loads the model first."""


def local_fleet(config: EngineConfig, path: Path, options: FleetOptions, num_engines: int) -> Fleet:
    """Return a fleet of processes, not started yet: as many as ``--replicas`` or ``--autoscale`` says.

    Args:
        num_engines: largest number of engine processes that share the machine, those of other fleets included.

    Raises:
        ConfigError: there are fewer GPUs than replicas.
    """
    policy, count = policy_of(config, options), options.replicas
    if policy is not None:
        # The memory that the model needs is known only once a replica runs.
        count = max(1, policy.least)
    launcher = _launcher(with_peers(config, options), path, options, num_engines)
    return Fleet(launcher, count, limits_of(config, options), seed=config.seed, policy=policy, roles=options.roles)


def _launcher(config: EngineConfig, path: Path, options: FleetOptions, num_engines: int) -> ReplicaLauncher:
    """Return the launcher of the processes: forked processes that share a CPU, or one process for each GPU."""
    gpus = gpus_of(config, options, num_engines)
    shared = shared_config(config, num_engines, cores().usable)
    client = partial(
        EngineClient,
        model_path=path,
        heartbeat_timeout=options.silence_seconds,
        watchdog_timeout=options.watchdog_timeout,
    )
    if gpus:
        shared = replace(shared, gpu_memory_utilization=config.gpu_memory_utilization)
        makes = {gpu: partial(client, shared, spawn=partial(spawn_engine, gpu=gpu)) for gpu in gpus}
        return GpuLauncher({gpu: ProcessLauncher(make) for gpu, make in makes.items()})
    template = EngineTemplate(shared, path)
    make = partial(client, shared, spawn=template.spawn)
    is_always_there = options.autoscale_bounds is None or options.autoscale_bounds[0] > 0
    return ProcessLauncher(make, template, keeps_template=is_always_there)


def policy_of(config: EngineConfig, options: FleetOptions) -> AutoscalePolicy | None:
    """Return the policy of ``--autoscale``; None without it.

    Each replica is meant to have half of the sequences that it can run, because starting another one takes seconds.
    """
    if options.autoscale_bounds is None:
        return None
    least, most = options.autoscale_bounds
    seqs = MOST_GPU_SEQS if config.max_num_seqs is None and takes_gpu(config.device) else config.most_seqs
    policy = AutoscalePolicy(least, most, rows=max(1, seqs // 2))
    return policy if options.idle_seconds is None else replace(policy, idle_seconds=options.idle_seconds)


def limits_of(config: EngineConfig, options: FleetOptions) -> DispatcherLimits:
    """Return the dispatcher's limits for the replicas of a server."""
    return DispatcherLimits(
        # Draining replicas and their replacements are both counted.
        most_replicas=2 * options.most_replicas,
        hold_seconds=START_SECONDS,
        heartbeat_seconds=options.silence_seconds,
        adapter_slots=config.max_loras,
    )


def with_peers(config: EngineConfig, options: FleetOptions) -> EngineConfig:
    """Return the options for a replica that copies KV from other replicas, if there are any.

    Raises:
        ConfigError: several replicas would publish KV events at the same address.
    """
    if options.most_replicas > 1 and config.kv_events_config is not None:
        raise ConfigError(
            "--kv-events-config is an option of one engine; a fleet itself routes by its replicas' caches. Leave the "
            "option out, or start servers with one replica."
        )
    if config.kv_peer_gib is not None or options.most_replicas < 2:
        return config
    return replace(config, kv_peer_gib=PEER_GIB)


def shared_config(config: EngineConfig, replicas: int, num_cores: int) -> EngineConfig:
    """Return the options for one of ``replicas`` replicas of a machine, each of one rank or more.

    Each replica gets a share of the cores as threads, and a share of ``--gpu-memory-utilization``. The values of
    ``--threads`` and ``--kv-cache-memory`` count for each rank of each replica.
    """
    return replace(
        config,
        threads=config.threads or max(1, num_cores // (replicas * config.num_ranks)),
        gpu_memory_utilization=max(LEAST_UTILIZATION, config.gpu_memory_utilization / replicas),
    )
