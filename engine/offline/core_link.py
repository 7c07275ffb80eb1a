"""Core link: the ``EngineLink`` of an engine core in this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..core.engine_core import EngineCore
from ..messages import Abort, ForgetTokens, Submit, TokenTexts


@dataclass(frozen=True, slots=True)
class CoreLink:
    """Hands messages to a core at once."""

    core: EngineCore

    def describe_tokens(self, message: TokenTexts | ForgetTokens) -> None:
        """Describe the tokens of a vocabulary, or let them be given up."""
        self.core.handle([message])

    def submit(self, submits: Sequence[Submit]) -> None:
        """Start sequences."""
        self.core.handle(submits)

    def abort(self, ids: Iterable[int]) -> None:
        """End sequences."""
        self.core.handle([Abort(tuple(ids))])
