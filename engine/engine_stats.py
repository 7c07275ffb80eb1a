"""Engine statistics: counters and histogram observations, by the names in metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

_MAX_OBSERVATIONS = 4096


@dataclass(slots=True)
class DraftStats:
    """Counters of drafts since the start.

    Attributes:
        drafts: number of rows with drafts, over all steps.
        draft_tokens: number of drafts; ``drafted`` has the counts by source.
        draft_tokens_accepted: number of accepted drafts; ``drafts_accepted`` has the counts by source.
        accepted_runs: number of rows with drafts, by the number of their drafts that were accepted.
    """

    drafts: int = 0
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    drafts_accepted: dict[str, int] = field(default_factory=dict)
    accepted_runs: dict[int, int] = field(default_factory=dict)

    def count(self, source: str, num_drafts: int, num_accepted: int) -> None:
        """Count the drafts of one row."""
        self.drafts += 1
        self.draft_tokens += num_drafts
        self.draft_tokens_accepted += num_accepted
        self.drafted[source] = self.drafted.get(source, 0) + num_drafts
        self.drafts_accepted[source] = self.drafts_accepted.get(source, 0) + num_accepted
        self.accepted_runs[num_accepted] = self.accepted_runs.get(num_accepted, 0) + 1


@dataclass(slots=True)
class EngineStats:
    """Counters since the start and observations since the last report, from ``Scheduler``, ``Proposer`` and core.

    Attributes:
        steps: number of forward passes.
        rows: number of rows, added up over all steps.
        prompt_tokens: tokens of admitted prompts.
        prompt_tokens_cached: prompt tokens found in the prefix cache.
        prompt_tokens_forked: cached prompt tokens that another running sequence shared at admission.
        computed_tokens: input tokens of the model.
        generation_tokens: tokens drawn.
        preemptions: sequences sent back to the queue.
        accepted: sequences queued.
        finished: sequences ended, by reason.
        forced_tokens: tokens drawn without the model, as the grammar allowed no other.
        seconds: seconds of steps, by part; ``step`` is the whole step.
        draft_stats: statistics of drafts.
    """

    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_forked: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    accepted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    forced_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    observations: dict[str, list[float]] = field(default_factory=dict)
    draft_stats: DraftStats = field(default_factory=DraftStats)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram; observations beyond the bound are dropped until the next report."""
        values = self.observations.setdefault(name, [])
        if len(values) < _MAX_OBSERVATIONS:
            values.append(value)

    def count_finished(self, reason: str) -> None:
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def count_unfinished(self, reason: str) -> None:
        """Count all sequences that were accepted and have not ended as ended."""
        if unfinished := self.accepted - sum(self.finished.values()):
            self.finished[reason] = self.finished.get(reason, 0) + unfinished

    def count_step(self, num_tokens: int, num_rows: int) -> None:
        """Count a step, its input tokens and its rows."""
        self.steps += 1
        self.rows += num_rows
        self.computed_tokens += num_tokens
        self.observe("iteration_tokens_total", num_tokens)

    def count_prompt(self, num_tokens: int, num_cached: int, num_forked: int) -> None:
        """Count the prompt of an admitted sequence."""
        self.prompt_tokens += num_tokens
        self.prompt_tokens_cached += num_cached
        self.prompt_tokens_forked += num_forked

    def add_seconds(self, parts: Mapping[str, float]) -> None:
        for part, seconds in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def counters(self) -> dict[str, float]:
        """All counters, flat: ``finished`` becomes ``finished_stop`` and so on."""
        return _flat(self, "observations", "draft_stats") | _flat(self.draft_stats)

    def take_observations(self) -> dict[str, list[float]]:
        taken, self.observations = self.observations, {}
        return taken


def _flat(stats: EngineStats | DraftStats, *without: str) -> dict[str, float]:
    """Return the counters of a record by name; those that are by a key have it in their names."""
    values = {each.name: getattr(stats, each.name) for each in fields(stats) if each.name not in without}
    split = {name: values.pop(name) for name, value in tuple(values.items()) if isinstance(value, dict)}
    return {**values, **{f"{name}_{key}": count for name, counts in split.items() for key, count in counts.items()}}
