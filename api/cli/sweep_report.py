"""Sweep report: the knee of a sweep's throughput curve, and the table of the sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

_LEAST_BEND = 0.1
"""Smallest distance from the chord, as a fraction of the whole, for which a curve counts as bent."""
_LEAST_SHARE = 0.5
"""Smallest throughput at a knee, as a fraction of the best throughput."""
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
PERCENTILES = ("p50", "p95", "p99")


@dataclass(frozen=True, slots=True)
class Level:
    """One number of clients, and the measurements with it.

    Attributes:
        figures: figures as in ``bench_report.summarise``, with counts of ``invalid_answers`` by fault.
        interrupted: whether some of the level's requests have not ended. Such a level is shown, but not used for the
            knee.
    """

    clients: int
    figures: dict[str, Any]
    interrupted: bool = False

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return float(self.figures["output_tokens_per_s"])


def find_knee(levels: Sequence[Level]) -> int | None:
    """Return the index of the knee. More clients than at the knee cost much latency and bring little throughput.

    The method is Kneedle (Satopaa et al., 2011) for a rising, concave curve: clients and throughput are both scaled to
    0..1, and the knee is the level farthest above the chord from the first level to the last. The result is None for
    fewer than three levels and for an almost straight curve. It is also None if throughput more than doubles after the
    knee, as in a noisy curve that still rises: its knee may be beyond the last level.
    """
    whole = [level for level in levels if not level.interrupted]
    if len(whole) < 3:
        return None
    heights = _scaled([level.throughput for level in whole])
    places = _scaled([float(level.clients) for level in whole])
    bends = [height - place for height, place in zip(heights, places, strict=True)]
    best = max(range(len(whole)), key=bends.__getitem__)
    is_near_best = whole[best].throughput >= _LEAST_SHARE * max(level.throughput for level in whole)
    return best if bends[best] >= _LEAST_BEND and is_near_best else None


def _scaled(values: Sequence[float]) -> list[float]:
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


def sweep_table(levels: Sequence[Level], knee: int | None, *, in_terminal: bool = False) -> str:
    """Format a sweep in at most 80 columns. The line of the knee is marked, and bold in a terminal."""
    lines = ["", _HEADS[0], _HEADS[1]]
    for index, level in enumerate(levels):
        line = _line(level, "*" if index == knee else "!" if level.interrupted else " ")
        lines.append(f"{_BOLD}{line}{_PLAIN}" if in_terminal and index == knee else line)
    lines.append("")
    if knee is not None:
        share = levels[knee].throughput / max(level.throughput for level in levels)
        lines.append(f"* Knee (Kneedle): {levels[knee].clients} clients have {share:.0%} of the best throughput.")
    elif sum(not level.interrupted for level in levels) > 2:
        lines.append("No knee: throughput keeps growing. The knee may be beyond the last level.")
    if (last := levels[-1]).interrupted:
        lines.append(f"! Interrupted after {last.figures['requests']} requests: too few to compare.")
    for title, key in (("Failed", "errors"), ("Invalid answers", "invalid_answers")):
        if counts := _sum(levels, key):
            lines.append(f"{title}: {', '.join(f'{count} {kind}' for kind, count in counts.items())}")
    return "\n".join(lines)


_HEADS = (
    f"{'':7}{'output':>7}{'':6}{'time to first token, ms':>24}{'between tokens, ms':>21}",
    f"{'clients':7}{'tok/s':>7}{'req/s':>6}"
    + "".join(f"{name:>8}" for name in PERCENTILES)
    + "".join(f"{name:>7}" for name in PERCENTILES)
    + f"{'failed':>7}{'invalid':>8}",
)


def _line(level: Level, mark: str) -> str:
    figures = level.figures
    failed = figures["requests"] - figures["completed"]
    digits = 2 if figures["requests_per_s"] < 100 else 0
    return (
        f"{level.clients:>5}{mark}{level.throughput:>8.1f}{figures['requests_per_s']:>6.{digits}f}"
        + "".join(_cell(figures["ttft_ms"], name, 8) for name in PERCENTILES)
        + "".join(_cell(figures["itl_ms"], name, 7) for name in PERCENTILES)
        + f"{failed:>7}{sum(figures['invalid_answers'].values()):>8}"
    )


def _cell(values: dict[str, float] | None, name: str, width: int) -> str:
    """Return a number of milliseconds in the width of its column: 3.21, 32.1, 321, 32100."""
    if values is None:
        return f"{'-':>{width}}"
    value = values[name]
    return f"{value:>{width}.{2 if value < 10 else 1 if value < 100 else 0}f}"


def _sum(levels: Sequence[Level], key: str) -> dict[str, int]:
    total: dict[str, int] = {}
    for level in levels:
        for kind, count in level.figures[key].items():
            total[kind] = total.get(kind, 0) + count
    return total
