"""``Worker``: the device's side of the engine. It loads a model, sizes its KV pool and runs batches on both."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from ...kernels import ops
from ...kernels.layouts import int8_kv_layout
from ...lora.adapter_pool import AdapterPool
from ...lora.base_projections import BaseLayout
from ...radix.namespace import ENDLESS
from ..batch import Batch, Masks, StepHandle, StepResult
from ..checkpoint.base_digest import base_digest
from ..checkpoint.gguf import GgufFile
from ..checkpoint.model_config import ModelShape
from ..checkpoint.pooling_config import read_pooler
from ..checkpoint.read_config import open_checkpoint
from ..config import EngineConfig
from ..errors import ConfigError
from ..kv_cache.state_cache import StateSlots
from ..loading.base_layout import adapter_bytes, matrix_bytes
from ..loading.model_impl import layout_of, load_by, notices, own_config
from ..loading.weight_forms import choose_weight_form
from ..machine.software import install_command
from ..models.decoder import DecoderModel
from ..models.kv_pool import KvPool, KvPrefault, bytes_per_page
from ..models.model import Model
from ..models.state_pool import StatePool, state_bytes
from ..sampling.sampler import Sampler
from ..step_timer import StepTimer
from ..text.end_tokens import read_end_tokens
from ..types import Pooler
from .adapter_options import adapter_reader, check_adapters, check_folder
from .device import choose_device, choose_dtype, choose_kv_dtype, place_threads
from .draft_worker import DraftModel, DraftWorker, draft_pages, find_draft, load_draft
from .forward_pass import choose_forward
from .gpu_memory import StepMemory, measure_steps, single_row
from .input_builder import InputBuilder
from .kv_budget import check_budget, longest_sequence, pool_bytes, share_states, weight_room
from .model_runner import ModelRunner

_SLOT_PATIENCE = 64  # steps that an adapter waits for a slot before one is closed for it


@dataclass(slots=True)
class DeferredStep:
    """A step that is computed when its result is read: on a CPU an earlier launch would gain nothing."""

    runner: ModelRunner
    batch: Batch
    masks: Callable[[], Masks] | None = None

    def draw(self, masks: Callable[[], Masks] | None) -> None:
        self.masks = masks

    def result(self) -> StepResult:
        return self.runner.run(self.batch, self.masks)


class Weights(NamedTuple):
    """A model and the draft model, None without; what engine processes that are forked from one another share."""

    model: Model
    draft: DraftModel | None


class Worker:
    """Loads a model and runs batches on it.

    Args:
        model_path: folder in Hugging Face format or GGUF file.
        step_timer: makes the timer of each step.
        weights: what ``load_weights`` has loaded with the same options; None to load them.

    Attributes:
        draft: the draft model; None without.
        vocab_size: width of the logits.
        eos_ids: the tokens that end an answer, see ``read_end_tokens``.
        max_model_len: tokens that a sequence may have: the model's limit, or the pool's where that is less.
        states: slots of recurrent states; None for a model without.
        rope_switch: tokens beyond which a sequence's KV is another one; ``ENDLESS`` if none becomes so long.
        adapters: names, memory and slots of adapters; None without ``enable_lora``.
        overlaps: whether the device computes while the host goes on. CPU kernels run on the engine's own thread.
        pooler: what the model gives beside tokens.
        base_digest: tells its weights from others'.
        summary: lines for people about model, pool and kernels.

    Raises:
        ModelError: the model cannot be computed exactly.
        ConfigError: the options do not fit the model or the memory.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        step_timer: Callable[[], StepTimer] = StepTimer,
        *,
        weights: Weights | None = None,
    ) -> None:
        started = time.monotonic()
        device = _set_up_device(config)
        self.overlaps = device.type == "cuda"
        checkpoint = open_checkpoint(model_path)
        weights = _load(config, checkpoint, model_path, device) if weights is None else weights
        self.model = model = weights.model
        self.vocab_size, self.eos_ids = model.config.vocab_size, _end_tokens(config, model.config, model_path)
        self.pooler = _pooler(model, model_path)
        self.base_digest = base_digest(checkpoint, dummy=config.load_format == "dummy")
        loaded = time.monotonic()
        layout = layout_of(model, checkpoint, dummy=config.load_format == "dummy") if config.enable_lora else None
        self.adapters = _adapters(config, layout) if layout else None
        slot_bytes = _slot_bytes(config, layout) if layout else 0
        steps = self._measure_steps(config)
        kv = self._make_pool(config, steps or StepMemory(), slot_bytes, weights.draft)
        self._runner = self._make_runner(config, kv, step_timer)
        self._runner.run(single_row(1, (0,)))  # the smallest step: no request waits for what first use sets up
        self._kv_prefault = KvPrefault(kv) if device.type == "cpu" else None
        kv_format = " of 8 bits" if kv.k.dtype is int8_kv_layout.DTYPE else ""
        self.summary = (
            f"{_shape(model.config)}; {_number_formats(model, device)}; "
            f"loaded in {loaded - started:.1f} s, warm after {time.monotonic() - loaded:.1f} s more",
            f"KV pool: {kv.num_pages * kv.page_size:,} tokens{kv_format} "
            f"in pages of {kv.page_size} ({kv.num_pages * kv.page_bytes / 2**30:.2f} GiB); "
            f"context {self.max_model_len:,}; up to {config.max_num_seqs} sequences and "
            f"{config.max_num_batched_tokens:,} tokens a step",
            *([_states(self.states, kv.state_bytes)] if self.states else []),
            *([self.draft.summary] if self.draft else []),
            *notices(model),
            *([f"Steps: {steps}"] if steps else []),
            *([_slots(config, slot_bytes)] if self.adapters else []),
            _kernel_status(device),
        )

    def launch(self, batch: Batch) -> StepHandle:
        """Start the forward pass of a step: see ``ModelRunner.launch``."""
        if self._kv_prefault is not None:
            self._kv_prefault.reach(batch)
        return self._runner.launch(batch) if self.overlaps else DeferredStep(self._runner, batch)

    def free_memory(self) -> None:
        """Give memory of a GPU back that torch only caches."""
        if self.overlaps:
            torch.cuda.empty_cache()

    def _measure_steps(self, config: EngineConfig) -> StepMemory | None:
        """Measure the memory of steps if the size of a GPU's pool depends on it."""
        if not self.overlaps or not (config.kv_cache_memory is config.num_gpu_blocks_override is None):
            return None
        return measure_steps(self.model, config, self.adapters.bank if self.adapters else None)

    def _make_pool(self, config: EngineConfig, steps: StepMemory, slot_bytes: int, draft: DraftModel | None) -> KvPool:
        """Size and allocate the KV pool; sets ``num_pages`` and ``max_model_len``, and makes ``draft`` with its own."""
        model = self.model
        dtype = choose_kv_dtype(config, model.config, model.device, model.dtype)
        page_bytes = bytes_per_page(model.config, config.block_size, dtype)
        page_bytes += draft.hidden_bytes(config.block_size) if draft else 0
        num_bytes = pool_bytes(config, model.device, steps, slot_bytes)
        self.draft: DraftWorker | None = None
        num_draft_pages = 0
        if draft is not None:
            num_draft_pages, draft_bytes = draft_pages(config, num_bytes, page_bytes, draft)
            num_bytes -= draft_bytes
        states = None
        self.states: StateSlots | None = None
        if isinstance(model, DecoderModel) and model.config.has_states:
            self.num_pages, self.states = share_states(
                config, num_bytes, page_bytes, state_bytes(model.config, model.dtype)
            )
            states = StatePool(model.config, self.states.total, model.dtype, model.device)
        else:
            self.num_pages = config.num_gpu_blocks_override or num_bytes // page_bytes
        hidden = None
        if draft is not None:
            hidden = draft.hidden_pool(self.num_pages, config.block_size)
            self.draft = DraftWorker(config, draft, num_draft_pages, self.vocab_size, hidden)
        self.max_model_len = longest_sequence(config, model.config, self.num_pages, on_gpu=self.overlaps)
        self.rope_switch = (model.config.rope_switch or ENDLESS) if model.long_offset else ENDLESS
        try:
            return KvPool(model.config, self.num_pages, config.block_size, dtype, model.device, states, hidden)
        except OSError as error:
            size = f"{self.num_pages * page_bytes / 2**30:,.1f} GiB"
            raise ConfigError(
                f"The system gives no {size} for the KV pool: {error.strerror}. Try: rootgraft serve --kv-cache-memory "
                "4 (GiB)"
            ) from error

    def _make_runner(self, config: EngineConfig, kv: KvPool, step_timer: Callable[[], StepTimer]) -> ModelRunner:
        model, bank = self.model, self.adapters.bank if self.adapters else None
        inputs = InputBuilder(
            config.max_num_seqs,
            self.max_model_len,
            config.block_size,
            model.device,
            bank,
            model.long_offset,
            model.config.has_states,
            keeps_all=kv.hidden is not None and kv.hidden.holds_last,
        )
        sampler = Sampler(config.max_num_seqs, self.vocab_size, model.device)
        return ModelRunner(model, choose_forward(config, model, kv, inputs), kv, inputs, sampler, step_timer)


