"""Kernels of lesser levels of CPUs than this one's, compiled on first use."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootgraft.kernels.cpu.build import default_cache, find_or_compile, open_library
from rootgraft.kernels.cpu.native_library import NativeLibrary
from rootgraft.kernels.cpu.portable_build import CPUINFO, LEVELS

BASELINE = "x86-64"
"""Every x86 CPU of 64 bits: no level of the package, but what its sources can be compiled for."""


def load_level(level: str, cpuinfo: Path = CPUINFO) -> NativeLibrary:
    """Return the library of a level of the package, or of ``BASELINE``; skip the test where this CPU cannot run it."""
    if level == BASELINE:
        return NativeLibrary(open_library(find_or_compile(default_cache(), (f"-march={BASELINE}",))))
    if not cpuinfo.exists() or not LEVELS[level].needs <= set(cpuinfo.read_text().split()):
        pytest.skip(f"this CPU lacks instructions of {level}")
    return NativeLibrary(open_library(find_or_compile(default_cache(), LEVELS[level].target)))
