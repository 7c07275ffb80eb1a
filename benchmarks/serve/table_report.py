"""The table as Markdown, and the JSON of ``benchmarks/results``, from a record of runs."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks.condense import COLUMNS, rows, short
from benchmarks.serve.alternate import NO_DRAFTS, PrecisionClass
from benchmarks.serve.run_record import Figures, RunRecord
from benchmarks.serve.server import ROOT
from benchmarks.serve.workloads import NAMES

LOADS = {
    "W1": "one stream",
    "W2": "32 at once",
    "W3": "64 questions over a shared 1,500-token prompt",
    "W4": "8 agents, 6 turns each",
    "W5": "48 answers that follow JSON schemas",
    "W6": "W2 over the base model and eight adapters",
    "W7": "W3, W5 and W6 mixed",
}
QUALITY_FORMS = {"stored_dynamic": "4 bits", "stored": "4 bits, 16-bit activations", "int8_dynamic+int8_kv": "8 bits"}
"""Forms of ``benchmarks.quality`` that servers of the classes have, and what they are called."""


class TableReport:
    """Results of some classes at one temperature, from a record."""

    def __init__(self, record: RunRecord, classes: Sequence[PrecisionClass], temperature: float) -> None:
        self._record = record
        self._classes = classes
        self._temperature = temperature

    def markdown(self) -> str:
        """Return one table of output tokens a second, and one of latencies for each class."""
        drawn = "greedy" if self._temperature == 0 else f"sampled at temperature {self._temperature:g}"
        parts = [f"Output tokens a second, {drawn}, medians:", "", *self._speeds(), "", *self._notes()]
        for each in self._classes:
            parts += ["", f"{each.title}, {drawn}:", "", *self._details(each)]
        return "\n".join(parts)

    def comparison(self, measured: PrecisionClass) -> Figures:
        """Return the entry of a class in ``comparisons`` of a kept file."""
        machine, settings = self._record.settings["machine"], self._record.settings
        starts = {each["server"]: each for each in self._record.entries("command", **{"class": measured.name})}
        memory = {
            each["server"]: short(each["memory_mib"])
            for each in self._record.entries("memory_mib", **{"class": measured.name})
        }
        repeats = {
            (load, server): found
            for load in measured.workloads
            for server in (form.name for form in measured.servers)
            if (found := self._repeats(measured, server, load))
        }
        return {
            **{key: machine[key] for key in ("date", "commit", "python", "torch")},
            "temperature": self._temperature,
            "seed": settings["seed"],
            "commands": {server: without_paths(each["command"]) for server, each in starts.items()},
            "failed": {server: without_paths(reason) for server, reason in self._failed(measured).items()},
            "first_answer_s": {server: short(each["first_answer_s"]) for server, each in starts.items()},
            "memory_mib": memory,
            "rows": rows(repeats),
        }

    def _repeats(self, measured: PrecisionClass, server: str, load: str) -> list[Figures]:
        fields = {"class": measured.name, "server": server, "workload": load, "temperature": self._temperature}
        found = {each["repeat"]: each["figures"] for each in self._record.entries("figures", **fields)}
        return [found[number] for number in sorted(found)]

    def _failed(self, measured: PrecisionClass) -> dict[str, str]:
        """Return the reasons of servers that lack a workload at this temperature."""
        found = {
            form.name: [
                reason
                for load in measured.workloads
                if not self._repeats(measured, form.name, load) and (reason := self._reason(measured, form.name, load))
            ]
            for form in measured.servers
        }
        return {server: "; ".join(dict.fromkeys(reasons)) for server, reasons in found.items() if reasons}

    def _reason(self, measured: PrecisionClass, server: str, load: str) -> str:
        """Return why a workload was not measured last time, "" if nothing was recorded."""
        entries = self._record.entries("failed", **{"class": measured.name, "server": server})
        reasons = [each["failed"] for each in entries if each.get("workload", load) == load]
        return reasons[-1] if reasons else ""

    def _speeds(self) -> Iterator[str]:
        """Yield the lines of the table of speeds: a row for each workload, a column for each server."""
        columns = [(each, form.name) for each in self._classes for form in each.servers]
        names = [f"{each.title}: {name}" if number == 0 else name for each, number, name in _numbered(self._classes)]
        yield _line("", *names)
        yield _line(*["---"] * (len(columns) + 1))
        for load in NAMES:
            cells = [self._cell(each, name, load, _speed, "{:,.4g}") for each, name in columns]
            if any(cells):
                yield _line(f"{load}: {LOADS[load]}", *cells)
        for label, load, figure, form in _FURTHER:
            cells = [self._cell(each, name, load, figure, form) for each, name in columns]
            if any(cells):
                yield _line(label, *cells)

    def _cell(
        self, measured: PrecisionClass, server: str, load: str, figure: Callable[[Figures], float | None], form: str
    ) -> str:
        values = [value for each in self._repeats(measured, server, load) if (value := figure(each)) is not None]
        return form.format(statistics.median(values)) if values else ""

    def _notes(self) -> Iterator[str]:
        for each in self._classes:
            ours, peers = [form.name for form in each.servers[:1]], [form.name for form in each.servers if form.is_peer]
            if ratios := self._ratios(each, ours, peers):
                yield f"- {each.title}: rootgraft has {ratios} times the best peer's speed"
            if ratios := self._ratios(each, ours, [name for form in each.servers if (name := form.name) == NO_DRAFTS]):
                yield f"- {each.title}: with drafts it has {ratios} times its speed without"
            for server, reason in self._failed(each).items():
                yield f"- {each.title}, {server}: {without_paths(reason)}"
        for part in self._record.entries("quality"):
            known = {form["form"]: form for form in part["quality"]["forms"]}
            for form, title in QUALITY_FORMS.items():
                if form in known:
                    agreement = 100 * known[form]["bfloat16_agreement"]
                    ratio = known[form]["bfloat16_perplexity_ratio"]
                    same = f"{agreement:.1f} % of the most likely tokens are those of bfloat16"
                    yield f"- rootgraft in {title}: {same}, at {ratio:.3f} times its perplexity"

    def _ratios(self, measured: PrecisionClass, ours: Sequence[str], others: Sequence[str]) -> str:
        """Return our median speed in each workload, over the best one of the others: "1.2 (W1), 1.6 (W2)"."""
        found = []
        for load in measured.workloads:
            mine, best = (
                max((value for name in names if (value := self._median_speed(measured, name, load))), default=None)
                for names in (ours, others)
            )
            if mine and best:
                found.append(f"{mine / best:.2f} ({load})")
        return ", ".join(found)

    def _median_speed(self, measured: PrecisionClass, server: str, load: str) -> float | None:
        speeds = [_speed(figures) for figures in self._repeats(measured, server, load)]
        return statistics.median(speeds) if speeds else None

    def _details(self, measured: PrecisionClass) -> Iterator[str]:
        """Yield the lines of a class: a row for each workload and server."""
        yield _line("", "server", *(label for label, _, _ in _DETAILS), "repeats", "failed")
        yield _line(*["---"] * (len(_DETAILS) + 4))
        for load in measured.workloads:
            for form in measured.servers:
                repeats = self._repeats(measured, form.name, load)
                if not repeats:
                    reason = without_paths(self._reason(measured, form.name, load) or "not measured").replace("|", "/")
                    yield _line(load, form.name, reason, *[""] * (len(_DETAILS) + 1))
                    continue
                cells = [self._cell(measured, form.name, load, figure, shape) for _, figure, shape in _DETAILS]
                count = sum(each["requests"] - each["completed"] for each in repeats)
                yield _line(load, form.name, *cells, str(len(repeats)), str(count))


def results(record: RunRecord, classes: Sequence[PrecisionClass], temperatures: Sequence[float]) -> Figures:
    """Return the document of ``benchmarks/results``; a class has an entry for each temperature."""
    machine = record.settings["machine"]
    words = [machine["cpu"], f"{machine['cores']} cores", f"{machine['memory_gib']} GiB", *machine["instructions"]]
    comparisons = {
        each.name + ("" if temperature == 1 else "-greedy" if temperature == 0 else f"-{temperature:g}"): TableReport(
            record, classes, temperature
        ).comparison(each)
        for temperature in temperatures
        for each in classes
    }
    return {
        "machine": ", ".join(words),
        "release": version("rootgraft"),
        "versions": record.settings["versions"],
        "columns": COLUMNS,
        "comparisons": comparisons,
        "parts": {name: each[name] for name in ("quality",) for each in record.entries(name)},
    }


def without_paths(text: str) -> str:
    """Return a command or reason without where this machine keeps its files."""
    words = text.replace(shlex.quote(sys.executable), "python").replace(sys.executable, "python")
    return words.replace(f"{ROOT}/", "").replace(str(Path.home()), "~")


def _speed(figures: Figures) -> float:
    return float(figures["output_tokens_per_s"])


def _percentile(key: str, name: str) -> Callable[[Figures], float | None]:
    return lambda figures: None if figures[key] is None else float(figures[key][name])


def _valid(figures: Figures) -> float | None:
    return 100 * figures["valid"] / figures["with_schema"] if figures["with_schema"] else None


def _cached(figures: Figures) -> float | None:
    cached = figures["cached_tokens"]
    return None if cached is None else 100 * cached / max(1, figures["prompt_tokens"])


_Figure = Callable[[Figures], float | None]
_FURTHER: tuple[tuple[str, str, _Figure, str], ...] = (
    ("of W5's answers valid", "W5", _valid, "{:.0f} %"),
    ("TTFT p50 in W2, ms", "W2", _percentile("ttft_ms", "p50"), "{:,.0f}"),
    ("inter-token p99 in W2, ms", "W2", _percentile("itl_ms", "p99"), "{:,.0f}"),
)
_DETAILS: tuple[tuple[str, _Figure, str], ...] = (
    ("out tok/s", _speed, "{:,.1f}"),
    ("TTFT p50 ms", _percentile("ttft_ms", "p50"), "{:,.0f}"),
    ("TTFT p99 ms", _percentile("ttft_ms", "p99"), "{:,.0f}"),
    ("ITL p50 ms", _percentile("itl_ms", "p50"), "{:,.1f}"),
    ("ITL p99 ms", _percentile("itl_ms", "p99"), "{:,.1f}"),
    ("cached", _cached, "{:.0f} %"),
    ("valid", _valid, "{:.0f} %"),
)


def _numbered(classes: Sequence[PrecisionClass]) -> Iterator[tuple[PrecisionClass, int, str]]:
    return ((each, number, form.name) for each in classes for number, form in enumerate(each.servers))


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
