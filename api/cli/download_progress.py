"""How a download looks: a bar in a terminal, a line for each file in a log."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tqdm import tqdm

from ...engine.checkpoint.locate import Progress


@contextmanager
def show_download() -> Iterator[Progress]:
    """Show a progress bar: the ``progress`` of ``engine.checkpoint.locate``, drawn from the first call on."""
    bars: dict[str, tqdm] = {}

    def progress(what: str, done: int, total: int) -> None:
        if what not in bars:
            bars[what] = _bar(what, total)
        bars[what].update(done - bars[what].n)

    try:
        yield progress
    finally:
        for bar in bars.values():
            bar.close()


def _bar(what: str, total: int) -> tqdm:
    in_terminal = sys.stderr.isatty()
    if not in_terminal:
        print(f"{what} ({total / 1e6:.0f} MB)", file=sys.stderr, flush=True)
    return tqdm(
        desc=what,
        total=total,
        unit="B",
        unit_scale=True,
        disable=not in_terminal,
        ncols=shutil.get_terminal_size().columns,
        bar_format="{desc}  {percentage:3.0f}% {bar:30} {n_fmt}/{total_fmt}B  {rate_fmt}",
    )
