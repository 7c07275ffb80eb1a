"""Grammar backends: one interface to llguidance's parser and XGrammar's automaton. A state follows one answer.

If a backend fails, its state allows no token, and `failure` returns the reason. This must not be confused with the end
of an answer, at which a state allows only end tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Row: TypeAlias = NDArray[np.int32]


class BackendState(Protocol):
    """The operations that a matcher needs of a backend. A matcher never passes end tokens to it."""

    def fill(self, row: Row) -> None:
        """Write the bitmask of the allowed tokens. It includes the end tokens if the text so far is complete."""

    def accept(self, token: int) -> bool:
        """Advance by a token. Returns False, and changes nothing, if the token is not allowed."""

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by the longest allowed prefix of ``tokens``. Returns its length, which may be 0 after a failure."""

    def rollback(self, count: int) -> None:
        """Undo the last `count` tokens."""

    def copy(self) -> BackendState:
        """Return an independent state at the same position."""

    def search_copy(self) -> BackendState:
        """Return a copy for one search of an end. The copy need not check after each token that an end still exists."""

    def can_end(self) -> bool:
        """Return whether the text so far is complete."""

    def failure(self) -> str | None:
        """Return why the backend has failed, or None."""

    def forced(self) -> bytes:
        """Return the bytes that must come next, or as many of them as the backend knows."""

    def string_end(self) -> bytes:
        """Return the shortest end of the string that has begun; empty if the backend does not know it."""


class LlguidanceBackend:
    """A state of llguidance's parser for one answer."""

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    @property
    def parser(self) -> Any:
        """The library's parser object. The library fills the masks of many such objects in one call."""
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
    """A state of XGrammar's automaton for one answer.

    Args:
        size: number of the vocabulary's ids. The library sets bits beyond them, up to the end of the last word, where
            it allows more tokens than it excludes.
    """

    def __init__(self, matcher: Any, size: int) -> None:
        self._matcher = matcher
        self._size = size

    def fill(self, row: Row) -> None:
        """See ``BackendState.fill``."""
        if not self._matcher.fill_next_token_bitmask(row.reshape(1, -1), 0):
            row[:] = -1
        if beyond := -self._size % 32:
            row[-1:].view(np.uint32)[0] &= 0xFFFFFFFF >> beyond

    def accept(self, token: int) -> bool:
        return bool(self._matcher.accept_token(token))

    def advance(self, tokens: Sequence[int]) -> int:
        return next((count for count, token in enumerate(tokens) if not self.accept(token)), len(tokens))

    def rollback(self, count: int) -> None:
        if count:
            self._matcher.rollback(count)

    def copy(self) -> XgrammarBackend:
        return XgrammarBackend(self._matcher.fork(), self._size)

    def search_copy(self) -> XgrammarBackend:
        return self.copy()

    def can_end(self) -> bool:
        return bool(self._matcher.is_completed())

    def failure(self) -> str | None:
        return None

    def forced(self) -> bytes:
        """Return the jump-forward string. Like a token, it may begin or end in the middle of a UTF-8 character."""
        try:
            return bytes(self._matcher.find_jump_forward_string().encode())
        except UnicodeDecodeError as error:  # The library decodes the bytes; the exception holds the bytes themselves.
            return bytes(error.object)

    def string_end(self) -> bytes:
        return b""


COPY = 4


class SearchExhausted(Exception):
    """Raised when a search has tried its limit of tokens. The limit exists because all streams wait for a search."""


class BoundedState:
    """A state with a limit on the number of tokens that it and all its copies try.

    The limit counts tokens rather than time, so that masks depend on the tokens of the answer alone. A copy counts as
    `COPY` tokens, because a copy takes about the time of that many tokens when it first advances.
    """

    def __init__(self, state: BackendState, left: list[int]) -> None:
        self._state = state
        self._left = left

    def fill(self, row: Row) -> None:
        self._state.fill(row)

    def accept(self, token: int) -> bool:
        """Advance by a token, if it is allowed. An attempt counts against the limit."""
        self._left[0] -= 1
        if self._left[0] < 0:
            raise SearchExhausted
        return self._state.accept(token)

    def advance(self, tokens: Sequence[int]) -> int:
        """Advance by the longest allowed prefix. The first token that is not allowed counts against the limit too."""
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
    """Return whether ``tokens`` complete the answer. The state is left unchanged, unless its backend fails.

    Advancing and rolling back takes a fraction of the time of copying the state and advancing the copy.
    """
    count = state.advance(tokens)
    found = count == len(tokens) and state.can_end()
    rollback_unless_failed(state, count)
    return found


def advance(state: BackendState, tokens: Sequence[int]) -> bool:
    """Advance by all of ``tokens``. Returns False, and changes nothing, if one of them is not allowed."""
    count = state.advance(tokens)
    if count < len(tokens):
        rollback_unless_failed(state, count)
    return count == len(tokens)


def rollback_unless_failed(state: BackendState, count: int) -> None:
    """Roll back ``count`` tokens. A state whose backend has failed is left unchanged, as it has no further use."""
    if count and state.failure() is None:
        state.rollback(count)
