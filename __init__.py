"""rootgraft: structured generation and multi-LoRA serving over one base model, with a radix prefix cache.

The offline interface: `LLM`, `SamplingParams`, `EngineError`, and the other names that vLLM's scripts import. The names
resolve lazily, so that the command line and the API process import no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .engine.offline import vllm_modules

if TYPE_CHECKING:
    from .engine.errors import EngineError
    from .engine.offline.async_llm import AsyncLLM
    from .engine.offline.async_llm import AsyncLLM as AsyncLLMEngine
    from .engine.offline.inputs import PromptType, TextPrompt, TokensPrompt
    from .engine.offline.llm import LLM
    from .engine.offline.llm_engine import AsyncEngineArgs, EngineArgs, LLMEngine
    from .engine.offline.pooling_params import PoolingParams
    from .engine.offline.request_output import CompletionOutput, RequestOutput
    from .engine.offline.sampling_params import SamplingParams
    from .outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "EngineError",
    "LLMEngine",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
]

_MODULES = {
    **dict.fromkeys(
        (
            "ClassificationOutput",
            "ClassificationRequestOutput",
            "EmbeddingOutput",
            "EmbeddingRequestOutput",
            "PoolingOutput",
            "PoolingRequestOutput",
            "ScoringOutput",
            "ScoringRequestOutput",
        ),
        ".outputs",
    ),
    "AsyncEngineArgs": ".engine.offline.llm_engine",
    "AsyncLLM": ".engine.offline.async_llm",
    "AsyncLLMEngine": ".engine.offline.async_llm",
    "CompletionOutput": ".engine.offline.request_output",
    "EngineArgs": ".engine.offline.llm_engine",
    "EngineError": ".engine.errors",
    "LLM": ".engine.offline.llm",
    "LLMEngine": ".engine.offline.llm_engine",
    "PoolingParams": ".engine.offline.pooling_params",
    "PromptType": ".engine.offline.inputs",
    "RequestOutput": ".engine.offline.request_output",
    "SamplingParams": ".engine.offline.sampling_params",
    "TextPrompt": ".engine.offline.inputs",
    "TokensPrompt": ".engine.offline.inputs",
}


vllm_modules.install()


def __getattr__(name: str) -> Any:
    """Import one of the names in ``__all__`` on first access; say what to do instead of a name that vLLM's has."""
    if name not in _MODULES:
        if row := import_module(".engine.offline.vllm_table", __name__).peer_names("vllm").get(name):
            raise ImportError(f"rootgraft has no {name}: {row.words}.")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name], __name__), name)
