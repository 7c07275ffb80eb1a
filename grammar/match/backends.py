"""The state of a grammar along one answer, in either library, behind the same few methods.

An error of a library is kept apart from an end: a failed state allows nothing and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Row: TypeAlias = NDArray[np.int32]


class BackendState(Protocol):
    """What a matcher asks of a grammar library. End tokens are never given to it: an end cannot become an error."""

    def fill(self, row: Row) -> None:
        """Write the allowed tokens, end tokens included where the answer may end."""

    def accept(self, token: int) -> bool:
        """Advance by a token; False, and no change, if it is not allowed."""

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by the first of some tokens, up to one that is not allowed; returns how many."""

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""

    def copy(self) -> BackendState:
        """An independent state at the same place."""

    def can_end(self) -> bool:
        """Whether the text so far is complete."""

    def failure(self) -> str | None:
        """Why the library can go no further, if it cannot."""

    def forced(self) -> bytes:
        """Bytes that must come next, if the library knows them."""


class LlguidanceBackend:
    """A state of llguidance's parser."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, row: Row) -> None:
        """Write the allowed tokens."""
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def accept(self, token: int) -> bool:
        """Advance by a token, if it is allowed."""
        return bool(self._matcher.try_consume_tokens([token]))

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by as many of the first tokens as are allowed; of a failure, none are said to be."""
        return int(self._matcher.try_consume_tokens(tokens))

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        if count and not self._matcher.rollback(count):
            raise ValueError(f"cannot take back {count} tokens: {self._matcher.get_error()[:200]}")

    def copy(self) -> LlguidanceBackend:
        """An independent state."""
        return LlguidanceBackend(self._matcher.deep_copy())

    def can_end(self) -> bool:
        """Whether the text is complete."""
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    def failure(self) -> str | None:
        """Why it can go no further."""
        return str(self._matcher.stop_reason()) if self._matcher.is_error() else None

    def forced(self) -> bytes:
        """Bytes that must come next."""
        return bytes(self._matcher.compute_ff_bytes())


class XgrammarBackend:
    """A state of XGrammar's automaton."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, row: Row) -> None:
        """Write the allowed tokens."""
        if not self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0):
            row[:] = -1

    def accept(self, token: int) -> bool:
        """Advance by a token, if it is allowed."""
        return bool(self._matcher.accept_token(token))

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by as many of the first tokens as are allowed."""
        return next((count for count, token in enumerate(tokens) if not self.accept(token)), len(tokens))

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        if count:
            self._matcher.rollback(count)

    def copy(self) -> XgrammarBackend:
        """An independent state."""
        return XgrammarBackend(self._matcher.fork())

    def can_end(self) -> bool:
        """Whether the text is complete."""
        return bool(self._matcher.is_completed())

    def failure(self) -> str | None:
        """Why it can go no further."""
        return None

    def forced(self) -> bytes:
        """Bytes that must come next."""
        return bytes(self._matcher.find_jump_forward_string().encode())


class Exhausted(Exception):
    """A search has tried as many tokens as it may: all streams wait for it."""


class Bounded:
    """A state that accepts so many tokens, those of all its copies counted together.

    A clock would have what is allowed depend on more than the tokens of the answer.
    """

    def __init__(self, state: BackendState, left: list[int]) -> None:
        self._state = state
        self._left = left

    def fill(self, row: Row) -> None:
        """Write the allowed tokens."""
        self._state.fill(row)

    def accept(self, token: int) -> bool:
        """Advance by a token, if it is allowed."""
        self._left[0] -= 1
        if self._left[0] < 0:
            raise Exhausted
        return self._state.accept(token)

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by as many of the first tokens as are allowed; one that is not counts as well."""
        left = self._left[0]
        taken = self._state.advance(tokens if len(tokens) <= left else tokens[: max(left, 0)])
        self._left[0] = left - min(taken + 1, len(tokens))
        if self._left[0] < 0:
            raise Exhausted
        return taken

    def rollback(self, count: int) -> None:
        """Take back the last tokens."""
        self._state.rollback(count)

    def copy(self) -> Bounded:
        """An independent state that shares the count."""
        return Bounded(self._state.copy(), self._left)

    def can_end(self) -> bool:
        """Whether the text is complete."""
        return self._state.can_end()

    def failure(self) -> str | None:
        """Why it can go no further."""
        return self._state.failure()

    def forced(self) -> bytes:
        """Bytes that must come next."""
        return self._state.forced()


def leads_to_end(state: BackendState, tokens: Sequence[int]) -> bool:
    """Whether some tokens are a way to an end; the state is left as it is."""
    after = state.copy()
    return after.advance(tokens) == len(tokens) and after.can_end()


def advance(state: BackendState, tokens: Sequence[int]) -> bool:
    """Accept all of some tokens, or none."""
    taken = state.advance(tokens)
    if taken < len(tokens):
        take_back(state, taken)
    return taken == len(tokens)


def take_back(state: BackendState, count: int) -> None:
    """Roll back, unless the library has failed: then the state leads nowhere any more, and nothing else is lost."""
    if count and state.failure() is None:
        state.rollback(count)
