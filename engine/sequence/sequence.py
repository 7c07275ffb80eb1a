"""Sequence: the state of one stream of tokens, from its arrival to its end. Written by the scheduler alone."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from enum import Enum

from ...radix.namespace import Path
from ..kv_cache.prefix_cache import Lease
from ..types import Priority, SamplingParams, Usage
from .guarded_matcher import GuardedMatcher


class Status(Enum):
    """State of a sequence. Preemption takes it from RUNNING back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence has ``num_computed`` tokens in the KV pool and wants all ``num_tokens`` there.

    ``Scheduler`` is the only writer of its fields after ``__init__`` (``tests/engine/test_one_writer.py``).

    Attributes:
        tokens: int32, the prompt and then the generated tokens.
        path: the namespaces under which its prefix is shared.
        stop_ids: tokens that end it.
        seed: the seed of its draws.
        arrival: ``time.monotonic()`` at the engine.
        max_model_len: most tokens, prompt and generated.
        matcher: its grammar's state after the tokens generated so far; None for free text.
        adapter: load id of its adapter's version, -1 for the base model.
        adapted_from: position of the first token that the adapter reads.
        slot: device slot of its adapter while it runs, else -1.
        num_prompt: tokens of the prompt.
        lease: its lease on pages while it runs, else None.
        row: its row while it runs, else -1.
        num_computed: tokens whose KV is in the pool (0 while it waits).
        num_cached: prefix hit at its first admission in tokens, -1 before.
        num_preempted: preemptions so far.
        num_scored: tokens of the prompt whose logprobs were sent or not requested.
        num_forked, num_pinned, num_drafted, num_forced: see ``Usage``.
        tenant: whose share of the engine it uses.
        priority: its priority class in the queue; REALTIME once it has waited for long.
        session: the session whose call it is, "" for none.
        pins: beginnings of its prompt that are to be pinned: (tokens, seconds), 0 for not at all.
    """

    id: int
    tokens: array[int]
    params: SamplingParams
    path: Path
    stop_ids: frozenset[int]
    seed: int
    arrival: float
    max_model_len: int
    matcher: GuardedMatcher | None = None
    adapter: int = -1
    adapted_from: int = 0
    slot: int = -1
    num_prompt: int = 0
    status: Status = Status.WAITING
    lease: Lease | None = None
    row: int = -1
    num_computed: int = 0
    num_cached: int = -1
    num_preempted: int = 0
    num_scored: int = 0
    num_forked: int = 0
    num_pinned: int = 0
    num_drafted: int = 0
    num_forced: int = 0
    tenant: str = ""
    priority: Priority = Priority.INTERACTIVE
    session: str = ""
    pins: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Count the prompt, and the tokens of it that need no logprobs."""
        self.num_prompt = len(self.tokens)
        scored = self.params.prompt_logprobs is not None
        self.num_scored = max(1, self.params.logprob_start_len) if scored else self.num_prompt

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens that it may still generate, by ``max_tokens`` and by ``max_model_len``."""
        return min(self.params.max_tokens - self.num_generated, self.max_model_len - len(self.tokens))

    @property
    def prefilling(self) -> bool:
        """Whether more than its last token still lacks KV."""
        return self.num_computed < len(self.tokens) - 1

    @property
    def awaits_mask(self) -> bool:
        """Whether it sits out steps until its next mask is filled."""
        return self.matcher is not None and self.matcher.is_filling_ahead

    @property
    def reusable(self) -> int:
        """Most tokens to take from the prefix cache: the last one is always computed, for its logits.

        A prompt token that is still to be scored needs the logits of the position before it.
        """
        return (self.num_scored if self.num_scored < self.num_prompt else len(self.tokens)) - 1

    @property
    def usage(self) -> Usage:
        """Token counts for the client."""
        return Usage(
            prompt=self.num_prompt,
            cached=max(self.num_cached, 0),
            completion=self.num_generated,
            shortest=self.matcher.num_shortest if self.matcher else None,
            drafted=self.num_drafted,
            forced=self.num_forced,
            forked=self.num_forked,
            pinned=self.num_pinned,
        )
