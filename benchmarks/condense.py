"""Condense raw results into the file that is kept in ``benchmarks/results``: one per machine and release.

    python -m benchmarks.condense table.json drafts.json --machine 'AMD EPYC (Zen 4), 2 cores' \\
        --output benchmarks/results/2026-11-22-zen4.json

The comparisons, parts and versions of an output of ``benchmarks.serve.table`` are taken over. Other JSON is kept whole
as a part, and text as its lines.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MEDIAN = "median"  # Stands for the number of a repeat.
SCHEMAS = ("W5", "W7")  # workloads with answers that follow a schema
FIGURES: dict[str, tuple[str, ...]] = {  # column -> path into the figures of a repeat
    "output_tokens_per_s": ("output_tokens_per_s",),
    "ttft_p50_ms": ("ttft_ms", "p50"),
    "ttft_p99_ms": ("ttft_ms", "p99"),
    "itl_p50_ms": ("itl_ms", "p50"),
    "itl_p99_ms": ("itl_ms", "p99"),
    "prompt_tokens": ("prompt_tokens",),
    "cached_tokens": ("cached_tokens",),
    "completed": ("completed",),
    "valid": ("valid",),
}
COLUMNS = ["workload", "server", "repeat", *FIGURES]
WIDTH = 160  # characters of a line of JSON


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("raw", nargs="+", type=Path)
    parser.add_argument("--machine", required=True, help="processor, instruction sets, cores and memory, in words")
    parser.add_argument("--release", default="0.1.0, not released yet", help="version of rootgraft")
    parser.add_argument("--versions", nargs="+", default=[], metavar="NAME=VERSION", help="versions of the peers")
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    found = condense(args.raw)
    versions = found.pop("versions") | dict(pair.split("=", 1) for pair in args.versions)
    document = {"machine": args.machine, "release": args.release, "versions": versions} | found
    args.output.write_text("\n".join(render(document)) + "\n")


def condense(paths: list[Path]) -> dict[str, Any]:
    """Versions of peers, comparisons and parts of a kept file, in the order of the paths."""
    versions: dict[str, Any] = {}
    comparisons: dict[str, Any] = {}
    parts: dict[str, Any] = {}
    for path in paths:
        name = re.sub(r"^\d{4}-\d\d-\d\d-", "", path.stem)  # without its date
        if path.suffix != ".json":
            parts[name] = path.read_text().splitlines()
        elif "comparisons" in (document := json.loads(path.read_text())):
            if document["columns"] != COLUMNS:
                raise SystemExit(f"{path} has the columns {document['columns']}, and not {COLUMNS}.")
            versions |= document["versions"]
            comparisons |= document["comparisons"]
            parts |= document["parts"]
        else:
            parts[name] = document
    return {"versions": versions, "columns": COLUMNS, "comparisons": comparisons, "parts": parts}


def rows(loads: Mapping[tuple[str, str], list[dict[str, Any]]]) -> list[list[Any]]:
    """Return the rows of all workloads and servers: the medians first, then each repeat.

    Args:
        loads: figures of the repeats by workload and server.
    """
    found = [row for (load, server), repeats in loads.items() for row in _rows(load, server, repeats)]
    return sorted(found, key=lambda row: (row[2] != MEDIAN, row[0]))


def _rows(load: str, server: str, repeats: list[dict[str, Any]]) -> Iterator[list[Any]]:
    """The medians of a workload on a server, then each repeat."""
    found = [[_figure(load, name, figures) for name in FIGURES] for figures in repeats]
    columns = [[value for value in column if value is not None] for column in zip(*found, strict=True)]
    yield [load, server, MEDIAN, *(short(statistics.median(column)) if column else None for column in columns)]
    for number, row in enumerate(found):
        yield [load, server, number, *row]


def _figure(load: str, name: str, figures: dict[str, Any]) -> float | None:
    value: Any = figures if name != "valid" or load in SCHEMAS else {}
    for key in FIGURES[name]:
        value = (value or {}).get(key)
    return short(value)


def short(value: float | None) -> float | None:
    """Return a number with four significant digits."""
    return value if value is None or isinstance(value, int) else float(f"{value:.4g}")


def render(value: Any, indent: int = 0) -> Iterator[str]:
    """Lines of JSON. What fits into one is one, and so is a list of numbers: a table has a line for each row."""
    flat = json.dumps(value, ensure_ascii=False)
    numbers = isinstance(value, list) and not any(isinstance(item, dict | list | str) for item in value)
    if not isinstance(value, dict | list) or numbers or len(flat) + indent <= WIDTH:
        yield flat
        return
    keys = [f"{json.dumps(key)}: " for key in value] if isinstance(value, dict) else [""] * len(value)
    items = value.values() if isinstance(value, dict) else value
    yield flat[0]
    for number, (key, item) in enumerate(zip(keys, items, strict=True), 1):
        *lines, last = render(item, indent + 1)
        first, *others = *lines, last + ("," if number < len(value) else "")
        yield from (f" {key}{first}", *(f" {line}" for line in others))
    yield flat[-1]


if __name__ == "__main__":
    main()