def load_weights(config: EngineConfig, model_path: Path) -> Weights | None:
    """Load the weights for a ``Worker`` of this process or of one that is forked from it; no thread is started.

    Returns:
        None for a GPU, whose memory no other process can have.

    Raises:
        ModelError, ConfigError: as ``Worker``.
    """
    device = _set_up_device(replace(config, threads=1))
    return _load(config, open_checkpoint(model_path), model_path, device) if device.type == "cpu" else None


def _set_up_device(config: EngineConfig) -> torch.device:
    """Choose the device, kernels and threads."""
    device = choose_device(config)
    ops.use_native(config.native_kernels)
    if device.type == "cpu":
        ops.set_threads(place_threads(config))
    return device


def _load(config: EngineConfig, checkpoint: Path | GgufFile, model_path: Path, device: torch.device) -> Weights:
    dtype, dummy = choose_dtype(config, device), config.load_format == "dummy"
    check_folder(config)
    shape = own_config(config.model_impl, checkpoint)
    draft = None
    if shape is not None:
        check_budget(config, shape, device, dtype)
        check_adapters(config, checkpoint, dtype)
        draft = find_draft(config, shape, device, model_path)
    available = weight_room(config, shape, device, dtype)
    model = load_by(
        config.model_impl,
        checkpoint,
        dtype=dtype,
        device=device,
        max_positions=config.max_model_len,
        dummy=dummy,
        weights=choose_weight_form(config, device, dtype, checkpoint, available=available),
        available=available,
    )
    if shape is None:  # of the transformers library, which tells its shape with its weights
        draft = find_draft(config, model.config, device, model_path)
    return Weights(model, None if draft is None else load_draft(config, model, draft))


