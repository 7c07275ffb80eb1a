"""``ModelRunner``: one step on the device, from its plan to the drawn tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.layouts.staging import HostCopy, to_device
from ...kernels.ops import Largest
from ...lora.lora_step import LoraStep
from ...lora.own.own_weights import OwnStep
from ...lora.published.saved_modules import MOST_ADDED_TOKENS
from ..batch import Batch, Masks, Row, RowResult, StepResult
from ..models.decoder import DecoderModel
from ..models.kv_pool import KvPool
from ..models.model import Model
from ..sampling.draft_verify import SamplingPositions, sampling_positions
from ..sampling.logprobs import prompt_logprobs
from ..sampling.sampler import DeviceMasks, Drawing, Sampler
from ..step_timer import StepTimer
from ..types import Logprob
from .draw_graphs import DrawGraphs, LineEdits, LineMasks, joined_masks
from .input_builder import DrawnTokens, HostInputs, InputBuilder, last_tokens
from .prompt_pooling import PromptPooling

# Prompt logits are computed for this many positions at a time: those of a whole chunk would take 100 MB and more.
_PROMPT_SLICE = 64


class StepMirror(Protocol):
    """Makes the other ranks of the model compute each part of a step that this runner is about to compute."""

    def step(self, batch: Batch, /) -> Batch:
        """Start the forward pass of a batch on the other ranks. Returns the batch with this rank's parts of pages."""

    def head(self, tokens: Seq[int], /, *, best: bool) -> None:
        """Start to compute logits of tokens of the last step, or only the largest of each, on the other ranks."""


_Head = Callable[[Tensor, LoraStep | None, OwnStep | None], Tensor | Largest]
_PromptScores = Callable[[], list[Logprob]]  # waits for the logprobs of a slice of a prompt


@dataclass(slots=True)
class RunnerStep:
    """A launched step of a ``ModelRunner`` (``batch.StepHandle``).

    Attributes:
        hidden: [S, H] hidden states of the kept tokens, overwritten by the next step's forward pass.
        step_timer: measures the seconds of the step's parts.
        drawing: the drawn tokens; set by ``draw``.
        prompt_scores: prompt logprobs, set by ``draw``, by index of their row in the batch.
        pooled: pooled values of prompts by the index of their row in the batch; set by ``draw``.
    """

    runner: ModelRunner
    batch: Batch
    inputs: HostInputs
    hidden: Tensor
    step_timer: StepTimer
    drawing: Drawing | None = None
    prompt_scores: dict[int, list[_PromptScores]] = field(default_factory=dict)
    pooled: dict[int, HostCopy] = field(default_factory=dict)

    def draw(self, masks: Callable[[], Masks] | None) -> None:
        """Begin to draw the step's tokens and to score its prompts. Called before the next step is launched."""
        self.runner.begin_draw(self, masks)

    def result(self) -> StepResult:
        """Wait for the drawn tokens and prompt logprobs."""
        return self.runner.collect(self)


