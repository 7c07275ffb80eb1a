"""Kernels of lesser levels of CPUs than this one's, compiled on first use."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootgraft.kernels.cpu.build import default_cache, find_or_compile, open_library
from rootgraft.kernels.cpu.native_library import NativeLibrary
from rootgraft.kernels.cpu.portable_build import CPUINFO, LEVELS

BASELINE = "x86-64"
"""Every x86 CPU of 64 bits: no level of the package, but what its sources can be compiled for."""


WITHOUT_AMX = "avx512-bf16 without AMX"
"""What Zen 4 and Zen 5 run of the level ``avx512-bf16``, whose library takes AMX where a CPU has it."""


def load_level(level: str, cpuinfo: Path = CPUINFO) -> NativeLibrary:
    """Return the library of a level of the package, of ``WITHOUT_AMX`` or ``BASELINE``.

    The test is skipped where this CPU cannot run it.
    """
    if level == BASELINE:
        return NativeLibrary(open_library(find_or_compile(default_cache(), (f"-march={BASELINE}",))))
    known = LEVELS["avx512-bf16" if level == WITHOUT_AMX else level]
    if not cpuinfo.exists() or not known.needs <= set(cpuinfo.read_text().split()):
        pytest.skip(f"this CPU lacks instructions of {level}")
    target = tuple(flag for flag in known.target if level != WITHOUT_AMX or not flag.startswith("-mamx"))
    return NativeLibrary(open_library(find_or_compile(default_cache(), target)))
