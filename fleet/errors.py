"""Errors of the fleet, in addition to those of the engine."""

from __future__ import annotations

from ..engine.errors import EngineError


class CatalogUnavailable(EngineError):
    """A change of the model catalogue could not be written; the catalogue's file is unchanged.

    Args:
        is_full: whether the disk was full, which gives HTTP 507 instead of 503.
    """

    def __init__(self, message: str, *, is_full: bool) -> None:
        super().__init__(message)
        self.is_full = is_full
