"""The device's side of the engine: a model, its KV pool and the runner over both."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from ...kernels import ops
from ...kernels.layouts import int8_kv_layout
from ...lora.adapter_pool import AdapterPool
from ...lora.base_projections import BaseLayout
from ...lora.read_adapter import AdapterReader
from ..batch import Batch, Draw
from ..checkpoint.model_config import ModelConfig
from ..config import EngineConfig
from ..errors import ConfigError
from ..loading.base_layout import adapter_bytes, base_layout
from ..loading.load_model import load_model
from ..loading.weight_forms import choose_weight_form
from ..models.decoder import DecoderModel
from ..models.forward_inputs import HostInputs, InputBuilder
from ..models.kv_pool import KvPool, bytes_per_page
from ..models.kv_prefault import KvPrefault
from ..sampling.sampler import Sampler
from .cpu_graphs import CpuGraphs
from .cuda_graphs import graphs_for
from .device import choose_device, choose_dtype, choose_kv_dtype, kv_bytes, num_threads
from .gpu_memory import StepMemory, measure_steps, trial
from .model_runner import ModelRunner

_PATIENCE = 64  # steps that an adapter waits for a slot before one is closed for it


class Worker:
    """Loads a model and runs batches on it.

    Args:
        config: all options.
        model_path: folder in Hugging Face format or GGUF file.

    Attributes:
        model: its weights.
        num_pages: pages in the pool.
        vocab_size: width of the logits.
        eos_ids: the model's own end tokens.
        max_model_len: tokens that a sequence may have: the model's limit, or the pool's where that is less.
        adapters: names, memory and slots of adapters; None without ``enable_lora``.
        overlaps: whether the device computes while the host goes on. A CPU's kernels run on the engine's own thread.
        summary: lines that tell a person what was set up.

    Raises:
        ModelError: the model cannot be computed exactly.
        ConfigError: the options do not fit the model or the memory.
    """

    def __init__(self, config: EngineConfig, model_path: Path) -> None:
        started = time.monotonic()
        device = choose_device(config)
        dtype = choose_dtype(config, device)
        ops.use_native(config.native_kernels)
        if device.type == "cpu":
            ops.set_threads(num_threads(config))
        model = self.model = load_model(
            model_path,
            dtype=dtype,
            device=device,
            max_positions=config.max_model_len,
            dummy=config.load_format == "dummy",
            weights=choose_weight_form(config, device, dtype),
        )
        loaded = time.monotonic()
        layout = base_layout(model, model_path, dummy=config.load_format == "dummy") if config.enable_lora else None
        self.adapters = _adapters(config, layout) if layout else None
        self.overlaps = device.type == "cuda"
        slot_bytes = config.max_loras * adapter_bytes(layout, config.max_lora_rank) if layout else 0
        self.vocab_size, self.eos_ids = model.config.vocab_size, model.config.eos_token_ids
        bank = self.adapters.bank if self.adapters else None
        is_measured = device.type == "cuda" and config.kv_cache_memory is config.num_gpu_blocks_override is None
        steps = measure_steps(model, config, bank) if is_measured else StepMemory()
        kv_dtype = choose_kv_dtype(config, model.config, device, dtype)
        page_bytes = bytes_per_page(model.config, config.block_size, kv_dtype)
        self.num_pages = config.num_gpu_blocks_override or pool_bytes(config, device, steps, slot_bytes) // page_bytes
        self.max_model_len = _max_model_len(config, model.config, self.num_pages)
        kv = KvPool(model.config, self.num_pages, config.block_size, kv_dtype, device)
        inputs = InputBuilder(config.max_num_seqs, self.max_model_len, config.block_size, device, bank)
        sampler = Sampler(config.max_num_seqs, self.vocab_size, device)
        self._runner = ModelRunner(model, _forward(config, model, kv, inputs), kv, inputs, sampler)
        self._warm_up()
        self._kv_prefault = KvPrefault(kv, page_bytes) if device.type == "cpu" else None
        self.summary = (
            f"{_shape(model.config)}, {_number_formats(model)} on {device}, "
            f"loaded in {loaded - started:.1f} s, warm after {time.monotonic() - loaded:.1f} s more",
            f"KV pool: {self.num_pages * config.block_size:,} tokens{_kv_format(kv_dtype)} "
            f"in pages of {config.block_size} ({self.num_pages * page_bytes / 2**30:.2f} GiB); "
            f"context {self.max_model_len:,}; up to {config.max_num_seqs} sequences and "
            f"{config.max_num_batched_tokens:,} tokens a step",
            *([f"Steps: {steps}"] if is_measured else []),
            *([_slots(config, slot_bytes)] if self.adapters else []),
            ops.native_status() if device.type == "cpu" else ops.triton_status(),
        )

    def launch(self, batch: Batch) -> Draw:
        """Start the forward pass of a step: see ``ModelRunner.launch``.

        On a CPU nothing would be gained by that: the whole step is computed when its result is read.
        """
        if self._kv_prefault is not None:
            self._kv_prefault.reach(batch)
        if self.overlaps:
            return self._runner.launch(batch)
        return lambda masks: partial(self._runner.run, batch, masks)

    def _warm_up(self) -> None:
        """Run the smallest step, so that no request pays for what is set up on first use."""
        self._runner.run(trial(1, (0,)))


def _shape(config: ModelConfig) -> str:
    return (
        f"{config.family}: {config.num_layers} layers of {config.hidden_size}, "
        f"{config.num_heads} heads over {config.num_kv_heads}, vocabulary {config.vocab_size:,}"
    )


def _number_formats(model: DecoderModel) -> str:
    """The model's type, and the forms of quantised weights."""
    name = str(model.dtype).removeprefix("torch.")
    packed = [part.packed for part in model.projections]
    forms = sorted({part.format for part in packed if isinstance(part, ops.QuantisedLinear)})
    return f"{name} with weights in {' and '.join(form.description for form in forms)}" if forms else name


