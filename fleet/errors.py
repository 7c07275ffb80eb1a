"""Errors of the fleet beside those of the engine."""

from __future__ import annotations

from ..engine.errors import EngineError


class CatalogUnavailable(EngineError):
    """A change of the model catalogue that could not be written; its file is as it was before.

    Args:
        is_full: whether the disk had no space for it. HTTP 507 then, else 503.
    """

    def __init__(self, message: str, *, is_full: bool) -> None:
        super().__init__(message)
        self.is_full = is_full
