"""Overload protection: queue limits by priority class and tenant, expected wait, 503 and 429 with Retry-After.

    0 ........................................ limit
    |----- batch ------|                               a priority class leaves room for the classes above it
    |----- interactive -----------------|
    |----- realtime -----------------------|

A tenant may have as many sequences waiting as there are places left (Choudhury and Hahne, "Dynamic Queue Length
Thresholds", 1998): a single tenant gets half of the queue, and the next one still finds a place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...engine.types import Priority
from ..errors import Rejection

ROOM = {Priority.REALTIME: 1.0, Priority.INTERACTIVE: 0.9, Priority.BATCH: 0.5}
"""Share of the queue that is open to a priority class."""

MEMORY_SECONDS = 10.0
_LEAST_SECONDS = 0.5  # of observation before a rate means anything
_LEAST_SEQUENCES = 4  # that have left before it does: the first of a shared prompt keeps all others waiting
_BUNCH_SECONDS = 0.1  # between sequences of one bunch


class DrainRate:
    """Rate at which sequences and prompt tokens leave the queue, while it is not empty.

    Exponential average over ``MEMORY_SECONDS`` in which sequences waited. Sequences that began together tend to end
    together, so places come free in bunches, and new requests arrive just after a bunch. The pause after a bunch is
    therefore counted with it, at the length of the longest recent pause, at first ``_LEAST_SECONDS``.

    Time with a single waiting sequence is not counted: it waits for its own prompt or for a warm-up, and does not show
    how many could have begun.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pause = 0.0  # since the last sequence left
        self._longest_pause = _LEAST_SECONDS
        self._sequences = 0.0
        self._tokens = 0.0
        self._seen = 0  # sequences that have ever left

    def wait(self, seconds: float) -> None:
        """Count time with several sequences in the queue."""
        self._fade(seconds)
        self._seconds += seconds
        self._pause += seconds
        self._longest_pause = max(self._longest_pause, self._pause)

    def wait_alone(self, seconds: float) -> None:
        """Count time with one sequence in the queue."""
        self._fade(seconds)
        self._pause = 0.0

    def leave(self, num_tokens: int) -> None:
        """Count a sequence that has its first token."""
        self._pause = 0.0
        self._sequences += 1
        self._tokens += num_tokens
        self._seen += 1

    def seconds_for(self, sequences: int, num_tokens: int) -> float | None:
        """Return the seconds until so many sequences and tokens have left; None while the rate is unknown."""
        if self._seconds < _LEAST_SECONDS or self._seen < _LEAST_SEQUENCES or not self._sequences:
            return None
        seconds = self._seconds + self._longest_pause - self._pause
        by_count = sequences * seconds / self._sequences
        by_tokens = num_tokens * seconds / self._tokens if self._tokens else 0.0
        return max(by_count, by_tokens)

    def _fade(self, seconds: float) -> None:
        keep = math.exp(-seconds / MEMORY_SECONDS)
        self._seconds *= keep
        self._longest_pause *= keep
        self._sequences *= keep
        self._tokens *= keep


@dataclass(frozen=True, slots=True)
class Load:
    """Sequences and prompt tokens that one HTTP request adds to the queue."""

    tenant: str
    priority: Priority
    sequences: int
    tokens: int


