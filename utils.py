"""The names that scripts of vLLM import from its module of this name."""

from .engine.offline.argument_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]
