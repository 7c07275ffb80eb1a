"""A step of a simulated device: its result is known when it is launched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rootgraft.engine.batch import Batch, Masks, StepResult


@dataclass
class ComputedStep:
    """An ``engine.batch.StepHandle``."""

    batch: Batch
    computed: StepResult

    def draw(self, masks: Callable[[], Masks] | None) -> None:
        pass

    def result(self) -> StepResult:
        return self.computed
