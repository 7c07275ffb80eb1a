"""Portable builds: libraries compiled in advance, for levels of CPUs, into the package.

    python -m rootgraft.kernels.cpu.portable_build [--all | --native] [--cache FOLDER]

compiles them: for this CPU's own level, as when the package is installed, or for all levels, as for a wheel or a
container image. If no level fits the CPU, a library for exactly this CPU is compiled at the first start. ``--native``
compiles it now into the cache, which each start searches first.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import os
import shutil
import sys
from collections.abc import Sequence, Set
from pathlib import Path
from typing import NamedTuple

from .build import (
    FLAGS,
    NATIVE,
    BuildError,
    add_sources,
    default_cache,
    find_compiler,
    find_or_compile,
    is_compiled,
    open_library,
)

FOLDER = Path(__file__).parent / "portable"
CPUINFO = Path("/proc/cpuinfo")


class CpuLevel(NamedTuple):
    """A class of CPUs.

    Attributes:
        target: the compiler's flags for it.
        needs: flags in /proc/cpuinfo that a CPU must have to run the level's library.
    """

    target: tuple[str, ...]
    needs: frozenset[str]


_V3 = frozenset(("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe"))
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_VNNI, _VBMI = "-mavx512vnni", "-mavx512vbmi"
# AMX permission is requested at run time, so a library may contain its instructions even for CPUs without AMX.
LEVELS = {
    "avx512-bf16": CpuLevel(
        ("-march=x86-64-v4", _VNNI, _VBMI, "-mavx512bf16", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        _V4 | {"avx512_vnni", "avx512vbmi", "avx512_bf16"},
    ),
    "avx512-vbmi": CpuLevel(("-march=x86-64-v4", _VNNI, _VBMI), _V4 | {"avx512_vnni", "avx512vbmi"}),
    "avx512-vnni": CpuLevel(("-march=x86-64-v4", _VNNI), _V4 | {"avx512_vnni"}),
    "avx512": CpuLevel(("-march=x86-64-v4",), _V4),
    "avx2": CpuLevel(("-march=x86-64-v3",), _V3),
}
"""Levels by name, the best first. They differ in the compiler features that the sources test."""
BASELINE = "x86-64"
"""The level of every 64-bit x86 CPU. The package has no library for it, but the sources can be compiled for it."""
HOLDABLE = {**LEVELS, BASELINE: CpuLevel((f"-march={BASELINE}",), frozenset())}
"""Values that ``LEVEL_VARIABLE`` may have."""
LEVEL_VARIABLE = "ROOTGRAFT_CPU_LEVEL"
_FEATURES = frozenset[str]().union(*(level.needs for level in LEVELS.values()))


def held_level() -> str | None:
    """Return the level to which the environment limits this CPU; None for no limit.

    Raises:
        BuildError: ``LEVEL_VARIABLE`` names no level.
    """
    name = os.environ.get(LEVEL_VARIABLE) or None
    if name is not None and name not in HOLDABLE:
        raise BuildError(f"{LEVEL_VARIABLE} must be one of {', '.join(HOLDABLE)}, not {name!r}")
    return name


def has_avx512() -> bool:
    """Return whether the level to which this CPU is limited has AVX-512; True without a limit. May raise BuildError."""
    held = held_level()
    return held is None or HOLDABLE[held].needs >= _V4


def target_of_this_cpu() -> tuple[str, ...]:
    """Return the compiler's flags for this CPU, or for the level to which it is limited. Raises like ``held_level``."""
    return NATIVE if held_level() is None else HOLDABLE[own_level() or BASELINE].target


def own_level(cpuinfo: Path | None = None) -> str | None:
    """Return the level with all features of this CPU that the kernels can use; None if no level has them."""
    usable = _usable_flags(cpuinfo) & _FEATURES
    return next((name for name, level in LEVELS.items() if level.needs == usable), None)


def build_portable(folder: Path, cache: Path, levels: Sequence[str]) -> list[Path]:
    """Compile the libraries of these levels into the folder, and return them.

    Args:
        cache: folder of compiled libraries; libraries that are there are copied instead of compiled.

    Raises:
        BuildError: no compiler, or it fails.
    """
    compiler = find_compiler()
    built = {folder / _file_name(level): find_or_compile(cache, LEVELS[level].target, compiler) for level in levels}
    folder.mkdir(parents=True, exist_ok=True)
    for target, library in built.items():
        shutil.copy(library, target)
    return list(built)


def find_fitting(folder: Path | None = None, cpuinfo: Path | None = None) -> Path | None:
    """Return the folder's library for this CPU's own level and these sources; None if there is none."""
    level = own_level(cpuinfo)
    return None if level is None else _present(folder or FOLDER, level)


def find_portable(folder: Path | None = None, cpuinfo: Path | None = None) -> Path | None:
    """Return the best library in the folder for these sources that this CPU can run; None if there is none."""
    flags = _usable_flags(cpuinfo)
    found = (_present(folder or FOLDER, name) for name, level in LEVELS.items() if level.needs <= flags)
    return next(filter(None, found), None)


def load_best(cache: Path) -> ctypes.CDLL:
    """Load the library for exactly this CPU if it is in the cache; else the package's for its level; else compile one.

    If it cannot be compiled, a library of a lower level is loaded.

    Raises:
        BuildError: no library can be loaded or built; the message says what to install.
    """
    target = target_of_this_cpu()
    fitting = None if is_compiled(cache, target) else find_fitting()
    if fitting is not None:
        try:
            return open_library(fitting)
        except BuildError as error:
            print(f"The package's CPU kernels are not used: {error}", file=sys.stderr, flush=True)
    try:
        return open_library(find_or_compile(cache, target))
    except BuildError:
        if (portable := find_portable()) is None or portable == fitting:
            raise
        return open_library(portable)


def _present(folder: Path, level: str) -> Path | None:
    path = folder / _file_name(level)
    return path if path.exists() else None


def _file_name(level: str) -> str:
    digest = hashlib.sha256(" ".join((*FLAGS, *LEVELS[level].target)).encode())
    add_sources(digest)
    return f"{level}-{digest.hexdigest()[:16]}.so"


def _usable_flags(cpuinfo: Path | None) -> Set[str]:
    """Return the flags of a CPU; for this CPU, only those that the environment allows."""
    flags = _cpu_flags(cpuinfo or CPUINFO)
    held = None if cpuinfo else held_level()
    return flags if held is None else flags & HOLDABLE[held].needs


def _cpu_flags(cpuinfo: Path) -> Set[str]:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


def main(arguments: Sequence[str] | None = None) -> int:
    """Compile libraries. Returns 0, or 1 with a line on standard error that says what happens instead."""
    parser = argparse.ArgumentParser(prog="portable_build", description=__doc__)
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--all", action="store_true", help="for all levels, instead of this CPU's own")
    kinds.add_argument("--native", action="store_true", help="for this very CPU, into the cache")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder of compiled libraries")
    options = parser.parse_args(arguments)
    own = own_level()
    try:
        if options.native:
            print(find_or_compile(options.cache))
            return 0
        if own is None and not options.all:
            raise BuildError("no level is exactly what this CPU has")
        for path in build_portable(FOLDER, options.cache, list(LEVELS) if options.all else [str(own)]):
            print(path)
    except BuildError as error:
        print(
            f"The package holds no compiled CPU kernels: {error}. They are compiled at the first start instead, in "
            "about half a minute, where there is a C++ compiler; elsewhere plain torch serves, many times slower.",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
