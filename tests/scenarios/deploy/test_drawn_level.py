"""The level of the CPU that CI holds some tests down to: below the machine's own, and each in its turn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.machine.drawn_level import DRAWN_FOLDERS, DRAWN_LEVELS, draw_level

from rootgraft.kernels.cpu.portable_build import BASELINE, LEVELS

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("own", [*LEVELS, None])
def test_every_level_below_the_machine_s_own_is_drawn_with_every_folder(own: str | None) -> None:
    below = [BASELINE] if own == "avx2" else list(DRAWN_LEVELS)
    draws = [draw_level(f"{number:08x}{'0' * 32}", own) for number in range(8 * len(below) * len(DRAWN_FOLDERS))]
    assert {(draw.level, draw.folder) for draw in draws} == {
        (level, folder) for level in below for folder in DRAWN_FOLDERS
    }
    assert all(draws.count(draw) == 8 for draw in draws)


def test_the_folders_are_there_and_ci_draws_one_by_the_commit() -> None:
    assert all((ROOT / folder).is_dir() for folder in DRAWN_FOLDERS)
    run = (ROOT / ".ci" / "run").read_text()
    [command] = re.findall(r"read -r level folder < <\((.*?) \"\$\(", run)
    program = command.split()
    assert program[0] == ".venv/bin/python" and (ROOT / program[1]).is_file()
    found = subprocess.run(
        [sys.executable, *program[1:], "0123456789abcdef"],
        cwd=ROOT, capture_output=True, text=True, check=True, env={**os.environ, "ROOTGRAFT_CPU_LEVEL": ""},
    )  # fmt: skip
    level, folder = found.stdout.split()
    assert level in DRAWN_LEVELS and folder in DRAWN_FOLDERS
