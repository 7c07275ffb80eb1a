"""A model's KV pool, and its runner: the builder of its inputs, its forward pass and its sampler."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...lora.lora_step import AdapterBank
from ..config import EngineConfig
from ..errors import ConfigError
from ..models.decoder import DecoderModel
from ..models.hidden_pool import HiddenPool
from ..models.kv_pool import KvPool
from ..models.model import Model
from ..models.pipeline_stage import PipelineStage
from ..models.state_pool import StatePool
from ..sampling.sampler import Sampler
from ..step_timer import StepTimer
from .cpu_graphs import CpuGraphs
from .cuda_graphs import graphs_for
from .draw_graphs import draws_for
from .input_builder import HostInputs, InputBuilder
from .model_runner import ModelRunner, StepMirror
from .prompt_pooling import PromptPooling
from .worker_plan import WorkerPlan


def make_kv_pool(config: EngineConfig, model: Model, plan: WorkerPlan, hidden: HiddenPool | None) -> KvPool:
    """Allocate the KV pool, and the recurrent states of a model that has them.

    Raises:
        ConfigError: the operating system cannot allocate the memory.
    """
    states = None
    if plan.states is not None:
        assert isinstance(model, DecoderModel)
        states = StatePool(model.config, plan.states.total, model.dtype, model.device)
    try:
        return KvPool(model.config, plan.num_pages, config.block_size, plan.kv_dtype, model.device, states, hidden)
    except OSError as error:
        gib = plan.num_pages * plan.page_bytes / 2**30
        raise ConfigError(
            f"The system refuses {gib:,.1f} GiB for the KV pool: {error.strerror}. Try: rootgraft serve "
            f"--kv-cache-memory {min(4.0, gib / 2):.2g} (GiB)"
        ) from error


def make_runner(
    config: EngineConfig,
    model: Model,
    kv: KvPool,
    *,
    max_model_len: int,
    vocab_size: int,
    bank: AdapterBank | None = None,
    head: Model | None = None,
    step_timer: Callable[[], StepTimer] = StepTimer,
    mirror: StepMirror | None = None,
    pooling: PromptPooling | None = None,
) -> ModelRunner:
    """Make the runner of a model, with all its CUDA graphs captured.

    Args:
        vocab_size: width of the logits.
        bank: the adapters on the device; None if absent.
        head: model that computes the logits.
        step_timer: makes the timer of each step.
        mirror: the other ranks of the model; None for a single rank.
        pooling: pooling of rows whose prompts are pooled; None pools the last token.
    """
    inputs = InputBuilder(
        config.most_seqs,
        max_model_len,
        config.block_size,
        model.device,
        bank,
        model.long_offset,
        model.config.has_states,
        keeps_all=kv.hidden is not None and kv.hidden.holds_last,
    )
    sampler = Sampler(config.most_seqs, vocab_size, model.device)
    graphs, draws = graphs_for(config, model, kv, inputs), None
    if graphs is not None:
        graphs.capture(graphs.variants)
        # A rank of a model on several devices has only a part of the head: it captures no draws.
        draws = draws_for(config, head or model, sampler, graphs.capturer) if mirror is None else None
    if draws is not None:
        draws.capture(draws.variants)
    forward = graphs.forward if graphs else _uncaptured(config, model, kv, inputs)
    return ModelRunner(head or model, forward, kv, inputs, sampler, step_timer, mirror, pooling, draws)


def _uncaptured(config: EngineConfig, model: Model, kv: KvPool, inputs: InputBuilder) -> Callable[[HostInputs], Tensor]:
    """Return a forward pass without CUDA graphs: CPU graphs, or eager."""
    if isinstance(model, PipelineStage):
        return partial(_forward_in_parts, model, kv, inputs)
    if isinstance(model, DecoderModel) and model.device.type == "cpu" and not config.enforce_eager:
        return CpuGraphs(model, kv, inputs, config.most_seqs).forward
    return partial(_forward_eagerly, model, kv, inputs)


def _forward_in_parts(model: PipelineStage, kv: KvPool, inputs: InputBuilder, step: HostInputs) -> Tensor:
    """Compute a step in two batches, so that a stage computes the second one while the next stage has the first."""
    middle = step.num_rows // 2
    parts = [step] if not middle else [step.some_rows(0, middle), step.some_rows(middle, step.num_rows)]
    return torch.cat([model.forward(inputs.to_tensors(part), kv) for part in parts])


def _forward_eagerly(model: Model, kv: KvPool, inputs: InputBuilder, step: HostInputs) -> Tensor:
    return model.forward(inputs.to_tensors(step), kv)
