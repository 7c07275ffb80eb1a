"""Which drafts stand: the places of a step at which tokens are drawn, and what came of them row by row.

A token is drawn at every place as if the drafts before it were the sequence's own tokens: from its own logits, under
its own mask and penalties, with the random number of its own position. Where the drawn tokens are the drafts, these
are the very draws that would have been made one step after the other; the first that differs still counts, and what
was drawn behind it is forgotten. So drafts change when a token is drawn, never which.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..batch import Row, RowResult
from ..types import Logprob

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingPositions:
    """Places at which tokens are drawn from logits: S of them.

    Attributes:
        row: [S] int64, the row of each.
        num_generated: [S] int64, tokens generated there if the drafts before it stand.
        ahead: the drafts of its row before each.
    """

    row: Ints
    num_generated: Ints
    ahead: Sequence[Sequence[int]]

    def __len__(self) -> int:
        """S."""
        return len(self.ahead)


class Drawn(NamedTuple):
    """What came of a place: the token, -1 if none could be drawn; its logprob if wanted; whether there was a choice."""

    token: int
    logprob: Logprob | None = None
    is_forced: bool = False


def sampling_positions(rows: Sequence[Row], forced: Mapping[int, int]) -> SamplingPositions:
    """The lines of rows in order, but for those whose token is ``forced`` (by their number among all)."""
    places = [(row, ahead) for row in rows for ahead in range(row.num_positions)]
    if forced:
        places = [place for line, place in enumerate(places) if line not in forced]
    return SamplingPositions(
        np.fromiter((row.row for row, _ in places), np.int64, len(places)),
        np.fromiter((row.num_generated + ahead for row, ahead in places), np.int64, len(places)),
        [row.drafts[:ahead] if ahead else () for row, ahead in places],
    )


def accept_drafts(rows: Sequence[Row], drawn: Sequence[Drawn], forced: Mapping[int, int]) -> list[RowResult]:
    """What each row brought.

    Args:
        rows: rows that draw.
        drawn: what came of ``lines_of(rows, forced)``.
        forced: the tokens of the other lines.
    """
    if len(drawn) == len(rows) and not forced:  # one line each, the common case
        return [_alone(place) for place in drawn]
    rest = iter(drawn)
    results, line = [], 0
    for row in rows:
        numbers = range(line, line + row.num_positions)
        mine = [Drawn(forced[number], None, True) if number in forced else next(rest) for number in numbers]
        results.append(_accept_row(row, mine))
        line = numbers.stop
    return results


def _alone(place: Drawn) -> RowResult:
    """What a row without drafts brought, which was drawn."""
    if place.token < 0:
        return RowResult(failed=True)
    return RowResult((place.token,), () if place.logprob is None else (place.logprob,))


def _accept_row(row: Row, drawn: list[Drawn]) -> RowResult:
    """The longest run of drafts that were drawn, and the token behind it."""
    count = 0
    for place, draft in zip(drawn, row.drafts, strict=False):
        if place.token != draft:
            break
        count += 1
    failed = drawn[count].token < 0
    kept = drawn[: count if failed else count + 1]
    return RowResult(
        tuple(place.token for place in kept),
        tuple(place.logprob for place in kept if place.logprob is not None),
        num_forced=sum(place.is_forced for place in kept),
        failed=failed,
    )
