"""How the grammar would spell an instance: keys in its order, numbers without a needless point.

Walks the analysis in plain Python, so it is also a second opinion on what the alternatives admit.
"""

from __future__ import annotations

from typing import Any

from rootgraft.grammar.schema.analysis import Analysis
from rootgraft.grammar.schema.constraints import ALWAYS, Alternative, Conj
from rootgraft.grammar.schema.json_types import ARRAY, FALSE, FRACTION, INTEGER, NULL, NUMBER, OBJECT, STRING, TRUE
from rootgraft.grammar.schema.scalars import decimal

MISSING = object()


def spell(analysis: Analysis, conj: Conj, value: Any) -> Any:
    """The instance as the grammar writes it, or MISSING if no alternative admits it."""
    if conj == ALWAYS:
        return _plain(value)
    for alternative in analysis.conjunction(conj):
        found = _in_alternative(analysis, alternative, value)
        if found is not MISSING:
            return found
    return MISSING


def _plain(value: Any) -> Any:
    if isinstance(value, float) and value == int(value):
        return int(value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _in_alternative(analysis: Analysis, alternative: Alternative, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        bit = NULL if value is None else TRUE if value else FALSE
        return value if alternative.types & bit else MISSING
    if isinstance(value, int | float):
        number = decimal(value)
        bit = INTEGER if number == int(number) else FRACTION
        fits = alternative.types & bit and alternative.numbers.admits(number)
        fits = fits and (alternative.numbers.values is None or number in alternative.numbers.values)
        return _plain(value) if fits else MISSING
    if isinstance(value, str):
        strings = alternative.strings
        fits = alternative.types & STRING and strings.admits(value)
        return value if fits and (strings.values is None or value in strings.values) else MISSING
    if isinstance(value, list):
        return _array(analysis, alternative, value) if alternative.types & ARRAY else MISSING
    return _object(analysis, alternative, value) if alternative.types & OBJECT else MISSING


def _array(analysis: Analysis, alternative: Alternative, value: list[Any]) -> Any:
    arrays = alternative.arrays
    if len(value) < arrays.least or (arrays.most is not None and len(value) > arrays.most):
        return MISSING
    items = [spell(analysis, arrays.item(index), item) for index, item in enumerate(value)]
    if MISSING in items or (arrays.unique and _repeats(items)):
        return MISSING
    for entry in arrays.contains:
        hits = sum(spell(analysis, entry.item, item) is not MISSING for item in value)
        if hits < entry.least or (entry.most is not None and hits > entry.most):
            return MISSING
    return items


def _repeats(items: list[Any]) -> bool:
    marked = [(isinstance(item, bool), item) for item in items]
    return any(item in marked[:index] for index, item in enumerate(marked))


def _object(analysis: Analysis, alternative: Alternative, value: dict[str, Any]) -> Any:
    objects = alternative.objects
    if len(value) < objects.least or (objects.most is not None and len(value) > objects.most):
        return MISSING
    if not value.keys() >= set(objects.required):
        return MISSING
    names = objects.declared()
    order = [name for name in names if name in value] + [name for name in value if name not in names]
    found = {}
    for name in order:
        if objects.names != ALWAYS and spell(analysis, objects.names, name) is MISSING:
            return MISSING
        found[name] = spell(analysis, objects.value(name), value[name])
        if found[name] is MISSING:
            return MISSING
    return found


__all__ = ["MISSING", "NUMBER", "spell"]
