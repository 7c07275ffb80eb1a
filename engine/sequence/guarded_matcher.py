"""Guarded matcher: the only owner of a sequence's grammar state. Its errors end one sequence, not the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ...grammar.match.reasoning_matcher import AnswerMatcher

T = TypeVar("T")
logger = logging.getLogger("rootgraft.grammar")


class GuardedMatcher:
    """Ensures that only one thread at a time uses a grammar matcher, because a ``Matcher`` is not thread-safe::

        thread               when                                          through
        grammar-slow-masks   a slow mask is filled before its step         ``fill_ahead``
        grammar-replays      another engine's tokens are replayed          ``replay_ahead``
        grammar-masks        the masks of a launched step are filled       ``lend``, ``lent``
        step                 otherwise: admission, drafting, stop check    all others

    The step thread makes all calls except ``lent``, ``fail`` and ``explain``. While another thread uses the matcher,
    these calls raise RuntimeError, except ``is_filling_ahead``, ``cancel`` and ``num_shortest``.

    If the matcher raises an error, its state may be partly changed. So it is not used any more: it accepts no token and
    proposes none. The stop check then ends the sequence, with ``failure`` as the reason.
    """

    def __init__(self, matcher: AnswerMatcher) -> None:
        self._matcher = matcher
        self._failure: str | None = None
        self._no_token: str | None = None  # Why the masks of the last step allow no token; None if they allow some.
        self._ahead: Future[None] | None = None  # Work on the threads grammar-slow-masks and grammar-replays.
        self._step: Future[Any] | None = None  # Work on the thread grammar-masks.

    def fill_ahead(self, thread: ThreadPoolExecutor, remaining: int) -> None:
        """Start filling the next mask on ``thread``, with ``remaining`` tokens left to generate."""
        self._ahead = thread.submit(self._own().prepare, remaining)

    def replay_ahead(self, thread: ThreadPoolExecutor, tokens: Sequence[int], remaining: int) -> None:
        """Start advancing, on ``thread``, by tokens that another engine drew.

        The matcher fails if the grammar refuses one of them. Afterwards the plan for an end within the budget is the
        same as if all masks had been filled, so later masks are the same too.

        Args:
            remaining: number of tokens left to generate before the first of ``tokens``.
        """
        self._ahead = thread.submit(self._replay, self._own(), tokens, remaining)

    def _replay(self, matcher: AnswerMatcher, tokens: Sequence[int], remaining: int) -> None:
        try:
            for count, token in enumerate(tokens):
                if not matcher.replay(token, remaining - count):
                    self._failure = f"it refuses token {count} of the tokens that another engine generated"
                    return
        except Exception as error:
            # An error of a library, or a bug, ends only this sequence.
            self.fail(error)

    @property
    def is_filling_ahead(self) -> bool:
        """Whether `fill_ahead` or `replay_ahead` still works. Until its work is done, the sequence is in no step."""
        if self._ahead is not None and self._ahead.done():
            self._ahead = None
        return self._ahead is not None

    def cancel(self) -> None:
        """Cancel the work of ``fill_ahead`` or ``replay_ahead``, as the sequence has ended."""
        if self._ahead is not None:
            self._ahead.cancel()

    def lend(self, filling: Future[Any]) -> None:
        """Lend the matcher to the thread that fills the masks of a step, until ``filling`` is done."""
        self._own()
        self._no_token = None
        self._step = filling

    @property
    def lent(self) -> AnswerMatcher:
        """The matcher, for the thread to which it is lent."""
        return self._matcher

    def fail(self, error: Exception) -> None:
        """Log an error of a library, or a bug, and make the matcher fail for good. Called by the thread using it."""
        logger.error("A grammar raised an exception; its request ends", exc_info=error)
        self._failure = self._failure or type(error).__name__

    def explain(self, reason: str) -> None:
        """Record why a mask of the step allows no token. It ends the sequence only if the step draws there."""
        self._no_token = reason

    def is_slow(self, remaining: int) -> bool:
        """Return whether the next mask is likely to take long."""
        return self._ask(lambda matcher: matcher.is_slow(remaining), False)

    def may_draft(self, remaining: int) -> bool:
        """Return whether a draft model may draw the next token: the matcher takes drafts, and its mask is not slow."""
        return self._ask(lambda matcher: matcher.may_draft and not matcher.is_slow(remaining), False)

    def draft(self, limit: int) -> Sequence[int]:
        """Return at most ``limit`` tokens of the text that the grammar forces next."""
        return self._ask(lambda matcher: matcher.draft(limit), ())

    def admits(self, tokens: Sequence[int]) -> int:
        """Return how many leading tokens of ``tokens`` the grammar admits next."""
        return self._ask(lambda matcher: matcher.admits(tokens), 0)

    def rollback_to(self, num_tokens: int) -> None:
        """Undo all accepted tokens but the first ``num_tokens``. The matcher fails if it has accepted fewer."""
        self._ask(lambda matcher: matcher.rollback(matcher.num_tokens - num_tokens), None)

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, and changes nothing, if the grammar does not allow it."""
        return self._ask(lambda matcher: matcher.accept(token), False)

    @property
    def is_done(self) -> bool:
        return self._ask(lambda matcher: matcher.is_done, False)

    @property
    def is_whole(self) -> bool:
        return self._ask(lambda matcher: matcher.is_whole, False)

    @property
    def may_go_on(self) -> bool:
        return self._ask(lambda matcher: matcher.may_go_on, False)

    @property
    def has_failed(self) -> bool:
        """Whether the matcher has raised an exception, or `fail` was called."""
        return self._failure is not None

    @property
    def failure(self) -> str | None:
        """Why the grammar can allow no further token; None if it can."""
        return self._ask(lambda matcher: matcher.failure, None) or self._failure or self._no_token

    @property
    def num_shortest(self) -> int | None:
        # The value is a constant of the grammar, so no other thread has to be waited for.
        return self._matcher.num_shortest

    def _ask(self, question: Callable[[AnswerMatcher], T], otherwise: T) -> T:
        """Return the result of ``question``; ``otherwise`` if the matcher has failed or fails in the call."""
        matcher = self._own()
        if self._failure is None:
            try:
                return question(matcher)
            except Exception as error:
                # An error of a library, or a bug, ends only this sequence.
                self.fail(error)
        return otherwise

    def _own(self) -> AnswerMatcher:
        """Return the matcher to the step thread. Raises RuntimeError while another thread uses it."""
        if self._step is not None and self._step.done():
            self._step = None
        if self._step is not None or self.is_filling_ahead:
            raise RuntimeError("the matcher is in use on another thread")
        return self._matcher