def _end_tokens(config: EngineConfig, model: ModelShape, model_path: Path) -> tuple[int, ...]:
    return read_end_tokens(model, model_path, None if config.tokenizer is None else Path(config.tokenizer))


def _pooler(model: Model, model_path: Path) -> Pooler:
    """Return what a model gives beside tokens."""
    own = model.config if isinstance(model, DecoderModel) else None
    classes, generates = (own.num_classes, own.generates) if own else (0, True)
    return read_pooler(model_path, model.config, classes=classes, generates=generates)


def _shape(config: ModelShape) -> str:
    kv_heads = "1 KV head" if config.num_kv_heads == 1 else f"{config.num_kv_heads} KV heads"
    return (
        f"{config.family}: {config.num_layers} layers of {config.hidden_size}, "
        f"{config.num_heads} heads over {kv_heads}, vocabulary {config.vocab_size:,}"
    )


def _number_formats(model: Model, device: torch.device) -> str:
    """Describe the model's type and device, and the forms of quantised weights."""
    name = f"{str(model.dtype).removeprefix('torch.')} on {device}"
    packed = model.weights if isinstance(model, DecoderModel) else ()
    quantised = [part for part in packed if isinstance(part, ops.QuantisedLinear)]
    if not quantised:
        return name
    forms = {(part.format.description, part.widened and part.widened.few_rows) for part in quantised}
    described = " and ".join(
        form if few is None else f"{form} for steps of {'1 row' if few == 1 else f'up to {few} rows'}"
        for form, few in sorted(forms, key=str)
    )
    return f"{name}, weights in {described}{', else widened' if any(few for _, few in forms) else ''}"


def _slot_bytes(config: EngineConfig, layout: BaseLayout) -> int:
    """Return the bytes of full slots; on a GPU also of embeddings and heads that adapters bring."""
    matrices = 0 if layout.device.type == "cpu" else _most_own(config, layout) * matrix_bytes(layout)
    return config.max_loras * adapter_bytes(layout, config.max_lora_rank) + matrices


def _most_own(config: EngineConfig, layout: BaseLayout) -> int:
    """Return how many adapters in slots may bring an embedding or a head."""
    default = config.max_loras if layout.device.type == "cpu" else 1
    return default if config.max_lora_embeddings is None else min(config.max_lora_embeddings, config.max_loras)


def _slots(config: EngineConfig, slot_bytes: int) -> str:
    return (
        f"Adapters: {config.max_loras} slots up to rank {config.max_lora_rank} (at most {slot_bytes / 2**30:.2f} GiB); "
        f"up to {config.max_adapters:,} loaded"
    )


def _adapters(config: EngineConfig, layout: BaseLayout) -> AdapterPool:
    return AdapterPool(
        adapter_reader(config, layout),
        max_loras=config.max_loras,
        max_adapters=config.max_adapters,
        max_cpu_bytes=(config.max_cpu_loras or 4 * config.max_loras) * adapter_bytes(layout, config.max_lora_rank),
        patience=_SLOT_PATIENCE,
        max_own=_most_own(config, layout),
    )


def _states(slots: StateSlots, state_bytes: int) -> str:
    return (
        f"Recurrent states: {slots.num_checkpoints:,} checkpoints of prefixes, one for every {slots.interval:,} "
        f"tokens, beside {slots.num_rows} of sequences ({slots.total * state_bytes / 2**30:.2f} GiB). "
        "Drafts are off: a rejected one would remain in the state"
    )


def _kernel_status(device: torch.device) -> str:
    """Return the line on kernels; where a compiler is all that they lack, with the command that installs it."""
    if device.type != "cpu":
        return ops.triton_status(device)
    status = ops.native_status()
    return f"{status}. Try: {install_command('g++')}" if "no C++ compiler" in status else status
