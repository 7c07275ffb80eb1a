"""``rootgraft bench step``: measures the parts of an engine's step without a server, and compares them with limits.

A limit is the shortest possible time of a part, from the machine's memory bandwidth and peak performance.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

import orjson

from ...engine.checkpoint.config_overrides import resolve_served_model
from ...engine.config import EngineConfig
from ...engine.errors import ConfigError
from ...engine.profiling.step_report import Part, StepLoad, StepTimes
from ...engine.whole_file import write_whole
from .options import StepOptions


def bench_step(engine: EngineConfig, options: StepOptions) -> int:
    """Measure, print the table and write the JSON file. Returns 0."""
    from ...engine.profiling.step_profiler import measure_steps

    files = resolve_served_model(engine)
    load = StepLoad(options.rows, options.context, options.shared, options.prefill, options.steps)
    times = measure_steps(engine, files.path, load)
    print(table(times))
    if options.output_json is not None:
        _write(Path(options.output_json), load, times)
    return 0


def table(times: StepTimes) -> str:
    """Format the times as text: milliseconds of a step, their share of the step, and the share of the limit."""
    lines = [
        *times.summary,
        f"Limits: reading {times.reading / 1e9:.1f} GB/s, {times.products / 1e9:.0f} G products/s",
        "",
        f"{'Part of a step':<24}{'ms':>9}{'% of step':>12}{'% of limit':>12}",
        *(_line(name, part, times.seconds) for name, part in times.parts.items()),
        _line("rest", Part(times.rest), times.seconds),
        "",
        _total("forward and head", _sum(part for part in times.parts.values() if part.is_forward)),
        _total("everything else", times.seconds - _sum(part for part in times.parts.values() if part.is_forward)),
        _total("step", times.seconds),
        _total("step without timers", times.untimed),
        f"{'tokens per second':<24}{times.tokens / times.untimed:>9.0f}",
        f"{'% of limit':<24}{100 * limit(times) / times.untimed:>9.0f}",
    ]
    return "\n".join(lines)


def limit(times: StepTimes) -> float:
    """Return a lower bound, in seconds, of the time that the machine needs for a step."""
    return sum(part.limit or 0.0 for part in times.parts.values())


def _line(name: str, part: Part, step: float) -> str:
    share = f"{100 * part.limit / part.seconds:.0f}" if part.limit is not None and part.seconds else ""
    return f"{name:<24}{part.seconds * 1e3:>9.2f}{100 * part.seconds / step:>12.1f}{share:>12}".rstrip()


def _total(name: str, seconds: float) -> str:
    return f"{name:<24}{seconds * 1e3:>9.2f}"


def _sum(parts: Iterable[Part]) -> float:
    return sum(part.seconds for part in parts)


def _write(path: Path, load: StepLoad, times: StepTimes) -> None:
    """Write the file of ``--output-json``."""
    document = {"load": asdict(load), "times": asdict(times), "limit": limit(times)}
    try:
        write_whole(path, orjson.dumps(document, option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise ConfigError(f"--output-json: {path} cannot be written: {error.strerror}.") from error
