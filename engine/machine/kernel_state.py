"""State of the CPU kernels on this machine: compiler, cache, and which library the next start will use."""

from __future__ import annotations

import ctypes
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True)
class KernelState:
    """CPU kernels as the next start will find them.

    Attributes:
        status: fitting, the package's library of this CPU's level; built for this CPU; compiled at the next start;
            portable, the package's of a lesser level; or missing, so that plain torch computes.
        compiler: version of the compiler; empty without a compiler.
        cache: folder of compiled libraries.
        is_writable: whether libraries can be put there.
        instruction_set: instruction set of a library that is there.
        fault: why there is none for this very CPU.
    """

    status: Literal["fitting", "built", "compiled at start", "portable", "missing"]
    compiler: str
    cache: Path
    is_writable: bool
    instruction_set: str = ""
    fault: str = ""


def kernel_state() -> KernelState:
    """Return the state, without compiling anything."""
    from ...kernels.cpu.build import BuildError, default_cache, find_compiler, is_compiled, library_path
    from ...kernels.cpu.portable_build import find_fitting, find_portable, target_of_this_cpu

    cache = default_cache()
    is_writable = _is_writable(cache)
    try:
        version = _version(find_compiler())
    except BuildError:
        version = ""
    try:
        target = target_of_this_cpu()
    except BuildError as error:
        return KernelState("missing", version, cache, is_writable, fault=str(error))
    fitting = None if is_compiled(cache, target) else find_fitting()
    if fitting is not None and (says := _instruction_set(fitting)):
        return KernelState("fitting", version, cache, is_writable, says)
    try:
        path = library_path(cache, target)
    except BuildError as error:
        fault = str(error)
    else:
        if path.exists():
            return KernelState("built", version, cache, is_writable, _instruction_set(path))
        if is_writable:
            return KernelState("compiled at start", version, cache, is_writable)
        fault = f"the cache {cache} cannot be written"
    if (portable := find_portable()) is not None:
        return KernelState("portable", version, cache, is_writable, _instruction_set(portable), fault)
    return KernelState("missing", version, cache, is_writable, fault=fault)


def _instruction_set(path: Path) -> str:
    """Return what a library says of itself; an empty string if it does not load."""
    with suppress(OSError, AttributeError):
        library = ctypes.CDLL(str(path))
        library.instruction_set.restype = ctypes.c_char_p
        return str(library.instruction_set().decode())
    return ""


def _version(compiler: str) -> str:
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=20, check=False)
        return done.stdout.partition("\n")[0].strip() or compiler
    return compiler


def _is_writable(folder: Path) -> bool:
    """Return whether the folder can be written, or made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK)
