"""Tests of the native kernels under the compiler's sanitizers, which say what no test sees.

    python -m benchmarks.sanitize {address,thread} [--level avx2] [ARGUMENTS OF PYTEST]

``address`` is for accesses outside of tensors, vectors and stacks, and for undefined behaviour; ``thread`` for data
races. Both watch what the compiler wrote, so neither sees AMX's tiles, nor ``address`` masked loads: for these there is
``tests/support/kernels/guarded_memory.py``. The library is compiled first, which takes minutes. A finding ends the run
with a stack, or with ``thread`` is told and ends in exit code 66. Results: ``docs/internals/notebook/sanitizers.md``.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rootgraft.kernels import backend
from rootgraft.kernels.cpu.build import NATIVE, default_cache, find_compiler, find_or_compile, open_library
from rootgraft.kernels.cpu.portable_build import LEVELS

TESTS = [str(Path(__file__).parents[1] / "tests" / name) for name in ("kernels", "scenarios/kernels")]
SANITIZERS = {
    "address": (("asan", "ubsan"), "-fsanitize=address,undefined,float-cast-overflow"),
    "thread": (("tsan",), "-fsanitize=thread"),
}
SETTINGS = {
    "ASAN_OPTIONS": "detect_leaks=0",
    "UBSAN_OPTIONS": "print_stacktrace=1:halt_on_error=1",
    "TSAN_OPTIONS": "report_signal_unsafe=0:ignore_noninstrumented_modules=1",
    "PYTHONMALLOC": "malloc",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sanitizer", choices=SANITIZERS)
    parser.add_argument("--level", choices=LEVELS, help="level of CPUs; default: this CPU's")
    options, arguments = parser.parse_known_args()
    loaded = os.environ.pop("LD_PRELOAD", None)  # not for the compiler, nor for what tests start
    names, flag = SANITIZERS[options.sanitizer]
    target = LEVELS[options.level].target if options.level else NATIVE
    library = find_or_compile(default_cache(), (*target, "-O1", "-g1", "-fno-omit-frame-pointer", flag))
    find = [[find_compiler(), f"-print-file-name=lib{name}.so"] for name in names]
    runtimes = " ".join(subprocess.check_output(command, text=True).strip() for command in find)
    if loaded != runtimes:  # The runtimes must be loaded before any other library.
        command = ["setarch", "-R", sys.executable, "-m", "benchmarks.sanitize", *sys.argv[1:]]
        os.execvpe(command[0], command, os.environ | SETTINGS | {"LD_PRELOAD": runtimes})
    setattr(backend, "load_best", lambda cache: open_library(library))  # noqa: B010 (the name is imported there)
    return int(pytest.main(["--capture=sys", *(arguments or TESTS)]))


if __name__ == "__main__":
    sys.exit(main())
