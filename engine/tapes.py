"""Forward passes of small steps on a CPU, recorded once for each shape and replayed.

A step of few tokens takes its time to a good part in Python, tensor by tensor and call by call, always the same ones.
Steps of one shape differ in nothing but what their inputs hold, so the inputs are copied to where the recorded calls
read them, and the calls are made again.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.inputs import ForwardInputs, HostInputs, InputBuilder
from engine.kv_pool import KvPool
from engine.models.decoder import DecoderModel
from engine.rooms import InputRoom
from kernels.ops import Tape, record

_MOST_TOKENS = 64  # of a step that is recorded: in a larger one Python's share is lost among the products
_MOST_SHAPES = 128  # that are remembered, the least recently used forgotten: some megabytes each
SIGHTINGS = 3  # steps of a shape before it is recorded, which takes as long as some steps

# Tokens, rows, and the projections that adapters change.
_Shape = tuple[int, int, frozenset[str]]


@dataclass(slots=True)
class _Recording:
    """A shape's recorded pass, and the memory that it reads and writes."""

    room: InputRoom
    inputs: ForwardInputs
    residual: Tensor
    hidden: Tensor
    tape: Tape


@dataclass(slots=True)
class _Sightings:
    """How often a shape that is not recorded was seen; -1: it cannot be recorded."""

    count: int = 0


class StepTapes:
    """The forward pass of a model: replayed where its shape is known.

    Args:
        model: its layers.
        kv: the pool that steps read and write.
        inputs: what makes the arrays of steps.
    """

    def __init__(self, model: DecoderModel, kv: KvPool, inputs: InputBuilder) -> None:
        self._model = model
        self._kv = kv
        self._inputs = inputs
        self._shapes: OrderedDict[_Shape, _Recording | _Sightings] = OrderedDict()

    @property
    def recorded(self) -> list[_Shape]:
        """The shapes that are replayed: tokens, rows, projections that adapters change."""
        return [shape for shape, known in self._shapes.items() if isinstance(known, _Recording)]

    @torch.inference_mode()
    def forward(self, step: HostInputs) -> Tensor:
        """``DecoderModel.forward``. The result is overwritten by the next step of the same shape."""
        if step.num_tokens > _MOST_TOKENS:
            return self._run(step)
        bank = self._inputs.bank
        projections = frozenset[str]() if step.slots is None or bank is None else bank.projections(step.slots)
        shape = (step.num_tokens, step.num_rows, projections)
        known = self._known(shape)
        if isinstance(known, _Recording):
            return self._replay(known, step)
        if known.count < 0:
            return self._run(step)
        known.count += 1
        return self._record(shape, step) if known.count == SIGHTINGS else self._run(step)

    def _run(self, step: HostInputs) -> Tensor:
        return self._model.forward(self._inputs.place(step), self._kv)

    def _known(self, shape: _Shape) -> _Recording | _Sightings:
        known = self._shapes.setdefault(shape, _Sightings())
        self._shapes.move_to_end(shape)
        if len(self._shapes) > _MOST_SHAPES:
            self._shapes.popitem(last=False)
        return known

    def _record(self, shape: _Shape, step: HostInputs) -> Tensor:
        num_tokens, num_rows, projections = shape
        bank = self._inputs.bank
        room = InputRoom(num_tokens, num_rows, self._inputs.table_width, self._model.device)
        lora = bank.recorded_step(projections, room.segments.segments(num_tokens)) if bank and projections else None
        fixed = room.inputs(num_tokens, num_rows, step.max_query, self._inputs.max_context, lora=lora)
        room.fill(step)
        residual = self._model.embed(fixed)
        hidden, tape = record(lambda: self._model.run_layers(residual, fixed, self._kv))
        self._shapes[shape] = _Sightings(-1) if tape is None else _Recording(room, fixed, residual, hidden, tape)
        return hidden

    def _replay(self, recording: _Recording, step: HostInputs) -> Tensor:
        recording.room.fill(step)
        recording.residual.copy_(self._model.embed(recording.inputs))
        recording.tape.replay()
        return recording.hidden
