"""Admission of requests: the queue limits and the key's rate limits, and what a request holds of both until its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...engine.types import Priority
from .api_keys import Key
from .overload import Load, QueueLimits
from .rate_limits import RateLimits, Reservation

if TYPE_CHECKING:
    from ...engine.serving.request import TextRequest


@dataclass(frozen=True, slots=True)
class Demand:
    """What one HTTP request asks for.

    Attributes:
        priority: of its sequences.
        prompts: of each prompt its tokens, the number of its answers, and the most tokens of an answer.
    """

    priority: Priority
    prompts: tuple[tuple[int, int, int], ...]

    @classmethod
    def of(cls, requests: Sequence[TextRequest]) -> Demand:
        """Return the demand of the requests of one HTTP request."""
        prompts = tuple((len(each.tokens), each.n, each.params.max_tokens) for each in requests)
        return cls(requests[0].priority, prompts)

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for tokens, _, _ in self.prompts)

    @property
    def most_tokens(self) -> int:
        """Tokens of the prompts and of the longest answers."""
        return self.prompt_tokens + sum(n * most for _, n, most in self.prompts)


class HeldTicket(Protocol):
    """What a request that was admitted holds until its end; see ``Ticket``."""

    def take(self, sequence: tuple[int, int], num_tokens: int) -> None: ...

    def close(self) -> None: ...


class RequestAdmission:
    """Admits requests to the engine. Belongs to one event loop.

    Attributes:
        queue_limits: of the sequences without a first token.
        limits: rate limits of keys.
    """

    def __init__(self, queue_limits: QueueLimits, limits: RateLimits) -> None:
        self.queue_limits = queue_limits
        self.limits = limits

    def admit(self, key: Key, demand: Demand) -> Ticket:
        """Admit one HTTP request with all of its prompts.

        Raises:
            Rejection: 503 if the server is too busy, 429 if the key or its tenant is over its limit.
        """
        sequences = sum(n for _, n, _ in demand.prompts)
        load = Load(key.tenant, demand.priority, sequences, demand.prompt_tokens)
        self.queue_limits.check(load)
        reservation = self.limits.reserve(key, demand.most_tokens)
        self.queue_limits.join(load)
        return Ticket(self, load, reservation, demand)


class Ticket:
    """Places in the queue that one HTTP request holds until its first tokens, and tokens of its key until its end."""

    def __init__(self, admission: RequestAdmission, load: Load, reservation: Reservation, demand: Demand) -> None:
        self._admission = admission
        self._load = load
        self._reservation = reservation
        # Of n sequences with one prompt, the first computes it.
        self._waiting = {
            (prompt, index): 0 if index else tokens
            for prompt, (tokens, n, _) in enumerate(demand.prompts)
            for index in range(n)
        }
        self._begun = False
        self._num_generated = 0

    def take(self, sequence: tuple[int, int], num_tokens: int) -> None:
        """Count tokens of a sequence (prompt, index), or its end with 0; the first ones give back its place."""
        self._num_generated += num_tokens
        if sequence in self._waiting:
            self._begun = True
            self._leave(sequence, begun=True)

    def close(self) -> None:
        """Give back unused places and tokens. A request without a first token has used no tokens."""
        for sequence in tuple(self._waiting):
            self._leave(sequence, begun=False)
        used = self._load.tokens + self._num_generated if self._begun else 0
        self._admission.limits.settle(self._reservation, used)

    def _leave(self, sequence: tuple[int, int], *, begun: bool) -> None:
        self._admission.queue_limits.leave(self._load, self._waiting.pop(sequence), begun=begun)
