"""From logits to tokens, for all lines of a step at once: the places after each row's last token and its drafts.

    mask -> logit_bias -> penalties -> min_tokens -> temperature -> top_k -> top_p -> min_p -> draw

What no row of a step uses is not computed. A line's token depends on its own logits, parameters, seed and number of
generated tokens, never on its neighbours (``engine.sampling.top_k_top_p``). ``engine.sampling.draft_verify`` says which
of a row's tokens count if it has drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.layouts.staging import HostCopy, to_device
from ...kernels.ops import Largest, largest
from ...kernels.sampling_ops import mask_logits
from ..batch import Row, RowResult, RowStart
from .draft_verify import Drawn, SamplingPositions, accept_drafts, sampling_positions
from .logprobs import logprob_columns, to_logprob
from .penalties import LogitEdits
from .top_k_top_p import Draws, draw_any, draw_kept, pad, row_slices, uniforms

Ints = npt.NDArray[np.int64]
Params = npt.NDArray[np.void]  # of _ROW

_ROW = np.dtype(
    [
        ("temperature", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("min_p", np.float32),
        ("seed", np.uint64),
        ("num_logprobs", np.int64),  # -1: none wanted, not even of the chosen token
        ("num_prompt_logprobs", np.int64),
    ]
)
_COOLEST = 1e-20  # a positive temperature below this is this: in float32 it might become 0, and 0 is greedy


@dataclass(frozen=True, slots=True)
class Allowed:
    """Masks of some lines of the logits; the other lines may draw any token.

    Attributes:
        lines: [G] int64, which lines.
        words: [G, ceil(V / 32)] int32 on the logits' device; bit j of word w is set if token 32 * w + j is allowed.
    """

    lines: Tensor
    words: Tensor


@dataclass(frozen=True, slots=True)
class Drawing:
    """Tokens of a step, being drawn.

    Attributes:
        rows: those that draw.
        lines: of them, but for those forced.
        forced: tokens that are taken without a draw, by the number of their line among all.
        tokens: [S] int64 on the device, of ``lines``, -1 for those that fail. None if S is 0.
    """

    rows: Sequence[Row]
    lines: SamplingPositions
    forced: Mapping[int, int]
    tokens: Tensor | None = None
    _copy: HostCopy | None = None  # of the tokens, or of these with their logprobs if any are wanted
    _num_logprobs: Sequence[int] = ()  # that are wanted at each line, -1 for none; empty if nobody wants any

    def wait(self) -> list[Drawn]:
        """What came of ``lines``."""
        if self._copy is None:
            return []
        values = self._copy.wait().tolist()
        if not self._num_logprobs:
            return [Drawn(token) for token in values]
        return [_scored(*each) for each in zip(values, self._num_logprobs, strict=True)]


class Sampler:
    """Draws the next tokens of every row of a step.

    Args:
        max_num_seqs: how many rows there are.
        vocab_size: V, the width of the logits.
        device: where the logits are.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._rows = np.zeros(max_num_seqs, _ROW)
        self._edits = LogitEdits(max_num_seqs, vocab_size)

    def start(self, starts: Sequence[RowStart]) -> None:
        """Rows are taken: remember parameters, seed and penalty counts; forget whatever was in those rows before."""
        for start in starts:
            params = start.params
            self._rows[start.row] = (
                max(params.temperature, _COOLEST) if params.temperature else 0.0,
                params.top_k if params.top_k < self._vocab_size else 0,
                params.top_p,
                params.min_p,
                start.seed % (1 << 64),
                -1 if params.logprobs is None else params.logprobs,
                params.prompt_logprobs or 0,
            )
            self._edits.start(start)

    def num_prompt_logprobs(self, row: int) -> int:
        """How many of the best tokens to name at each position of the row's prompt (``prompt_logprobs``' num_top)."""
        return int(self._rows["num_prompt_logprobs"][row])

    def takes_best(self, lines: SamplingPositions) -> bool:
        """Whether ``draw`` can do with the largest logit of each of these lines, where no masks are.

        It can where each line takes its best token, of logits as they are, and nobody asks for logprobs.
        """
        rows = lines.row
        if (self._rows["temperature"][rows] > 0).any() or (self._rows["num_logprobs"][rows] >= 0).any():
            return False
        return not self._edits.concern(rows, lines.num_generated)

    def sample(
        self,
        logits: Tensor | None,
        rows: Sequence[Row],
        allowed: Allowed | None = None,
        forced: Mapping[int, int] | None = None,
    ) -> list[RowResult]:
        """``draw`` and ``collect``."""
        return self.collect(self.draw(logits, rows, sampling_positions(rows, forced or {}), allowed, forced))

    def draw(
        self,
        logits: Tensor | Largest | None,
        rows: Sequence[Row],
        lines: SamplingPositions,
        allowed: Allowed | None = None,
        forced: Mapping[int, int] | None = None,
    ) -> Drawing:
        """Begin to draw a token at each line of the rows. What was drawn before must have been collected.

        A row fails, alone, if the logits of a line that counts hold NaN or +inf, or if nothing may be drawn there:
        everything is masked, banned or -inf.

        Args:
            logits: [S, V] float32, of the lines in order, but for those forced; None if S is 0. May be overwritten.
                Where ``takes_best`` is true and there are no masks, the largest of each line will do.
            rows: the rows that draw.
            lines: of them, but for those forced.
            allowed: the masks of lines under a grammar, by their place in ``logits``, or None if there are none.
            forced: tokens to take without a draw, by the number of their line among all.
        """
        forced = forced or {}
        if logits is None or not len(lines):
            return Drawing(rows, lines, forced)
        if isinstance(logits, Largest):
            tokens = torch.where(_are_finite(logits.value), logits.column, -1)
            return Drawing(rows, lines, forced, tokens, HostCopy(tokens))
        tokens, columns = self._draw_lines(logits, lines, allowed)
        if columns is None:
            return Drawing(rows, lines, forced, tokens, HostCopy(tokens))
        return Drawing(rows, lines, forced, tokens, HostCopy(columns), self._rows["num_logprobs"][lines.row].tolist())

    def collect(self, drawing: Drawing) -> list[RowResult]:
        """Wait for what is drawn, keep what stands, and count it for the rows' penalties."""
        results = accept_drafts(drawing.rows, drawing.wait(), drawing.forced)
        for row, result in zip(drawing.rows, results, strict=True):
            self._edits.count(row.row, result.tokens)
        return results

    def _draw_lines(
        self, logits: Tensor, lines: SamplingPositions, allowed: Allowed | None
    ) -> tuple[Tensor, Tensor | None]:
        """The token of each line, [S] int64, -1 where it fails; what ``_with_logprobs`` gives, if it is wanted."""
        params = self._rows[lines.row]
        wanted = np.flatnonzero(params["num_logprobs"] >= 0)
        edits = allowed is not None or self._edits.concern(lines.row, lines.num_generated)
        before = largest(logits)[0] if edits else None  # an edit may hide what is not finite
        edited = self._edited(logits, lines, allowed, keep=bool(len(wanted))) if edits else logits
        best, tokens = largest(edited)
        sound = _are_finite(best) if before is None else _are_finite(best) & _are_finite(before)
        self._draw_random(tokens, edited, best, params, lines.num_generated)
        drawn = torch.where(sound, tokens, -1)
        if not len(wanted):
            return drawn, None
        return drawn, self._with_logprobs(drawn, logits, tokens, wanted, int(params["num_logprobs"].max()))

    def _edited(self, logits: Tensor, lines: SamplingPositions, allowed: Allowed | None, keep: bool) -> Tensor:
        """Logits after mask, bias, penalties and bans; ``logits`` themselves stay as they are if ``keep``."""
        edited = logits
        if allowed is not None:
            edited = logits.clone() if keep else logits
            mask_logits(edited, allowed.lines, allowed.words)
        if self._edits.concern(lines.row, lines.num_generated):
            edited = edited.clone() if keep and edited is logits else edited
            self._edits.apply(edited, lines)
        return edited

    def _draw_random(self, tokens: Tensor, logits: Tensor, best: Tensor, params: Params, num_generated: Ints) -> None:
        """Replace the best tokens [S] of lines that are not greedy. Draws from all and by rank go separate ways."""
        random = params["temperature"] > 0
        ranked = random & ((params["top_k"] > 0) | (params["top_p"] < 1))
        for lines, by_rank in ((random & ~ranked, False), (ranked, True)):
            if lines.any():
                at = self._column(np.flatnonzero(lines)).squeeze(1)
                mine = pad(logits if lines.all() else logits[at])
                tokens[at] = self._draw(mine, best[at, None], params[lines], num_generated[lines], by_rank)

    def _draw(self, logits: Tensor, best: Tensor, params: Params, num_generated: Ints, by_rank: bool) -> Tensor:
        u = uniforms(params["seed"], num_generated.astype(np.uint64))
        fields = (params[name] for name in ("temperature", "top_k", "top_p", "min_p"))
        draws = Draws(*(self._column(values) for values in (*fields, u)))
        use_min_p = bool(params["min_p"].any())
        return torch.cat(
            [
                draw_kept(logits[some], best[some], draws.rows(some))
                if by_rank
                else draw_any(logits[some], best[some], draws.rows(some), use_min_p)
                for some in row_slices(logits)
            ]
        )

    def _column(self, values: npt.NDArray[np.generic]) -> Tensor:
        # A GPU need not have done with the forward: a copy that waited would stop the host here.
        return to_device(values[:, None], self._device)

    def _with_logprobs(self, drawn: Tensor, logits: Tensor, tokens: Tensor, wanted: Ints, num_top: int) -> Tensor:
        """[S, 3 ...] float64: ``drawn`` and the columns of ``logprob_columns``, 0 for lines that want none."""
        at = self._column(wanted).squeeze(1)
        some = logits if len(wanted) == len(logits) else logits[at]
        columns = logprob_columns(some, tokens[at], num_top)
        behind = torch.zeros(len(drawn), columns.shape[1], dtype=torch.float64, device=self._device)
        behind[at] = columns
        return torch.cat([drawn.double()[:, None], behind], dim=1)


def _are_finite(values: Tensor) -> Tensor:
    """[S] bool. Two ops, where ``torch.isfinite`` makes a chain of them that takes longer than the others of a draw."""
    return values - values == 0


def _scored(columns: list[float], num_logprobs: int) -> Drawn:
    """What came of a line where some lines' logprobs are wanted, from a row of ``_with_logprobs``."""
    token = int(columns[0])
    is_wanted = num_logprobs >= 0 and token >= 0
    return Drawn(token, to_logprob(token, columns[1:], num_logprobs) if is_wanted else None)
