"""Draft verification: the sampling positions of a step, and the drafts that equal the tokens drawn there.

At every sampling position a token is drawn as if the drafts before it were generated tokens: from the logits, mask,
penalties and random number of that position. As long as the drawn tokens equal the drafts, decoding without drafts
would have drawn the same tokens. The first drawn token that differs from its draft is kept too, and the tokens after it
are discarded. So drafts have an effect on the time at which tokens are drawn, but not on the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..batch import Row, RowResult
from ..types import AllowedLogprobs, Logprob

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingPositions:
    """The S sampling positions of a step that need logits, in order.

    Attributes:
        rows: the rows that draw.
        forced: tokens that masks force, by index among all sampling positions of ``rows``; these need no logits.
        row: [S] int64, the row of each position.
        num_generated: [S] int64, tokens generated before each position if the drafts before it are accepted.
        drafts: for each position, the drafts of its row before it.
    """

    rows: Sequence[Row]
    forced: Mapping[int, int]
    row: Ints
    num_generated: Ints
    drafts: Sequence[Sequence[int]]

    def __len__(self) -> int:
        return len(self.drafts)


class Drawn(NamedTuple):
    """The token drawn at a position, -1 if no token could be drawn.

    Attributes:
        logprob: logprob of the token, if it was requested.
        is_forced: whether a mask forced the token.
        is_limited: whether another token would have been drawn without a token budget.
        allowed: logprobs of the allowed tokens at the position, if they were requested.
    """

    token: int
    logprob: Logprob | None = None
    is_forced: bool = False
    is_limited: bool = False
    allowed: AllowedLogprobs | None = None


def sampling_positions(rows: Sequence[Row], forced: Mapping[int, int]) -> SamplingPositions:
    """Return the sampling positions of rows that draw, without the forced ones."""
    found = [(row, ahead) for row in rows for ahead in range(row.num_positions)]
    if forced:
        found = [each for index, each in enumerate(found) if index not in forced]
    return SamplingPositions(
        rows,
        forced,
        np.fromiter((row.row for row, _ in found), np.int64, len(found)),
        np.fromiter((row.num_generated + ahead for row, ahead in found), np.int64, len(found)),
        [row.drafts[:ahead] if ahead else () for row, ahead in found],
    )


def accept_drafts(positions: SamplingPositions, drawn: Sequence[Drawn]) -> list[RowResult]:
    """Return the accepted tokens of each row; ``drawn`` are the tokens of the positions, without the forced ones."""
    rows, forced = positions.rows, positions.forced
    # The common case is one position for each row.
    if len(drawn) == len(rows) and not forced:
        return [_single(each) for each in drawn]
    rest = iter(drawn)
    results, first = [], 0
    for row in rows:
        indices = range(first, first + row.num_positions)
        of_row = [Drawn(forced[index], None, True) if index in forced else next(rest) for index in indices]
        results.append(_accept_row(row, of_row))
        first = indices.stop
    return results


def _single(drawn: Drawn) -> RowResult:
    """The result of a row without drafts."""
    if drawn.token < 0:
        return RowResult(failed=True)
    logprobs = () if drawn.logprob is None else (drawn.logprob,)
    allowed = () if drawn.allowed is None else (drawn.allowed,)
    return RowResult((drawn.token,), logprobs, is_limited=drawn.is_limited, allowed=allowed)


def _accept_row(row: Row, drawn: list[Drawn]) -> RowResult:
    """Accept the longest run of drafts that equal the drawn tokens, and the token drawn after it."""
    count = 0
    for each, draft in zip(drawn, row.drafts, strict=False):
        if each.token != draft:
            break
        count += 1
    failed = drawn[count].token < 0
    accepted = drawn[: count if failed else count + 1]
    return RowResult(
        tuple(each.token for each in accepted),
        tuple(each.logprob for each in accepted if each.logprob is not None),
        num_forced=sum(each.is_forced for each in accepted),
        failed=failed,
        is_limited=any(each.is_limited for each in accepted),
        allowed=tuple(each.allowed for each in accepted if each.allowed is not None),
    )
