"""One step on the device: plan in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Batch, Masks, Row, RowResult, StepResult
from engine.inputs import HostInputs, InputBuilder
from engine.kv_pool import KvPool
from engine.laps import Laps
from engine.models.decoder import DecoderModel
from engine.sampler import Allowed, Sampler, prompt_logprobs
from engine.types import Logprob
from lora.apply import LoraStep

# Logits of a prompt are made for this many positions at a time: a whole chunk's would take 100 MB and more.
_PROMPT_SLICE = 64


class ModelRunner:
    """Applies a ``Batch``: rows taken, pages copied, forward, draw. Holds nothing of the sequences but their rows.

    Args:
        model: weights on the device.
        forward: its forward pass: hidden states [T, H] of a step's tokens, good until the next step.
        kv: the pool that the batch's page ids point into.
        inputs: the builder that keeps the page table.
        sampler: the rows' parameters and draws.
    """

    def __init__(
        self,
        model: DecoderModel,
        forward: Callable[[HostInputs], Tensor],
        kv: KvPool,
        inputs: InputBuilder,
        sampler: Sampler,
    ) -> None:
        self._model = model
        self._kv = kv
        self._forward = forward
        self._inputs = inputs
        self._sampler = sampler

    @torch.inference_mode()
    def run(self, batch: Batch, masks: Callable[[], Masks] | None = None) -> StepResult:
        """Compute a step. ``batch.rows`` is not empty; ``masks`` is called when the forward is done."""
        return self.launch(batch, masks)()

    @torch.inference_mode()
    def launch(self, batch: Batch, masks: Callable[[], Masks] | None = None) -> Callable[[], StepResult]:
        """Start the forward pass of a step, for which a GPU's host does not wait; the call that is returned does the
        rest, and waits. No other step may be launched before.
        """
        laps = Laps()
        self._sampler.start(batch.starts)
        self._kv.copy(batch.copies)
        inputs = self._inputs.build(batch)
        laps.end("inputs")
        hidden = self.forward(inputs)
        laps.end("forward")
        return lambda: self._finish(batch, inputs, hidden, masks, laps)

    def forward(self, inputs: HostInputs) -> Tensor:
        """Hidden states [T, H] of a step's tokens, good until the next step."""
        return self._forward(inputs)

    @torch.inference_mode()
    def _finish(
        self, batch: Batch, inputs: HostInputs, hidden: Tensor, masks: Callable[[], Masks] | None, laps: Laps
    ) -> StepResult:
        laps.skip()
        drawn = self._draw(batch, inputs, hidden, masks, laps)
        rows = enumerate(zip(batch.rows, _last_tokens(batch).tolist(), strict=True))
        results = tuple(self._result(i, row, last, hidden, inputs, drawn) for i, (row, last) in rows)
        return StepResult(results, laps.seconds)

    def _draw(
        self, batch: Batch, inputs: HostInputs, hidden: Tensor, masks: Callable[[], Masks] | None, laps: Laps
    ) -> dict[int, RowResult]:
        """The next tokens of each row that draws, by the row's index in the batch.

        The masks are waited for before the head: where they leave no choice, no logits are needed.
        """
        drawing = [i for i, row in enumerate(batch.rows) if row.draws]
        if not drawing:
            return {}
        filled = masks() if masks else None
        laps.end("masks")
        forced = _forced(filled) if filled else {}
        at = _logit_tokens(batch, forced)
        logits = self._logits(hidden, inputs, at) if len(at) else None
        laps.end("head")
        allowed = self._allowed(filled, forced) if filled else None
        results = self._sampler.sample(logits, [batch.rows[i] for i in drawing], allowed, forced)
        laps.end("sample")
        return dict(zip(drawing, results, strict=True))

    def _logits(self, hidden: Tensor, inputs: HostInputs, at: NDArray[np.int64]) -> Tensor:
        """Logits [len(at), V] of some tokens of the step."""
        lora = self._head_lora(inputs.slots, at)
        if len(at) == len(hidden):
            return self._model.logits(hidden, lora)
        return self._model.logits(hidden[_to(hidden.device, at)], lora)

    def _head_lora(self, slots: NDArray[np.int32] | None, tokens: NDArray[np.int64] | slice) -> LoraStep | None:
        """The adapters' part in the head for some tokens of the step."""
        bank = self._inputs.bank
        return None if slots is None or bank is None else bank.head_step(slots[tokens])

    def _allowed(self, masks: Masks, forced: Mapping[int, int]) -> Allowed | None:
        """The masks as the sampler takes them: by the place of their line among those with logits."""
        kept = [i for i, token in enumerate(masks.forced) if token < 0]
        if not kept:
            return None
        before = np.searchsorted(sorted(forced), [masks.lines[i] for i in kept])
        lines = np.take(masks.lines, kept) - before
        words = masks.words if len(kept) == len(masks.lines) else masks.words[kept]
        device = self._model.device
        return Allowed(_to(device, lines), _to(device, words))

    def _result(
        self, index: int, row: Row, last: int, hidden: Tensor, inputs: HostInputs, drawn: dict[int, RowResult]
    ) -> RowResult:
        result = drawn.get(index, RowResult())
        if not row.prompt_targets:
            return result
        # The tokens before the last position have targets, but for leading ones that need no score.
        first = last + 1 - row.num_drafts - row.draws - len(row.prompt_targets)
        scores = self._score_prompt(row, first, hidden, inputs.slots)
        return replace(result, prompt_logprobs=scores)

    def _score_prompt(
        self, row: Row, first: int, hidden: Tensor, slots: NDArray[np.int32] | None
    ) -> tuple[Logprob, ...]:
        """Logprobs of the row's ``prompt_targets``, from the hidden states of the positions before them.

        Args:
            first: where in the step the token before the first target is.
        """
        scores: list[Logprob] = []
        num_top = self._sampler.num_prompt_logprobs(row.row)
        targets = torch.as_tensor(row.prompt_targets, dtype=torch.int64, device=hidden.device)
        for wanted in targets.split(_PROMPT_SLICE):
            part = slice(first, first + len(wanted))
            logits = self._model.logits(hidden[part], self._head_lora(slots, part))
            scores += prompt_logprobs(logits, wanted, num_top)
            first = part.stop
        return tuple(scores)


def _forced(masks: Masks) -> dict[int, int]:
    """The tokens about which masks leave no choice, by their lines."""
    return {line: token for line, token in zip(masks.lines, masks.forced, strict=True) if token >= 0}


def _logit_tokens(batch: Batch, forced: Mapping[int, int]) -> NDArray[np.int64]:
    """[S] int64, index in the step of the token before each line, but for lines that are forced."""
    ends = accumulate(len(row.tokens) for row in batch.rows)
    at = [token for row, end in zip(batch.rows, ends, strict=True) for token in range(end - row.num_lines, end)]
    return np.asarray([token for line, token in enumerate(at) if line not in forced], np.int64)


def _last_tokens(batch: Batch) -> NDArray[np.int64]:
    """[R] int64, index in the step of each row's last token."""
    return np.cumsum([len(row.tokens) for row in batch.rows]) - 1


def _to(device: torch.device, values: NDArray[Any]) -> Tensor:
    """A copy on the device, of which the host does not wait for the end: it would wait for the forward too."""
    return torch.from_numpy(values).to(device, non_blocking=True)
