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
    """The library of CPU kernels that the next start will use.

    Attributes:
        status: the kind of library: the package's library for this CPU's instruction level (fitting); one that was
            compiled for this CPU (built); one that the next start will compile; the package's library for a lower level
            (portable); or none, so that plain torch computes (missing).
        compiler: version of the compiler; empty without a compiler.
        cache: folder of compiled libraries.
        is_writable: whether libraries can be written to this folder.
        instruction_set: instruction set of the library, if it exists already.
        fault: reason why there is no library for exactly this CPU.
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
