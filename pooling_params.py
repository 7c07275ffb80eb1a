"""The names that scripts of vLLM import from its module of this name."""

from .engine.offline.pooling_params import PoolingParams

__all__ = ["PoolingParams"]
