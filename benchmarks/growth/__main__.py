"""Growth curves, measured, compared with what their algorithms say, and drawn.

    python -m benchmarks.growth [--curves context batch ...] [--output growth.json] [--chart docs/internals/growth.svg]
    python -m benchmarks.growth --quick

context       decode step and time to first token, 1k to 32k tokens     about 4 minutes on two cores
batch         decode step of 1 to 256 sequences                         1 minute
adapters      a step with 1 to 1,000 registered, 1 to 64 active         2 minutes
schemas       1 to 1,000 distinct JSON schemas                          2 minutes
tree          the prefix cache with 1,000 to 1,000,000 tokens           1 minute
scheduler     steps without a model, 1 to 256 running, to 10,000 waiting  20 seconds
connections   a server with 1 to 2,000 connections at once              1 minute

All but the last run in this process. Context, batch and adapters have random weights in the shape of SmolLM2-135M, in
bfloat16. A curve's exponent is fitted in logarithms; a point *bends* if it is over 1.25 times of what every smaller
point and the exponent that the algorithm allows say. The limit is the time in which the machine reads the bytes or
makes the products, at the better of the rates before and after. Exit code 1 if a curve bends, or is farther from its
limit than it may be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.growth import (
    adapter_curves,
    batch_curve,
    connection_curves,
    context_curves,
    scheduler_curves,
    schema_curves,
    tree_curves,
)
from benchmarks.growth.curve import Curve
from benchmarks.growth.growth_chart import growth_svg
from benchmarks.serve.server import machine

CURVES: dict[str, Callable[[bool], list[Curve]]] = {
    "context": context_curves.measure,
    "batch": batch_curve.measure,
    "adapters": adapter_curves.measure,
    "schemas": schema_curves.measure,
    "tree": tree_curves.measure,
    "scheduler": scheduler_curves.measure,
    "connections": connection_curves.measure,
}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", nargs="+", default=list(CURVES), choices=list(CURVES))
    parser.add_argument("--quick", action="store_true", help="small sizes, to see that it works")
    parser.add_argument("--output", type=Path, help="JSON file; curves in it that are not measured now are kept")
    parser.add_argument("--chart", type=Path, help="SVG file of all curves in --output")
    args = parser.parse_args(argv)
    known = _known(args.output)
    for name in args.curves:
        for curve in CURVES[name](args.quick):
            known[curve.name] = curve
            print(_row(curve), flush=True)
            if args.output:
                document = {"machine": machine(), "curves": [_entry(each) for each in known.values()]}
                args.output.write_text(json.dumps(document, indent=1) + "\n")
    curves = list(known.values())
    if args.chart:
        args.chart.write_text(growth_svg(curves))
    print("\n" + table(curves))
    return int(not all(curve.is_within for curve in curves))


def _known(path: Path | None) -> dict[str, Curve]:
    """Return the curves of an earlier output by name, in their order."""
    if path is None or not path.exists():
        return {}
    fields = Curve.__slots__
    entries = json.loads(path.read_text())["curves"]
    return {each["name"]: Curve(**{key: each[key] for key in fields}) for each in entries}


def _entry(curve: Curve) -> dict[str, object]:
    found = {"fitted_exponent": round(curve.fitted_exponent(), 3), "bends": curve.bends(), "ratio": curve.ratio()}
    return asdict(curve) | found | {"worst": curve.worst()}


def table(curves: Sequence[Curve]) -> str:
    """Return the curves as a Markdown table."""
    head = "| curve | sizes | first, last | fitted exponent | allowed | times the limit: last, worst | bends at |"
    return "\n".join([head, "|---|---|---|---|---|---|---|", *map(_row, curves)])


def _row(curve: Curve) -> str:
    ratio, worst = curve.ratio(), curve.worst()
    of_limit = ""
    if ratio is not None and worst is not None:
        allowed = "" if curve.most is None else f" (at most {curve.most:g})"
        of_limit = f"{ratio:.2f}{allowed}, {worst[0]:.2f} at {worst[1]:,}"
    cells = (
        f"{curve.title}, by {curve.x_label}",
        f"{curve.x[0]:,} to {curve.x[-1]:,}",
        f"{curve.y[0]:.4g}, {curve.y[-1]:.4g}",
        f"{curve.fitted_exponent():.2f}",
        f"{curve.exponent:g}: {curve.reason}",
        of_limit,
        ", ".join(f"{x:,}" for x in curve.bends()),
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
