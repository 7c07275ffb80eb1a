"""Portable builds: libraries compiled ahead for classes of CPUs, as for a container image that holds no compiler.

    python -m rootgraft.kernels.cpu.portable_build

compiles them into the package. Where a compiler is at hand, the library for this very CPU is built and used instead.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from pathlib import Path

from .build import FLAGS, BuildError, add_sources, compile_library, find_compiler, load_library

FOLDER = Path(__file__).parent / "portable"
_V4 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
# By name, the best first: the compiler's flags, and those of /proc/cpuinfo that a CPU must have. AMX is asked for when
# it runs, so that its instructions may be in a library for CPUs without.
LEVELS = {
    "avx512-bf16": (
        ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni", "-mavx512vbmi", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        (*_V4, "avx512_bf16", "avx512_vnni", "avx512vbmi"),
    ),
    "avx512": (("-march=x86-64-v4",), _V4),
    "avx2": (("-march=x86-64-v3",), ("avx2", "bmi1", "bmi2", "f16c", "fma", "abm", "movbe")),
}


def build_portable(folder: Path = FOLDER) -> list[Path]:
    """Compile the library of each level into the folder and return the files. Raises BuildError."""
    compiler = find_compiler()
    folder.mkdir(parents=True, exist_ok=True)
    targets = []
    for level, (flags, _) in LEVELS.items():
        print(f"Compiling the CPU kernels for {level}", file=sys.stderr, flush=True)
        target = folder / _file_name(level)
        compile_library(compiler, (*FLAGS, *flags), target)
        targets.append(target)
    return targets


def find_portable(folder: Path = FOLDER, cpuinfo: Path = Path("/proc/cpuinfo")) -> Path | None:
    """Return the best library in the folder that is of these sources and that this CPU can run."""
    flags = _cpu_flags(cpuinfo)
    for level, (_, needs) in LEVELS.items():
        target = folder / _file_name(level)
        if flags.issuperset(needs) and target.exists():
            return target
    return None


def load_best(cache: Path) -> ctypes.CDLL:
    """Load the library for this CPU, compiled into the cache where needed, or else a portable one.

    Raises:
        BuildError: the library cannot be built, and there is no portable one; says what to install.
    """
    try:
        return load_library(cache)
    except BuildError:
        if (portable := find_portable()) is None:
            raise
        try:
            return ctypes.CDLL(str(portable))
        except OSError as error:
            raise BuildError(str(error)) from error


def _file_name(level: str) -> str:
    digest = hashlib.sha256()
    add_sources(digest)
    return f"{level}-{digest.hexdigest()[:16]}.so"


def _cpu_flags(cpuinfo: Path) -> set[str]:
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2] for line in lines if line.startswith("flags")), "").split())


if __name__ == "__main__":
    for path in build_portable():
        print(path)
