"""Listed values: all values of a part of a schema, each as an expression of the grammar, if there are few."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from decimal import Decimal
from fractions import Fraction
from itertools import islice, product
from typing import Any

from ..regex.ecma_regex import repeat_product
from ..regex.string_automaton import START, AutomatonTooLarge
from ..schema.constraints import ALWAYS, Alternative, Arrays, Conj, Numbers, Objects, Strings
from ..schema.json_types import ARRAY, FRACTION, INTEGER, NUMBER, OBJECT, STRING
from ..schema.string_language import MAX_PLACES, expressions
from .key_classes import key_classes
from .lark_rules import LarkRules, literal_number, literal_string
from .string_rules import automaton

MAX_LISTED_VALUES = 60
_MAX_TRIES = 4_000
# A value that can be hashed, equal for equal JSON, and the expression that writes it.
_Listed = tuple[Any, str]


class _TooMany(Exception):
    """There are more values than can be listed."""


def listed_values(rules: LarkRules, conj: Conj) -> list[str] | None:
    """Return one expression for each value of a conjunction; None if there are too many, or one cannot be listed."""
    try:
        return list(dict(_values(rules, conj)).values())
    except _TooMany:
        return None


def listed_strings(found: Sequence[Strings]) -> list[str] | None:
    """Return all strings that satisfy any of some constraints; None if they are too many."""
    try:
        listed = list(dict.fromkeys(text for strings in found for text in _strings(strings)))
    except _TooMany:
        return None
    return listed if len(listed) <= MAX_LISTED_VALUES else None


def _values(rules: LarkRules, conj: Conj) -> list[_Listed]:
    if conj == ALWAYS:
        raise _TooMany
    rules.satisfiability.min_size(conj)
    alternatives = rules.satisfiability.satisfiable_alternatives(conj)
    return _few(listed for each in alternatives for listed in _of_alternative(rules, each))


def _few(values: Iterator[_Listed]) -> list[_Listed]:
    found: dict[Any, str] = {}
    for tried, (value, written) in enumerate(values):
        found.setdefault(value, written)
        if len(found) > MAX_LISTED_VALUES or tried > _MAX_TRIES:
            raise _TooMany
    return list(found.items())


def _of_alternative(rules: LarkRules, each: Alternative) -> Iterator[_Listed]:
    for word in rules.words(each.types):
        yield ("word", word), rules.terminal(f"/{word}/")
    if each.types & NUMBER:
        for value in _numbers(each.types, each.numbers):
            yield ("number", value), literal_number(value)
    if each.types & STRING:
        for text in _strings(each.strings):
            yield ("string", text), rules.literal_string(text)
    if each.types & (ARRAY | OBJECT) and rules.literal_string is not literal_string:
        # Arrays and objects are listed in the style of JSON only.
        raise _TooMany
    if each.types & ARRAY and rules.satisfiability.array_is_satisfiable(each.arrays):
        yield from _arrays(rules, each.arrays)
    if each.types & OBJECT and rules.satisfiability.object_is_satisfiable(each.objects):
        yield from _objects(rules, each.objects)


def _numbers(types: int, numbers: Numbers) -> Iterator[Decimal]:
    values: Iterator[Decimal]
    if numbers.values is not None:
        values = iter(sorted(numbers.values))
    elif numbers.low is None or numbers.high is None:
        raise _TooMany
    elif numbers.low == numbers.high:
        values = iter((numbers.low,))
    elif types & FRACTION or numbers.high - numbers.low > _MAX_TRIES:
        raise _TooMany
    else:
        first, last = Fraction(numbers.low), Fraction(numbers.high)
        values = map(Decimal, range(-(-first.numerator // first.denominator), last.numerator // last.denominator + 1))
    for value in values:
        if types & (INTEGER if value == int(value) else FRACTION) and numbers.admits(value):
            yield value


def _strings(strings: Strings) -> Iterator[str]:
    if strings.values is not None:
        yield from strings.values
        return
    if strings.most is None and not (strings.patterns or strings.formats):
        raise _TooMany
    must, must_not = expressions(strings)
    if sum(map(repeat_product, (*must, *(node for group in must_not for node in group.nodes)))) > MAX_PLACES:
        raise _TooMany
    try:
        found = automaton(strings)
    except AutomatonTooLarge:
        raise _TooMany from None
    if found is None:
        return
    if found.num_ends[START, 0] > MAX_LISTED_VALUES:
        raise _TooMany
    yield from found.strings()


def _arrays(rules: LarkRules, arrays: Arrays) -> Iterator[_Listed]:
    if arrays.contains:
        raise _TooMany
    most = arrays.most
    for index in range(arrays.num_prefix + 1):
        if not rules.satisfiability.is_satisfiable(arrays.item(index)):
            rules.check_not_narrowed(arrays.item(index))
            most = index if most is None else min(most, index)
    if most is None or most > MAX_LISTED_VALUES:
        raise _TooMany
    items = [_values(rules, arrays.item(index)) for index in range(most)]
    for count in range(arrays.least, most + 1):
        for chosen in product(*items[:count]):
            values = [value for value, _ in chosen]
            if arrays.unique and len(set(values)) < count:
                continue
            yield ("array", *values), " ".join(['"["', ' "," '.join(written for _, written in chosen), '"]"'])


def _objects(rules: LarkRules, objects: Objects) -> Iterator[_Listed]:
    for _, conj in key_classes(objects):
        if rules.satisfiability.is_satisfiable(conj):
            raise _TooMany
        rules.check_not_narrowed(conj)
    options: list[list[_Listed | None]] = []
    for name in objects.declared():
        conj = objects.value(name)
        is_possible = rules.satisfiability.is_satisfiable(conj) and rules.analysis.admits_name(objects.names, name)
        if not is_possible:
            rules.check_not_narrowed(conj)
        values = _values(rules, conj) if is_possible else []
        written: list[_Listed | None] = [
            ((name, value), f'{literal_string(name)} ":" {expression}') for value, expression in values
        ]
        options.append(written if name in objects.required else [None, *written])
    for chosen in islice(product(*options), _MAX_TRIES + 1):
        present = [each for each in chosen if each is not None]
        if objects.least <= len(present) and (objects.most is None or len(present) <= objects.most):
            members = ' "," '.join(expression for _, expression in present)
            yield ("object", frozenset(value for value, _ in present)), " ".join(['"{"', members, '"}"'])
