"""Sweep chart: draws throughput, TTFT and ITL by the number of clients, as SVG or PNG.

The picture has its own background, which is light or dark according to the viewer's setting. Percentiles also differ in
their dashes, so that they can be distinguished without colours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from ...engine.errors import ConfigError
from ...engine.whole_file import write_whole
from .sweep_report import PERCENTILES, Level

_WIDTH, _HEIGHT = 960, 340
# Vertical bounds of the curves.
_TOP, _BOTTOM = 84, 286
_PANELS = ((58, 300), (384, 600), (684, 900))  # left and right edge of each panel
_MOST_TICKS = 6
CHART_STYLE = """
.ground{fill:#ffffff}.frame{stroke:#d5dae1;fill:none}.grid{stroke:#e7eaef}.knee{stroke:#b4552d;stroke-dasharray:3 3}
text{font:12px system-ui,-apple-system,"Segoe UI",sans-serif;fill:#3a4150}.title{font-size:14px;font-weight:600}
.head{font-weight:600}.small{font-size:11px;fill:#69717f}.mark{fill:#b4552d;font-size:11px}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.c0{stroke:#0f7b6c}.c1{stroke:#3f6fb5}.c2{stroke:#8a4fa8}
.d0{fill:#0f7b6c}.d1{fill:#3f6fb5}.d2{fill:#8a4fa8}.s1{stroke-dasharray:7 3}.s2{stroke-dasharray:2 3}
@media (prefers-color-scheme: dark){
.ground{fill:#14181d}.frame{stroke:#3a4450}.grid{stroke:#262d36}text{fill:#d3d9e1}.small{fill:#98a2b0}
.c0{stroke:#35b89f}.c1{stroke:#74a5ea}.c2{stroke:#c58ae0}.d0{fill:#35b89f}.d1{fill:#74a5ea}.d2{fill:#c58ae0}
.knee{stroke:#eb9d4d}.mark{fill:#eb9d4d}}
"""


class PlotCurve(NamedTuple):
    """A named curve: a value for each position; None for a position without a value."""

    name: str
    values: Sequence[float | None]


def write_chart(path: Path, levels: Sequence[Level], knee: int | None, subject: str) -> None:
    """Write the picture of a sweep.

    Args:
        path: path that ends in .svg or .png.
        subject: model and server, for the title.

    Raises:
        ConfigError: the file cannot be written, or cairosvg is missing for a PNG.
    """
    whole = [level for level in levels if not level.interrupted]
    content = chart_svg(whole, knee, subject).encode()
    if path.suffix.lower() == ".png":
        content = _png(content)
    try:
        write_whole(path, content)
    except OSError as error:
        raise ConfigError(f"--output-chart: {path} cannot be written: {error.strerror}.") from error


def _png(svg: bytes) -> bytes:
    try:
        import cairosvg
    except ImportError:
        raise ConfigError(
            "--output-chart: PNG needs cairosvg (pip install cairosvg); SVG needs no extra package."
        ) from None
    return bytes(cairosvg.svg2png(bytestring=svg, scale=2))


def chart_svg(levels: Sequence[Level], knee: int | None, subject: str) -> str:
    """Return the picture as SVG."""
    clients = [level.clients for level in levels]
    speed = [PlotCurve("output tokens a second", [level.throughput for level in levels])]
    ttft, itl = _latencies(levels, "ttft_ms"), _latencies(levels, "itl_ms")
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img">',
        f"<title>{escape(subject)}: throughput and latencies by number of clients</title>",
        f"<style>{CHART_STYLE}</style>",
        f'<rect class="ground" width="{_WIDTH}" height="{_HEIGHT}"/>',
        svg_text(20, 28, escape(subject), "title"),
        *LinePlot(_PANELS[0], "Output tokens a second", clients, speed, mark=knee).parts(),
        *LinePlot(_PANELS[1], "Time to first token, ms", clients, ttft, is_log=True, mark=knee).parts(),
        *LinePlot(_PANELS[2], "Time between tokens, ms", clients, itl, is_log=True, mark=knee).parts(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _latencies(levels: Sequence[Level], key: str) -> list[PlotCurve]:
    return [
        PlotCurve(name, [None if level.figures[key] is None else level.figures[key][name] for level in levels])
        for name in PERCENTILES
    ]


class LinePlot:
    """One plot of curves with a logarithmic x axis, between ``y`` = 84 and 286.

    Args:
        sides: left and right edge.
        x: positions of the curves' values, ascending.
        x_label: label of the x axis.
        is_log: whether the y axis is logarithmic too.
        mark: index of the position that is marked as the knee; None for no mark.
    """

    def __init__(
        self,
        sides: tuple[int, int],
        title: str,
        x: Sequence[int],
        curves: Sequence[PlotCurve],
        *,
        x_label: str = "clients",
        is_log: bool = False,
        mark: int | None = None,
    ) -> None:
        self._left, self._right = sides
        self._title = title
        self._values = x
        self._label = x_label
        self._curves = curves
        self._mark = mark
        self._is_log = is_log
        known = [value for curve in curves for value in curve.values if value is not None]
        self._ticks: list[float] = []
        if known:
            self._ticks = log_ticks(min(known), max(known)) if is_log else linear_ticks(max(known))

    def parts(self) -> list[str]:
        """Return the elements: title, grid, frame, knee, and the curves with a name at the end of each."""
        title = svg_text(self._left, _TOP - 20, self._title, "head")
        if not self._ticks:
            return [title, svg_text(self._left, (_TOP + _BOTTOM) / 2, "nothing was measured", "small")]
        return [title, *self._frame(), *self._x_labels(), *self._lines()]

    def _x(self, count: float) -> float:
        span = math.log(self._values[-1] / self._values[0]) or 1.0
        return self._left + 10 + (self._right - self._left - 20) * math.log(count / self._values[0]) / span

    def _y(self, value: float) -> float:
        low, high = self._ticks[0], self._ticks[-1]
        share = math.log(max(value, low) / low) / math.log(high / low) if self._is_log else (value - low) / (high - low)
        return _BOTTOM - (_BOTTOM - _TOP) * share

    def _frame(self) -> list[str]:
        left, right = self._left, self._right
        parts = []
        for tick in self._ticks:
            y = self._y(tick)
            parts.append(f'<line class="grid" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(svg_text(left - 6, y + 4, f"{tick:,g}", "small", "end"))
        parts.append(f'<rect class="frame" x="{left}" y="{_TOP}" width="{right - left}" height="{_BOTTOM - _TOP}"/>')
        if self._mark is not None:
            x = self._x(self._values[self._mark])
            parts.append(f'<line class="knee" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{_BOTTOM}"/>')
            parts.append(svg_text(x, _TOP - 5, "knee", "mark", "middle"))
        return parts

    def _x_labels(self) -> list[str]:
        """Return the numbers below the plot, without numbers that would overlap the previous one."""
        parts, free = [], -math.inf
        for count in self._values:
            if self._x(count) >= free:
                parts.append(svg_text(self._x(count), _BOTTOM + 17, f"{count:,}", "small", "middle"))
                free = self._x(count) + 12 + 7 * len(f"{count:,}")
        return [*parts, svg_text((self._left + self._right) / 2, _BOTTOM + 37, self._label, "small", "middle")]

    def _lines(self) -> list[str]:
        parts = []
        names = []
        for number, curve in enumerate(self._curves):
            pairs = zip(self._values, curve.values, strict=True)
            points = [(self._x(count), self._y(value)) for count, value in pairs if value is not None]
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(f'<polyline class="line c{number} s{number}" points="{path}"/>')
            parts += [f'<circle class="d{number}" cx="{x:.1f}" cy="{y:.1f}" r="2.6"/>' for x, y in points]
            names.append(points[-1][1])
        if len(self._curves) > 1:
            for number, (curve, y) in enumerate(zip(self._curves, _apart(names), strict=True)):
                parts.append(f'<text class="d{number}" x="{self._right + 6}" y="{y + 4:.1f}">{curve.name}</text>')
        return parts


def _apart(heights: list[float], least: float = 13.0) -> list[float]:
    """Return heights in the same order, moved apart so that names at them do not overlap."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved = list(heights)
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + least)
    return moved


def linear_ticks(highest: float) -> list[float]:
    """Return 0 and multiples of 1, 2 or 5 times a power of ten, the last at or above ``highest``."""
    raw = (highest or 1.0) / (_MOST_TICKS - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(mantissa * power for mantissa in (1, 2, 5, 10) if mantissa * power >= raw * (1 - 1e-9))
    return [step * number for number in range(math.ceil(highest / step - 1e-9) + 1)] or [0.0, step]


def log_ticks(lowest: float, highest: float) -> list[float]:
    """Return 1, 2 and 5 times powers of ten around both values, or only powers of ten if these are too many."""
    lowest = max(lowest, 1e-3)
    first, last = math.floor(math.log10(lowest)), math.ceil(math.log10(max(highest, lowest)))
    for mantissas in ((1, 2, 5), (1,)):
        series = sorted({m * 10.0**power for power in range(first, last + 1) for m in mantissas})
        begin = max(number for number, tick in enumerate(series) if tick <= lowest * (1 + 1e-9))
        end = next((number for number, tick in enumerate(series) if tick >= highest), len(series) - 1)
        end = max(end, begin + 1)
        if end - begin < _MOST_TICKS + 1 and end < len(series):
            return series[begin : end + 1]
    return series[begin : end + 1]


def svg_text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    """Return a text element; ``style`` is a class of ``CHART_STYLE``."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'
