"""Forward passes on a CPU, recorded once and replayed.

A step takes its time to a part in Python, tensor by tensor and call by call, always the same ones. Steps differ in
nothing but how many tokens and rows they have and what their inputs hold, so the inputs are copied to where the
recorded calls read them, the calls are told the two numbers, and are made again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ...kernels.layouts.staging import to_device
from ...kernels.ops import Buffers, RecordedPass, record
from ...lora.lora_step import LoraStep
from ...lora.segments import StaticSegments
from ..models.decoder import DecoderModel
from ..models.forward_inputs import ForwardInputs, HostInputs, InputBuilder
from ..models.kv_pool import KvPool
from .static_inputs import StaticInputs

# Tokens of a step that is recorded: in a larger one Python's share is lost among the products.
_MOST_TOKENS: Final = 512
_MOST_TAPES: Final = 64  # the least recently used is forgotten

# The projections that adapters change in a step: only their calls are made.
_Projections = frozenset[str]


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recorded pass, in two parts: between them the last layer's KV is there, and tokens that are not kept drop out.

    Attributes:
        inputs: that it reads, of the step that was recorded.
        queries: [most tokens, Hq, D], what the first part leaves to the second.
        extend: the first part, of all tokens.
        hidden: [most tokens, H], where the result is.
        finish: the second part, of the tokens that are kept.
    """

    inputs: ForwardInputs
    queries: Tensor
    extend: RecordedPass
    hidden: Tensor
    finish: RecordedPass


class CpuGraphs:
    """The forward pass of a model, recorded for each set of projections that adapters change.

    Args:
        model: its layers.
        kv: the pool that steps read and write.
        inputs: what makes the arrays of steps.
        max_num_seqs: the most rows of a step.
    """

    def __init__(self, model: DecoderModel, kv: KvPool, inputs: InputBuilder, max_num_seqs: int) -> None:
        self._model = model
        self._kv = kv
        self._inputs = inputs
        self._room = StaticInputs(_MOST_TOKENS, max_num_seqs, inputs.table_width, model.device)
        self._residual = torch.empty((_MOST_TOKENS, model.config.hidden_size), device=model.device)
        self._kept_start = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=model.device)
        self._kept_segments = StaticSegments(_MOST_TOKENS, model.device)
        self._buffers = Buffers(_MOST_TOKENS)
        self._known: OrderedDict[_Projections, _Recording | None] = OrderedDict()

    @property
    def recorded(self) -> list[_Projections]:
        """What is replayed: the projections that adapters change."""
        return [projections for projections, known in self._known.items() if known]

    def forward(self, step: HostInputs) -> Tensor:
        """``DecoderModel.forward``. The result is overwritten by the next step."""
        if step.num_tokens > _MOST_TOKENS:
            return self._run(step)
        bank = self._inputs.bank
        projections = _Projections() if step.slots is None or bank is None else bank.projections(step.slots)
        if projections not in self._known:
            return self._record(projections, step) if step.num_kept else self._run(step)
        self._known.move_to_end(projections)
        known = self._known[projections]
        return self._replay(known, step) if known else self._run(step)

    def _run(self, step: HostInputs) -> Tensor:
        return self._model.forward(self._inputs.place(step), self._kv)

    def _record(self, projections: _Projections, step: HostInputs) -> Tensor:
        num_tokens, num_kept = step.num_tokens, step.num_kept
        lora = self._recorded_lora(projections, self._room.segments)
        inputs = self._room.inputs(num_tokens, step.num_rows, step.max_query, self._inputs.max_context, lora=lora)
        of_kept = replace(
            inputs,
            query_start=self._kept_start[: step.num_rows + 1],
            lora=self._recorded_lora(projections, self._kept_segments),
        )
        self._fill(step)
        residual = self._embedded(inputs)
        queries, extend = record(lambda: self._model.extend(residual, inputs, self._kv), self._buffers)
        self._keep(queries, step)
        q, residual = queries[:num_kept], residual[:num_kept]
        hidden, finish = record(lambda: self._model.finish(q, residual, of_kept, self._kv), self._buffers)
        if len(self._known) == _MOST_TAPES:
            self._known.popitem(last=False)
        if extend is None or finish is None:
            self._known[projections] = None
            return hidden
        for result in queries, hidden:
            result.resize_(_MOST_TOKENS, *result.shape[1:])
        self._known[projections] = _Recording(inputs, queries, extend, hidden, finish)
        return hidden[:num_kept]

    def _recorded_lora(self, projections: _Projections, room: StaticSegments) -> LoraStep | None:
        """The adapters' part over all segments that there may be: those that a step lacks are empty."""
        bank = self._inputs.bank
        return bank.recorded_step(projections, room.segments(_MOST_TOKENS)) if bank and projections else None

    def _replay(self, recording: _Recording, step: HostInputs) -> Tensor:
        self._fill(step)
        self._embedded(replace(recording.inputs, token_ids=self._room.token_ids(step.num_tokens)))
        recording.extend.replay(step.num_tokens, step.num_rows)
        self._keep(recording.queries, step)
        if step.num_kept:
            recording.finish.replay(step.num_kept, step.num_rows)
        return recording.hidden[: step.num_kept]

    def _fill(self, step: HostInputs) -> None:
        """Put a step where the recorded passes read it."""
        self._room.fill(step)
        kept = step if step.kept is None else step.kept
        self._kept_start[: step.num_rows + 1] = to_device(kept.query_start, self._kept_start.device)
        if kept.slots is not None:
            self._kept_segments.fill(kept.slots)

    def _keep(self, queries: Tensor, step: HostInputs) -> None:
        """Move what belongs to the kept tokens to the front of the queries and of the residual stream."""
        if step.kept is None:
            return
        tokens = to_device(step.kept.tokens, queries.device)
        for rows in queries, self._residual:
            rows[: len(tokens)] = rows[tokens]

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        """The residual stream in front of the first layer, where the recorded passes change it."""
        residual = self._residual[: len(inputs.token_ids)]
        return residual.copy_(self._model.embed(inputs))
