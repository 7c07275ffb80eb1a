"""CPU graphs: forward passes recorded once as lists of kernel calls and replayed without Python.

In eager mode Python takes a large part of the time of a small step, although all steps make the same kernel calls.
Steps differ only in their inputs and in their numbers of tokens and rows. So a replay copies the inputs to the buffers
that the recorded calls read, sets the two numbers in the calls, and makes the calls again. Steps with an adapter that
has its own norms run eagerly.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from ...kernels.layouts.staging import to_device
from ...kernels.pass_graphs import Buffers, RecordedPass, record
from ...lora.lora_step import LoraStep
from ...lora.own.own_weights import OwnStep
from ...lora.segments import StaticSegments
from ..models.decoder import DecoderModel
from ..models.forward_inputs import ForwardInputs
from ..models.kv_pool import KvPool
from .input_builder import HostInputs, InputBuilder
from .static_inputs import StaticInputs

_MOST_TOKENS: Final = 640  # tokens of a recorded step: of a larger one Python takes a negligible part
_MOST_GRAPHS: Final = 64  # graphs that are kept; the least recently used one is dropped

# The projections that adapters change in a step. A recording holds adapter calls for these alone.
_Projections = frozenset[str]


@dataclass(frozen=True, slots=True)
class _Recording:
    """A recorded pass in two parts, ``extend`` and ``finish``.

    ``extend`` computes all tokens up to the KV of the last layer. ``finish`` computes the rest of the last layer, for
    the tokens whose hidden states are needed (``KeptTokens``).

    Attributes:
        inputs: inputs of the step that was recorded.
        queries: [most tokens, Hq, D], result of ``extend``.
        seen: [most tokens, H] each, further results of ``extend``: the layer inputs that a draft head reads. Empty
            without a draft head.
        hidden: [most tokens, H], result of ``finish``.
    """

    inputs: ForwardInputs
    queries: Tensor
    seen: tuple[Tensor, ...]
    extend: RecordedPass
    hidden: Tensor
    finish: RecordedPass


class CpuGraphs:
    """The forward pass of a model, recorded for each set of projections that adapters change, else eager."""

    def __init__(self, model: DecoderModel, kv: KvPool, inputs: InputBuilder, max_num_seqs: int) -> None:
        self._model = model
        self._kv = kv
        self._inputs = inputs
        self._static = StaticInputs(
            _MOST_TOKENS, max_num_seqs, inputs.table_width, model.device, has_states=model.config.has_states
        )
        self._residual = torch.empty((_MOST_TOKENS, model.config.hidden_size), device=model.device)
        made = model.layer_inputs
        self._layer_inputs = (
            None if made is None else torch.empty((_MOST_TOKENS, made.width), dtype=model.dtype, device=model.device)
        )
        self._kept_start = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=model.device)
        self._kept_segments = StaticSegments(_MOST_TOKENS, model.device)
        self._buffers = Buffers(_MOST_TOKENS)
        self._recordings: OrderedDict[_Projections, _Recording | None] = OrderedDict()

    @property
    def recorded(self) -> list[_Projections]:
        """Keys of the recorded passes: the projections that adapters change."""
        return [projections for projections, recording in self._recordings.items() if recording]

    def forward(self, step: HostInputs) -> Tensor:
        """Return the hidden states of the kept tokens, [S, H], valid until the next step."""
        if step.num_tokens > _MOST_TOKENS:
            return self._run_eagerly(step)
        bank, own = self._inputs.bank, self._inputs.own_step(step.slots)
        if own is not None and own.has_norms:
            return self._run_eagerly(step)
        projections = _Projections() if step.slots is None or bank is None else bank.projections(step.slots)
        if projections not in self._recordings:
            return self._record(projections, step, own) if step.num_kept else self._run_eagerly(step)
        self._recordings.move_to_end(projections)
        recording = self._recordings[projections]
        return self._replay(recording, step, own) if recording else self._run_eagerly(step)

    def _run_eagerly(self, step: HostInputs) -> Tensor:
        return self._model.forward(self._inputs.to_tensors(step), self._kv)

    def _record(self, projections: _Projections, step: HostInputs, own: OwnStep | None) -> Tensor:
        num_tokens, num_kept = step.num_tokens, step.num_kept
        lora = self._recorded_lora(projections, self._static.segments)
        inputs = self._static.inputs(num_tokens, step.num_rows, step.max_query, self._inputs.max_context, lora=lora)
        inputs = replace(inputs, layer_inputs=self._of_layers(num_tokens))
        of_kept = replace(
            inputs,
            layer_inputs=self._of_layers(num_kept),
            query_start=self._kept_start[: step.num_rows + 1],
            lora=self._recorded_lora(projections, self._kept_segments),
        )
        self._fill(step)
        residual = self._embedded(replace(inputs, own=own))
        queries, extend = record(lambda: self._model.extend(residual, inputs, self._kv), self._buffers)
        seen = () if self._kv.hidden is None else self._kv.hidden.take_seen()
        self._write_seen(seen, step)
        self._move_kept(queries, step)
        q, residual = queries[:num_kept], residual[:num_kept]
        hidden, finish = record(lambda: self._model.finish(q, residual, of_kept, self._kv), self._buffers)
        self._write_last(hidden, step)
        if len(self._recordings) == _MOST_GRAPHS:
            self._recordings.popitem(last=False)
        if extend is None or finish is None:
            self._recordings[projections] = None
            return hidden
        for result in queries, *seen, hidden:
            result.resize_(_MOST_TOKENS, *result.shape[1:])
        self._recordings[projections] = _Recording(inputs, queries, seen, extend, hidden, finish)
        return hidden[:num_kept]

    def _recorded_lora(self, projections: _Projections, segments: StaticSegments) -> LoraStep | None:
        """Return the adapters' part over all possible segments; a step leaves the ones it lacks empty."""
        bank = self._inputs.bank
        return bank.recorded_step(projections, segments.segments(_MOST_TOKENS)) if bank and projections else None

    def _replay(self, recording: _Recording, step: HostInputs, own: OwnStep | None) -> Tensor:
        self._fill(step)
        token_ids, positions = self._static.token_ids(step.num_tokens), self._static.positions(step.num_tokens)
        self._embedded(replace(recording.inputs, token_ids=token_ids, positions=positions, own=own))
        recording.extend.replay(step.num_tokens, step.num_rows)
        self._write_seen(recording.seen, step)
        self._move_kept(recording.queries, step)
        if step.num_kept:
            recording.finish.replay(step.num_kept, step.num_rows)
        hidden = recording.hidden[: step.num_kept]
        self._write_last(hidden, step)
        return hidden

    def _write_seen(self, seen: tuple[Tensor, ...], step: HostInputs) -> None:
        """Leave inputs of layers to a draft head."""
        if self._kv.hidden is not None:
            kv_loc = to_device(step.kv_loc, self._residual.device)
            self._kv.hidden.write_seen([each[: step.num_tokens] for each in seen], kv_loc)

    def _write_last(self, hidden: Tensor, step: HostInputs) -> None:
        """Write the last hidden states to a draft head's pool; for a head that reads them, all tokens are kept."""
        if self._kv.hidden is not None and step.kept is None:
            kv_loc = to_device(step.kv_loc, hidden.device)
            self._kv.hidden.write_last(hidden, self._residual[: step.num_tokens], kv_loc)

    def _fill(self, step: HostInputs) -> None:
        """Copy a step to the static inputs."""
        self._static.fill(step)
        kept = step if step.kept is None else step.kept
        self._kept_start[: step.num_rows + 1] = to_device(kept.query_start, self._kept_start.device)
        if kept.slots is not None:
            self._kept_segments.fill(kept.slots)

    def _move_kept(self, queries: Tensor, step: HostInputs) -> None:
        """Move the rows of the kept tokens to the front of the queries and of the residual stream."""
        if step.kept is None:
            return
        tokens = to_device(step.kept.tokens, queries.device)
        for rows in queries, self._residual, self._layer_inputs:
            if rows is not None:
                rows[: len(tokens)] = rows[tokens]

    def _embedded(self, inputs: ForwardInputs) -> Tensor:
        """Write the residual stream before the first layer to the buffer that the recorded passes update.

        If layers have further inputs for each token (``LayerInputs``), these are written to their buffer too.
        """
        residual = self._residual[: len(inputs.token_ids)]
        residual.copy_(self._model.embed(inputs))
        if (layer_inputs := self._of_layers(len(residual))) is not None:
            made = self._model.with_layer_inputs(inputs, residual).layer_inputs
            assert made is not None
            layer_inputs.copy_(made)
        return residual

    def _of_layers(self, count: int) -> Tensor | None:
        """Return the buffer of the layers' further inputs for ``count`` tokens; None if layers have none."""
        return None if self._layer_inputs is None else self._layer_inputs[:count]
