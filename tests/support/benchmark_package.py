"""Makes `benchmarks` importable without the repository's root, and so `api` and `engine`, on `sys.path`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType


def register() -> None:
    """Enter a package `benchmarks` whose modules are found in the repository."""
    package = ModuleType("benchmarks")
    package.__path__ = [str(Path(__file__).parents[2] / "benchmarks")]
    sys.modules["benchmarks"] = package
