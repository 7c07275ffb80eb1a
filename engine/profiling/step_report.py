"""Load and result of ``rootgraft bench step``: where the time of an engine's steps goes. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The load of every measured step.

    Attributes:
        rows: number of sequences that draw one token each; they use the base model and the adapters in turn.
        context: number of tokens of each sequence at the first measured step.
        shared: number of tokens of the prefix that all sequences have in common.
        prefill: number of tokens of a new prompt in each step.
        steps: number of measured steps.
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
        seconds: seconds of the part in a step.
        limit: least seconds in which the machine could read the part's bytes and make its products; None if this is not
            computed.
        is_forward: whether the part belongs to the forward pass.
    """

    seconds: float
    limit: float | None = None
    is_forward: bool = False


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Means over the faster half of the steps, which leaves out those that other work on the machine has disturbed.

    Attributes:
        summary: lines about model, pool and kernels.
        reading: bytes per second that the machine reads from memory.
        products: multiplications per second that the machine makes with weights of this form.
        seconds: seconds of a whole step, with timers around every native call.
        untimed: seconds of a whole step without these timers.
        tokens: number of tokens generated in a step.
        parts: parts of the step, in order; their seconds and ``rest`` add up to ``seconds``.
        rest: seconds that belong to no part.
    """

    summary: tuple[str, ...]
    reading: float
    products: float
    seconds: float
    untimed: float
    tokens: float
    parts: Mapping[str, Part]
    rest: float
