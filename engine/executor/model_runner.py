"""One step on the device: plan in, tokens out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.layouts.staging import to_device
from ...kernels.ops import Largest
from ...lora.lora_step import LoraStep
from ..batch import Batch, Draw, Masks, Read, Row, RowResult, StepResult
from ..models.decoder import DecoderModel
from ..models.forward_inputs import DrawnTokens, HostInputs, InputBuilder, last_tokens
from ..models.kv_pool import KvPool
from ..sampling.draft_verify import sampling_positions
from ..sampling.logprobs import prompt_logprobs
from ..sampling.sampler import Allowed, Drawing, Sampler
from ..step_timer import StepTimer
from ..types import Logprob

# Logits of a prompt are made for this many positions at a time: a whole chunk's would take 100 MB and more.
_PROMPT_SLICE = 64

_Head = Callable[[Tensor, LoraStep | None], Tensor | Largest]
_Scores = Callable[[], list[Logprob]]  # of a part of a prompt, waited for


class ModelRunner:
    """Applies a ``Batch``: rows taken, pages copied, forward, draw. Holds nothing of the sequences but their rows.

    Args:
        model: weights on the device.
        forward: its forward pass: hidden states [S, H] of a step's kept tokens, good until the next step.
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
        self._drawn: DrawnTokens | None = None  # by the step before

    def run(self, batch: Batch, masks: Callable[[], Masks] | None = None) -> StepResult:
        """Compute a step. ``batch.rows`` is not empty; ``masks`` is called when the forward is done."""
        return self.launch(batch)(masks)()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> Draw:
        """Start the forward pass of a step, for which a GPU's host does not wait.

        It may begin with tokens that the step before draws, once that one's ``Draw`` was called. What is returned is to
        be called when that one was read, since a draw depends on the tokens before it, and before the next launch. A
        step whose result nobody wants, and that takes no rows, need not be drawn.
        """
        step_timer = StepTimer()
        self._kv.copy(batch.copies)
        inputs = self._inputs.build(batch, self._drawn)
        step_timer.end("inputs")
        hidden = self.forward(inputs)
        step_timer.end("forward")
        return lambda masks: self._begin_result(batch, inputs, hidden, masks, step_timer)

    def forward(self, inputs: HostInputs) -> Tensor:
        """Hidden states [S, H] of a step's kept tokens, good until the next step."""
        return self._forward(inputs)

    def draw(
        self, batch: Batch, inputs: HostInputs, hidden: Tensor, masks: Masks | None, step_timer: StepTimer
    ) -> Drawing:
        """Begin to draw the tokens of a step. Where its masks leave no choice, no logits are needed."""
        forced = _forced(masks) if masks else {}
        rows = [row for row in batch.rows if row.draws]
        lines, at = sampling_positions(rows, forced), _logit_tokens(batch, inputs.query_start, forced)
        head = self._model.best if not masks and self._sampler.takes_best(lines) else self._model.logits
        logits = self._logits(head, hidden, inputs, at) if len(at) else None
        step_timer.end("head")
        allowed = self._allowed(masks, forced) if masks else None
        drawing = self._sampler.draw(logits, rows, lines, allowed, forced)
        step_timer.end("sample")
        return drawing

    @torch.inference_mode()
    def _begin_result(
        self, batch: Batch, inputs: HostInputs, hidden: Tensor, masks: Callable[[], Masks] | None, step_timer: StepTimer
    ) -> Read:
        """Begin all that needs the hidden states, which the next step overwrites.

        The sampler learns here, not at the launch, who takes which row: the step before had not been read then.
        """
        step_timer.skip()
        self._sampler.start(batch.starts)
        step_timer.end("inputs")
        filled = masks() if masks else None
        step_timer.end("masks")
        drawing = self.draw(batch, inputs, hidden, filled, step_timer)
        self._drawn = self._drawn_tokens(batch, drawing)
        scores = {
            number: self._score_prompt(row, int(inputs.query_start[number + 1]) - 1, hidden, inputs)
            for number, row in enumerate(batch.rows)
            if row.prompt_targets
        }
        return lambda: self._read(batch, drawing, scores, step_timer)

    def _read(
        self, batch: Batch, drawing: Drawing, scores: Mapping[int, list[_Scores]], step_timer: StepTimer
    ) -> StepResult:
        """What came of the step; ``scores`` are of prompts, by the number of their row in the batch."""
        step_timer.skip()
        drawn = iter(self._sampler.collect(drawing))
        step_timer.end("sample")
        results = [next(drawn) if row.draws else RowResult() for row in batch.rows]
        for number, parts in scores.items():
            scored = tuple(score for part in parts for score in part())
            results[number] = replace(results[number], prompt_logprobs=scored)
        return StepResult(tuple(results), step_timer.seconds)

    def _drawn_tokens(self, batch: Batch, drawing: Drawing) -> DrawnTokens | None:
        """For the next step, if it is planned ahead: none that follows a step with drafts is."""
        if any(row.num_drafts for row in drawing.rows):
            return None
        forced = {drawing.rows[line].row: token for line, token in drawing.forced.items()}
        return DrawnTokens(drawing.lines.row, drawing.tokens, forced, self._model.config.vocab_size)

    def _logits(self, head: _Head, hidden: Tensor, inputs: HostInputs, at: NDArray[np.int64]) -> Tensor | Largest:
        """Logits [len(at), V] of some tokens of the step, or the best of them."""
        lora = self._head_lora(inputs.slots, at)
        return head(hidden if len(at) == len(hidden) else hidden[to_device(inputs.place(at), hidden.device)], lora)

    def _head_lora(self, slots: NDArray[np.int32] | None, tokens: NDArray[np.int64]) -> LoraStep | None:
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
        return Allowed(to_device(lines, device), to_device(words, device))

    def _score_prompt(self, row: Row, last: int, hidden: Tensor, inputs: HostInputs) -> list[_Scores]:
        """Begin the logprobs of the row's ``prompt_targets``, from the hidden states of the positions before them.

        Args:
            last: where in the step the row's last token is.
        """
        # The tokens before the last position have targets, but for leading ones that need no score.
        first = last + 1 - row.num_drafts - row.draws - len(row.prompt_targets)
        tokens = np.arange(first, first + len(row.prompt_targets))
        places = inputs.place(tokens)  # which follow each other, too
        num_top = self._sampler.num_prompt_logprobs(row.row)
        scores = []
        for begin in range(0, len(tokens), _PROMPT_SLICE):
            wanted = row.prompt_targets[begin : begin + _PROMPT_SLICE]
            part = hidden[places[begin] : places[begin] + len(wanted)]
            logits = self._model.logits(part, self._head_lora(inputs.slots, tokens[begin : begin + len(wanted)]))
            scores.append(prompt_logprobs(logits, wanted, num_top))
        return scores


def _forced(masks: Masks) -> dict[int, int]:
    """The tokens about which masks leave no choice, by their lines."""
    return {line: token for line, token in zip(masks.lines, masks.forced, strict=True) if token >= 0}


def _logit_tokens(batch: Batch, query_start: NDArray[np.int32], forced: Mapping[int, int]) -> NDArray[np.int64]:
    """[S] int64, index in the step of the token before each line, but for lines that are forced."""
    lines = np.fromiter((row.num_positions for row in batch.rows), np.int64, len(batch.rows))
    at = last_tokens(query_start, lines)  # behind which the lines of a row stand
    return np.delete(at, list(forced)) if forced else at
