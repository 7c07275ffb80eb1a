"""Forward passes of small steps, recorded once for each shape and replayed.

A step of few tokens takes its time to a good part in Python, tensor by tensor and call by call, always the same ones.
Steps of one shape differ in nothing but what their inputs hold, so the inputs are copied to where the recorded calls
read them, and the calls are made again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.inputs import ForwardInputs
from engine.kv_pool import KvPool
from engine.models.decoder import DecoderModel
from kernels.ops import Tape, record

_MOST_TOKENS = 64  # of a step that is recorded: in a larger one Python's share is lost among the products
_MOST_SHAPES = 128  # that are remembered, the least recently used forgotten: some megabytes each
SIGHTINGS = 3  # steps of a shape before it is recorded, which takes as long as some steps

# Tokens, rows, and the projections that adapters change.
_Shape = tuple[int, int, frozenset[str] | None]


@dataclass(slots=True)
class _Recording:
    """A shape's recorded pass, and the memory that it reads and writes."""

    inputs: ForwardInputs
    residual: Tensor
    hidden: Tensor
    tape: Tape


@dataclass(slots=True)
class _Sightings:
    """How often a shape that is not recorded was seen; -1: it cannot be recorded."""

    count: int = 0


class StepGraphs:
    """The forward pass of a model: replayed where its shape is known.

    Args:
        model: its layers.
        kv: the pool that steps read and write.
        table_width: pages of the longest sequence.
    """

    def __init__(self, model: DecoderModel, kv: KvPool, table_width: int) -> None:
        self._model = model
        self._kv = kv
        self._table_width = table_width
        self._shapes: OrderedDict[_Shape, _Recording | _Sightings] = OrderedDict()

    @property
    def recorded(self) -> list[_Shape]:
        """The shapes that are replayed: tokens, rows, projections that adapters change."""
        return [shape for shape, known in self._shapes.items() if isinstance(known, _Recording)]

    @torch.inference_mode()
    def forward(self, inputs: ForwardInputs) -> Tensor:
        """``DecoderModel.forward``. The result is overwritten by the next step of the same shape."""
        num_tokens, num_rows = len(inputs.token_ids), len(inputs.context_len)
        if num_tokens > _MOST_TOKENS:
            return self._model.forward(inputs, self._kv)
        shape = (num_tokens, num_rows, None if inputs.lora is None else inputs.lora.projections)
        known = self._known(shape)
        if isinstance(known, _Recording):
            return self._replay(known, inputs)
        if known.count < 0:
            return self._model.forward(inputs, self._kv)
        known.count += 1
        return self._record(shape, inputs) if known.count == SIGHTINGS else self._model.forward(inputs, self._kv)

    def _known(self, shape: _Shape) -> _Recording | _Sightings:
        known = self._shapes.setdefault(shape, _Sightings())
        self._shapes.move_to_end(shape)
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.popitem(last=False)
        return known

    def _record(self, shape: _Shape, inputs: ForwardInputs) -> Tensor:
        fixed = _fixed(inputs, self._table_width)
        residual = self._model.embed(inputs)
        hidden, tape = record(lambda: self._model.run_layers(residual, fixed, self._kv))
        self._shapes[shape] = _Sightings(-1) if tape is None else _Recording(fixed, residual, hidden, tape)
        return hidden

    def _replay(self, recording: _Recording, inputs: ForwardInputs) -> Tensor:
        _refill(recording.inputs, inputs)
        recording.residual.copy_(self._model.embed(inputs))
        recording.tape.replay()
        return recording.hidden


def _fixed(inputs: ForwardInputs, table_width: int) -> ForwardInputs:
    """A copy with memory of its own, and with room for the longest sequence in the page table."""
    rows = len(inputs.context_len)
    page_table = inputs.page_table.new_zeros((rows, table_width))
    page_table[:, : inputs.page_table.shape[1]] = inputs.page_table
    return replace(
        inputs,
        positions=inputs.positions.clone(),
        kv_loc=inputs.kv_loc.clone(),
        page_table=page_table,
        query_start=inputs.query_start.clone(),
        context_len=inputs.context_len.clone(),
        lora=None if inputs.lora is None else inputs.lora.fixed(len(inputs.token_ids)),
    )


def _refill(fixed: ForwardInputs, inputs: ForwardInputs) -> None:
    """Copy a step's inputs to where the recorded calls read them."""
    fixed.positions.copy_(inputs.positions)
    fixed.kv_loc.copy_(inputs.kv_loc)
    fixed.page_table[:, : inputs.page_table.shape[1]] = inputs.page_table
    fixed.query_start.copy_(inputs.query_start)
    fixed.context_len.copy_(inputs.context_len)
    if fixed.lora is not None and inputs.lora is not None:
        fixed.lora.refill(inputs.lora)
