"""KV budget: how many pages the memory for KV holds, and how long a sequence may be with them."""

from __future__ import annotations

import torch

from ..checkpoint.model_config import ModelConfig, ModelShape
from ..config import EngineConfig
from ..errors import ConfigError
from ..kv_cache.state_cache import StateSlots, share_budget
from ..machine import resources
from ..models.kv_pool import bytes_per_page
from ..models.state_pool import state_bytes
from .device import choose_kv_dtype, gpu_room, kv_bytes
from .gpu_memory import StepMemory

_LEAST_PAGES = 3  # a sequence has one at least, and one is for copies


def check_budget(config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    """Check the options of the KV pool before the weights are loaded. Weights can only reduce the pool's memory.

    Raises:
        ConfigError: the error that making the pool or ``longest_sequence`` would raise later.
    """
    page_bytes = bytes_per_page(model, config.block_size, choose_kv_dtype(config, model, device, dtype))
    num_bytes = pool_bytes(config, device, StepMemory(), 0)
    if model.has_states:
        num_pages, _ = share_states(config, num_bytes, page_bytes, state_bytes(model, dtype))
    else:
        num_pages = config.num_gpu_blocks_override or num_bytes // page_bytes
    longest_sequence(config, model, num_pages, on_gpu=device.type == "cuda")


def pool_bytes(config: EngineConfig, device: torch.device, steps: StepMemory, slot_bytes: int) -> int:
    """Return the bytes of the KV pool: on a GPU its share minus weights, steps and full adapter slots.

    Nothing is subtracted from ``--kv-cache-memory``. On a CPU nothing is subtracted either: adapter slots need no
    memory beside the host's copies, and steps take little.
    """
    is_shared = device.type == "cuda" and config.kv_cache_memory is None
    return max(0, kv_bytes(config, device) - (steps.total + slot_bytes if is_shared else 0))


def share_states(config: EngineConfig, num_bytes: int, page_bytes: int, state_size: int) -> tuple[int, StateSlots]:
    """Divide bytes between pages of KV and slots of recurrent states. Returns the number of pages, and the slots.

    If an option sets the number of pages, the states take memory in addition.

    Raises:
        ConfigError: the states of all sequences leave nothing for KV.
    """
    sharing, size, rows = config.enable_prefix_caching, config.block_size, config.most_seqs
    if (num_pages := config.num_gpu_blocks_override) is not None:
        run = -(-state_size // page_bytes)
        num_checkpoints = max(rows, num_pages // run) if sharing else 0
        return num_pages, StateSlots(rows, num_checkpoints, run * size, min(rows, config.max_drafts))
    most = (num_bytes - 2 * page_bytes) // (2 * state_size)
    if rows * state_size > num_bytes - 2 * page_bytes and most > 0:
        raise ConfigError(
            f"A sequence has a recurrent state of {state_size / 2**20:.1f} MiB, and those of --max-num-seqs {rows} "
            f"leave no memory for KV of {num_bytes / 2**30:.1f} GiB. Try: rootgraft serve --max-num-seqs {most}"
        )
    return share_budget(num_bytes, size, page_bytes, state_size, rows, sharing=sharing, most_drafts=config.max_drafts)


def weight_room(config: EngineConfig, model: ModelConfig | None, device: torch.device, dtype: torch.dtype) -> int:
    """Return the bytes that weights may take: on a GPU the free part of its share, less the smallest KV pool.

    Args:
        model: configuration of the model; None for a model of the transformers library, whose shape is not known yet.
    """
    if device.type != "cuda":
        return resources.memory().available
    named, pages = config.kv_cache_memory, config.num_gpu_blocks_override
    if named is None and pages is None:
        room = gpu_room(config, device)
        pages = _LEAST_PAGES if config.max_model_len is None else -(-config.max_model_len // config.block_size) + 2
    else:
        room = torch.cuda.mem_get_info(device)[0]
    if named is not None:
        return max(0, room - int(named * 2**30))
    if model is None:
        return max(0, room)
    return max(0, room - (pages or 0) * bytes_per_page(model, config.block_size, dtype))


def longest_sequence(config: EngineConfig, model: ModelShape, num_pages: int, *, on_gpu: bool = False) -> int:
    """Return the length of the longest sequence, checked against the model and the pool (one page is for copies)."""
    pool = (num_pages - 1) * config.block_size - 1
    if pool < 1:
        raise ConfigError(
            f"No memory is left for the KV pool: {num_pages} pages of {config.block_size} tokens. Free some memory, "
            f"or use a smaller model{'' if on_gpu else ' or --quantization'}. Try: rootgraft serve "
            + ("--max-num-seqs 16 --gpu-memory-utilization 0.95" if on_gpu else "--kv-cache-memory 0.5 (GiB)")
        )
    wanted = config.max_model_len
    if wanted is None:
        return min(model.max_position_embeddings, pool)
    if wanted > model.max_position_embeddings:
        limit = model.max_position_embeddings
        raise ConfigError(
            f"--max-model-len {wanted} is beyond the model's own limit, {limit}. "
            f"Try: rootgraft serve --max-model-len {limit}"
        )
    if wanted > pool:
        raise ConfigError(
            f"--max-model-len {wanted} does not fit into the KV pool, which holds {pool} tokens; --kv-cache-memory "
            f"makes the pool larger. Try: rootgraft serve --max-model-len {pool}"
        )
    return wanted