def _kv_format(kv_dtype: torch.dtype) -> str:
    """What is to be said of the pool's type, if it is not the model's."""
    return " of 8 bits" if kv_dtype is int8_kv_layout.DTYPE else ""


def _slots(config: EngineConfig, slot_bytes: int) -> str:
    return (
        f"Adapters: {config.max_loras} slots up to rank {config.max_lora_rank} (at most {slot_bytes / 2**30:.2f} GiB); "
        f"up to {config.max_adapters:,} loaded"
    )


def _adapters(config: EngineConfig, layout: BaseLayout) -> AdapterPool:
    root = None if config.lora_dir is None else Path(config.lora_dir)
    if root is not None and not root.is_dir():
        raise ConfigError("--lora-dir must be a folder.")
    return AdapterPool(
        AdapterReader(layout, config.max_lora_rank, root=root),
        max_loras=config.max_loras,
        max_adapters=config.max_adapters,
        max_cpu_bytes=(config.max_cpu_loras or 4 * config.max_loras) * adapter_bytes(layout, config.max_lora_rank),
        patience=_PATIENCE,
    )


def pool_bytes(config: EngineConfig, device: torch.device, steps: StepMemory, slot_bytes: int) -> int:
    """Memory for the KV pool: on a GPU, what weights, steps and full slots leave of its share.

    A pool whose size is named gets that. On a CPU slots are the host's copies, and steps take little.
    """
    is_shared = device.type == "cuda" and config.kv_cache_memory is None
    return max(0, kv_bytes(config, device) - (steps.total + slot_bytes if is_shared else 0))


def _forward(
    config: EngineConfig, model: DecoderModel, kv: KvPool, inputs: InputBuilder
) -> Callable[[HostInputs], Tensor]:
    """The forward pass: captured, recorded, or op by op."""
    if graphs := graphs_for(config, model, kv, inputs):
        graphs.capture(graphs.variants)
        return graphs.forward
    if model.device.type == "cpu" and not config.enforce_eager:
        return CpuGraphs(model, kv, inputs, config.max_num_seqs).forward
    return lambda step: model.forward(inputs.place(step), kv)


def _max_model_len(config: EngineConfig, model: ModelConfig, num_pages: int) -> int:
    """The longest sequence, checked against the model and the pool (which keeps a page for copies)."""
    pool = (num_pages - 1) * config.block_size - 1
    if pool < 1:
        raise ConfigError(f"No memory is left for the KV pool: {num_pages} pages. Give it --kv-cache-memory in GiB.")
    asked = config.max_model_len
    if asked is None:
        return min(model.max_position_embeddings, pool)
    if asked > model.max_position_embeddings:
        raise ConfigError(f"--max-model-len {asked} is beyond the model's own limit, {model.max_position_embeddings}.")
    if asked > pool:
        raise ConfigError(f"--max-model-len {asked} does not fit the KV pool, which holds {pool} tokens.")
    return asked
