"""Resources of the processes of a running server: memory, descriptors, threads and processes, by their roles."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil

from benchmarks.soaking.memory import means_of, slope_of

KINDS = ("memory_mib", "descriptors", "threads", "processes")
_ROLES = (("engine", " engine "), ("compile workers", "compile_worker"), ("program workers", "program_worker"))


def role_of(process: psutil.Process, api: int) -> str:
    """Return what a process of the server is, by its command line."""
    if process.pid == api:
        return "api"
    words = " ".join(process.cmdline()) + " "
    return next((role for role, part in _ROLES if part in words), "others")


@dataclass
class Series:
    """Samples of named quantities over time.

    Attributes:
        seconds: when each sample was taken.
        values: by name; a name that a sample lacks has 0 there.
    """

    seconds: list[float] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, now: float, sample: Mapping[str, float]) -> None:
        """Add a sample."""
        for name in sample.keys() - self.values.keys():
            self.values[name] = [0.0] * len(self.seconds)
        self.seconds.append(now)
        for name, values in self.values.items():
            values.append(sample.get(name, 0.0))

    def report(self, warm: float) -> dict[str, Any]:
        """Return for each quantity its least, most and last value, and its slope after ``warm`` seconds.

        The slope is per hour, with its 95 % interval, by the means of blocks, which ``means`` has.
        """
        first = next((at for at, second in enumerate(self.seconds) if second >= warm), len(self.seconds))
        found = {}
        for name, values in sorted(self.values.items()):
            late = values[first:]
            slope, error = slope_of([second / 3600 for second in self.seconds[first:]], late)
            found[name] = {
                "start": round(values[0], 1),
                "most": round(max(values), 1),
                "end": round(values[-1], 1),
                "slope_per_hour": None if slope is None else round(slope, 3),
                "interval_95": None if slope is None else [round(slope - error, 3), round(slope + error, 3)],
                "means": means_of(late),
            }
        return found


def sample(api: psutil.Process) -> tuple[dict[str, float], float]:
    """Return what each role holds, and the processor seconds of all processes so far.

    Memory is resident and anonymous: pages of files are left out, as others share them.
    """
    found: dict[str, float] = defaultdict(float)
    used = 0.0
    for process in [api, *api.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            with process.oneshot():
                role, memory, times = role_of(process, api.pid), process.memory_info(), process.cpu_times()
                threads = process.num_threads()
            held = ((memory.rss - memory.shared) / 2**20, process.num_fds(), threads, 1)
            used += times.user + times.system
            for kind, value in zip(KINDS, held, strict=True):
                found[f"{role}.{kind}"] += value
                found[f"all.{kind}"] += value
    return dict(found), used


def is_flat(report: Mapping[str, Any], most_slope: float) -> bool:
    """Return whether a slope's interval holds zero or less, or the slope is small."""
    return report["slope_per_hour"] is not None and (
        report["interval_95"][0] <= 0 or report["slope_per_hour"] < most_slope
    )
