"""The sampler: from the logits of all sampling positions of a step to the accepted tokens of each row.

    mask -> allowed_token_ids -> logit_bias -> penalties -> min_tokens -> temperature -> filters -> draw

``engine.sampling.top_k_top_p`` defines the filters and their order. A filter that no row of a step uses is not
computed. A position's token depends on its own logits, parameters, seed and number of generated tokens, never on other
positions. Rows with drafts keep the accepted ones and one token more (``engine.sampling.draft_verify``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...kernels.layouts.draw_params import COLUMNS, DrawParams, DrawTable
from ...kernels.layouts.logit_edits import Edits
from ...kernels.layouts.staging import HostCopy, to_device
from ...kernels.ops import Largest, largest, on_triton
from ...kernels.sampling_ops import draw_lines, draw_tokens, draws_tokens, has_kernel, mask_logits
from ..batch import Row, RowResult, RowStart, TokenCheck
from ..types import AllowedLogprobs
from .allowed_logprobs import AllowedDrawing
from .draft_verify import Drawn, SamplingPositions, accept_drafts, sampling_positions
from .limited_draw import LimitedLines
from .logprobs import logprob_columns, named_columns, to_logprob
from .penalties import LogitEdits, Words
from .top_k_top_p import draw_any, draw_kept, exponentials, num_noise, pad, row_slices, uniforms

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Params = npt.NDArray[np.void]  # records of the type _ROW

_ROW = np.dtype(
    [
        *((name, str(dtype).removeprefix("torch.")) for name, dtype in COLUMNS.items()),
        ("seed", np.uint64),
        ("num_logprobs", np.int64),  # -1: none wanted, not even of the chosen token
        ("num_prompt_logprobs", np.int64),
    ],
    align=True,  # torch refuses columns whose stride is not a multiple of the item size.
)
_MIN_TEMPERATURE = 1e-20  # least positive temperature: float32 might round a smaller one to 0, which means greedy


@dataclass(frozen=True, slots=True)
class DeviceMasks:
    """Token masks on the device of the logits. Positions without a mask may draw any token.

    Attributes:
        positions: [G] int64, the masked rows of the logits.
        words: [G, ceil(V / 32)] int32; bit j of word w is set if token 32 * w + j is allowed.
        checks: checks by masked row of the logits, for rows whose token budget may exclude some of the allowed tokens.
    """

    positions: Tensor
    words: Tensor
    checks: Mapping[int, TokenCheck] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Drawing:
    """The tokens of a step while they are being drawn.

    Attributes:
        tokens: [S] int64 on the device, -1 for a position that fails. None if S is 0.
    """

    positions: SamplingPositions
    tokens: Tensor | None = None
    _copy: HostCopy | None = None  # Copy of the tokens, or of ``scored_tokens`` if logprobs are requested.
    _num_logprobs: Sequence[int] = ()  # wanted at each position, -1 for none; empty if no row wants any
    _redraw: Callable[[list[int]], _Redrawn] | None = None  # replaces tokens after which no end fits
    _allowed: AllowedDrawing | None = None

    def wait(self) -> list[Drawn]:
        """Wait for the tokens of all positions."""
        if self._copy is None:
            return []
        values = self._copy.wait().tolist()
        tokens = [int(each[0]) for each in values] if self._num_logprobs else values
        redrawn = self._redraw(tokens) if self._redraw is not None else None
        if redrawn is not None and redrawn.columns is not None:
            values = redrawn.columns.tolist()
        if not self._num_logprobs:
            drawn = [Drawn(token) for token in tokens]
        else:
            drawn = [_scored(*each) for each in zip(values, self._num_logprobs, strict=True)]
        for position in redrawn.positions if redrawn is not None else ():
            drawn[position] = drawn[position]._replace(is_limited=True)
        for position, allowed in (self._allowed.wait(tokens) if self._allowed is not None else {}).items():
            drawn[position] = drawn[position]._replace(allowed=allowed)
        return drawn


class _Redrawn(NamedTuple):
    """The positions whose tokens were replaced in the list given; new ``_with_logprobs`` if any are wanted."""

    positions: Sequence[int]
    columns: Tensor | None = None


class Sampler:
    """Draws the next tokens of all rows of a step.

    Logits are as wide as the largest vocabulary of a row that draws: ``vocab_size``, or an adapter's own. Logits of
    tokens that a row's vocabulary lacks are -inf.

    Attributes:
        vocab_size: size of the vocabulary of the model.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._device = device
        self._rows = np.zeros(max_num_seqs, _ROW)
        self._table = DrawTable(max_num_seqs, device) if on_triton(device) else None
        self._edits = LogitEdits(max_num_seqs, vocab_size)
        self._names: dict[int, Ints] = {}  # ``logprob_token_ids`` of the rows that have any
        self._allowed_rows: set[int] = set()  # rows that want ``AllowedLogprobs``

    def start(self, starts: Sequence[RowStart]) -> None:
        """Replace the parameters, seed and penalty counts of these rows."""
        for start in starts:
            params = start.params
            options = {name: getattr(params, name) for name in COLUMNS}
            if params.temperature:
                options["temperature"] = max(params.temperature, _MIN_TEMPERATURE)
            if params.top_k >= (start.vocab_size or self.vocab_size):
                options["top_k"] = 0
            self._rows[start.row] = (
                *options.values(),
                start.seed % (1 << 64),
                len(params.logprob_token_ids) or (-1 if params.logprobs is None else params.logprobs),
                params.prompt_logprobs or 0,
            )
            self._names.pop(start.row, None)
            self._allowed_rows.discard(start.row)
            if params.allowed_logprobs:
                self._allowed_rows.add(start.row)
            if params.logprob_token_ids:
                self._names[start.row] = np.asarray(params.logprob_token_ids, np.int64)
            self._edits.start(start)
        if self._table is not None and starts:
            started = np.array([start.row for start in starts])
            self._table.write(started, self._rows[started])

    def num_prompt_logprobs(self, row: int) -> int:
        """Top logprobs wanted at each position of the row's prompt."""
        return int(self._rows["num_prompt_logprobs"][row])

    def takes_best(self, positions: SamplingPositions) -> bool:
        """Return whether, without masks, the largest logit of each position is all that ``draw`` needs.

        This is true if every position is greedy, has unedited logits, and needs no logprobs.
        """
        is_greedy = not (self._rows["temperature"][positions.row] > 0).any()
        return is_greedy and not self._wants_logprobs(positions) and not self._has_edits(positions)

    def is_usual(self, positions: SamplingPositions) -> bool:
        """Return whether no position wants logprobs of tokens that its row names, or of all that its mask allows."""
        rows = set(positions.row.tolist())
        return rows.isdisjoint(self._names) and rows.isdisjoint(self._allowed_rows)

    def num_logprobs(self, positions: SamplingPositions) -> list[int]:
        """Return the top logprobs wanted at each position, -1 for not even the token's; empty if none wants any."""
        return self._rows["num_logprobs"][positions.row].tolist() if self._wants_logprobs(positions) else []

    def allowed_masks(self, positions: SamplingPositions, width: int) -> tuple[Ints, Words] | None:
        """Return masks of the positions whose rows name the tokens that they may draw, as ``LogitEdits`` has them."""
        return self._edits.allowed_masks(positions, width)

    def edits(self, positions: SamplingPositions) -> Edits | None:
        """Return the edits of these positions but ``allowed_masks``; None if there are none."""
        return self._edits.packed(positions) if self._has_edits(positions) else None

    def _wants_logprobs(self, positions: SamplingPositions) -> bool:
        return bool((self._rows["num_logprobs"][positions.row] >= 0).any())

    def _has_edits(self, positions: SamplingPositions) -> bool:
        return self._edits.concern(positions.row, positions.num_generated)

    @property
    def table(self) -> Tensor | None:
        """Parameters and seeds of rows on the device, ``DrawTable.rows``; None where draws are no kernels' of a GPU."""
        return None if self._table is None else self._table.rows

    def sample(
        self,
        logits: Tensor | None,
        rows: Sequence[Row],
        masks: DeviceMasks | None = None,
        forced: Mapping[int, int] | None = None,
    ) -> list[RowResult]:
        """``draw`` and ``collect``."""
        return self.collect(self.draw(logits, sampling_positions(rows, forced or {}), masks))

    def draw(
        self, logits: Tensor | Largest | None, positions: SamplingPositions, masks: DeviceMasks | None = None
    ) -> Drawing:
        """Begin to draw a token at each position. The results of the draw before must have been collected.

        A row fails, without effect on others, if the logits of a position that counts hold NaN or +inf, or if no token
        may be drawn: every token is masked, banned or -inf.

        Args:
            logits: [S, V] float32, which may be overwritten, or their largest if ``takes_best`` is true and there are
                no masks; None if S is 0.
        """
        if logits is None or not len(positions):
            return Drawing(positions)
        if isinstance(logits, Largest):
            tokens = torch.where(_are_finite(logits.value), logits.column, -1)
            return Drawing(positions, tokens, HostCopy(tokens))
        allowed = self._allowed(logits, positions, masks)
        tokens, columns, redraw = self._draw_positions(logits, positions, masks)
        if columns is None:
            return Drawing(positions, tokens, HostCopy(tokens), (), redraw, allowed)
        num_logprobs = self._rows["num_logprobs"][positions.row].tolist()
        return Drawing(positions, tokens, HostCopy(columns), num_logprobs, redraw, allowed)

    def collect(self, drawing: Drawing) -> list[RowResult]:
        """Wait for the drawn tokens, verify the drafts, and count the accepted tokens for the rows' penalties."""
        drawn = drawing.wait()
        if self._allowed_rows:
            drawn = [
                each._replace(allowed=AllowedLogprobs(each.token, b"", b""))
                if each.allowed is None and row in self._allowed_rows
                else each
                for each, row in zip(drawn, drawing.positions.row.tolist(), strict=True)
            ]
        results = accept_drafts(drawing.positions, drawn)
        for row, result in zip(drawing.positions.rows, results, strict=True):
            self._edits.count(row.row, result.tokens)
        return results

    def _allowed(
        self, logits: Tensor, positions: SamplingPositions, masks: DeviceMasks | None
    ) -> AllowedDrawing | None:
        """Begin the logprobs of allowed tokens at masked positions of rows that want them. Raw ``logits`` stay so."""
        if masks is None or not self._allowed_rows:
            return None
        of_positions = positions.row.tolist()
        wanted = [each for each in masks.positions.tolist() if of_positions[each] in self._allowed_rows]
        if not wanted:
            return None
        masked = logits.clone()
        mask_logits(masked, masks.positions, masks.words)
        return AllowedDrawing(masked[self._index(np.array(wanted))], wanted)

    def _draw_positions(
        self, logits: Tensor, positions: SamplingPositions, masks: DeviceMasks | None
    ) -> tuple[Tensor, Tensor | None, Callable[[list[int]], _Redrawn] | None]:
        """Return the token of each position, [S] int64, -1 if it fails; the logprobs or None; and a function or None.

        The logprobs are those of ``_with_logprobs``. The function is called when the host has the tokens. It replaces
        those after which no end of the answer fits in the token budget.
        """
        params = self._rows[positions.row]
        wanted = np.flatnonzero(params["num_logprobs"] >= 0)
        edits = masks is not None or self._has_edits(positions)
        # The largest logit before edits, as an edit may hide a value that is not finite.
        before = largest(logits)[0] if edits else None
        edited = self._edited(logits, positions, masks, keep=bool(len(wanted))) if edits else logits
        lines = None if masks is None or not masks.checks else edited[self._index(np.array(list(masks.checks)))]
        drawn = self._draw_lines(edited, positions)
        if before is not None:
            drawn = torch.where(_are_finite(before), drawn, -1)
        columns = self._with_logprobs(drawn, logits, wanted, positions.row) if len(wanted) else None
        if masks is None or lines is None:
            return drawn, columns, None
        limited = LimitedLines(lines, masks.checks, params, positions.num_generated)

        def redraw(tokens: list[int]) -> _Redrawn:
            changed = limited.redraw(tokens)
            if not changed or columns is None:
                return _Redrawn(changed)
            again = torch.tensor(tokens, dtype=torch.int64, device=self._device)
            return _Redrawn(changed, self._with_logprobs(again, logits, wanted, positions.row).cpu())

        return drawn, columns, redraw

    def _edited(self, logits: Tensor, positions: SamplingPositions, masks: DeviceMasks | None, keep: bool) -> Tensor:
        """Return logits after mask, bias, penalties and bans; ``logits`` themselves stay unchanged if ``keep``."""
        edited = logits
        if masks is not None:
            edited = logits.clone() if keep else logits
            mask_logits(edited, masks.positions, masks.words)
        if self._has_edits(positions):
            edited = edited.clone() if keep and edited is logits else edited
            self._edits.apply(edited, positions)
        return edited

    def _draw_lines(self, logits: Tensor, positions: SamplingPositions) -> Tensor:
        """Draw from each line of edited logits: [S] int64, -1 where the largest is not finite."""
        num_generated = positions.num_generated
        if self._table is not None and has_kernel(logits):
            lines = to_device(np.stack([positions.row, num_generated], 1), self._device)
            return draw_lines(logits, self._table.rows, lines)
        params = self._rows[positions.row]
        if draws_tokens(logits):
            return draw_tokens(logits, self._draw_params(params, num_generated, logits.shape[1]))
        best, tokens = largest(logits)
        self._draw_random(tokens, logits, best, params, num_generated)
        return torch.where(_are_finite(best), tokens, -1)

    def _draw_random(self, tokens: Tensor, logits: Tensor, best: Tensor, params: Params, num_generated: Ints) -> None:
        """Replace the greedy tokens [S] of random positions. With top_k or top_p a draw is by rank, else from all."""
        random, ranked = params["temperature"] > 0, _are_ranked(params)
        for chosen, by_rank in ((random & ~ranked, False), (random & ranked, True)):
            if not chosen.any():
                continue
            index = self._column(np.flatnonzero(chosen)).squeeze(1)
            draws = self._draw_params(params[chosen], num_generated[chosen], logits.shape[1])
            top, some = best[index, None], pad(logits if chosen.all() else logits[index])
            use_min_p = bool(params["min_p"][chosen].any())
            tokens[index] = torch.cat(
                [
                    draw_kept(some[rows], top[rows], draws.rows(rows))
                    if by_rank
                    else draw_any(some[rows], top[rows], draws.rows(rows), use_min_p)
                    for rows in row_slices(some)
                ]
            )

    def _draw_params(self, params: Params, num_generated: Ints, width: int) -> DrawParams:
        """Return the parameters of some positions, with the random numbers of races if one is drawn so."""
        seeds, at = params["seed"], num_generated.astype(np.uint64)
        has_race = ((params["temperature"] > 0) & ~_are_ranked(params)).any()
        noise = to_device(exponentials(seeds, at, num_noise(width)), self._device) if has_race else None
        return DrawParams.of(params, self._column, uniforms(seeds, at), noise)

    def _index(self, values: Ints) -> Tensor:
        return self._column(values).squeeze(1)

    def _column(self, values: npt.NDArray[np.generic]) -> Tensor:
        # A synchronous copy would make the host wait here for the GPU's forward pass.
        return to_device(values[:, None], self._device)

    def _with_logprobs(self, drawn: Tensor, logits: Tensor, wanted: Ints, rows: Ints) -> Tensor:
        """[S, 3 ...] float64: ``drawn`` and the columns of ``logprob_columns``, 0 for positions that want none.

        Columns of a row that names tokens come from ``named_columns``. ``rows`` [S] are the rows of the positions.
        """
        has_names = np.fromiter((row in self._names for row in rows[wanted].tolist()), bool, len(wanted))
        plain, named = wanted[~has_names], wanted[has_names]
        counts = self._rows["num_logprobs"][rows[plain]]
        num_top = min(int(counts.max(initial=0)), logits.shape[1])
        names = self._padded_names(rows[named])
        held = max(num_top, names.shape[1])
        columns = torch.zeros(len(drawn), 2 + 2 * held, dtype=torch.float64, device=self._device)
        for chosen, width in ((plain, num_top), (named, names.shape[1])):
            if not len(chosen):
                continue
            index = self._column(chosen).squeeze(1)
            some = logits if len(chosen) == len(logits) else logits[index]
            tokens = drawn[index].clamp(min=0)
            if chosen is plain:
                found = logprob_columns(some, tokens, width)
            else:
                found = named_columns(some, tokens, to_device(names, self._device))
            columns[index, : 2 + width] = found[:, : 2 + width]
            columns[index, 2 + held : 2 + held + width] = found[:, 2 + width :]
        return scored_tokens(drawn, columns)

    def _padded_names(self, rows: Ints) -> Ints:
        """[n, m] int64, the names of each row, followed by 0 where another row has more."""
        names = [self._names[row] for row in rows.tolist()]
        padded = np.zeros((len(names), max(map(len, names), default=0)), np.int64)
        for line, each in zip(padded, names, strict=True):
            line[: len(each)] = each
        return padded


def scored_tokens(drawn: Tensor, columns: Tensor) -> Tensor:
    """[S, 1 + n] float64: tokens [S] and the ``logprob_columns`` [S, n] of each, as a ``Drawing`` reads them."""
    return torch.cat([drawn.double()[:, None], columns], dim=1)


def _are_ranked(params: Params) -> Bools:
    """[S] bool, the positions whose draws, if random, are by rank."""
    return (params["top_k"] > 0) | (params["top_p"] < 1)


def _are_finite(values: Tensor) -> Tensor:
    """[S] bool, in two ops: the chain that ``torch.isfinite`` launches takes longer than the rest of a draw."""
    return values - values == 0


def _scored(columns: list[float], num_logprobs: int) -> Drawn:
    """Read a row of ``_with_logprobs``."""
    token = int(columns[0])
    is_wanted = num_logprobs >= 0 and token >= 0
    return Drawn(token, to_logprob(token, columns[1:], num_logprobs) if is_wanted else None)