class QueueLimits:
    """Limits on the sequences without a first token. Belongs to one event loop.

    Args:
        max_sequences: most that may wait.
        max_tokens: most tokens in their prompts.
        max_seconds: longest expected wait of a request, batch class aside.
        clock: seconds, monotonic.
    """

    def __init__(
        self, max_sequences: int, max_tokens: int, max_seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_sequences = max_sequences
        self._max_tokens = max_tokens
        self._max_seconds = max_seconds
        self._clock = clock
        self._rate = DrainRate()
        self._at = clock()
        self._left_at = -math.inf  # time of the last one counted in the rate
        self._waiting: dict[tuple[str, Priority], list[int]] = {}  # sequences and tokens

    @property
    def sequences(self) -> int:
        return sum(count for count, _ in self._waiting.values())

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self._waiting.values())

    def waiting(self, priority: Priority) -> int:
        return sum(count for (_, each), (count, _) in self._waiting.items() if each is priority)

    def expected_wait(self, tenant: str, priority: Priority) -> float:
        """Return the seconds until a tenant's sequences of this class and above have begun; 0 while unknown.

        Tenants take turns, so the wait is for the tenant's own load times the number of tenants, at most for all.
        """
        self._pass_time()
        ahead = {group: load for group, load in self._waiting.items() if group[1] <= priority}
        own = [load for group, load in ahead.items() if group[0] == tenant]
        tenants = len({group[0] for group in ahead})
        sequences, tokens = (
            min(tenants * sum(load[i] for load in own), sum(load[i] for load in ahead.values())) for i in (0, 1)
        )
        return self._rate.seconds_for(sequences, tokens) or 0.0

    def drain_seconds(self, priority: Priority) -> float:
        """Return the seconds until all sequences of this class and above have begun; 0 while unknown."""
        self._pass_time()
        ahead = [load for group, load in self._waiting.items() if group[1] <= priority]
        sequences, tokens = (sum(load[i] for load in ahead) for i in (0, 1))
        return self._rate.seconds_for(sequences, tokens) or 0.0

    def check(self, load: Load) -> None:
        """Check that a request may join the queue. It always may if the queue is empty.

        Raises:
            Rejection: 503 if the queue is full or too slow, 429 if the tenant has too much in it; with Retry-After.
        """
        if not self.sequences:
            return
        room = ROOM[load.priority]
        for reason, what, waiting, more, limit in (
            ("max_queued_requests", "requests", self.sequences, load.sequences, self._max_sequences),
            ("max_queued_tokens", "prompt tokens", self.tokens, load.tokens, self._max_tokens),
        ):
            if waiting + more > limit * room:
                text = f"The server is busy: {waiting} {what} are waiting, of {limit} that may."
                raise Rejection(503, text, reason, self._until_room())
        self._check_wait(load)
        self._check_share(load)

    def join(self, load: Load) -> None:
        self._change(load, load.sequences, load.tokens)

    def leave(self, load: Load, num_tokens: int, *, begun: bool) -> None:
        """Remove a sequence that has its first token, or has ended without one.

        Args:
            load: of the request, as it joined.
            num_tokens: prompt tokens of this sequence in ``load``.
            begun: it has a token.
        """
        others = self.sequences > 1
        self._change(load, -1, -num_tokens)
        if begun and (others or self._at - self._left_at < _BUNCH_SECONDS):
            self._rate.leave(num_tokens)
            self._left_at = self._at

    def _check_wait(self, load: Load) -> None:
        wait = self.expected_wait(load.tenant, load.priority)
        if load.priority is Priority.BATCH or wait <= self._max_seconds:
            return
        text = f"The server is busy: a new request would wait about {wait:.1f} seconds, of {self._max_seconds:g} that"
        raise Rejection(503, f"{text} are allowed.", "queue_slow", wait - self._max_seconds)

    def _check_share(self, load: Load) -> None:
        own = sum(count for (tenant, _), (count, _) in self._waiting.items() if tenant == load.tenant)
        left = self._max_sequences - self.sequences
        if load.tenant and own + load.sequences > left:
            text = f"Too many requests with keys of yours are waiting: {own}, where {left} places are left."
            raise Rejection(429, text, "tenant_share", self._until_room())

    def _until_room(self) -> float:
        """Return the seconds until a tenth of the queue has begun."""
        self._pass_time()
        return (self._rate.seconds_for(self.sequences, self.tokens) or 0.0) / 10

    def _change(self, load: Load, sequences: int, tokens: int) -> None:
        self._pass_time()
        group = load.tenant, load.priority
        waiting = self._waiting.setdefault(group, [0, 0])
        waiting[0] += sequences
        waiting[1] += tokens
        if not waiting[0]:
            del self._waiting[group]

    def _pass_time(self) -> None:
        now = self._clock()
        if self.sequences > 1:
            self._rate.wait(now - self._at)
        elif self.sequences:
            self._rate.wait_alone(now - self._at)
        self._at = now
