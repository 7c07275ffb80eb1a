"""One stream of tokens being generated, and where it stands."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from ...radix.namespace import Path
from ..kv_cache.prefix_cache import Lease
from ..types import Priority, SamplingParams, Usage

if TYPE_CHECKING:
    from ...grammar.match.matcher import Matcher


class Status(Enum):
    """Where a sequence is in its life. Preemption takes it from RUNNING back to WAITING."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A sequence has ``num_computed`` tokens in the KV pool and wants all ``num_tokens`` there; that is all it does.

    Only the ``Scheduler`` writes its fields.

    Attributes:
        tokens: int32, the prompt and then what was generated.
        path: the namespaces under which its prefix is shared.
        stop_ids: tokens that end it.
        seed: the seed of its draws.
        arrival: ``time.monotonic()`` at the engine.
        max_model_len: most tokens, prompt and generated.
        matcher: the state of its grammar after the tokens generated so far, None for free text.
        adapter: load id of its adapter's version, -1 for the base model.
        adapted_from: position of the first token that the adapter reads.
        slot: the slot that it holds for its adapter while it runs, else -1.
        lease: its hold on pages while it runs, else None.
        row: its row while it runs, else -1.
        num_computed: tokens whose KV is in the pool (0 while it waits).
        num_cached: tokens found in the cache at its first admission, -1 before.
        tenant: whose share of the engine it uses up.
        priority: its band in the queue. Written by the queue alone, when it has waited for long.
        num_scored: tokens of the prompt whose logprobs have been given or were not asked for.
        num_forked, num_pinned, num_drafted, num_forced: see ``Usage``.
        session: the session whose call it is, "" for none.
        pin_seconds: how long its prompt is to be pinned, 0 for not at all.
        waited: seconds that it was in the queue until it was last admitted. Written by the queue alone.
        num_overtaken: sequences of its own tenant and band that came later and were admitted before it.
    """

    id: int
    tokens: array[int]
    params: SamplingParams
    path: Path
    stop_ids: frozenset[int]
    seed: int
    arrival: float
    max_model_len: int
    matcher: Matcher | None = None
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
    waited: float = 0.0
    num_overtaken: int = 0
    session: str = ""
    pin_seconds: float = 0.0

    def __post_init__(self) -> None:
        """Count the prompt, and what of it needs no logprobs."""
        self.num_prompt = len(self.tokens)
        scored = self.params.prompt_logprobs is not None
        self.num_scored = max(1, self.params.logprob_start_len) if scored else self.num_prompt

    @property
    def num_tokens(self) -> int:
        """All tokens: prompt and generated."""
        return len(self.tokens)

    @property
    def num_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def remaining(self) -> int:
        """Tokens that it may still generate, by its own ``max_tokens`` and by ``max_model_len``."""
        return min(self.params.max_tokens - self.num_generated, self.max_model_len - self.num_tokens)

    @property
    def prefilling(self) -> bool:
        """Whether more than its last token still lacks KV."""
        return self.num_computed < len(self.tokens) - 1

    @property
    def reusable(self) -> int:
        """How many of its tokens may come from the cache: its last one is always computed, for its logits.

        A prompt's token that is still to be scored needs the logits of the position before it.
        """
        return (self.num_scored if self.num_scored < self.num_prompt else len(self.tokens)) - 1

    @property
    def usage(self) -> Usage:
        """Its tokens, as the client is told them."""
        shortest = self.matcher.num_shortest if self.matcher else None
        cached = max(self.num_cached, 0)
        return Usage(
            prompt=self.num_prompt,
            cached=cached,
            completion=self.num_generated,
            shortest=shortest,
            drafted=self.num_drafted,
            forced=self.num_forced,
            forked=self.num_forked,
            pinned=self.num_pinned,
        )


@dataclass(frozen=True, slots=True)
class MaskJob:
    """The masks to fill for a row of a step.

    Attributes:
        line: the row's first line among all of the batch.
        matcher: the state of its grammar; filling advances it by the drafts.
        drafts: the row's drafts.
        remaining: tokens that it may still generate.
        num_early: before so many more tokens it has not reached ``min_tokens``, so it must not end while the grammar
            lets it go on.
        scored: the logprobs of its tokens are wanted, so the model is asked even where there is no choice.
    """

    line: int
    matcher: Matcher
    drafts: Seq[int]
    remaining: int
    num_early: int
    scored: bool
