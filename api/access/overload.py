"""What waits for its first token, and whether more may join it: limits, room for others, and the expected wait.

    0 ........................................ limit
    |----- batch ------|                               a band leaves room for those before it
    |----- interactive -----------------|
    |----- realtime -----------------------|

A tenant may have as many sequences waiting as there are places left (Choudhury and Hahne, "Dynamic Queue Length
Thresholds", 1998): alone half of the queue, and whoever comes after it still finds a place.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...engine.types import Priority
from ..errors import Rejection

ROOM = {Priority.REALTIME: 1.0, Priority.INTERACTIVE: 0.9, Priority.BATCH: 0.5}
"""Share of the queue that is open to a band."""

MEMORY_SECONDS = 10.0
_LEAST_SECONDS = 0.5  # of observation before a rate means anything
_BUNCH_SECONDS = 0.1  # between those that began together


class DrainRate:
    """How many sequences and prompt tokens leave the queue in a second, while there is something in it.

    Averages over the last ``MEMORY_SECONDS`` in which something waited; earlier ones fade out. Sequences that began
    together tend to end together, so places come free in bunches, and the moment just after one is when others join.
    A bunch is counted when it has come, so the pause after it is too: as long as the longest one lately, from its
    beginning on. Before the first pause is over, ``_LEAST_SECONDS`` stand for it.

    One that waits alone waits for its own prompt, or for a server that warms up: how many could have begun with it is
    not seen, so such time is not counted.
    """

    def __init__(self) -> None:
        self._seconds = 0.0
        self._pause = 0.0  # since something left
        self._longest_pause = _LEAST_SECONDS
        self._sequences = 0.0
        self._tokens = 0.0

    def wait(self, seconds: float) -> None:
        """So much time has passed with several in the queue."""
        self._fade(seconds)
        self._seconds += seconds
        self._pause += seconds
        self._longest_pause = max(self._longest_pause, self._pause)

    def wait_alone(self, seconds: float) -> None:
        """So much time has passed with one in the queue."""
        self._fade(seconds)
        self._pause = 0.0

    def leave(self, num_tokens: int) -> None:
        """A sequence has its first token."""
        self._pause = 0.0
        self._sequences += 1
        self._tokens += num_tokens

    def seconds_for(self, sequences: int, num_tokens: int) -> float | None:
        """Until so much has left the queue, whichever of both takes longer; None while nothing is known."""
        if self._seconds < _LEAST_SECONDS or not self._sequences:
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
    """What one HTTP request adds to the queue: sequences, and tokens of their prompts."""

    tenant: str
    priority: Priority
    sequences: int
    tokens: int


class QueueLimits:
    """The sequences that have no token yet. Belongs to one event loop.

    Args:
        max_sequences: most that may wait.
        max_tokens: most tokens in their prompts.
        max_seconds: longest that a tenant's may be expected to wait, if they are not of the last band.
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
        self._left_at = -math.inf  # when one last left that counts
        self._waiting: dict[tuple[str, Priority], list[int]] = {}  # sequences and tokens

    @property
    def sequences(self) -> int:
        """How many wait."""
        return sum(count for count, _ in self._waiting.values())

    @property
    def tokens(self) -> int:
        """Tokens of their prompts."""
        return sum(tokens for _, tokens in self._waiting.values())

    def waiting(self, priority: Priority) -> int:
        """How many wait in a band."""
        return sum(count for (_, band), (count, _) in self._waiting.items() if band is priority)

    def expected_wait(self, tenant: str, priority: Priority) -> float:
        """Seconds until all of a tenant's in this band and those before it have begun; 0 while nothing is known.

        Tenants take turns, so it waits for its own, times the number of tenants, and never for more than there is.
        """
        self._pass_time()
        ahead = {who: load for who, load in self._waiting.items() if who[1] <= priority}
        own = [load for who, load in ahead.items() if who[0] == tenant]
        tenants = len({who[0] for who in ahead})
        sequences, tokens = (
            min(tenants * sum(load[i] for load in own), sum(load[i] for load in ahead.values())) for i in (0, 1)
        )
        return self._rate.seconds_for(sequences, tokens) or 0.0

    def drain_seconds(self, priority: Priority) -> float:
        """Seconds until all that waits in this band and those before it has begun; 0 while nothing is known."""
        self._pass_time()
        ahead = [load for who, load in self._waiting.items() if who[1] <= priority]
        sequences, tokens = (sum(load[i] for load in ahead) for i in (0, 1))
        return self._rate.seconds_for(sequences, tokens) or 0.0

    def check(self, load: Load) -> None:
        """Whether a request may join. One that finds the queue empty always may.

        Raises:
            Rejection: 503 if the queue is full or too slow for it, 429 if its tenant has too much in it; both say
                when to come back.
        """
        if not self.sequences:
            return
        room = ROOM[load.priority]
        for what, waiting, more, limit in (
            ("requests", self.sequences, load.sequences, self._max_sequences),
            ("prompt tokens", self.tokens, load.tokens, self._max_tokens),
        ):
            if waiting + more > limit * room:
                text = f"The server is busy: {waiting} {what} are waiting, of {limit} that may."
                raise Rejection(503, text, "queue_full", self._until_room())
        self._check_wait(load)
        self._check_share(load)

    def join(self, load: Load) -> None:
        """A request waits."""
        self._change(load, load.sequences, load.tokens)

    def leave(self, load: Load, num_tokens: int, *, begun: bool) -> None:
        """A sequence of a request no longer waits: it has its first token, or has ended without one.

        Args:
            load: of the request, as it joined.
            num_tokens: of its tokens, those of this sequence's prompt.
            begun: whether the engine has taken it.
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
        if load.tenant and own and own + load.sequences > left:
            text = f"Too many requests with keys of yours are waiting: {own}, where {left} places are left."
            raise Rejection(429, text, "tenant_share", self._until_room())

    def _until_room(self) -> float:
        """Seconds until a tenth of what waits has begun."""
        self._pass_time()
        return (self._rate.seconds_for(self.sequences, self.tokens) or 0.0) / 10

    def _change(self, load: Load, sequences: int, tokens: int) -> None:
        self._pass_time()
        who = (load.tenant, load.priority)
        waiting = self._waiting.setdefault(who, [0, 0])
        waiting[0] += sequences
        waiting[1] += tokens
        if not waiting[0]:
            del self._waiting[who]

    def _pass_time(self) -> None:
        now = self._clock()
        if self.sequences > 1:
            self._rate.wait(now - self._at)
        elif self.sequences:
            self._rate.wait_alone(now - self._at)
        self._at = now
