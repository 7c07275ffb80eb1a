"""The names that scripts of vLLM import from its module of this name."""

from .engine.offline.pair_outputs import ScoringOutput
from .engine.offline.pooled_output import ClassificationOutput, EmbeddingOutput, PooledRequestOutput, PoolingOutput
from .engine.offline.request_output import CompletionOutput, RequestOutput

PoolingRequestOutput = PooledRequestOutput
EmbeddingRequestOutput = PooledRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PooledRequestOutput[ClassificationOutput]
ScoringRequestOutput = PooledRequestOutput[ScoringOutput]

__all__ = [
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "PoolingOutput",
    "PoolingRequestOutput",
    "RequestOutput",
    "ScoringOutput",
    "ScoringRequestOutput",
]
