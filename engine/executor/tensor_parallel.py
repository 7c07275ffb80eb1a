"""Ranks of one model: what is checked before they start, who they are, and the worker of each."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from ..checkpoint.base_digest import base_digest
from ..checkpoint.read_config import open_checkpoint
from ..config import EngineConfig
from ..errors import ConfigError
from ..loading.model_impl import own_config
from ..loading.shards import check_split, fitting_sizes
from ..loading.stages import check_stages
from ..machine import resources
from .device import choose_device

_PACKAGES = "rootgraft", "torch", "numpy"


def plan_ranks(config: EngineConfig, model_path: Path) -> tuple[EngineConfig, list[torch.device]]:
    """Check the number of ranks before any rank starts. Returns the options, and the device of each rank.

    Raises:
        ConfigError: the model cannot be split over so many ranks, or the machine cannot run them.
        ModelError: the model is not supported.
    """
    size = config.num_ranks
    model = own_config(config.model_impl, open_checkpoint(model_path))
    if model is None:
        raise ConfigError(
            f"{config.ranks_option}: the transformers library computes this model, and only on one device. Leave the "
            "option out."
        )
    model = model.up_to(config.max_model_len or model.max_position_embeddings)
    device = choose_device(config)
    if config.tensor_parallel_size > 1:
        check_split(model, config.tensor_parallel_size)
    if config.pipeline_parallel_size > 1:
        check_stages(model, config.pipeline_parallel_size)
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if count < size:
            fitting = [1, *(each for each in fitting_sizes(model) if each <= count)]
            raise ConfigError(
                f"{config.ranks_option} needs {size} GPUs, but {count} can be seen (CUDA_VISIBLE_DEVICES may hide "
                f"others). Try: rootgraft serve --tensor-parallel-size {fitting[-1]}"
            )
        if config.pipeline_parallel_size > 1 and config.kv_cache_memory is None:
            raise ConfigError(
                f"{config.ranks_option} on GPUs needs --kv-cache-memory, the GiB for the KV of each rank."
            )
        return replace(config, enforce_eager=True), [torch.device("cuda", rank) for rank in range(size)]
    threads = config.threads or max(1, resources.cores().compute_threads // size)
    return replace(config, enforce_eager=True, threads=threads), [device] * size


def rank_device(name: str) -> torch.device:
    """Return this process's device by its name, and compute on it from now on."""
    device = torch.device(name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def identity(config: EngineConfig, model_path: Path) -> list[str]:
    """Return what all ranks must have alike: versions of the program and its libraries, and the files of the model."""
    digest = base_digest(open_checkpoint(model_path), dummy=config.load_format == "dummy")
    return [*(f"{name} {_version(name)}" for name in _PACKAGES), f"model files of digest {digest}"]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"
