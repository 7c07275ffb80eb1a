"""Partition of products into parts for threads: all is computed once, and no thread more than its part at most."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.partition import FEW_ROWS, busy_share, compiled, cut
from rootgraft.kernels.cpu.build import BuildError, find_compiler

THREADS = (1, 2, 3, 16, 36, 64, 200)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    return compiled(tmp_path_factory.mktemp("partition"))


@pytest.mark.parametrize("columns", [1, 16, 40, 576, 960, 49_152])
def test_parts_are_a_whole_product_and_none_is_empty(program: Path, columns: int) -> None:
    panels = -(-columns // 16)
    for threads in THREADS:
        for rows in (1, FEW_ROWS, FEW_ROWS + 1, 47, 512, 1030):
            costs = cut(program, threads, rows, columns, 576)
            assert sum(costs) == rows * panels and min(costs) > 0
            if rows <= FEW_ROWS:  # one part for a thread, and no more threads than end sooner
                assert max(costs) == rows * -(-panels // threads)
                assert len(costs) == -(-panels // -(-panels // threads))


def test_threads_take_what_is_left_of_others() -> None:
    assert busy_share([1, 1, 1, 1], 2) == 1.0
    assert busy_share([3, 1, 1, 1], 2) == 1.0  # the second takes its own two and the first one's other
    assert busy_share([2, 1], 4) == 3 / 8
