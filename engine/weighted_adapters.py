"""Weighted adapters: combinations of several adapters, each with a weight, as PEFT's "cat" makes them.

    in requests      a0:0.7+a1:0.3
    in the engine    0.7*a0 + 0.3*a1     differs from all names of adapters, which cannot contain ' ' or '*'

The combination changes the model's weights by the weighted sum of its adapters' changes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from .errors import RequestError, quoted

MAX_PARTS = 8
"""Largest number of adapters in a combination."""
MAX_WEIGHT = 100.0
"""Largest absolute value of a weight."""

_REQUESTED = re.compile(r"(?P<name>[^\s*]+?):(?P<weight>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE]-?\d+)?)")
_JOIN = " + "


class WeightedPart(NamedTuple):
    """An adapter of a combination, and its weight."""

    name: str
    weight: float


def combination_name(parts: Iterable[WeightedPart]) -> str:
    """Return the engine's name of a combination. It does not depend on the order of the parts."""
    return _JOIN.join(f"{part.weight!r}*{part.name}" for part in sorted(parts))


def requested_name(parts: Iterable[WeightedPart]) -> str:
    """Return the name of a combination as requests write it."""
    return "+".join(f"{part.name}:{part.weight:g}" for part in parts)


def is_combination(name: str | None) -> bool:
    """Return whether one of the engine's names is the name of a combination."""
    return name is not None and "*" in name


def parts_of(name: str) -> tuple[WeightedPart, ...]:
    """Return the parts of a name of ``combination_name``; none for any other name."""
    if not is_combination(name):
        return ()
    parts = []
    for each in name.split(_JOIN):
        weight, star, part = each.partition("*")
        try:
            parts.append(WeightedPart(part, float(weight)))
        except ValueError:
            return ()
        if not star or not part:
            return ()
    return tuple(parts)


def renamed(name: str, rename: Callable[[str], str]) -> str:
    """Return the engine's name of an adapter or a combination, with each adapter's name replaced."""
    parts = parts_of(name)
    return combination_name(part._replace(name=rename(part.name)) for part in parts) if parts else rename(name)


def names_in(name: str) -> tuple[str, ...]:
    """Return the adapters that a name in the engine stands for: the adapter itself, or a combination's parts."""
    parts = parts_of(name)
    return tuple(part.name for part in parts) if parts else (name,)


def read_combination(model: str) -> tuple[WeightedPart, ...]:
    """Return the parts of a name such as ``a0:0.7+a1:0.3``, or of a ``combination_name``; none for other names."""
    if (parts := parts_of(model)) or ":" not in model:
        return parts
    found: list[WeightedPart] = []
    # Every piece between plus signs must be a name with a weight: the name itself cannot contain a plus sign.
    for each in model.split("+"):
        match = _REQUESTED.fullmatch(each)
        if match is None:
            return ()
        found.append(WeightedPart(match["name"], float(match["weight"])))
    return tuple(found)


def check_parts(parts: Sequence[WeightedPart], field: str = "model") -> None:
    """Check the parts of a combination.

    Args:
        field: the request's field, for errors.

    Raises:
        RequestError: there are too many parts, an adapter occurs twice, or a weight is out of bounds.
    """
    if len(parts) > MAX_PARTS:
        raise RequestError(
            f"At most {MAX_PARTS} adapters may be combined; {quoted(field)} names {len(parts)}.", param=field
        )
    seen: set[str] = set()
    for part in parts:
        if part.name in seen:
            raise RequestError(
                f"The adapter {quoted(part.name)} is given twice: give it once, with the sum of its weights.",
                param=field,
            )
        if not math.isfinite(part.weight) or abs(part.weight) > MAX_WEIGHT:
            raise RequestError(
                f"The weight of the adapter {quoted(part.name)} must be from -{MAX_WEIGHT:g} to {MAX_WEIGHT:g}, "
                f"not {part.weight:g}.",
                param=field,
            )
        seen.add(part.name)
