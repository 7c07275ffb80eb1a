"""Defaults of a step by device: sequences and tokens that a GPU's memory serves well, chosen before weights load."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from ...kernels import ops
from ..checkpoint.gguf import GgufFile
from ..checkpoint.model_config import ModelConfig
from ..checkpoint.read_config import open_checkpoint
from ..config import DEFAULT_TOKENS, MOST_GPU_SEQS, EngineConfig
from ..loading.model_impl import own_config
from ..loading.tensor_names import expected_shapes
from ..models.kv_pool import bytes_per_page
from ..models.state_pool import state_bytes
from .device import choose_device, choose_dtype, choose_kv_dtype, gpu_room

_LEAST_SEQS = 16
_SEQS_STEP = 8
_TOKENS_OF_A_SEQUENCE = 512  # tokens of the pool for each sequence: with fewer, sequences would preempt one another
_SCRATCH_SHARE = 16  # the logits of a step and what a draw makes of them take at most this part of the memory
_LOGITS_COPIES = 10
_STATES_SHARE = 4  # the same share for recurrent states
# Memory from which a step has so many tokens. 2,048 of 8B take 47 ms on an H200, half of the target latency.
_BYTES_OF_TOKENS = {2048: 16 << 30, 1024: 8 << 30}


def with_device_defaults(config: EngineConfig, model_path: Path) -> EngineConfig:
    """Return the options, with numbers of sequences and tokens of a step that fit the GPU if the options set none.

    The smaller general defaults are used on a CPU, on a GPU without Triton kernels, and for a model of the transformers
    library.

    Raises:
        ModelError: the checkpoint's configuration cannot be read.
        ConfigError: the requested device does not exist.
    """
    if config.max_num_seqs is not None and config.max_num_batched_tokens is not None:
        return config
    device = choose_device(config)
    if device.type != "cuda" or not (config.native_kernels and ops.on_triton(device)):
        return config
    checkpoint = open_checkpoint(model_path)
    model = own_config(config.model_impl, checkpoint)
    dtype = choose_dtype(config, device)
    if model is None or dtype is torch.float32:
        return config
    room = gpu_room(config, device)
    seqs = config.max_num_seqs
    if seqs is None:
        weights = _weight_bytes(config, checkpoint, model, dtype) // config.num_ranks
        seqs = _sequences(config, model, device, dtype, room, room - weights)
        seqs = min(seqs, config.max_num_batched_tokens or seqs)
    tokens = config.max_num_batched_tokens or max(seqs, _tokens(room))
    return replace(config, max_num_seqs=seqs, max_num_batched_tokens=tokens)


def _sequences(
    config: EngineConfig, model: ModelConfig, device: torch.device, dtype: torch.dtype, room: int, pool: int
) -> int:
    """Return how many sequences a step may have.

    Args:
        room: bytes for weights, steps and KV.
        pool: bytes of ``room`` that remain without the weights.
    """
    page = bytes_per_page(model, config.block_size, choose_kv_dtype(config, model, device, dtype))
    page //= min(config.tensor_parallel_size, model.num_kv_heads) * config.pipeline_parallel_size
    if config.kv_cache_memory is not None:
        pool = int(config.kv_cache_memory * 2**30)
    pages = config.num_gpu_blocks_override or max(0, pool) // page
    fitting = [
        MOST_GPU_SEQS,
        pages * config.block_size // _TOKENS_OF_A_SEQUENCE,
        room // _SCRATCH_SHARE // (_LOGITS_COPIES * model.vocab_size * torch.float32.itemsize),
    ]
    if model.has_states:
        fitting.append(max(0, pool) // _STATES_SHARE // state_bytes(model, dtype))
    return max(_LEAST_SEQS, min(fitting) // _SEQS_STEP * _SEQS_STEP)


def _tokens(room: int) -> int:
    """Return how many tokens a step may have: activations grow with them."""
    return next((tokens for tokens, least in _BYTES_OF_TOKENS.items() if room >= least), DEFAULT_TOKENS)


def _weight_bytes(config: EngineConfig, checkpoint: Path | GgufFile, model: ModelConfig, dtype: torch.dtype) -> int:
    """Return about the bytes of the weights: of the files if they are quantised, else of the tensors."""
    plain = sum(math.prod(shape) for shape in expected_shapes(model).values()) * dtype.itemsize
    if config.load_format == "dummy":
        return plain
    if isinstance(checkpoint, GgufFile):
        return min(plain, checkpoint.path.stat().st_size)
    stored = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    return min(plain, stored) if stored else plain
