"""GPU memory of activations and CUDA graphs, measured at the start, so that the KV pool gets the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from ...lora.lora_step import AdapterBank
from ...lora.prepare_factors import NORM_BYTES
from ...lora.segments import make_segments
from ..batch import Batch, Row, RowStart
from ..config import EngineConfig
from ..models.decoder import DecoderModel
from ..models.hidden_pool import HiddenPool
from ..models.kv_pool import KvPool
from ..models.model import Model
from ..models.state_pool import StatePool
from ..sampling.sampler import DeviceMasks, Sampler
from ..types import MAX_LOGPROBS, SamplingParams
from .cuda_graphs import graphs_for
from .draw_graphs import draws_for
from .input_builder import InputBuilder
from .model_runner import ModelRunner

_MIB = 2**20
_T = TypeVar("_T")


class StepMemory(NamedTuple):
    """Bytes that steps need in addition to weights and KV.

    Attributes:
        activations: bytes of the activations of the largest step.
        graphs: bytes of all CUDA graphs.
    """

    activations: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.activations + self.graphs

    def beside(self, other: StepMemory) -> StepMemory:
        """Return what both need, one step of each after the other: a cache keeps what the other does not use."""
        return StepMemory(self.activations + other.activations, self.graphs + other.graphs)

    def __str__(self) -> str:
        return f"{self.activations / _MIB:,.0f} MiB for activations, {self.graphs / _MIB:,.0f} MiB for captured steps"


def single_row(num_tokens: int, pages: range | tuple[int, ...]) -> Batch:
    """Return a batch of one row of token 0, drawn greedily."""
    tokens = [0] * num_tokens
    start = RowStart(0, SamplingParams(temperature=0.0), tokens, num_tokens, (), 0)
    row = Row(0, 0, tokens, 0, tuple(pages), draws=True, num_generated=0)
    return Batch((row,), (start,))


def measure_steps(
    model: Model,
    config: EngineConfig,
    bank: AdapterBank | None,
    *,
    hidden: Callable[[int, int], HiddenPool | None] | None = None,
    head: Model | None = None,
    vocab_size: int | None = None,
) -> StepMemory | None:
    """Measure the memory of the largest steps on a GPU and of CUDA graphs, with a small pool that is freed afterwards.

    The step with the most tokens is run op by op, with adapters if adapters are enabled. Then the draw with the most
    lines is run, for rows with all options that take memory. Memory is added for computing the norms of an adapter with
    DoRA, which may happen at the same time.

    Args:
        hidden: makes the pool of hidden states that a draft head reads, given the number of pages and the tokens of a
            page.
        head: model that computes the logits; None for ``model``.
        vocab_size: width of the logits; None for the model's.

    Returns:
        The memory; None if an option sets the size of the KV pool, which then does not depend on it.
    """
    if config.kv_cache_memory is not None or config.num_gpu_blocks_override is not None:
        return None
    memory = _measure(model, config, bank, hidden, head or model, vocab_size or model.config.vocab_size)
    # Return the memory that was freed with that frame to the device.
    torch.cuda.empty_cache()
    return memory


def _measure(
    model: Model,
    config: EngineConfig,
    bank: AdapterBank | None,
    hidden: Callable[[int, int], HiddenPool | None] | None,
    head: Model,
    vocab_size: int,
) -> StepMemory:
    num_tokens = min(config.most_tokens, model.max_positions)
    pages = range(-(-num_tokens // config.block_size))
    has_states = model.config.has_states
    states = None
    if isinstance(model, DecoderModel) and has_states:
        states = StatePool(model.config, config.most_seqs + 1, model.dtype, model.device)
    seen = None if hidden is None else hidden(len(pages), config.block_size)
    kv = KvPool(model.config, len(pages), config.block_size, model.dtype, model.device, states, seen)
    inputs = InputBuilder(
        config.most_seqs,
        model.max_positions,
        config.block_size,
        model.device,
        bank,
        has_states=has_states,
        keeps_all=seen is not None and seen.holds_last,
    )
    sampler = Sampler(config.most_seqs, vocab_size, model.device)
    runner = ModelRunner(head, lambda step: model.forward(inputs.to_tensors(step), kv), kv, inputs, sampler)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_reserved(model.device)
    batch = single_row(num_tokens, pages)
    runner.run(batch)
    if bank is not None and isinstance(model, DecoderModel):
        _run_adapted(config, model, kv, inputs, bank, batch)
    _draw_worst(config, sampler, vocab_size, model.device)
    activations = torch.cuda.max_memory_reserved(model.device) - before + (NORM_BYTES if bank is not None else 0)
    return StepMemory(activations, _measure_graphs(config, model, head, kv, inputs, sampler))


@torch.inference_mode()
def _run_adapted(
    config: EngineConfig, model: DecoderModel, kv: KvPool, inputs: InputBuilder, bank: AdapterBank, batch: Batch
) -> None:
    """Run the step with adapters of the largest rank in every product: slots are empty, but what they need is taken."""
    step = inputs.to_tensors(inputs.build(batch))
    segments = make_segments(np.zeros(batch.num_tokens, np.int32), model.device)
    assert segments is not None
    lora = bank.widest_step(config.max_lora_rank, segments)
    model.forward(replace(step, lora=lora), kv)


@torch.inference_mode()
def _draw_worst(config: EngineConfig, sampler: Sampler, vocab_size: int, device: torch.device) -> None:
    """Draw the most lines of a step from rows with masks, penalties, logprobs and filters."""
    num_rows, drafts = config.most_seqs, config.max_drafts
    shares = [drafts // num_rows + (row < drafts % num_rows) for row in range(num_rows)]
    num_top = min(MAX_LOGPROBS, vocab_size)
    params = SamplingParams(
        temperature=1.0, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.1, logprobs=num_top, top_n_sigma=3.0
    )
    race = SamplingParams(temperature=1.0, min_p=0.1, logprobs=num_top)
    sampler.start([RowStart(row, params if row % 2 else race, [0], 1, (), row) for row in range(num_rows)])
    rows = [
        Row(row, 0, [0] * (share + 1), 0, (), draws=True, num_generated=0, num_drafts=share)
        for row, share in enumerate(shares)
    ]
    count = num_rows + sum(shares)
    words = torch.full((count, -(-vocab_size // 32)), -1, dtype=torch.int32, device=device)
    masks = DeviceMasks(torch.arange(count, device=device), words)
    sampler.sample(torch.zeros(count, vocab_size, device=device), rows, masks)


def _measure_graphs(
    config: EngineConfig, model: Model, head: Model, kv: KvPool, inputs: InputBuilder, sampler: Sampler
) -> int:
    """Return the bytes of all graphs of steps and of draws, from the first two of each.

    The first graph is the largest one and allocates the memory that all graphs share. Each further graph takes as much
    memory as the second one.
    """
    graphs = graphs_for(config, model, kv, inputs)
    if graphs is None:
        return 0
    taken = _measure_captures(model, graphs.variants, graphs.capture)
    draws = draws_for(config, head, sampler, graphs.capturer)
    return taken if draws is None else taken + _measure_captures(model, draws.variants, draws.capture)


def _measure_captures(model: Model, variants: Sequence[_T], capture: Callable[[Sequence[_T]], None]) -> int:
    """Return the bytes of the graphs of all these variants, from the first two."""
    free = [_free(model.device)]
    for variant in variants[:2]:
        capture([variant])
        free.append(_free(model.device))
    first, *second = (before - after for before, after in pairwise(free))
    return first + max(0, *second, 0) * (len(variants) - 1)


def _free(device: torch.device) -> int:
    """Return the free bytes after emptying torch's cache."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return int(free)
