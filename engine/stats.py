"""What the engine counts, by the names under which it reports. Gauges and counters are floats, histograms lists."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

_MAX_OBSERVATIONS = 4096


@dataclass(slots=True)
class EngineStats:
    """Counters since the start, and observations since the last report. Written by ``Scheduler`` and ``EngineCore``.

    Attributes:
        steps: forward passes.
        prompt_tokens: tokens of admitted prompts.
        prompt_tokens_cached: those of them found in the prefix cache.
        computed_tokens: tokens put through the model.
        generation_tokens: tokens drawn.
        preemptions: sequences sent back to the queue for lack of pages.
        finished: sequences ended, by reason.
    """

    steps: int = 0
    prompt_tokens: int = 0
    prompt_tokens_cached: int = 0
    computed_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    accepted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    observations: dict[str, list[float]] = field(default_factory=dict)

    def observe(self, name: str, value: float) -> None:
        """Add to a histogram; beyond the bound an observation is dropped until the next report."""
        values = self.observations.setdefault(name, [])
        if len(values) < _MAX_OBSERVATIONS:
            values.append(value)

    def count_finished(self, reason: str) -> None:
        """Count the end of a sequence."""
        self.finished[reason] = self.finished.get(reason, 0) + 1

    def counters(self) -> dict[str, float]:
        """All counters, flat: ``finished`` becomes ``finished_stop`` and so on."""
        values = asdict(self)
        finished = values.pop("finished")
        values.pop("observations")
        return {**values, **{f"finished_{reason}": count for reason, count in finished.items()}}

    def take_observations(self) -> dict[str, list[float]]:
        """The observations since the last call."""
        taken, self.observations = self.observations, {}
        return taken
