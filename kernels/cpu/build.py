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
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
FLAGS = ("-O3", "-std=c++17", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-fno-strict-aliasing", "-w")
_TIMEOUT = 600  # seconds for the compiler


class BuildError(Exception):
    """The native kernels cannot be built or loaded; the message gives the reason."""


def find_compiler() -> str:
    """Return the path of the system's C++ compiler.

    Raises:
        BuildError: there is none.
    """
    for name in ("g++", "c++"):
        if path := shutil.which(name):
            return path
    raise BuildError("no C++ compiler (g++ or c++) was found")


def default_cache() -> Path:
    """Return the cache folder of compiled libraries, by the XDG convention."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rootgraft" / "kernels"


def library_path(cache: Path, arch: str = "native", compiler: str | None = None) -> Path:
    """Return where the library of these sources, compiler and CPU is in the cache, once it is built.

    Raises:
        BuildError: no compiler, or it does not run.
    """
    compiler = compiler or find_compiler()
    try:
        return cache / f"{_fingerprint(compiler, (*FLAGS, f'-march={arch}'))}.so"
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error


def load_library(cache: Path, arch: str = "native", compiler: str | None = None) -> ctypes.CDLL:
    """Load the library from the cache folder, or compile it into there with one line on stderr.

    Processes may do this concurrently: one compiles, the others wait for it. It ends by a rename, so that a process
    which is killed leaves no half of a library.

    Args:
        cache: folder of compiled libraries, made where missing.
        arch: the compiler's ``-march``: this machine, or a lesser instruction set.
        compiler: its path; found where None.

    Raises:
        BuildError: no compiler, or it fails, or the result does not load.
    """
    compiler = compiler or find_compiler()
    target = library_path(cache, arch, compiler)
    try:
        if not target.exists():
            _make_private(cache)
            with _locked(target.with_suffix(".lock")):
                if not target.exists():
                    print(f"Compiling the CPU kernels (once, some seconds) into {target}", file=sys.stderr, flush=True)
                    compile_library(compiler, (*FLAGS, f"-march={arch}"), target)
        return ctypes.CDLL(str(target))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error


def _make_private(cache: Path) -> None:
    """Create the folder for this user alone, since its libraries are executed."""
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of this file within the block; the file is left, since others may be waiting for it."""
    with path.open("a") as file:
        with contextlib.suppress(OSError):  # a file system without locks: each process compiles for itself
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
        sources = sorted(SOURCES.rglob("*.cpp"))
        objects = [str(Path(folder) / f"{path.stem}.o") for path in sources]
        compile = [compiler, *flags, f"-I{SOURCES}", "-c"]
        _run_all([[*compile, str(path), "-o", out] for path, out in zip(sources, objects, strict=True)])
        library = str(Path(folder) / target.name)
        _run([compiler, "-shared", "-pthread", *objects, "-o", library])
        os.replace(library, target)


def _run_all(commands: list[list[str]]) -> None:
    """Run all commands in parallel; whatever ends the wait for them ends them too.

    Raises:
        BuildError: with the first error's output.
        subprocess.TimeoutExpired: they take longer than ``_TIMEOUT`` in all.
    """
    deadline = time.monotonic() + _TIMEOUT
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(_started(command)) for command in commands]
        outputs = [process.communicate(timeout=max(0.0, deadline - time.monotonic()))[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        _check(process.returncode, output)


@contextlib.contextmanager
def _started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command within the block, in a process group of its own: the compiler's own children end with it."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            yield process
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
