"""The names that scripts of vLLM import from its module of this name."""

from .engine.offline.request_output import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
