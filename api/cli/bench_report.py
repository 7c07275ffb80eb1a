"""Bench report: figures and table of ``rootgraft bench serve`` (throughput, TTFT, ITL, TPOT, end-to-end latency)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from .remote_server import Timing

PERCENTILES = (50, 90, 95, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """Return a percentile, with linear interpolation between the two nearest ranks."""
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    low = int(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarise(timings: Sequence[Timing]) -> dict[str, Any]:
    """Return the figures of a run: counts, tokens, throughput per second, latencies in milliseconds.

    The duration is from the first request sent to the end of the last stream. Tokens and latencies include only
    completed requests.
    """
    completed = [timing for timing in timings if timing.error is None]
    duration = max(t.ended for t in timings) - min(t.started for t in timings)
    prompt, completion = sum(t.prompt for t in completed), sum(t.completion for t in completed)
    cached = [t.cached for t in completed if t.cached is not None]
    return {
        "requests": len(timings),
        "completed": len(completed),
        "errors": dict(Counter(t.error for t in timings if t.error is not None).most_common()),
        "duration_s": duration,
        "prompt_tokens": prompt,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": completion,
        "requests_per_s": len(completed) / duration,
        "output_tokens_per_s": completion / duration,
        "total_tokens_per_s": (prompt + completion) / duration,
        "ttft_ms": _distribution([t.ttft for t in completed if t.ttft is not None]),
        "itl_ms": _distribution([gap for t in completed for gap in t.gaps]),
        "tpot_ms": _distribution([t.tpot for t in completed if t.tpot is not None]),
        "e2e_ms": _distribution([t.latency for t in completed]),
    }


def _distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    values = {"mean": fmean(seconds)} | {f"p{p}": percentile(seconds, p) for p in PERCENTILES}
    return {name: value * 1e3 for name, value in values.items()}


def table(figures: dict[str, Any]) -> str:
    """Format the figures as a text table of about 70 columns."""
    lines = ["", *(f"{label:<34}{value}" for label, value in _totals(figures)), "", _row("", _columns())]
    for label, key in _LATENCIES:
        values = figures[key]
        lines.append(_row(label, [f"{values[n]:.2f}" if values else "-" for n in _columns()]))
    for title, counts in (("Errors", figures["errors"]), ("Invalid answers", figures.get("invalid_answers"))):
        if counts:
            lines += ["", title, *(f"  {count:>6}  {kind}" for kind, count in counts.items())]
    return "\n".join(lines)


_LATENCIES = (
    ("Time to first token (ms)", "ttft_ms"),
    ("Inter-token latency (ms)", "itl_ms"),
    ("Time per output token (ms)", "tpot_ms"),
    ("End to end (ms)", "e2e_ms"),
)


def _columns() -> list[str]:
    return ["mean", "p50", "p90", "p99"]


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<28}" + "".join(f"{cell:>11}" for cell in cells)


def _totals(figures: dict[str, Any]) -> list[tuple[str, str]]:
    prompt, cached = figures["prompt_tokens"], figures["cached_tokens"]
    share = "not reported" if cached is None else f"{cached:,} ({100 * cached / max(prompt, 1):.1f} %)"
    return [
        ("Requests completed", f"{figures['completed']} of {figures['requests']}"),
        ("Duration (s)", f"{figures['duration_s']:.2f}"),
        ("Prompt tokens", f"{prompt:,}"),
        ("  of which cached", share),
        ("Output tokens", f"{figures['output_tokens']:,}"),
        ("Requests per second", f"{figures['requests_per_s']:.2f}"),
        ("Output tokens per second", f"{figures['output_tokens_per_s']:.2f}"),
        ("Prompt and output tokens per s", f"{figures['total_tokens_per_s']:.2f}"),
    ]
