"""Fleet on Ray: replicas as actors of a cluster, for ``rootgraft serve --ray-address``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ...engine.config import EngineConfig
from ...engine.errors import ConfigError
from ...engine.json_options import HF_OVERRIDES, parse_overrides
from ...engine.machine.resources import cores
from ..fleet import Fleet
from ..fleet_options import FleetOptions
from ..gpu_launcher import gpus_of
from ..local_fleet import limits_of, shared_config, with_peers
from .cluster_room import GIB, ReplicaResources
from .ray_cluster import LOCAL, RayCluster, check_address, check_ray
from .ray_launcher import RayLauncher

_WEIGHTS = (".safetensors", ".gguf")


def ray_fleet(config: EngineConfig, path: Path, options: FleetOptions, num_engines: int = 1) -> Fleet:
    """Return a fleet of ``options.replicas`` actors, which is not started yet.

    Args:
        num_engines: number of replicas of the whole server, those of other models included.

    Raises:
        ConfigError: an address or device is wrong, Ray is not installed or has another version, or this machine has
            fewer GPUs than a local Ray's replicas take.
    """
    assert options.ray_address is not None
    check_address(options.ray_address)
    check_ray()
    num_engines = max(num_engines, options.replicas)
    is_local = options.ray_address == LOCAL
    has_gpu = config.device == "cuda"
    if is_local:
        has_gpu = bool(gpus_of(config, options, num_engines))
        shared = shared_config(config, num_engines, cores().usable)
        config = replace(shared, gpu_memory_utilization=config.gpu_memory_utilization) if has_gpu else shared
    elif config.device == "auto":
        raise ConfigError(
            "--device is auto; with --ray-address it must be cpu or cuda, because a cluster's machines may differ."
        )
    elif parse_overrides(config.hf_overrides):
        raise ConfigError(
            f"{HF_OVERRIDES} creates a folder on this machine that the other nodes of --ray-address cannot read: "
            "write its keys into config.json of a copy of the model that all nodes can read."
        )
    config = with_peers(config, options)
    resources = resources_of(config, path, has_gpu=has_gpu)
    if is_local:
        # Fleets of several models share this machine, regardless of the threads of each.
        resources = replace(resources, num_cpus=1)
    cluster = RayCluster(options.ray_address, resources, options.replicas, num_engines)
    launcher = RayLauncher(
        cluster,
        config,
        path,
        resources,
        heartbeat_timeout=options.silence_seconds,
        watchdog_timeout=options.watchdog_timeout,
    )
    return Fleet(launcher, options.replicas, limits_of(config, options), seed=config.seed, roles=options.roles)


def resources_of(config: EngineConfig, path: Path, *, has_gpu: bool) -> ReplicaResources:
    """Return the least resources of a replica: threads, its own GPUs if it has any, weights and KV of its ranks."""
    files = [path] if path.is_file() else [file for file in path.iterdir() if file.suffix in _WEIGHTS]
    kv, ranks = int((config.kv_cache_memory or 0.0) * GIB), config.num_ranks
    return ReplicaResources(
        num_cpus=(config.threads or 1) * ranks,
        num_gpus=int(has_gpu) * ranks,
        memory=sum(file.stat().st_size for file in files) + kv * ranks,
        num_ranks=ranks,
    )
