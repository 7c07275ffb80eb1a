"""Choice of device, number formats and CPU threads from the options, and the memory that the KV pool may take."""

from __future__ import annotations

import os

import torch

from ...kernels import ops
from ...kernels.cpu.build import BuildError
from ...kernels.cpu.portable_build import has_avx512
from ...kernels.layouts import int8_kv_layout, kv_forms
from ..checkpoint.model_config import ModelConfig, ModelShape
from ..config import EngineConfig
from ..error_stream import write_line
from ..errors import ConfigError
from ..machine import resources

_MOST_ROW_DIM = 256  # dimensions of a head whose keys the kernels of a GPU read in 8 bits
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device that the options name, or cuda if there is one. Raises ConfigError for cuda without one.

    In builds of torch for ROCm, AMD's GPUs are called cuda too. They are not chosen, because our kernels have never
    been compiled for them.
    """
    is_rocm = torch.version.hip is not None
    if config.device == "cuda" and (is_rocm or not torch.cuda.is_available()):
        reason = "no CUDA device is visible" if torch.version.cuda else "this torch is built for CPUs"
        reason = "this torch is built for ROCm, and AMD's GPUs are not supported" if is_rocm else reason
        raise ConfigError(
            f"--device cuda is not possible: {reason}. Use --device cpu to serve without a GPU. Try: rootgraft doctor"
        )
    if config.device == "auto":
        if is_rocm:
            write_line("AMD's GPUs are not supported: the CPU computes, with torch for ROCm")
        return torch.device("cuda" if torch.cuda.is_available() and not is_rocm else "cpu")
    return torch.device(config.device)


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype:
    """Return the number format of weights: the option's, or by default bfloat16 if it is at least as fast as float32.

    On a CPU, bfloat16 is used if torch or our kernels have instructions for products of bfloat16, or our kernels use
    AVX2. A step of few rows takes as long as reading its weights, and in bfloat16 these are half as many bytes; sums
    are in fp32 in both cases. On a GPU without instructions for bfloat16 (before sm_80) torch would emulate them, so
    the default is float16.

    Raises:
        ConfigError: the environment variable that limits the CPU's instructions names an unknown level.
    """
    if config.dtype != "auto":
        return _DTYPES[config.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    try:
        torch_has = has_avx512() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except BuildError as error:
        raise ConfigError(f"{error}.") from None
    kernels = ops.native_kernels()
    has = torch_has if kernels is None else kernels.library.keeps_bf16
    return torch.bfloat16 if has else torch.float32


def check_index(model: ModelConfig, device: torch.device) -> None:
    """Raise ConfigError for a model whose index chooses tokens, on a GPU: native kernels of a CPU compute it."""
    index = None if model.latent is None else model.latent.index
    blocks = model.block_index
    most = index.most if index is not None else None if blocks is None else blocks.most_tokens
    if most is not None and device.type == "cuda":
        raise ConfigError(
            f"Indexed attention is not supported on a GPU beyond {most:,} tokens (up to that length the index "
            f"chooses all tokens). Try: --max-model-len {most}, or --device cpu"
        )


def choose_kv_dtype(config: EngineConfig, model: ModelShape, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the number format of KV for a model in ``dtype``.

    Raises:
        ConfigError: no kernel supports KV of this format on this device, for latent attention, or for this block or
            head size.
    """
    name = config.kv_cache_dtype
    if name == "auto":
        return dtype
    if model.latent is not None:
        raise ConfigError(
            f"--kv-cache-dtype {name} is not supported for latent attention, which caches one vector of each token for "
            "all heads. Leave it at auto."
        )
    if any(dim is not None for dim in model.index_keys):
        raise ConfigError(
            f"--kv-cache-dtype {name} is not supported for attention whose index chooses blocks of tokens. Leave it at "
            "auto."
        )
    if model.has_position_keys:
        raise ConfigError(
            f"--kv-cache-dtype {name} is not supported with ALiBi, whose cached keys contain positions that 8 bits "
            "would round. Leave it at auto."
        )
    dims = {shape.dim for shape in model.kv_shapes if shape is not None}
    if odd := [dim for dim in dims if dim % int8_kv_layout.CELLS]:
        raise ConfigError(
            f"--kv-cache-dtype {name} needs heads of a multiple of {int8_kv_layout.CELLS} dimensions; this model's "
            f"have {odd[0]}. Leave it at auto."
        )
    if device.type != "cpu":
        return _row_dtype(name, model, device, dtype)
    if name != "int8":
        raise ConfigError(
            f"--kv-cache-dtype {name} needs a GPU. Try: rootgraft serve --kv-cache-dtype int8, which takes the same "
            "memory and is faster on a CPU."
        )
    if config.block_size % int8_kv_layout.CELLS:
        raise ConfigError(
            f"--kv-cache-dtype int8 needs a --block-size of a multiple of {int8_kv_layout.CELLS}, "
            f"not {config.block_size}."
        )
    return int8_kv_layout.DTYPE


def _row_dtype(name: str, model: ModelShape, device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """Return the type of KV in rows of 8 bits for a GPU. Raises ConfigError if no kernel of this device reads them."""
    is_computed = ops.on_triton(device) and dtype in (torch.bfloat16, torch.float16)
    dim = max((shape.dim for shape in model.kv_shapes if shape is not None), default=0)
    if not is_computed or dim > _MOST_ROW_DIM:
        raise ConfigError(
            f"--kv-cache-dtype {name} on a GPU needs the Triton kernels, bfloat16 or float16, and heads of at most "
            f"{_MOST_ROW_DIM} dimensions; this is {str(dtype).removeprefix('torch.')} with heads of {dim}. "
            "Leave it at auto."
        )
    return kv_forms.INT8 if name == "int8" else kv_forms.FLOAT8


def place_threads(config: EngineConfig) -> int:
    """Return the number of threads for CPU kernels: the option, or a number that fits the cores this process may use.

    If the option is not given and these cores are in several sockets, the calling thread, and all threads that it
    starts, are bound to the socket with the most of them. Memory that they write, above all weights and KV, is then
    local to this socket.
    """
    if config.threads is not None:
        return config.threads
    found = resources.cores()
    if found.has_other_sockets:
        os.sched_setaffinity(0, found.socket)
    return found.compute_threads


def kv_bytes(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes for the KV pool, once the weights are loaded.

    ``--gpu-memory-utilization`` is the share of the device's whole memory that weights, activations and KV of this
    process may take together. Memory of other processes on the device matters only in that it is not free. On a CPU the
    memory is shared with all other programs, so the default is at most 4 GiB for all ranks together. If the container
    has a memory limit, it counts as the machine's memory.
    """
    if config.kv_cache_memory is not None:
        return int(config.kv_cache_memory * 2**30)
    if device.type == "cuda":
        return gpu_room(config, device)
    shared = resources.kv_pool_bytes(resources.memory(), config.gpu_memory_utilization)
    return shared // config.num_ranks


def gpu_room(config: EngineConfig, device: torch.device) -> int:
    """Return the bytes of a GPU that this process may still take: the rest of its share, as far as it is free.

    The share is a part of the GPU's whole memory. So if several engines share a GPU and their shares fit in it
    together, each gets its share, in whatever order they start.
    """
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    return int(min(free, config.gpu_memory_utilization * total - own))
