"""Compilation of the C++ sources in ``src/`` to a shared library, cached by sources, compiler and CPU."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .child_command import ending_with_parent

SOURCES = Path(__file__).parent / "src"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-w")
NATIVE = ("-march=native",)
"""The compiler's flags for exactly this CPU."""
# Precompiled, as most sources include it, and reading it takes as long as compiling some of them.
_COMMON = "simd/simd.h"
_TIMEOUT = 1800  # Seconds allowed for the compiler, which has taken more than 600 on two busy cores.
_LOOK_SECONDS = 0.01  # Seconds between two checks of whether a compiler has ended.


class BuildError(Exception):
    """The native kernels cannot be built or loaded; the message gives the reason."""


def find_compiler() -> str:
    """Return the path of the system's C++ compiler.

    Raises:
        BuildError: there is no compiler.
    """
    for name in ("g++", "c++"):
        if path := shutil.which(name):
            return path
    raise BuildError("no C++ compiler (g++ or c++) was found")


def default_cache() -> Path:
    """Return the cache folder of compiled libraries, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rootgraft" / "kernels"


def library_path(cache: Path, target: tuple[str, ...] = NATIVE, compiler: str | None = None) -> Path:
    """Return the path in the cache of the library for these sources, compiler and CPU, whether built or not.

    Raises:
        BuildError: no compiler, or it does not run.
    """
    compiler = compiler or find_compiler()
    try:
        return cache / f"{_fingerprint(compiler, (*FLAGS, *target))}.so"
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error


def is_compiled(cache: Path, target: tuple[str, ...] = NATIVE) -> bool:
    """Return whether the library for a CPU, by default this one, is in the cache; False if that cannot be known."""
    try:
        return cache.is_dir() and library_path(cache, target).exists()
    except BuildError:
        return False


def find_or_compile(cache: Path, target: tuple[str, ...] = NATIVE, compiler: str | None = None) -> Path:
    """Return the library in the cache folder; compile it if it is missing, with one line on stderr.

    Processes may do this concurrently: one compiles, the others wait for it. The compile ends with a rename, so that a
    killed process leaves no incomplete library.

    Args:
        cache: folder of compiled libraries, made where missing.
        target: the compiler's flags for a CPU: for this CPU, or for a lesser instruction set.
        compiler: path of the compiler; None to search for one.

    Raises:
        BuildError: no compiler, or it fails.
    """
    compiler = compiler or find_compiler()
    library = library_path(cache, target, compiler)
    try:
        if not library.exists():
            _make_private(cache)
            with _locked(library.with_suffix(".lock")):
                if not library.exists():
                    with contextlib.suppress(OSError):  # a full disk under the log
                        print(
                            f"Compiling the CPU kernels (once, some seconds) into {library}",
                            file=sys.stderr,
                            flush=True,
                        )
                    compile_library(compiler, (*FLAGS, *target), library)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error
    return library


def load_library(cache: Path, arch: str = "native", compiler: str | None = None) -> ctypes.CDLL:
    """Load the library for one of the compiler's targets; ``find_or_compile`` finds or makes it.

    Args:
        arch: the compiler's ``-march``.

    Raises:
        BuildError: as for ``find_or_compile``, or the library does not load.
    """
    return open_library(find_or_compile(cache, (f"-march={arch}",), compiler))


def open_library(path: Path) -> ctypes.CDLL:
    """Load a library. Raises BuildError if it cannot be loaded."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(str(error)) from error


def _make_private(cache: Path) -> None:
    """Create the folder so that only this user can access it, as its libraries are executed."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a file within the block. The file is not deleted, as other processes may wait for it."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):  # The file system has no locks, so each process compiles for itself.
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    """Hash the sources, the flags, and the compiler's predefined macros, which identify compiler and CPU."""
    digest = hashlib.sha256(_run([compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]))
    digest.update(" ".join((compiler, *flags)).encode())
    add_sources(digest)
    return digest.hexdigest()[:32]


def add_sources(digest: hashlib._Hash) -> None:
    """Add the names and contents of all sources to a hash."""
    for path in sorted((*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.h"))):
        digest.update(path.relative_to(SOURCES).as_posix().encode() + b"\0" + path.read_bytes())


def compile_library(compiler: str, flags: tuple[str, ...], target: Path) -> None:
    """Compile the sources and put the library at ``target``, in one step. Raises BuildError."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        # The longest sources come first, so that none of them runs alone at the end.
        sources = sorted(SOURCES.rglob("*.cpp"), key=lambda path: path.stat().st_size, reverse=True)
        objects = [str(Path(folder) / f"{path.stem}.o") for path in sources]
        common = Path(folder) / "common.hpp"
        common.write_text(f'#include "{_COMMON}"\n')
        compile = [compiler, *flags, f"-I{SOURCES}"]
        _run_all([[*compile, "-x", "c++-header", str(common), "-o", f"{common}.gch"]])
        compile += ["-include", str(common), "-c"]
        _run_all([[*compile, str(path), "-o", out] for path, out in zip(sources, objects, strict=True)])
        library = str(Path(folder) / target.name)
        _run([compiler, "-shared", "-pthread", *sorted(objects), "-o", library])
        os.replace(library, target)


def _run_all(commands: list[list[str]]) -> None:
    """Run all commands, as many at a time as this process has cores. If the wait ends early, they are killed.

    Raises:
        BuildError: a command fails; the message has the first error's output.
        subprocess.TimeoutExpired: the commands take longer than ``_TIMEOUT`` in all.
    """
    deadline = time.monotonic() + _TIMEOUT
    waiting = commands[::-1]
    running: list[_RunningCompiler] = []
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < len(os.sched_getaffinity(0)):
                running.append(stack.enter_context(_started(waiting.pop())))
            for each in [each for each in running if each.process.poll() is not None]:
                running.remove(each)
                each.output.seek(0)
                _check(each.process.returncode, each.output.read())
            if running and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(running[0].process.args, _TIMEOUT)
            time.sleep(_LOOK_SECONDS)


@dataclass(frozen=True, slots=True)
class _RunningCompiler:
    """A running compiler, and the file to which its output goes."""

    process: subprocess.Popen[bytes]
    output: IO[bytes]


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[_RunningCompiler]:
    """Run a command within the block, in its own process group, so that the compiler's child processes end with it."""
    with (
        tempfile.TemporaryFile() as output,
        subprocess.Popen(
            ending_with_parent(command),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        ) as process,
    ):
        try:
            yield _RunningCompiler(process, output)
        except BaseException:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            raise


def _run(command: list[str]) -> bytes:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=_TIMEOUT, check=False)
    _check(done.returncode, done.stdout)
    return done.stdout


def _check(returncode: int, output: bytes) -> None:
    if returncode:
        lines = output.decode(errors="replace").strip().splitlines() or [f"exit status {returncode}"]
        raise BuildError(f"the C++ compiler failed: {next((line for line in lines if 'error' in line), lines[0])}")
