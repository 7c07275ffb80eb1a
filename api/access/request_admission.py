"""Request admission: applies queue limits and rate limits, and holds each request's share of both until its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ...engine.types import Priority
from .api_keys import Key
from .known_prefixes import KnownPrefixes, marks_of
from .overload import Answer, Load, QueueLimits
from .rate_limits import RateLimits, Reservation
from .wait_estimate import OUTPUT_WEIGHT, Work, work_of

if TYPE_CHECKING:
    from ...engine.serving.request import TextRequest


@dataclass(frozen=True, slots=True)
class Demand:
    """The resources that one HTTP request needs.

    Attributes:
        priority: the priority class of the request's sequences.
        prompts: for each prompt, its tokens, the number of its answers, and the largest number of tokens of an answer.
        marks: marks of each prompt, from ``marks_of``; empty if nothing is known about the prompts.
        may_be_deferred: whether the sequences have a grammar or an adapter.
        is_strict: whether to refuse the request if its first token cannot be generated in time.
    """

    priority: Priority
    prompts: tuple[tuple[int, int, int], ...]
    marks: tuple[tuple[int, ...], ...] = ()
    may_be_deferred: bool = False
    is_strict: bool = False

    @classmethod
    def of(cls, requests: Sequence[TextRequest], *, is_strict: bool = False) -> Demand:
        """Return the demand of the requests of one HTTP request."""
        prompts = tuple((len(each.tokens), each.n, each.params.max_tokens) for each in requests)
        marks = tuple(marks_of(each.tokens) for each in requests)
        deferred = any(each.grammar or each.reasoning or each.adapter for each in requests)
        return cls(requests[0].priority, prompts, marks, deferred, is_strict)

    @property
    def prompt_tokens(self) -> int:
        return sum(tokens for tokens, _, _ in self.prompts)

    @property
    def most_tokens(self) -> int:
        """Number of tokens of the prompts and of the longest possible answers."""
        return self.prompt_tokens + sum(n * most for _, n, most in self.prompts)


class Ticket(Protocol):
    """Interface of the resources that an admitted request holds until its end, see ``QueueTicket``."""

    def take(self, sequence: tuple[int, int], num_tokens: int) -> None: ...

    def close(self) -> None: ...


class RequestAdmission:
    """Admits requests to the engine. Belongs to one event loop.

    Attributes:
        queue_limits: limits on the sequences that wait for their first token.
        limits: rate limits of the API keys.
    """

    def __init__(self, queue_limits: QueueLimits, limits: RateLimits) -> None:
        self.queue_limits = queue_limits
        self.limits = limits
        self._known = KnownPrefixes()

    def admit(self, key: Key, demand: Demand) -> QueueTicket:
        """Admit one HTTP request with all of its prompts.

        Raises:
            Rejection: 503 if the server is too busy, 429 if the key or its tenant exceeds its limit.
        """
        short = self.queue_limits.short_tokens
        marks = demand.marks or ((),) * len(demand.prompts)
        new = [
            self._known.num_new(tokens, each) if each else tokens
            for (tokens, _, _), each in zip(demand.prompts, marks, strict=True)
        ]
        load = Load(
            key.tenant,
            demand.priority,
            sum(n for _, n, _ in demand.prompts),
            demand.prompt_tokens,
            is_short=max(new) <= short,
            is_known=any(each and each[0] in self._known for each in marks),
            may_be_deferred=demand.may_be_deferred,
            is_strict=demand.is_strict,
            longest=max(work_of(each[0], fresh, 0, short) for each, fresh in zip(demand.prompts, new, strict=True)),
        )
        self.queue_limits.check(load)
        reservation = self.limits.reserve(key, demand.most_tokens)
        works = {}
        for prompt, (tokens, n, most) in enumerate(demand.prompts):
            answer = self.queue_limits.answer_tokens(most)
            # Of n sequences with the same prompt, only the first one computes the prompt.
            first, others = work_of(tokens, new[prompt], answer, short), work_of(0, 0, answer, short)
            works.update({(prompt, index): others if index else first for index in range(n)})
        for each in marks:
            self._known.add(each)
        return QueueTicket(self, load, reservation, demand, works)


class QueueTicket:
    """The queue places that one HTTP request holds until its first tokens, and the rate limit tokens until its end.

    Args:
        works: the work of the request's sequences by (prompt, index).
    """

    def __init__(
        self,
        admission: RequestAdmission,
        load: Load,
        reservation: Reservation,
        demand: Demand,
        works: Mapping[tuple[int, int], Work],
    ) -> None:
        self._limits, self._queue = admission.limits, admission.queue_limits
        self._load = load
        self._reservation = reservation
        self._waiting = dict(works)
        self._most = {(prompt, i): most for prompt, (_, n, most) in enumerate(demand.prompts) for i in range(n)}
        self._begun: dict[tuple[int, int], Answer] = {}
        self._num_tokens: Counter[tuple[int, int]] = Counter()
        self._num_generated: int | None = None
        for work in works.values():
            self._queue.join(load, work)

    def take(self, sequence: tuple[int, int], num_tokens: int) -> None:
        """Count tokens of a sequence (prompt, index); 0 means its end.

        The first tokens release its place in the queue.
        """
        self._num_generated = (self._num_generated or 0) + num_tokens
        if (work := self._waiting.pop(sequence, None)) is not None:
            self._queue.leave(self._load, work, begun=num_tokens > 0)
            if num_tokens:
                self._begun[sequence] = self._queue.begin(self._load, self._most[sequence])
        if sequence in self._begun:
            self._num_tokens[sequence] += num_tokens
            self._queue.charge(self._load, OUTPUT_WEIGHT * num_tokens)
            if not num_tokens:
                self._queue.end(self._begun.pop(sequence), self._num_tokens[sequence])

    def close(self) -> None:
        """Release the unused places and tokens. A request without a first token has used no tokens."""
        for work in self._waiting.values():
            self._queue.leave(self._load, work, begun=False)
        self._waiting.clear()
        for sequence, answer in self._begun.items():
            # If the end of another answer ended the request, this answer's end may not have been reported. Its length
            # is then not known.
            self._queue.end(answer, self._num_tokens[sequence] if self._load.sequences == 1 else None)
        self._begun.clear()
        used = 0 if self._num_generated is None else self._load.tokens + self._num_generated
        self._limits.settle(self._reservation, used)
