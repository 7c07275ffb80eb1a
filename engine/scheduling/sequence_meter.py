"""Sequence meter: the times, the batch size and the KV pages of each sequence, told once, with its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..engine_stats import EngineStats
from ..sequence.sequence import Sequence
from ..types import SequenceStats


@dataclass(slots=True)
class _Begin:
    """A sequence's first admission, and the engine's counts then; ``first_token`` is None until it is drawn."""

    at: float
    num_steps: int
    num_rows: int
    first_token: float | None = None


class SequenceMeter:
    """Measures sequences with two clock readings and a difference of the engine's counts each: none for a token.

    Args:
        stats: counts of steps and rows.
        page_size: tokens in a page of KV.
        clock: seconds, monotonic, the clock of ``Sequence.arrival``.
    """

    def __init__(self, stats: EngineStats, page_size: int, clock: Callable[[], float]) -> None:
        self._stats = stats
        self._page_size = page_size
        self._clock = clock
        self._begun: dict[int, _Begin] = {}

    def admit(self, sequence: Sequence) -> None:
        """Note the first admission of a sequence, and count its prompt."""
        self._stats.count_prompt(sequence.num_prompt, sequence.num_cached, sequence.num_forked)
        self._begun[sequence.id] = _Begin(self._clock(), self._stats.steps, self._stats.rows)

    def draw_first(self, sequence: Sequence) -> None:
        """Note the first token of a sequence."""
        self._begun[sequence.id].first_token = self._clock()

    def end(self, sequence: Sequence) -> SequenceStats | None:
        """Return what was measured of a sequence that ends; call it while its KV is counted. None if it never began."""
        begin = self._begun.pop(sequence.id, None)
        if begin is None:
            return None
        now = self._clock()
        first = now if begin.first_token is None else begin.first_token
        steps = self._stats.steps - begin.num_steps
        return SequenceStats(
            queued=begin.at - sequence.arrival,
            prefill=first - begin.at,
            decode=now - first,
            preemptions=sequence.num_preempted,
            batch_size=(self._stats.rows - begin.num_rows) / steps if steps else 0.0,
            kv_pages=-(-sequence.num_computed // self._page_size),
        )
