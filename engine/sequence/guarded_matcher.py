"""Guarded matcher: the one owner of a sequence's grammar state, which says which thread may use it when."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...grammar.match.reasoning_matcher import AnswerMatcher


class GuardedMatcher:
    """A grammar matcher with one user at a time, as a ``Matcher`` is not thread-safe::

        thread               when                                          through
        grammar-slow-masks   a slow mask is filled before its step         ``fill_ahead``
        grammar-masks        the masks of a launched step are filled       ``lend``, ``lent``
        step                 otherwise: admission, drafting, stop check    all others

    The step thread makes all calls but ``lent``. While another thread has the matcher, they raise RuntimeError, except
    ``is_filling_ahead``, ``cancel`` and ``num_shortest``.
    """

    def __init__(self, matcher: AnswerMatcher) -> None:
        self._matcher = matcher
        self._ahead: Future[None] | None = None  # on grammar-slow-masks
        self._step: Future[Any] | None = None  # on grammar-masks

    def fill_ahead(self, thread: ThreadPoolExecutor, remaining: int) -> None:
        """Begin to fill the next mask, with ``remaining`` tokens left to generate."""
        self._ahead = thread.submit(self._own().prepare, remaining)

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
        self._step = filling

    @property
    def lent(self) -> AnswerMatcher:
        """The matcher, for the thread that it is lent to."""
        return self._matcher

    def is_slow(self, remaining: int) -> bool:
        return self._own().is_slow(remaining)

    def draft(self, limit: int) -> Sequence[int]:
        return self._own().draft(limit)

    def admits(self, tokens: Sequence[int]) -> int:
        """Return how many of some tokens the grammar admits next, one after the other."""
        return self._own().admits(tokens)

    def rollback_to(self, num_tokens: int) -> None:
        """Take back all but the first ``num_tokens`` tokens. ValueError if there are fewer."""
        matcher = self._own()
        matcher.rollback(matcher.num_tokens - num_tokens)

    def accept(self, token: int) -> bool:
        """Advance by a token. False, and nothing changes, if the grammar does not allow it."""
        return self._own().accept(token)

    @property
    def is_done(self) -> bool:
        return self._own().is_done

    @property
    def is_whole(self) -> bool:
        return self._own().is_whole

    @property
    def failure(self) -> str | None:
        return self._own().failure

    @property
    def num_shortest(self) -> int | None:
        return self._matcher.num_shortest  # a constant of the grammar

    def _own(self) -> AnswerMatcher:
        """Return the matcher to the step thread. RuntimeError while another thread has it."""
        if self._step is not None and self._step.done():
            self._step = None
        if self._step is not None or self.is_filling_ahead:
            raise RuntimeError("the matcher is in use on another thread")
        return self._matcher
