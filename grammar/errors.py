"""Errors of grammars: what a request's grammar does wrong, located by keyword and JSON Pointer."""

from __future__ import annotations


class GrammarError(Exception):
    """A refused grammar, with a message for its author: no path, address or internal state of a library.

    Attributes:
        keyword: the schema keyword or grammar part at fault (``"not"``, ``"regex"``, ``"schema"``).
        pointer: JSON Pointer to the fault in a schema; ``""`` for the root, and for grammars that are not schemas.
        reason: the fault, with the limit and the given value.
    """

    def __init__(self, keyword: str, pointer: str, reason: str) -> None:
        where = f" at {pointer!r}" if pointer else ""
        super().__init__(f"{keyword!r}{where}: {reason}")
        self.keyword = keyword
        self.pointer = pointer
        self.reason = reason

    def copy(self) -> GrammarError:
        # An exception that is raised repeatedly keeps the frames of each time.
        return type(self)(self.keyword, self.pointer, self.reason)


class GrammarTimeout(GrammarError):
    """A compile that exceeded its limit on processor time or memory, or ended the compiler, and was stopped."""


class CompileUnavailable(Exception):
    """A compile that failed for a reason that is not the grammar's, and may be asked for again."""
