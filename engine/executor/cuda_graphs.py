"""CUDA graphs of the forward pass of small steps, captured at the start: one launch in place of hundreds.

A graph has a fixed size. A step replays the smallest graph that is large enough for it. The remaining space is padding:
rows without tokens, and tokens whose K and V are written to no cell of the KV pool, for which the kernels do nothing.
All graphs share the input and result buffers. There are these kinds of graphs:

    decode    every row has one token, as many rows as tokens
    mixed     rows have any number of tokens: drafts, and chunks of prompts
    shared    like decode or mixed, with launches for prefixes that rows read together
    adapted   like decode or mixed, with launches for adapters in every projection but those of experts and heads, and
              for an adapter's own embedding in place of the model's
    all       like adapted, with launches for adapters of experts and heads too; only for a model that has these

Steps with an adapter that has its own norms run without a graph. So do all steps of a model in which an op makes the
host wait for the device, as plain torch does in a few ops for which a model's sizes fit no kernel.
"""

from __future__ import annotations

import functools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from ...kernels.layouts.staging import to_device
from ...kernels.ops import shares_prefixes
from ...kernels.pass_graphs import Capture, capture_for, host_wait
from ...lora.own.own_weights import OwnStep
from ...lora.own.static_own_rows import StaticOwnRows
from ..config import EngineConfig
from ..error_stream import write_line
from ..models.decoder import DecoderModel
from ..models.draft_head import DraftHead
from ..models.kv_pool import KvPool
from ..models.model import Model
from .input_builder import HostInputs, InputBuilder
from .static_inputs import StaticInputs

# Largest step that is captured, in tokens. In a larger one kernels take longer than launches, so a graph gains nothing.
MOST_TOKENS = 2048
# Sizes of captured steps: from each key on, the next size is larger by the value, in tokens.
_STEPS = {16: 8, 64: 16, 256: 64, 1024: 128}


class Variant(NamedTuple):
    """The steps that a graph serves.

    Attributes:
        num_tokens: largest number of tokens that the graph holds.
        is_mixed: whether rows may have any number of tokens.
        shares: whether rows may share prefixes.
        is_adapted: whether tokens may have adapters.
        adapts_products: whether adapters may change experts and heads.
    """

    num_tokens: int
    is_mixed: bool
    shares: bool
    is_adapted: bool
    adapts_products: bool = False


def sizes_up_to(most: int) -> list[int]:
    """Return the sizes of graphs in tokens, ascending; the last one is the first that is at least ``most``.

    The distance between sizes grows with the size, so that padding is a small part of any large step, and takes little
    time in a small one.
    """
    sizes = [1]
    while sizes[-1] < most:
        last = sizes[-1]
        step = max((step for begin, step in _STEPS.items() if last >= begin), default=last)
        sizes.append(last + step)
    return sizes


def padded_tokens(max_tokens: int) -> int:
    """Return the tokens of the largest pass of steps of up to ``max_tokens``; a captured one may have more."""
    return max(max_tokens, sizes_up_to(min(max_tokens, MOST_TOKENS))[-1])


