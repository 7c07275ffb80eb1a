"""What ``rootgraft bench step`` asks for and gets: where the time of an engine's steps goes. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..config import EngineConfig


@dataclass(frozen=True, slots=True)
class StepLoad:
    """What every measured step computes.

    Attributes:
        rows: sequences that draw one token each, over the base and the adapters in turn.
        context: tokens of each at the first measured step.
        shared: how many of them, from the first on, are the same in all rows.
        prefill: tokens of a new prompt that comes with each step.
        steps: how many are measured.
    """

    rows: int
    context: int
    shared: int
    prefill: int
    steps: int


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a step.

    Attributes:
        seconds: what it takes in a step.
        limit: the least that the machine could take for the bytes read and the products made; None: not reckoned.
        is_forward: whether it belongs to the forward pass.
    """

    seconds: float
    limit: float | None = None
    is_forward: bool = False


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Means over the faster half of the steps, which leaves those out that other work on the machine has disturbed.

    Attributes:
        summary: what was set up: model, pool, kernels.
        reading: bytes that the machine reads from memory in a second.
        products: products of the weights' form that it makes in a second.
        seconds: a whole step, timed call by call.
        untimed: a whole step without the timers in it.
        tokens: that a step brings.
        parts: of the step, in order; they and ``rest`` add up to ``seconds``.
        rest: what is in no part.
    """

    summary: tuple[str, ...]
    reading: float
    products: float
    seconds: float
    untimed: float
    tokens: float
    parts: Mapping[str, Part]
    rest: float


def measure(config: EngineConfig, model_path: Path, load: StepLoad) -> StepTimes:
    """Load a model, run steps, take their times. Raises ModelError, and ConfigError for a load that does not fit."""
    from .step_profiler import measure_steps

    return measure_steps(config, model_path, load)
