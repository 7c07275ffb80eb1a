"""Growth curves as one SVG picture, three plots in a row, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.growth.curve import Curve
from rootgraft.api.cli.sweep_chart import CHART_STYLE, LinePlot, PlotCurve, svg_text

_COLUMNS, _WIDTH, _HEIGHT = 3, 340, 280
_SIDES, _ABOVE = (52, 286), 40  # Left and right edge of a plot in its place; the room above a plot.


def growth_svg(curves: Sequence[Curve]) -> str:
    """Return the picture; a point that bends worse than its algorithm is named below the title of its plot."""
    rows = -(-len(curves) // _COLUMNS)
    width, height = _COLUMNS * _WIDTH, rows * _HEIGHT + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">',
        "<title>Growth curves: times by size, beside the machine's limit</title>",
        f"<style>{CHART_STYLE}</style>",
        f'<rect class="ground" width="{width}" height="{height}"/>',
    ]
    for number, curve in enumerate(curves):
        row, column = divmod(number, _COLUMNS)
        parts += [f'<g transform="translate({column * _WIDTH},{row * _HEIGHT - _ABOVE})">', *_plot(curve), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _plot(curve: Curve) -> list[str]:
    lines = [PlotCurve("", curve.y)]
    if curve.limit is not None:
        lines = [PlotCurve("ours", curve.y), PlotCurve("limit", curve.limit)]
    fitted = f"x^{curve.fitted_exponent():.2f}, allowed x^{curve.exponent:g}"
    bends = "".join(f", bends at {x:,}" for x in curve.bends())
    plot = LinePlot(_SIDES, curve.title, curve.x, lines, x_label=curve.x_label, is_log=True)
    return [*plot.parts(), svg_text(_SIDES[0], 78, fitted + bends, "mark" if bends else "small")]