class ModelRunner:
    """Applies batches to a model: page copies, forward pass, draws. It keeps state only for rows, not for sequences.

    Args:
        forward: runs the forward pass, and returns the hidden states [S, H] of a step's kept tokens, which are valid
            until the next step.
        step_timer: makes the timer of each step.
        mirror: the other ranks of the model; None for a single rank.
        pooling: pooling of rows whose prompts are pooled; None pools the last token.
        draws: captured draws; None if absent.
    """

    def __init__(
        self,
        model: Model,
        forward: Callable[[HostInputs], Tensor],
        kv: KvPool,
        inputs: InputBuilder,
        sampler: Sampler,
        step_timer: Callable[[], StepTimer] = StepTimer,
        mirror: StepMirror | None = None,
        pooling: PromptPooling | None = None,
        draws: DrawGraphs | None = None,
    ) -> None:
        self._model = model
        self._draws = draws
        self._mirror = mirror
        self._kv = kv
        self._forward = forward
        self._inputs = inputs
        self._sampler = sampler
        self._step_timer = step_timer
        self._drawn: DrawnTokens | None = None  # tokens drawn by the step before
        self._pooling = pooling or PromptPooling()

    def run(self, batch: Batch, masks: Callable[[], Masks] | None = None) -> StepResult:
        """Compute a step with at least one row; ``masks`` is called when the forward pass is done."""
        step = self.launch(batch)
        step.draw(masks)
        return step.result()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> RunnerStep:
        """Start the forward pass of a step, without waiting for a GPU.

        Its input tokens may be tokens that the step before draws, if that step's ``draw`` has been called. A step need
        not be drawn if its result is not needed and it starts no rows.
        """
        step_timer = self._step_timer()
        if self._mirror is not None:
            batch = self._mirror.step(batch)
        self._kv.copy(batch.copies)
        inputs = self._inputs.build(batch, self._drawn)
        step_timer.end("inputs")
        hidden = self.forward(inputs)
        step_timer.end("forward")
        return RunnerStep(self, batch, inputs, hidden, step_timer)

    def forward(self, inputs: HostInputs) -> Tensor:
        """Return the hidden states [S, H] of a step's kept tokens, valid until the next step."""
        return self._forward(inputs)

    @torch.inference_mode()
    def begin_draw(self, step: RunnerStep, masks: Callable[[], Masks] | None) -> None:
        """Begin the draw and all other work that reads a step's hidden states, which the next step overwrites.

        Rows assigned to new sequences (``batch.starts``) get their sampling parameters here, not at the launch: a step
        may be launched before the result of the step before is collected, which still needs the old ones.
        """
        step_timer, batch = step.step_timer, step.batch
        step_timer.skip()
        self._sampler.start(batch.starts)
        self._pooling.start(batch.starts)
        step_timer.end("inputs")
        filled = masks() if masks else None
        step_timer.end("masks")
        step.pooled = self._pool(step)
        step.drawing = drawing = self.draw(step, filled)
        self._drawn = self._drawn_tokens(drawing)
        for index, row in enumerate(batch.rows):
            if row.prompt_targets:
                step.prompt_scores[index] = self._score_prompt(step, row, int(step.inputs.query_start[index + 1]) - 1)

    def draw(self, step: RunnerStep, masks: Masks | None) -> Drawing:
        """Begin to draw the tokens of a step. Positions with a forced token, as pooled ones have, need no logits."""
        forced = (_forced(masks) if masks else {}) | self._pooling.forced(step.batch)
        positions = sampling_positions([row for row in step.batch.rows if row.draws], forced)
        tokens = _logit_tokens(step.batch, step.inputs.query_start, forced)
        if (drawn := self._draw_captured(step, tokens, positions, masks, forced)) is not None:
            step.step_timer.end("sample")
            return drawn
        head = self._model.best if not masks and self._sampler.takes_best(positions) else self._model.logits
        logits = self._logits(head, step, tokens) if len(tokens) else None
        step.step_timer.end("head")
        device_masks = self._device_masks(masks, forced, logits) if masks and isinstance(logits, Tensor) else None
        drawing = self._sampler.draw(logits, positions, device_masks)
        step.step_timer.end("sample")
        return drawing

    def _draw_captured(
        self,
        step: RunnerStep,
        tokens: NDArray[np.int64],
        positions: SamplingPositions,
        masks: Masks | None,
        forced: Mapping[int, int],
    ) -> Drawing | None:
        """Begin to draw by replaying a graph of head and draw; None if no graph has all options of these positions."""
        draws, sampler = self._draws, self._sampler
        if draws is None or not len(tokens) or not sampler.is_usual(positions):
            return None
        if (masks and masks.checks) or any(part is not None for part in self._of_head(step.inputs.slots, tokens)):
            return None
        allowed = sampler.allowed_masks(positions, draws.width)
        edits = LineEdits(joined_masks(_line_masks(masks, forced, draws.width), allowed), sampler.edits(positions))
        num_logprobs = sampler.num_logprobs(positions)
        if not draws.holds(len(tokens), edits, has_logprobs=bool(num_logprobs)):
            return None
        return draws.draw(step.hidden, step.inputs.hidden_index(tokens), positions, edits, num_logprobs)

    def collect(self, step: RunnerStep) -> StepResult:
        """Wait for the drawing and the prompt logprobs of a step."""
        assert step.drawing is not None  # ``draw`` was called
        step.step_timer.skip()
        drawn = iter(self._sampler.collect(step.drawing))
        step.step_timer.end("sample")
        results = [next(drawn) if row.draws else RowResult() for row in step.batch.rows]
        for index, slices in step.prompt_scores.items():
            scored = tuple(score for wait in slices for score in wait())
            results[index] = replace(results[index], prompt_logprobs=scored)
        for index, copied in step.pooled.items():
            results[index] = replace(results[index], pooled=copied.wait().numpy().tobytes())
        return StepResult(tuple(results), step.step_timer.seconds)

    def _pool(self, step: RunnerStep) -> dict[int, HostCopy]:
        """Add a step's hidden states to the sums for pooled prompts, and begin to copy the values of complete prompts.

        Returns:
            The pooled values of the prompts that end in this step, by index of their row in the batch.
        """
        found: dict[int, HostCopy] = {}
        for index, row in enumerate(step.batch.rows if self._pooling.is_used else ()):
            if not self._pooling.pools(row.row) or not row.num_kept:
                continue
            end, position = int(step.inputs.query_start[index + 1]), row.start + len(row.tokens)
            tokens = np.arange(end - row.num_kept, end)
            # Kept tokens of a row stand side by side in the result.
            first = int(step.inputs.hidden_index(tokens[:1])[0])
            self._pooling.add(row.row, step.hidden[first : first + row.num_kept], position - row.num_kept)
            if row.draws:
                pooled = self._pooling.pooled(row.row)
                if self._pooling.classifies(row.row):
                    pooled = self._class_logits(pooled, step.inputs.slots, tokens[-1:])
                found[index] = HostCopy(pooled)
        return found

    def _class_logits(self, hidden: Tensor, slots: NDArray[np.int32] | None, token: NDArray[np.int64]) -> Tensor:
        """Return the logits [classes] of the hidden state [H] of a token of the step, both fp32."""
        _, own = self._of_head(slots, token)
        heads = [each.score for _, each in own.parts] if own else []
        score = heads[0] if heads and heads[0] is not None else None
        if score is None and isinstance(self._model, DecoderModel):
            score = self._model.score
        assert score is not None  # a sequence without a head was refused
        return score @ hidden

    def _drawn_tokens(self, drawing: Drawing) -> DrawnTokens | None:
        """Return the inputs of a next step that is planned ahead; None if there are drafts, after which none is."""
        rows = drawing.positions.rows
        if any(row.num_drafts for row in rows):
            return None
        forced = {rows[index].row: token for index, token in drawing.positions.forced.items()}
        most = self._model.config.vocab_size + (MOST_ADDED_TOKENS if self._inputs.bank else 0)
        return DrawnTokens(drawing.positions.row, drawing.tokens, forced, most)

    def _logits(self, head: _Head, step: RunnerStep, tokens: NDArray[np.int64]) -> Tensor | Largest:
        """Return the logits [n, V] of n tokens of the step, or the largest of each."""
        hidden, inputs = step.hidden, step.inputs
        adapters = self._of_head(inputs.slots, tokens)
        own = adapters[1]
        # Adapters' own heads are only on this rank. The other ranks compute the model's head if a token needs it.
        if self._mirror is not None and (own is None or own.needs_head):
            self._mirror.head(tokens.tolist(), best=head == self._model.best and own is None)
        if len(tokens) != len(hidden):
            hidden = hidden[to_device(inputs.hidden_index(tokens), hidden.device)]
        return head(hidden, *adapters)

    @torch.inference_mode()
    def follow_head(self, step: RunnerStep, tokens: Seq[int], *, best: bool) -> None:
        """Compute this rank's part of the logits of some tokens of a step, which rank 0 gathers."""
        self._logits(self._model.best if best else self._model.logits, step, np.array(tokens, np.int64))

    def _of_head(
        self, slots: NDArray[np.int32] | None, tokens: NDArray[np.int64]
    ) -> tuple[LoraStep | None, OwnStep | None]:
        """Return the adapters' LoRA on the head for tokens of the step, and their own heads in place of the model's."""
        bank = self._inputs.bank
        if slots is None or bank is None:
            return None, None
        return bank.head_step(slots[tokens]), bank.own_step(slots[tokens])

    def _device_masks(self, masks: Masks, forced: Mapping[int, int], logits: Tensor) -> DeviceMasks | None:
        """Return the masks of positions that are not forced, each with its position's index among the logits' rows.

        The masks are fitted to the width of the logits. Logits may be wider, if a row without a mask has a larger
        vocabulary, or narrower, if a position with a wider mask is forced.
        """
        kept = _unforced(masks)
        if not kept:
            return None
        words = masks.words if len(kept) == len(masks.positions) else masks.words[kept]
        device, width = self._model.device, logits.shape[1]
        found = DeviceMasks(to_device(_lines(masks, kept, forced), device), to_device(_as_wide(words, width), device))
        if not masks.checks:
            return found
        lines = _lines(masks, list(masks.checks), forced).tolist()
        return replace(found, checks=dict(zip(lines, masks.checks.values(), strict=True)))

    def _score_prompt(self, step: RunnerStep, row: Row, last: int) -> list[_PromptScores]:
        """Begin to compute the logprobs of a row's ``prompt_targets`` from the hidden states before these positions.

        Args:
            last: index of the row's last token in the step.
        """
        # All tokens before the last position have targets, except leading ones that need no score.
        first = last + 1 - row.num_drafts - row.draws - len(row.prompt_targets)
        tokens = np.arange(first, first + len(row.prompt_targets))
        num_top = self._sampler.num_prompt_logprobs(row.row)
        scores = []
        for begin in range(0, len(tokens), _PROMPT_SLICE):
            targets = row.prompt_targets[begin : begin + _PROMPT_SLICE]
            logits = self._logits(self._model.logits, step, tokens[begin : begin + len(targets)])
            assert isinstance(logits, Tensor)
            scores.append(prompt_logprobs(logits, targets, num_top))
        return scores


