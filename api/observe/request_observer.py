"""Request observer: measures latencies, usage, ends and queue places of one HTTP request from its deltas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..access.request_admission import Ticket
from .metrics import Metrics
from .token_usage import TokenCounts, UsageCount

if TYPE_CHECKING:
    from ...engine.serving.output_processor import Finish, TextDelta
    from ...engine.serving.request import TextRequest
    from ...engine.types import SequenceStats


@dataclass(frozen=True, slots=True)
class RequestEnd:
    """Times and counts of a request that has ended.

    Attributes:
        started: time of admission, in seconds since 1970.
        seconds: seconds from admission to end.
        first_token_seconds: seconds from admission to the first token; None if there was no token.
        tokens: token counts. For a sequence that the client did not read to its end, the delivered tokens are counted.
        finished: number of sequences by finish reason.
        measured: the engine's measurements of the sequences that ended by themselves, combined by ``together``; None if
            no sequence did.
        tokens_per_second: tokens per second of these sequences together, after the first token of each sequence; None
            without a second token.
    """

    started: float
    seconds: float
    first_token_seconds: float | None
    tokens: TokenCounts
    finished: dict[str, int]
    measured: SequenceStats | None = None
    tokens_per_second: float | None = None


class RequestObserver:
    """Measures the requests of one HTTP request from their admission to their end. It must get each delta once.

    Args:
        metrics: metrics for latencies, lengths and ends.
        requests: the admitted requests, one for each prompt.
        ticket: holds the requests' places in the queue, and their tokens within the limit of the API key.
        usage: sum of the requests' tokens; only this class writes it.
    """

    def __init__(self, metrics: Metrics, requests: Sequence[TextRequest], ticket: Ticket, usage: UsageCount) -> None:
        self._metrics = metrics
        self._requests = requests
        self._ticket = ticket
        self._usage = usage
        self._started = time.time()
        self._start = time.perf_counter()
        self._first: float | None = None
        self._last: dict[tuple[int, int], float] = {}
        self._running = {
            (prompt, index): 0 for prompt, request in enumerate(requests) for index in range(request.n)
        }  # Numbers of tokens of the sequences that have not ended.
        self._ends: dict[str, int] = {}
        # Lengths of the answers that have ended, by prompt.
        self._lengths: dict[int, list[int]] = {}
        self._measured: list[SequenceStats] = []
        self._num_later = 0  # Number of tokens after the first ones, of the sequences in `_measured`.
        for request in requests:
            metrics.observe_prompt(len(request.tokens), request.n, request.params.max_tokens)

    @property
    def is_complete(self) -> bool:
        """Whether all sequences have ended by themselves."""
        return not self._running

    def observe(self, deltas: Sequence[TextDelta]) -> None:
        """Count deltas that arrived together."""
        now = time.perf_counter() - self._start
        for delta in deltas:
            sequence = delta.prompt, delta.index
            if delta.tokens:
                self._ticket.take(sequence, len(delta.tokens))
                self._count_tokens(sequence, len(delta.tokens), now)
            if delta.finish is not None:
                self._ticket.take(sequence, 0)
                self._count_finish(sequence, delta.finish, now)

    def end(self, reason: str) -> RequestEnd:
        """Count the sequences that did not end by themselves, and release the ticket."""
        for (prompt, _), num_tokens in self._running.items():
            self._count_end(reason)
            if num_tokens:
                self._usage.add_aborted(prompt, len(self._requests[prompt].tokens), num_tokens)
        self._running.clear()
        self._ticket.close()
        seconds = time.perf_counter() - self._start
        measured = together(self._measured)
        rate = self._num_later / measured.decode if measured and measured.decode and self._num_later else None
        return RequestEnd(self._started, seconds, self._first, self._usage.counts(), self._ends, measured, rate)

    def _count_tokens(self, sequence: tuple[int, int], count: int, now: float) -> None:
        last = self._last.get(sequence)
        if last is None:
            self._metrics.observe_first(now)
            self._first = self._first or now
        elif now > last:  # Tokens that arrive together may be in several deltas.
            self._metrics.observe_between(now - last)
        self._last[sequence] = now
        self._running[sequence] += count

    def _count_finish(self, sequence: tuple[int, int], finish: Finish, now: float) -> None:
        usage, stats = finish.usage, finish.stats
        self._metrics.observe_end(now, usage, stats)
        lengths = self._lengths.setdefault(sequence[0], [])
        lengths.append(usage.completion)
        if len(lengths) == self._requests[sequence[0]].n:
            self._metrics.observe_longest(max(lengths))
        if stats is not None:
            self._measured.append(stats)
            self._num_later += max(0, usage.completion - 1)
        self._metrics.count_reasoning(usage.reasoning)
        self._usage.add(sequence[0], usage)
        del self._running[sequence]
        self._count_end(finish.reason)

    def _count_end(self, reason: str) -> None:
        self._metrics.count_end(reason)
        self._ends[str(reason)] = self._ends.get(str(reason), 0) + 1


def together(measured: Sequence[SequenceStats]) -> SequenceStats | None:
    """Combine the measurements of a request's sequences: the longest times, the largest batch, and all pages."""
    if len(measured) < 2:
        return measured[0] if measured else None
    return replace(
        measured[0],
        queued=max(each.queued for each in measured),
        prefill=max(each.prefill for each in measured),
        decode=max(each.decode for each in measured),
        preemptions=sum(each.preemptions for each in measured),
        batch_size=max(each.batch_size for each in measured),
        kv_pages=sum(each.kv_pages for each in measured),
    )
