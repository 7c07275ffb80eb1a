"""The times and counts of one HTTP request's sequences, from its admission to the end of the last one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .metrics import Metrics
from .token_usage import TokenCounts, UsageCount

if TYPE_CHECKING:
    from ...engine.serving.output_processor import Finish, TextDelta
    from ...engine.serving.request import TextRequest


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """How a request went.

    Attributes:
        started: when it was admitted, in seconds since 1970.
        seconds: how long it took.
        first_token_seconds: until its first token; None if none came.
        tokens: what it used. Of a sequence that the client did not wait for, the tokens that came.
        finished: how its sequences ended: reason -> how many.
    """

    started: float
    seconds: float
    first_token_seconds: float | None
    tokens: TokenCounts
    finished: dict[str, int]

    def facts(self) -> dict[str, Any]:
        """For the log."""
        return {
            "first_token_seconds": None if self.first_token_seconds is None else round(self.first_token_seconds, 6),
            "completion_tokens": self.tokens.completion,
            "cached_tokens": self.tokens.cached,
            "finished": self.finished,
        }


class RequestTimer:
    """Made when the requests of one HTTP request have been admitted.

    Args:
        metrics: where the observations go.
        requests: those, by the number of their prompt.
        drop_completion: generated tokens were not asked for, and do not count.
    """

    def __init__(self, metrics: Metrics, requests: Sequence[TextRequest], *, drop_completion: bool = False) -> None:
        self._metrics = metrics
        self._requests = requests
        self._started = time.time()
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last: dict[tuple[int, int], float] = {}
        self._open = {
            (prompt, index): 0 for prompt, request in enumerate(requests) for index in range(request.n)
        }  # tokens of the sequences that have not ended
        self._ends: dict[str, int] = {}
        self._usage = UsageCount(drop_completion=drop_completion)

    def note(self, prompt: int, deltas: Sequence[TextDelta]) -> None:
        """Take what just came for the prompt of this number."""
        now = time.perf_counter() - self._start
        for delta in deltas:
            sequence = prompt, delta.index
            if delta.tokens:
                self._note_tokens(sequence, len(delta.tokens), now)
            if delta.finish is not None:
                self._note_finish(sequence, delta.finish, now)

    def _note_tokens(self, sequence: tuple[int, int], count: int, now: float) -> None:
        last = self._last.get(sequence)
        if last is None:
            self._metrics.observe_first(now)
            self._first = self._first or now
        else:
            self._metrics.observe_between(now - last)
        self._last[sequence] = now
        self._open[sequence] += count

    def _note_finish(self, sequence: tuple[int, int], finish: Finish, now: float) -> None:
        self._metrics.end_to_end.observe(now)
        self._metrics.generated_tokens.observe(finish.usage.completion)
        self._usage.add(sequence[0], finish.usage)
        del self._open[sequence]
        self._count_end(finish.reason)

    def _count_end(self, reason: str) -> None:
        self._metrics.count_end(reason)
        self._ends[str(reason)] = self._ends.get(str(reason), 0) + 1

    def end(self, reason: str) -> RequestEnd:
        """Count the sequences that did not come to their own end."""
        for (prompt, _), num_tokens in self._open.items():
            self._count_end(reason)
            if num_tokens:
                self._usage.add_broken_off(prompt, len(self._requests[prompt].tokens), num_tokens)
        self._open.clear()
        seconds = time.perf_counter() - self._start
        return RequestEnd(self._started, seconds, self._first, self._usage.counts(), self._ends)
