"""Guarded matcher: the one owner of a sequence's grammar state, used by one thread at a time, that fails alone."""

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
    """A grammar matcher with one user at a time, as a ``Matcher`` is not thread-safe::

        thread               when                                          through
        grammar-slow-masks   a slow mask is filled before its step,        ``fill_ahead``,
                             or another engine's tokens are replayed       ``replay_ahead``
        grammar-masks        the masks of a launched step are filled       ``lend``, ``lent``
        step                 otherwise: admission, drafting, stop check    all others

    The step thread makes all calls but ``lent``, ``fail`` and ``explain``. While another thread has the matcher, they
    raise RuntimeError, except ``is_filling_ahead``, ``cancel`` and ``num_shortest``.

    A matcher that raises has failed for good, as its state may be half changed: it accepts no token and proposes none,
    and the stop check ends its sequence, with ``failure`` as the reason.
    """

    def __init__(self, matcher: AnswerMatcher) -> None:
        self._matcher = matcher
        self._failure: str | None = None
        self._no_token: str | None = None  # why the masks of the last step allow none, if they do not
        self._ahead: Future[None] | None = None  # on grammar-slow-masks
        self._step: Future[Any] | None = None  # on grammar-masks

    def fill_ahead(self, thread: ThreadPoolExecutor, remaining: int) -> None:
        """Begin to fill the next mask, with ``remaining`` tokens left to generate."""
        self._ahead = thread.submit(self._own().prepare, remaining)

    def replay_ahead(self, thread: ThreadPoolExecutor, tokens: Sequence[int], remaining: int) -> None:
        """Begin to advance by tokens that another engine drew, ``remaining`` being left before the first of them.

        The matcher fails if the grammar refuses one. The plan for an end within the budget is then as if all masks had
        been filled, so later masks are the same.
        """
        self._ahead = thread.submit(self._replay, self._own(), tokens, remaining)

    def _replay(self, matcher: AnswerMatcher, tokens: Sequence[int], remaining: int) -> None:
        try:
            for count, token in enumerate(tokens):
                if not matcher.replay(token, remaining - count):
                    self._failure = f"it refuses token {count} of those that another engine generated"
                    return
        except Exception as error:
            # An error of a library, or a bug, ends this sequence alone.
            self.fail(error)

    @property
    def is_filling_ahead(self) -> bool:
        """Whether a mask is being filled ahead: the sequence sits out steps until it is there."""
        if self._ahead is not None and self._ahead.done():
            self._ahead = None
        return self._ahead is not None

    def cancel(self) -> None:
        """End what is filled ahead, since the sequence has ended."""
        if self._ahead is not None:
            self._ahead.cancel()

    def lend(self, filling: Future[Any]) -> None:
        """Lend the matcher to the thread that fills the masks of a step, until ``filling`` is done."""
        self._own()
        self._no_token = None
        self._step = filling

    @property
    def lent(self) -> AnswerMatcher:
        """The matcher, for the thread that it is lent to."""
        return self._matcher

    def fail(self, error: Exception) -> None:
        """Log an error of a library, or a bug, and let the matcher fail for good. By the thread that uses it."""
        logger.error("A grammar raised an exception; its request ends", exc_info=error)
        self._failure = self._failure or type(error).__name__

    def explain(self, reason: str) -> None:
        """Say why a mask of the step allows no token. That ends the sequence only if the step comes to draw there."""
        self._no_token = reason

    def is_slow(self, remaining: int) -> bool:
        """Return whether the next mask is likely to take long."""
        return self._ask(lambda matcher: matcher.is_slow(remaining), False)

    def may_draft(self, remaining: int) -> bool:
        """Return whether a draft model may draw the next token: the grammar takes drafts, and its mask is not slow."""
        return self._ask(lambda matcher: matcher.may_draft and not matcher.is_slow(remaining), False)

    def draft(self, limit: int) -> Sequence[int]:
        """Return at most ``limit`` tokens of the text that the grammar forces next."""
        return self._ask(lambda matcher: matcher.draft(limit), ())

    def admits(self, tokens: Sequence[int]) -> int:
        """Return how many of some tokens the grammar admits next, one after the other."""
        return self._ask(lambda matcher: matcher.admits(tokens), 0)

    def rollback_to(self, num_tokens: int) -> None:
        """Take back all but the first ``num_tokens`` tokens. The matcher fails if there are fewer."""
        self._ask(lambda matcher: matcher.rollback(matcher.num_tokens - num_tokens), None)

    def accept(self, token: int) -> bool:
        """Advance by a token. False, and nothing changes, if the grammar does not allow it."""
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
        """Whether the matcher has raised, or was told to ``fail``."""
        return self._failure is not None

    @property
    def failure(self) -> str | None:
        """Why the grammar cannot be followed any further, None if it can."""
        return self._ask(lambda matcher: matcher.failure, None) or self._failure or self._no_token

    @property
    def num_shortest(self) -> int | None:
        # It is a constant of the grammar, so that no thread has to be waited for.
        return self._matcher.num_shortest

    def _ask(self, question: Callable[[AnswerMatcher], T], otherwise: T) -> T:
        """Return the matcher's answer, or another one if it has failed or fails now."""
        matcher = self._own()
        if self._failure is None:
            try:
                return question(matcher)
            except Exception as error:
                # An error of a library, or a bug, ends this sequence alone.
                self.fail(error)
        return otherwise

    def _own(self) -> AnswerMatcher:
        """Return the matcher to the step thread. RuntimeError while another thread has it."""
        if self._step is not None and self._step.done():
            self._step = None
        if self._step is not None or self.is_filling_ahead:
            raise RuntimeError("the matcher is in use on another thread")
        return self._matcher
