"""Rounding rows to integers overflows nothing, whatever the rows hold: said by the compiler's own checks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from support.machine.thoroughness import taking_turns

from rootgraft.kernels.cpu.build import FLAGS, SOURCES, BuildError, find_compiler

PROGRAM = Path(__file__).parents[2] / "support" / "kernels" / "round_rows.cpp"
CHECKS = ("-O1", "-fsanitize=undefined,float-cast-overflow", "-fno-sanitize-recover=all")


@pytest.mark.heavy
@pytest.mark.parametrize("arch", taking_turns(["native", "x86-64-v3", "x86-64"], 3))
def test_rows_of_no_numbers(tmp_path: Path, arch: str) -> None:
    try:
        compiler = find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    if not Path(subprocess.check_output([compiler, "-print-file-name=libubsan.so"], text=True).strip()).is_absolute():
        pytest.skip("the compiler has no library for its checks")
    sources = [str(PROGRAM), str(SOURCES / "simd" / "parallel.cpp")]
    program = tmp_path / "round_rows"
    command = [compiler, *FLAGS, *CHECKS, f"-march={arch}", f"-I{SOURCES}", *sources, "-o", str(program)]
    subprocess.run(command, check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
