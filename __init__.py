"""rootgraft: structured generation and multi-LoRA serving over one base model, with a radix prefix cache.

The offline interface: `LLM`, `SamplingParams`, `EngineError`. The names resolve lazily, so that the command line and
the API process import no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .engine.errors import EngineError
    from .engine.offline.llm import LLM
    from .engine.types import SamplingParams

__all__ = ["LLM", "EngineError", "SamplingParams"]

_MODULES = {"LLM": ".engine.offline.llm", "EngineError": ".engine.errors", "SamplingParams": ".engine.types"}


def __getattr__(name: str) -> Any:
    """Import one of the names in ``__all__`` on first access."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