class CudaGraphs:
    """The forward pass of a model, replayed from a CUDA graph if one holds the step, else eager.

    Args:
        capture: runs a pass and returns its replay.
        max_rows: largest number of rows of a step.
        max_tokens: largest number of tokens of a step, chunks of prompts included.
        max_rank: largest rank of an adapter.

    Attributes:
        capturer: captures further passes, which share the memory pool of these graphs.
    """

    def __init__(
        self,
        model: DecoderModel | DraftHead,
        kv: KvPool,
        inputs: InputBuilder,
        capture: Capture,
        *,
        max_rows: int,
        max_tokens: int,
        max_rank: int,
    ) -> None:
        self._model, self._kv, self._inputs = model, kv, inputs
        self.capturer = capture
        self._sizes = sizes_up_to(min(max_tokens, MOST_TOKENS))
        self._max_rows = self._sizes[bisect_left(self._sizes, min(max_rows, self._sizes[-1]))]
        self._adapted = inputs.bank.reserve(max_rank) if inputs.bank else frozenset[str]()
        self._products = inputs.bank.products if inputs.bank else frozenset[str]()
        has_states = model.config.has_states
        self._static = StaticInputs(
            self._sizes[-1],
            self._max_rows,
            inputs.table_width,
            model.device,
            has_states=has_states,
            num_slots=inputs.bank.num_slots if inputs.bank else 0,
        )
        shape = (self._sizes[-1], model.config.hidden_size)
        self._hidden = torch.zeros(shape, dtype=model.dtype, device=model.device)
        # A draft head reads the model's embedding, whatever an adapter brings.
        has_own = inputs.bank is not None and isinstance(model, DecoderModel)
        self._own_rows = StaticOwnRows(*shape, model.dtype, model.device) if has_own else None
        self._replays: dict[Variant, Callable[[], None]] = {}

    @property
    def variants(self) -> list[Variant]:
        """All variants, the largest first: the others then fit into the memory that its graph took."""
        return [
            Variant(size, is_mixed, shares, is_adapted, adapts_products)
            for size in reversed(self._sizes)
            for is_mixed in (True, False)
            for shares in (True, False)
            for is_adapted, adapts_products in ((True, True), (True, False), (False, False))
            if (size > 1 if is_mixed else size <= self._max_rows)
            and (shares_prefixes(self._num_rows(size), self._model.device) or not shares)
            and (self._inputs.bank or not is_adapted)
            and (self._products or not adapts_products)
        ]

    @torch.inference_mode()
    def host_wait(self) -> str | None:
        """Return the name of an op for which the host waits, so that a pass cannot be captured; None if absent."""
        smallest = {variant[1:]: variant for variant in self.variants}.values()
        found = next(filter(None, (host_wait(self._pass(variant)) for variant in smallest)), None)
        if self._kv.hidden is not None:
            self._kv.hidden.take_seen()  # Discard what an interrupted pass recorded.
        return found

    @torch.inference_mode()
    def capture(self, variants: Sequence[Variant]) -> None:
        """Run and capture a pass for each of these variants."""
        for variant in variants:
            self._replays[variant] = self.capturer(self._pass(variant))

    @torch.inference_mode()
    def forward(self, step: HostInputs) -> Tensor:
        """Return the hidden states of the kept tokens, [S, H], valid until the next step."""
        own = self._inputs.own_step(step.slots)
        is_captured = self._holds(step) and (own is None or self._holds_own(own))
        replay = self._replays.get(self._variant(step)) if is_captured else None
        if replay is None:
            return self._model.forward(self._inputs.to_tensors(step), self._kv)
        self._static.fill(step)
        if self._own_rows is not None and step.slots is not None:
            self._own_rows.fill(own, self._static.token_ids(step.num_tokens))
        replay()
        # A graph computes the hidden states of all tokens, and this step wants some of them.
        if step.kept is not None:
            return self._hidden[to_device(step.kept.tokens, self._hidden.device)]
        return self._hidden[: step.num_tokens]

    def _holds_own(self, own: OwnStep) -> bool:
        """Return whether graphs have room for what adapters bring of their own."""
        return not own.changes_hidden or (self._own_rows is not None and not own.has_norms)

    def _holds(self, step: HostInputs) -> bool:
        return (
            step.num_tokens <= self._sizes[-1]
            and step.num_rows <= self._max_rows
            and (step.shared is None or self._static.shared.holds(step.shared))
        )

    def _variant(self, step: HostInputs) -> Variant:
        size = self._sizes[bisect_left(self._sizes, step.num_tokens)]
        bank, slots = self._inputs.bank, step.slots
        adapts_products = bank is not None and slots is not None and bank.adapts_products(slots)
        return Variant(size, step.max_query > 1, step.shared is not None, slots is not None, adapts_products)

    def _num_rows(self, num_tokens: int) -> int:
        return min(num_tokens, self._max_rows)

    def _pass(self, variant: Variant) -> Callable[[], None]:
        """Return a pass over the static inputs.

        Capturing fixes the number of parts into which attention splits a context, so the number is that for the longest
        context. In a shorter context some parts are empty; their Triton programs end at once.
        """
        size = variant.num_tokens
        lora = None
        if variant.is_adapted and self._inputs.bank:
            names = self._adapted if variant.adapts_products else self._adapted - self._products
            lora = self._inputs.bank.recorded_step(names, self._static.segments.segments(size))
        inputs = self._static.inputs(
            size,
            self._num_rows(size),
            max_query=size if variant.is_mixed else 1,
            max_context=self._inputs.max_context,
            shares=variant.shares,
            lora=lora,
        )
        # Tokens that pad the step would have the weights of their experts read.
        inputs = replace(inputs, num_tokens=inputs.query_start[-1:], own_rows=self._own_rows if lora else None)
        result = self._hidden[:size]

        def run() -> None:
            result.copy_(self._model.forward(inputs, self._kv))

        return run


def graphs_for(config: EngineConfig, model: Model, kv: KvPool, inputs: InputBuilder) -> CudaGraphs | None:
    """Return graphs, none captured yet; None if model or kernels cannot be captured or ``enforce_eager`` is set."""
    latent = model.config.latent
    value_dim = None if latent is None else latent.kv_rank
    capture = None if config.enforce_eager else capture_for(kv.attended, model.dtype, value_dim)
    if capture is None or not isinstance(model, DecoderModel | DraftHead):
        return None
    graphs = CudaGraphs(
        model,
        kv,
        inputs,
        capture,
        max_rows=config.most_seqs,
        max_tokens=config.most_tokens,
        max_rank=config.max_lora_rank,
    )
    if model.device.type != "cpu" and (op := graphs.host_wait()) is not None:
        _say_once(f"CUDA graphs are off: no kernel of this GPU supports the model's sizes in one op ({op})")
        return None
    return graphs


# The memory of steps is measured with graphs of their own.
_say_once = functools.cache(write_line)