def _forced(masks: Masks) -> dict[int, int]:
    """Return the forced tokens by their sampling positions."""
    return {index: token for index, token in zip(masks.positions, masks.forced, strict=True) if token >= 0}


def _unforced(masks: Masks) -> list[int]:
    """Return the indices of the masks of positions that are not forced."""
    return [index for index, token in enumerate(masks.forced) if token < 0]


def _line_masks(masks: Masks | None, forced: Mapping[int, int], width: int) -> LineMasks | None:
    """Return the masks of positions that are not forced, for logits of this width; None if absent."""
    kept = _unforced(masks) if masks else []
    return LineMasks(_lines(masks, kept, forced), _as_wide(masks.words[kept], width)) if masks and kept else None


def _lines(masks: Masks, indices: Seq[int], forced: Mapping[int, int]) -> NDArray[np.int64]:
    """Return the rows of the logits of some masks, none of a forced position."""
    positions = np.take(masks.positions, indices)
    lines: NDArray[np.int64] = positions - np.searchsorted(sorted(forced), positions)
    return lines


def _as_wide(words: NDArray[np.int32], width: int) -> NDArray[np.int32]:
    """Cut or fill masks to the words of ``width`` logits."""
    num_words = -(-width // 32)
    if words.shape[1] == num_words:
        return words
    return np.pad(words[:, :num_words], ((0, 0), (0, max(0, num_words - words.shape[1]))))


def _logit_tokens(batch: Batch, query_start: NDArray[np.int32], forced: Mapping[int, int]) -> NDArray[np.int64]:
    """[S] int64, index in the step of the token before each sampling position that is not forced."""
    counts = np.fromiter((row.num_positions for row in batch.rows), np.int64, len(batch.rows))
    tokens = last_tokens(query_start, counts)
    return np.delete(tokens, list(forced)) if forced else tokens
