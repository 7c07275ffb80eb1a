"""From the timings of single requests to the figures and the table of ``rootgraft bench serve``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Timing:
    """One request. Times are seconds; those of a point are on ``time.perf_counter``'s scale.

    Attributes:
        started: when it was sent.
        ended: when its stream ended, or it failed.
        ttft: time to the first token, None if none came.
        gaps: times between one arrival of text and the next (a stream may bring several tokens at once).
        prompt: tokens of the prompt by the server's count, and of these ``cached`` (None: the server does not say).
        completion: tokens of the answer by the server's count, else the arrivals.
        finish: why the answer ended, in the server's word.
        error: the kind of failure, or None.
        message: the failure in one line.
    """

    started: float = 0.0
    ended: float = 0.0
    ttft: float | None = None
    gaps: list[float] = field(default_factory=list)
    prompt: int = 0
    cached: int | None = None
    completion: int = 0
    finish: str | None = None
    error: str | None = None
    message: str | None = None

    @property
    def latency(self) -> float:
        """From sending to the end of the stream."""
        return self.ended - self.started

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first; None for an answer of one token."""
        return sum(self.gaps) / (self.completion - 1) if self.completion > 1 and self.gaps else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which ``percent`` of the values lie, linear between the two nearest ranks."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def summarise(timings: Sequence[Timing]) -> dict[str, Any]:
    """The figures of a run: counts, tokens, throughput in units a second, latencies in milliseconds.

    The duration runs from the first request sent to the last stream's end. Only completed requests count for tokens
    and latencies.
    """
    good = [timing for timing in timings if timing.error is None]
    duration = max(t.ended for t in timings) - min(t.started for t in timings)
    prompt, completion = sum(t.prompt for t in good), sum(t.completion for t in good)
    cached = [t.cached for t in good if t.cached is not None]
    return {
        "requests": len(timings),
        "completed": len(good),
        "errors": dict(Counter(t.error for t in timings if t.error is not None).most_common()),
        "duration_s": duration,
        "prompt_tokens": prompt,
        "cached_tokens": sum(cached) if cached else None,
        "output_tokens": completion,
        "requests_per_s": len(good) / duration,
        "output_tokens_per_s": completion / duration,
        "total_tokens_per_s": (prompt + completion) / duration,
        "ttft_ms": _distribution([t.ttft for t in good if t.ttft is not None]),
        "itl_ms": _distribution([gap for t in good for gap in t.gaps]),
        "tpot_ms": _distribution([t.tpot for t in good if t.tpot is not None]),
        "e2e_ms": _distribution([t.latency for t in good]),
    }


def _distribution(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    shown = {"mean": fmean(seconds)} | {f"p{p}": percentile(seconds, p) for p in PERCENTILES}
    return {name: value * 1e3 for name, value in shown.items()}


def table(figures: dict[str, Any]) -> str:
    """The figures for a person, about 70 columns wide."""
    lines = ["", *(f"{label:<34}{value}" for label, value in _totals(figures)), "", _row("", _names())]
    for label, key in _LATENCIES:
        values = figures[key]
        lines.append(_row(label, [f"{values[n]:.2f}" if values else "-" for n in _names()]))
    if figures["errors"]:
        lines += ["", "Errors", *(f"  {count:>6}  {kind}" for kind, count in figures["errors"].items())]
    return "\n".join(lines)


_LATENCIES = (
    ("Time to first token (ms)", "ttft_ms"),
    ("Inter-token latency (ms)", "itl_ms"),
    ("Time per output token (ms)", "tpot_ms"),
    ("End to end (ms)", "e2e_ms"),
)


def _names() -> list[str]:
    return ["mean", *(f"p{p}" for p in PERCENTILES)]


def _row(label: str, cells: Sequence[str]) -> str:
    return f"{label:<28}" + "".join(f"{cell:>11}" for cell in cells)


def _totals(figures: dict[str, Any]) -> list[tuple[str, str]]:
    prompt, cached = figures["prompt_tokens"], figures["cached_tokens"]
    share = "not reported" if cached is None else f"{cached:,} ({100 * cached / max(prompt, 1):.1f} %)"
    return [
        ("Requests completed", f"{figures['completed']} of {figures['requests']}"),
        ("Duration (s)", f"{figures['duration_s']:.2f}"),
        ("Prompt tokens", f"{prompt:,}"),
        ("  of these cached", share),
        ("Output tokens", f"{figures['output_tokens']:,}"),
        ("Requests per second", f"{figures['requests_per_s']:.2f}"),
        ("Output tokens per second", f"{figures['output_tokens_per_s']:.2f}"),
        ("Prompt and output tokens per s", f"{figures['total_tokens_per_s']:.2f}"),
    ]
