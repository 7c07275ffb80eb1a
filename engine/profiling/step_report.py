"""Load and result of ``rootgraft bench step``: where the time of an engine's steps goes. Plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepLoad:
    """The load of every measured step.

    Attributes:
        rows: sequences that draw one token each, with the base model and the adapters in turn.
        context: tokens of each at the first measured step.
        shared: length of the prefix that all rows have in common.
        prefill: tokens of a new prompt that comes with each step.
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
        seconds: its time in a step.
        limit: the least seconds in which the machine could read its bytes and make its products; None: not computed.
        is_forward: whether it belongs to the forward pass.
    """

    seconds: float
    limit: float | None = None
    is_forward: bool = False


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Means over the faster half of the steps, which leaves out those that other work on the machine has disturbed.

    Attributes:
        summary: lines about model, pool and kernels.
        reading: bytes that the machine reads from memory in a second.
        products: products of the weights' form that it makes in a second.
        seconds: a whole step with every native call timed.
        untimed: a whole step without these timers.
        tokens: generated in a step.
        parts: of the step, in order; they and ``rest`` add up to ``seconds``.
        rest: seconds in no part.
    """

    summary: tuple[str, ...]
    reading: float
    products: float
    seconds: float
    untimed: float
    tokens: float
    parts: Mapping[str, Part]
    rest: float
