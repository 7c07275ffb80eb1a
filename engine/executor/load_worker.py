"""Loading of a worker: of one device, or of rank 0 of several, whose followers are started first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..config import EngineConfig
from ..errors import ConfigError, EngineDead
from .device_defaults import with_device_defaults
from .followers import Followers
from .load_weights import Weights
from .rank_workers import LeadWorker
from .tensor_parallel import identity, plan_ranks, rank_device
from .worker import Worker


def load_worker(
    config: EngineConfig,
    model_path: Path,
    weights: Weights | None = None,
    lost: Callable[[str], None] | None = None,
) -> tuple[EngineConfig, Worker]:
    """Make a worker. Returns the options, completed with defaults for steps that depend on the device, and the worker.

    Args:
        weights: loaded weights of a model on one device; None to load them.
        lost: called on a thread, with the reason, when another rank of the model has ended.

    Raises:
        ModelError, ConfigError: as ``Worker``; or the ranks cannot split the model, or cannot start.
    """
    config = with_device_defaults(config, model_path)
    if config.num_ranks == 1:
        return config, Worker(config, model_path, weights=weights)
    config, devices = plan_ranks(config, model_path)
    rank_device(str(devices[0]))
    followers = Followers(config, model_path, identity(config, model_path), devices, lost)
    try:
        worker = LeadWorker(config, model_path, followers)
    except BaseException as error:
        followers.fail(f"Rank 0 could not start: {error}")
        followers.close()
        if isinstance(error, RuntimeError | EngineDead):
            raise ConfigError(followers.reason) from error
        raise
    followers.started()
    return config, worker
