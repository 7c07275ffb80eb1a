"""The engine: from messages to tokens. See ``docs/architecture.md`` for its floors.

``LLM``, ``SamplingParams`` and the errors are what offline programs need; they are imported when first asked for, so
that no floor loads the ones above it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.errors import EngineError
    from engine.llm import LLM
    from engine.types import SamplingParams

__all__ = ["LLM", "EngineError", "SamplingParams"]

_HOMES = {"LLM": "engine.llm", "EngineError": "engine.errors", "SamplingParams": "engine.types"}


def __getattr__(name: str) -> Any:
    """One of the names in ``__all__``."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
