"""Kernels of lesser levels of CPUs than this one's, compiled on first use."""

from __future__ import annotations

from pathlib import Path

import pytest

from rootgraft.kernels.cpu.build import default_cache, find_or_compile, is_compiled, open_library
from rootgraft.kernels.cpu.native_library import NativeLibrary
from rootgraft.kernels.cpu.portable_build import CPUINFO, LEVELS

BUILT = Path(__file__).parents[3] / "build" / "kernels"
"""Where a build of the package compiles its kernels, see ``setup.py``."""
BASELINE = "x86-64"
"""Every x86 CPU of 64 bits: no level of the package, but what its sources can be compiled for."""


WITHOUT_AMX = "avx512-bf16 without AMX"
"""What Zen 4 and Zen 5 run of the level ``avx512-bf16``, whose library takes AMX where a CPU has it."""


def load_level(level: str, cpuinfo: Path = CPUINFO) -> NativeLibrary:
    """Return the library of a level of the package, of ``WITHOUT_AMX`` or ``BASELINE``.

    The test is skipped where this CPU cannot run it.
    """
    if level == BASELINE:
        return NativeLibrary(open_library(find_library((f"-march={BASELINE}",))))
    known = LEVELS["avx512-bf16" if level == WITHOUT_AMX else level]
    flags = set(cpuinfo.read_text().split()) if cpuinfo.exists() else set()
    if not known.needs <= flags:
        pytest.skip(f"this CPU lacks instructions of {level}")
    # A CPU without AMX runs the level's own library without it, so that no other one is compiled there.
    leaves_out_amx = level == WITHOUT_AMX and "amx_tile" in flags
    target = tuple(flag for flag in known.target if not (leaves_out_amx and flag.startswith("-mamx")))
    return NativeLibrary(open_library(find_library(target)))


def find_library(target: tuple[str, ...]) -> Path:
    """Return the library of these flags: where a build of the package has left it, or in the user's cache."""
    return find_or_compile(BUILT if is_compiled(BUILT, target) else default_cache(), target)
