"""What the engine counts, by the names under which it reports. Gauges and counters are floats, histograms lists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

_MAX_OBSERVATIONS = 4096


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and observations since the last report. Written by ``Scheduler``, its ``Drafter`` and
    ``EngineCore``.

    Attributes:
        steps: forward passes.
        prompt_tokens: tokens of admitted prompts.
        prompt_tokens_cached: those of them found in the prefix cache.
        prompt_tokens_forked: those of them that another running sequence used at that moment.
        computed_tokens: tokens put through the model.
        generation_tokens: tokens drawn.
        preemptions: sequences sent back to the queue for lack of pages.
        finished: sequences ended, by reason.
        forced_tokens: tokens drawn that a grammar left no choice about, so that the model was not asked.
        drafts: times that a sequence had drafts in a step.
        draft_tokens: the tokens of these; ``drafted`` counts them by source.
        draft_tokens_accepted: those of them that were accepted; ``drafts_accepted`` counts them by source.
        seconds: that steps took, and their parts: ``step`` is the whole.
    """

    steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    prompt_tokens_forked: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    accepted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    forced_tokens: int = 0
    drafts: int = 0
    draft_tokens: int = 0
    draft_tokens_accepted: int = 0
    drafted: dict[str, int] = field(default_factory=dict)
    drafts_accepted: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    observations: dict[str, list[float]] = field(default_factory=dict)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram; beyond the bound an observation is dropped until the next report."""
        values = self.observations.setdefault(name, [])
        if len(values) < _MAX_OBSERVATIONS:
            values.append(value)

    def count_finished(self, reason: str) -> None:
        """Count the end of a sequence."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def count_prompt(self, num_tokens: int, num_cached: int, num_forked: int) -> None:
        """Count the prompt of an admitted sequence."""
        self.prompt_tokens += num_tokens
        self.prompt_tokens_cached += num_cached
        self.prompt_tokens_forked += num_forked

    def count_drafts(self, source: str, num_drafts: int, num_accepted: int) -> None:
        """Count a sequence's drafts of one step."""
        self.drafts += 1
        self.draft_tokens += num_drafts
        self.draft_tokens_accepted += num_accepted
        self.drafted[source] = self.drafted.get(source, 0) + num_drafts
        self.drafts_accepted[source] = self.drafts_accepted.get(source, 0) + num_accepted

    def add_seconds(self, parts: Mapping[str, float]) -> None:
        """Add what parts of a step took."""
        for part, seconds in parts.items():
            self.seconds[part] = self.seconds.get(part, 0.0) + seconds

    def counters(self) -> dict[str, float]:
        """All counters, flat: ``finished`` becomes ``finished_stop`` and so on."""
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "observations"}
        split = {name: values.pop(name) for name in ("finished", "drafted", "drafts_accepted", "seconds")}
        return {**values, **{f"{name}_{key}": count for name, counts in split.items() for key, count in counts.items()}}

    def take_observations(self) -> dict[str, list[float]]:
        """The observations since the last call."""
        taken, self.observations = self.observations, {}
        return taken
