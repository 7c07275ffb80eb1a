"""Whether memory grows: samples of processes and folders, and the slope of a line with its confidence interval."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

BLOCKS = 20
_T_95 = 2.101  # Student's t, 97.5 %, of BLOCKS - 2 degrees of freedom


@dataclass
class Samples:
    """Samples of one process: seconds, resident anonymous memory in bytes, threads, open files.

    Pages of files are left out: how many of a library's are resident, and whose they are, depends on other processes.
    """

    process: psutil.Process
    seconds: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def take(self, now: float) -> None:
        """Add a sample."""
        self.seconds.append(now)
        info = self.process.memory_info()
        self.memory.append(info.rss - info.shared)
        self.threads.append(self.process.num_threads())
        self.files.append(self.process.num_fds())

    def report(self, warm: float) -> dict[str, object]:
        """Figures of the time after ``warm`` seconds."""
        first = next((i for i, at in enumerate(self.seconds) if at >= warm), 0)
        mib = [size / 2**20 for size in self.memory]
        slope, error = slope_of([at / 3600 for at in self.seconds[first:]], mib[first:])
        return {
            "mib": {"start": round(mib[0], 1), "warm": round(mib[first], 1), "end": round(mib[-1], 1)},
            "growth_after_warm_up_mib": round(mib[-1] - mib[first], 2),
            "mib_over_time": means_of(mib[first:]),
            "slope_mib_per_hour": None if slope is None else round(slope, 2),
            "slope_95_percent": None if slope is None else [round(slope - error, 2), round(slope + error, 2)],
            "threads": {"warm": self.threads[first], "most": max(self.threads), "end": self.threads[-1]},
            "open_files": {"warm": self.files[first], "most": max(self.files), "end": self.files[-1]},
        }


@dataclass
class FolderSamples:
    """Bytes of the files below a folder, which need not be there yet; the most at one time."""

    folder: Path
    most: int = 0

    def take(self, now: float) -> None:
        """Add a sample. Files that are removed meanwhile count as gone."""
        total = 0
        for file in self.folder.rglob("*"):
            with suppress(FileNotFoundError):
                total += file.stat().st_size if file.is_file() else 0
        self.most = max(self.most, total)


def means_of(values: Sequence[float]) -> list[float]:
    """The means of ``BLOCKS`` blocks."""
    size = max(1, len(values) // BLOCKS)
    return [round(statistics.fmean(values[at : at + size]), 2) for at in range(0, size * BLOCKS, size) if values[at:]]


def slope_of(x: Sequence[float], y: Sequence[float]) -> tuple[float | None, float]:
    """The slope of the least-squares line, and half the width of its 95 % interval.

    Samples that follow each other are alike, which would make the interval too narrow: the line goes through the
    means of ``BLOCKS`` blocks. None if there are too few samples.
    """
    size = len(x) // BLOCKS
    if not size:
        return None, math.inf
    starts = range(0, size * BLOCKS, size)
    xs, ys = ([statistics.fmean(values[i : i + size]) for i in starts] for values in (x, y))
    middle, mean = statistics.fmean(xs), statistics.fmean(ys)
    spread = sum((at - middle) ** 2 for at in xs)
    slope = sum((at - middle) * (value - mean) for at, value in zip(xs, ys, strict=True)) / spread
    rest = sum((value - mean - slope * (at - middle)) ** 2 for at, value in zip(xs, ys, strict=True))
    return slope, _T_95 * math.sqrt(rest / (BLOCKS - 2) / spread)
