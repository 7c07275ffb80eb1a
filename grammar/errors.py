"""The one error of this package that a request can cause."""

from __future__ import annotations


class GrammarError(Exception):
    """A grammar that is refused: what, where and why, in words that its author may read.

    The text never holds a path, an address or an internal state of a library.

    Attributes:
        keyword: the schema keyword or grammar part that cannot be promised (``"not"``, ``"regex"``, ``"schema"``).
        pointer: JSON Pointer to where it stands in a schema; ``""`` is the root, and the only one for other kinds.
        reason: what is wrong, with limit and value.
    """

    def __init__(self, keyword: str, pointer: str, reason: str) -> None:
        where = f" at {pointer!r}" if pointer else ""
        super().__init__(f"{keyword!r}{where}: {reason}")
        self.keyword = keyword
        self.pointer = pointer
        self.reason = reason

    def copy(self) -> GrammarError:
        """The same refusal as a new exception. One that is raised again and again keeps the frames of each time."""
        return type(self)(self.keyword, self.pointer, self.reason)


class GrammarTimeout(GrammarError):
    """A compile that passed its wall clock or memory limit and was stopped."""
