"""Draw measured speeds as a bar chart (SVG): output tokens per second, by workload and server.

    python -m benchmarks.picture benchmarks/results/2026-11-24-sampled-bf16.json --comparisons zen4
    python -m benchmarks.picture table.json --comparisons bf16 --output speed.svg

A file is one of ``benchmarks/results`` or an output of ``benchmarks.serve.table``; ``--comparisons`` picks some of its
comparisons by name. Bars are medians over the repeats. Of a server that occurs several times with one workload, the
first counts. Each workload has a scale of its own; numbers are at the bars.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Collection, Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.condense import MEDIAN

Speeds = dict[str, dict[str, float]]  # workload -> server -> tokens per second

TITLES = {
    "W1": "one stream",
    "W2": "32 at once",
    "W3": "shared 1,500-token prefix",
    "W4": "agents, 6 turns",
    "W5": "JSON schemas",
    "W6": "base + 8 adapters",
    "W7": "all of it, mixed",
}
COLOURS = ("#0f7b6c", "#8a94a6", "#c08a3e", "#7c6bb0")
LABEL, BARS, ROW, GAP, TOP = 230, 430, 17, 14, 44  # pixels


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=Path)
    parser.add_argument("--comparisons", nargs="+", default=[], help="names of comparisons; default: all")
    parser.add_argument("--output", type=Path, default=Path("docs/reference/speed.svg"))
    args = parser.parse_args()
    documents = [json.loads(path.read_text()) for path in args.results]
    args.output.write_text(draw(read(documents, args.comparisons)))
    return 0


def read(documents: Iterable[dict[str, Any]], comparisons: Collection[str] = ()) -> Speeds:
    """Median speeds of all servers and workloads, in the order of the workloads' names."""
    speeds: Speeds = {}
    for document in documents:
        for load, server, speed in _medians(document, comparisons):
            speeds.setdefault(load, {}).setdefault(server, speed)
    return dict(sorted(speeds.items()))


def _medians(document: dict[str, Any], comparisons: Collection[str]) -> Iterator[tuple[str, str, float]]:
    """Workload, server and median speed."""
    column = document["columns"].index("output_tokens_per_s")
    for name, comparison in document["comparisons"].items():
        for row in comparison["rows"]:
            if row[2] == MEDIAN and (not comparisons or name in comparisons):
                yield row[0], row[1], row[column]


def draw(speeds: Speeds) -> str:
    """An SVG image that reads on light and dark pages."""
    servers = list(dict.fromkeys(server for row in speeds.values() for server in row))
    parts, y = list(_legend(servers)), TOP
    for load, row in speeds.items():
        parts.append(_text(LABEL - 12, y + len(row) * ROW / 2 + 4, f"{load}  {TITLES.get(load, '')}", "end"))
        most = max(row.values())
        for server, speed in row.items():
            width = max(2.0, BARS * speed / most)
            colour = COLOURS[servers.index(server) % len(COLOURS)]
            parts.append(f'<rect x="{LABEL}" y="{y}" width="{width:.0f}" height="{ROW - 3}" rx="2" fill="{colour}"/>')
            parts.append(_text(LABEL + width + 6, y + ROW - 6, f"{speed:,.0f}", "start"))
            y += ROW
        y += GAP
    width, height = LABEL + BARS + 70, y
    style = "text{font:12px system-ui,sans-serif;fill:#3a4150}@media(prefers-color-scheme:dark){text{fill:#c9d1d9}}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    title = "<title>Output tokens per second by workload and server</title>"
    return "\n".join([head, title, f"<style>{style}</style>", *parts, "</svg>"]) + "\n"


def _legend(servers: list[str]) -> Iterable[str]:
    x = 12
    for number, server in enumerate(servers):
        yield f'<rect x="{x}" y="14" width="12" height="12" rx="2" fill="{COLOURS[number % len(COLOURS)]}"/>'
        yield _text(x + 18, 24, server, "start")
        x += 40 + 7 * len(server)


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{escape(text)}</text>'


if __name__ == "__main__":
    sys.exit(main())
