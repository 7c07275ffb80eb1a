"""Admission of requests: the queue limits and the key's rate limits, and what a request holds of both until its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .caller import Caller
from .overload import Load, QueueLimits
from .rate_limits import RateLimits, Reservation

if TYPE_CHECKING:
    from ...engine.serving.request import TextRequest


class RequestAdmission:
    """Admits requests to the engine. Belongs to one event loop.

    Attributes:
        queue_limits: of the sequences without a first token.
        limits: rate limits of keys.
    """

    def __init__(self, queue_limits: QueueLimits, limits: RateLimits) -> None:
        self.queue_limits = queue_limits
        self.limits = limits

    def admit(self, caller: Caller, requests: Sequence[TextRequest]) -> Ticket:
        """Admit the requests of one HTTP request, all or none.

        Raises:
            Rejection: 503 if the server is too busy, 429 if the key or its tenant is over its limit.
        """
        first = requests[0]
        load = Load(
            caller.key.tenant,
            first.priority,
            sum(request.n for request in requests),
            sum(len(request.tokens) for request in requests),
        )
        self.queue_limits.check(load)
        most = load.tokens + sum(request.n * request.params.max_tokens for request in requests)
        reservation = self.limits.reserve(caller.key, most)
        self.queue_limits.join(load)
        return Ticket(self, load, reservation, requests)


class Ticket:
    """Places in the queue that one HTTP request holds until its first tokens, and tokens of its key until its end."""

    def __init__(
        self, admission: RequestAdmission, load: Load, reservation: Reservation, requests: Sequence[TextRequest]
    ) -> None:
        self._admission = admission
        self._load = load
        self._reservation = reservation
        # Of n sequences with one prompt, the first computes it.
        self._waiting = {
            (prompt, index): 0 if index else len(request.tokens)
            for prompt, request in enumerate(requests)
            for index in range(request.n)
        }
        self._begun = False

    def begin(self, sequence: tuple[int, int]) -> None:
        """Give back the place of a sequence (prompt, index) at its first token or end; later calls do nothing."""
        if sequence in self._waiting:
            self._begun = True
            self._leave(sequence, begun=True)

    def close(self, num_generated: int) -> None:
        """Give back unused places and tokens. A request without a first token has used no tokens."""
        for sequence in tuple(self._waiting):
            self._leave(sequence, begun=False)
        used = self._load.tokens + num_generated if self._begun else 0
        self._admission.limits.settle(self._reservation, used)

    def _leave(self, sequence: tuple[int, int], *, begun: bool) -> None:
        self._admission.queue_limits.leave(self._load, self._waiting.pop(sequence), begun=begun)
