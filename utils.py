"""The names that scripts of vLLM import from its module of this name."""

from .engine.offline.argument_parser import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser"]

# vLLM's module is a package, so that scripts import from modules in it: the finder of vllm_modules.py has them.
__path__: list[str] = []
