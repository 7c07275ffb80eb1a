"""Whether a request may begin: the queue has room, its key has tokens. And what it holds of both until its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from .caller import Caller
from .overload import Load, QueueLimits
from .rate_limits import RateLimits, Reservation

if TYPE_CHECKING:
    from ...engine.serving.output_processor import TextDelta
    from ...engine.serving.request import TextRequest


class RequestAdmission:
    """Stands before the engine. Belongs to one event loop.

    Attributes:
        backlog: what waits.
        limits: what keys may use.
    """

    def __init__(self, queue_limits: QueueLimits, limits: RateLimits) -> None:
        self.queue_limits = queue_limits
        self.limits = limits

    def admit(self, caller: Caller, requests: Sequence[TextRequest]) -> Ticket:
        """Let the requests of one HTTP request in, all or none.

        Raises:
            Rejection: 503 if the server is too busy, 429 if the key or its tenant asks for too much.
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
    """What the requests of one HTTP request hold: places in the queue until their first tokens, tokens of the key."""

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
        self._generated = 0

    def note(self, prompt: int, deltas: Sequence[TextDelta]) -> None:
        """Take what just came for the prompt of this number."""
        for delta in deltas:
            self._generated += len(delta.tokens)
            if delta.tokens or delta.finish is not None:
                self._leave((prompt, delta.index), begun=True)

    def close(self) -> None:
        """Give back what was not used. A request that never got a token has used nothing."""
        for place in tuple(self._waiting):
            self._leave(place, begun=False)
        used = self._load.tokens + self._generated if self._begun else 0
        self._admission.limits.settle(self._reservation, used)

    def _leave(self, place: tuple[int, int], *, begun: bool) -> None:
        tokens = self._waiting.pop(place, None)
        if tokens is not None:
            self._begun = self._begun or begun
            self._admission.queue_limits.leave(self._load, tokens, begun=begun)
