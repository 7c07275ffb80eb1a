"""Grammar backends: llguidance's parser and XGrammar's automaton along one answer, behind one protocol.

A failure of a backend is kept apart from an end: a failed state allows nothing and says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Row: TypeAlias = NDArray[np.int32]


class BackendState(Protocol):
    """The operations that a matcher needs of a backend. End tokens are never passed to it: an end cannot fail."""

    def fill(self, row: Row) -> None:
        """Write the bitmask of the allowed tokens, end tokens included where the answer may end."""

    def accept(self, token: int) -> bool:
        """Advance by a token; False, and no change, if it is not allowed."""

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by the longest allowed prefix of some tokens. Returns its length; after a failure perhaps 0."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""

    def copy(self) -> BackendState:
        """Return an independent state at the same position."""

    def search_copy(self) -> BackendState:
        """Return a copy for a search of one end. The copy need not check that an end still exists after each token."""

    def can_end(self) -> bool:
        """Return whether the text so far is complete."""

    def failure(self) -> str | None:
        """Return why the backend has failed, or None."""

    def forced(self) -> bytes:
        """Return bytes that must come next, as far as the backend knows them."""

    def string_end(self) -> bytes:
        """Return the shortest end of the string that is under way, if it is known."""


class LlguidanceBackend:
    """A state of llguidance's parser."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def parser(self) -> Any:
        """The library's object, to fill the masks of many at once."""
        return self._matcher

    def fill(self, row: Row) -> None:
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)

    def accept(self, token: int) -> bool:
        return bool(self._matcher.try_consume_tokens([token]))

    def advance(self, tokens: Sequence[int]) -> int:
        return int(self._matcher.try_consume_tokens(tokens))

    def rollback(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            raise ValueError(f"cannot take back {count} tokens: {self._matcher.get_error()[:200]}")

    def copy(self) -> LlguidanceBackend:
        return LlguidanceBackend(self._matcher.deep_copy())

    def search_copy(self) -> LlguidanceBackend:
        return self.copy()

    def can_end(self) -> bool:
        return bool(self._matcher.is_accepting()) and not self._matcher.is_error()

    def failure(self) -> str | None:
        return str(self._matcher.stop_reason()) if self._matcher.is_error() else None

    def forced(self) -> bytes:
        return bytes(self._matcher.compute_ff_bytes())

    def string_end(self) -> bytes:
        return b""


class XgrammarBackend:
    """A state of XGrammar's automaton."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def fill(self, row: Row) -> None:
        if not self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0):
            row[:] = -1

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def advance(self, tokens: Sequence[int]) -> int:
        return next((count for count, token in enumerate(tokens) if not self.accept(token)), len(tokens))

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def copy(self) -> XgrammarBackend:
        return XgrammarBackend(self._matcher.fork())

    def search_copy(self) -> XgrammarBackend:
        return self.copy()

    def can_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def failure(self) -> str | None:
        return None

    def forced(self) -> bytes:
        """Return the jump-forward string, which may begin or end inside of a character, as tokens do."""
        try:
            return bytes(self._matcher.find_jump_forward_string().encode())
        except UnicodeDecodeError as error:  # the library makes a string of it
            return bytes(error.object)

    def string_end(self) -> bytes:
        return b""


COPY = 4


class SearchExhausted(Exception):
    """A search has tried as many tokens as it may: all streams wait for it."""


class BoundedState:
    """A state with a limit on the tokens it accepts, shared by all its copies.

    The limit counts tokens rather than time, so that masks depend on the tokens of the answer alone. A copy counts as
    `COPY` tokens, whose time it takes once it advances.
    """

    def __init__(self, state: BackendState, left: list[int]) -> None:
        self._state = state
        self._left = left

    def fill(self, row: Row) -> None:
        self._state.fill(row)

    def accept(self, token: int) -> bool:
        """Advance by a token, if it is allowed."""
        self._left[0] -= 1
        if self._left[0] < 0:
            raise SearchExhausted
        return self._state.accept(token)

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by the longest allowed prefix; the first token that is not allowed counts as well."""
        left = self._left[0]
        count = self._state.advance(tokens if len(tokens) <= left else tokens[: max(left, 0)])
        self._left[0] = left - min(count + 1, len(tokens))
        if self._left[0] < 0:
            raise SearchExhausted
        return count

    def rollback(self, count: int) -> None:
        self._state.rollback(count)

    def copy(self) -> BoundedState:
        self._left[0] -= COPY
        return BoundedState(self._state.copy(), self._left)

    def search_copy(self) -> BoundedState:
        self._left[0] -= COPY
        return BoundedState(self._state.search_copy(), self._left)

    def can_end(self) -> bool:
        return self._state.can_end()

    def failure(self) -> str | None:
        return self._state.failure()

    def forced(self) -> bytes:
        return self._state.forced()

    def string_end(self) -> bytes:
        return self._state.string_end()


def leads_to_end(state: BackendState, tokens: Sequence[int]) -> bool:
    """Return whether some tokens complete the answer; the state is left as it is, unless its backend fails.

    Advancing and rolling back takes a fraction of the time of a copy that advances.
    """
    count = state.advance(tokens)
    found = count == len(tokens) and state.can_end()
    rollback_unless_failed(state, count)
    return found


def advance(state: BackendState, tokens: Sequence[int]) -> bool:
    """Accept all of some tokens, or none."""
    count = state.advance(tokens)
    if count < len(tokens):
        rollback_unless_failed(state, count)
    return count == len(tokens)


def rollback_unless_failed(state: BackendState, count: int) -> None:
    """Roll back; a state whose backend has failed leads nowhere any more and is left as it is."""
    if count and state.failure() is None:
        state.rollback(count)
