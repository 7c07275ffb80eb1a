"""One step on the device: plan in, tokens out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.batch import Batch, Masks, Row, RowResult, StepResult
from engine.inputs import ForwardInputs, InputBuilder
from engine.kv_pool import KvPool
from engine.models.decoder import DecoderModel
from engine.sampler import Allowed, Sampler, prompt_logprobs
from engine.types import Logprob

# Logits of a prompt are made for this many positions at a time: a whole chunk's would take 100 MB and more.
_PROMPT_SLICE = 64


class ModelRunner:
    """Applies a ``Batch``: rows taken, pages copied, forward, draw. Holds nothing of the sequences but their rows.

    Args:
        model: weights on the device.
        kv: the pool that the batch's page ids point into.
        inputs: the builder that keeps the page table.
        sampler: the rows' parameters and draws.
    """

    def __init__(self, model: DecoderModel, kv: KvPool, inputs: InputBuilder, sampler: Sampler) -> None:
        self._model = model
        self._kv = kv
        self._inputs = inputs
        self._sampler = sampler

    @torch.inference_mode()
    def run(self, batch: Batch, masks: Callable[[], Masks] | None = None) -> StepResult:
        """Compute a step. ``batch.rows`` is not empty; ``masks`` is called when the logits are there."""
        self._sampler.start(batch.starts)
        self._kv.copy(batch.copies)
        inputs = self._inputs.build(batch)
        hidden = self._model.forward(inputs, self._kv)
        drawn = self._draw(batch, inputs, hidden, masks)
        return StepResult(tuple(self._result(i, row, hidden, inputs, drawn) for i, row in enumerate(batch.rows)))

    def _draw(
        self, batch: Batch, inputs: ForwardInputs, hidden: Tensor, masks: Callable[[], Masks] | None
    ) -> dict[int, RowResult]:
        """The next token of each row that draws, by the row's index in the batch."""
        drawing = [i for i, row in enumerate(batch.rows) if row.draws]
        if not drawing:
            return {}
        last = inputs.query_start[1:].long() - 1
        picked = hidden[last if len(drawing) == len(batch.rows) else last[drawing]]
        logits = self._model.logits(picked)
        allowed = self._allowed(drawing, masks()) if masks else None
        results = self._sampler.sample(logits, [batch.rows[i] for i in drawing], allowed)
        return dict(zip(drawing, results, strict=True))

    def _allowed(self, drawing: list[int], masks: Masks) -> Allowed:
        """The masks as the sampler takes them: by the line of their row among those that draw."""
        lines = [drawing.index(row) for row in masks.rows]
        return Allowed(torch.tensor(lines), torch.from_numpy(masks.words).to(self._model.device))

    def _result(
        self, index: int, row: Row, hidden: Tensor, inputs: ForwardInputs, drawn: dict[int, RowResult]
    ) -> RowResult:
        result = drawn.get(index, RowResult())
        if not row.prompt_targets:
            return result
        first = int(inputs.query_start[index])
        scores = self._score_prompt(row, hidden[first : first + len(row.prompt_targets)])
        return RowResult(result.tokens, result.logprobs, scores, result.failed)

    def _score_prompt(self, row: Row, hidden: Tensor) -> tuple[Logprob, ...]:
        """Logprobs of the row's ``prompt_targets``, from the hidden states of the positions before them."""
        scores: list[Logprob] = []
        num_top = self._sampler.num_prompt_logprobs(row.row)
        targets = torch.as_tensor(row.prompt_targets, dtype=torch.int64, device=hidden.device)
        for states, wanted in zip(hidden.split(_PROMPT_SLICE), targets.split(_PROMPT_SLICE), strict=True):
            scores += prompt_logprobs(self._model.logits(states), wanted, num_top)
        return tuple(scores)
