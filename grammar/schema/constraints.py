"""Constraints per JSON type, and `Alternative`: one member of the union of alternatives that a schema permits.

A *literal* is a subschema or its negation. A *conjunction* (`Conj`) is a set of literals that must all hold. An
alternative constrains every type separately and contains no union, reference or negation. Its properties and items are
conjunctions that are not analysed further, so that alternatives of recursive schemas are finite.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import TypeAlias, TypeVar

from ..regex.ecma_regex import pattern_matches
from ..regex.multiple_of import divides
from ..regex.string_formats import FORMATS, LOOKALIKES
from .json_types import ALL_TYPES, ARRAY, FRACTION, INTEGER, NUMBER, OBJECT, STRING

_T = TypeVar("_T")
_C = TypeVar("_C", "Numbers", "Strings", "Arrays", "Objects")
# A literal is 2 * node + (1 if negated); -1 is the schema `false`.
Conj: TypeAlias = frozenset[int]
# Largest number of integers within bounds that are tried one by one to find whether any is left.
MAX_COUNTED = 1_000
NEVER: Conj = frozenset((-1,))
ALWAYS: Conj = frozenset()


@dataclass(frozen=True, slots=True)
class Numbers:
    """Constraints on a number.

    ``multiple`` is the least common multiple of ``divisors``. No number in ``not_divisors`` may divide the value.
    ``values`` are the only permitted values, or None if values are not enumerated.
    """

    low: Decimal | None = None
    high: Decimal | None = None
    low_open: bool = False
    high_open: bool = False
    multiple: Fraction | None = None
    values: frozenset[Decimal] | None = None
    excluded: frozenset[Decimal] = frozenset()
    divisors: frozenset[Fraction] = frozenset()
    not_divisors: frozenset[int] = frozenset()

    def __and__(self, other: Numbers) -> Numbers:
        low, low_open = _tighter(self.low, self.low_open, other.low, other.low_open, above=True)
        high, high_open = _tighter(self.high, self.high_open, other.high, other.high_open, above=False)
        values = _merged(self.values, other.values, frozenset.intersection)
        multiple = self.multiple or other.multiple
        if self.multiple and other.multiple:
            multiple = _common_multiple(self.multiple, other.multiple)
        excluded, divisors = self.excluded | other.excluded, self.divisors | other.divisors
        not_divisors = self.not_divisors | other.not_divisors
        merged = Numbers(low, high, low_open, high_open, multiple, values, excluded, divisors, not_divisors)
        if values is None:
            return merged
        return Numbers(values=frozenset(filter(merged.admits, values)))

    def admits(self, value: Decimal) -> bool:
        """Return whether a number satisfies all constraints except the enumeration."""
        left_out = value in self.excluded or any(divides(Fraction(d), value) for d in self.not_divisors)
        return not left_out and self._is_within(value)

    def _is_within(self, value: Decimal) -> bool:
        """Return whether a number is within the bounds and a multiple."""
        above = self.low is None or value > self.low or (value == self.low and not self.low_open)
        below = self.high is None or value < self.high or (value == self.high and not self.high_open)
        return above and below and all(divides(d, value) for d in self.divisors)

    def types(self) -> int:
        """Return the bits of the number types that are not ruled out."""
        if self.values is not None:
            return sum({INTEGER if value == int(value) else FRACTION for value in self.values})
        step = self.multiple
        whole = Fraction(1) if step is None else Fraction(step.numerator)
        possible = NUMBER & ~INTEGER if any(whole % d == 0 for d in self.not_divisors) else NUMBER
        if self.low is None or self.high is None:
            return possible & (INTEGER if step == whole else NUMBER)
        if self.low > self.high or (self.low == self.high and (self.low_open or self.high_open)):
            return 0
        num_whole = self._num_multiples(whole)
        excluded = sum(value == int(value) and self._is_within(value) for value in self.excluded)
        found = INTEGER if num_whole > excluded else 0
        if found and self.not_divisors and num_whole <= MAX_COUNTED:
            first = -(-Fraction(self.low) // whole)
            counted = (Decimal(int((first + step) * whole)) for step in range(num_whole + 1))
            found = INTEGER if any(map(self.admits, counted)) else 0
        if step is None:
            has_fractions = self.low != self.high or not num_whole
        else:
            has_fractions = self._num_multiples(step) > num_whole
        return possible & (found | (FRACTION if has_fractions else 0))

    def _num_multiples(self, step: Fraction) -> int:
        """Count the multiples of a step within two bounds."""
        assert self.low is not None and self.high is not None
        low, high = Fraction(self.low), Fraction(self.high)
        first, last = -(-low // step), high // step
        first += self.low_open and first * step == low
        last -= self.high_open and last * step == high
        return max(0, last - first + 1)


@dataclass(frozen=True, slots=True)
class Strings:
    """Constraints on a string; lengths in Unicode scalars. `values` None: not enumerated.

    ``is_widest``: patterns and formats hold if they do to any validator, not only if they do to all of them.
    """

    least: int = 0
    most: int | None = None
    patterns: frozenset[str] = frozenset()
    not_patterns: frozenset[str] = frozenset()
    formats: frozenset[str] = frozenset()
    values: tuple[str, ...] | None = None
    excluded: frozenset[str] = frozenset()
    is_widest: bool = False

    @property
    def num_bytes(self) -> int:
        """Estimated size in memory."""
        texts = (*self.patterns, *self.not_patterns, *(self.values or ()), *self.excluded)
        return 1024 + sum(100 + len(text) for text in texts)

    def __and__(self, other: Strings) -> Strings:
        merged = Strings(
            max(self.least, other.least),
            _merged(self.most, other.most, min),
            self.patterns | other.patterns,
            self.not_patterns | other.not_patterns,
            self.formats | other.formats,
            None,
            self.excluded | other.excluded,
            self.is_widest or other.is_widest,
        )
        if self.values is None and other.values is None:
            return merged
        values = self.values if self.values is not None else other.values
        assert values is not None
        if values is not other.values and other.values is not None:
            keep = frozenset(other.values)
            values = tuple(value for value in values if value in keep)
        return Strings(values=values if merged == NO_STRINGS else tuple(filter(merged.admits, values)))

    def admits(self, value: str) -> bool:
        """Return whether a string satisfies all constraints except the enumeration."""
        return (
            self.least <= len(value)
            and (self.most is None or len(value) <= self.most)
            and value not in self.excluded
            and all(pattern_matches(pattern, value, self.is_widest) for pattern in self.patterns)
            and not any(pattern_matches(pattern, value, not self.is_widest) for pattern in self.not_patterns)
            and all(self._has_format(value, name) for name in self.formats)
        )

    def _has_format(self, value: str, name: str) -> bool:
        if not self.is_widest:
            return FORMATS[name].matches(value)
        return name not in LOOKALIKES or pattern_matches(LOOKALIKES[name], value, wide=True)

    def is_empty(self) -> bool:
        """Return whether no string satisfies lengths and enumeration."""
        return self.values == () or (self.most is not None and self.least > self.most)


@dataclass(frozen=True, slots=True)
class ArrayClause:
    """Constraints of one schema on items: by position, and for the rest (None: none)."""

    prefix: tuple[Conj, ...] = ()
    rest: Conj | None = None
    evaluates: bool = True

    def item(self, index: int) -> Conj:
        return self.prefix[index] if index < len(self.prefix) else self.rest or ALWAYS


@dataclass(frozen=True, slots=True)
class Contains:
    """At least `least` and at most `most` items satisfy the conjunction `item`."""

    item: Conj
    least: int
    most: int | None
    negated: Conj


@dataclass(frozen=True, slots=True)
class Arrays:
    """Constraints on an array."""

    clauses: tuple[ArrayClause, ...] = ()
    least: int = 0
    most: int | None = None
    contains: tuple[Contains, ...] = ()
    unique: bool = False

    def __and__(self, other: Arrays) -> Arrays:
        return Arrays(
            _joined(self.clauses, other.clauses),
            max(self.least, other.least),
            _merged(self.most, other.most, min),
            _joined(self.contains, other.contains),
            self.unique or other.unique,
        )

    def item(self, index: int) -> Conj:
        return ALWAYS.union(*(clause.item(index) for clause in self.clauses))

    @property
    def num_prefix(self) -> int:
        """The first index from which all items have the same constraints."""
        return max((len(clause.prefix) for clause in self.clauses), default=0)


@dataclass(frozen=True)
class ObjectClause:
    """Constraints of one schema on properties: by name, by pattern, and `rest` for all others.

    A name that is in `properties` or matches a pattern is not subject to `rest`, which is None without a constraint.
    With ``is_widest`` only that binds which does to every validator.
    """

    properties: tuple[tuple[str, Conj], ...] = ()
    patterns: tuple[tuple[str, Conj], ...] = ()
    rest: Conj | None = None
    evaluates: bool = True
    is_widest: bool = False

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        # Cached: alternatives are merged and compared often, and a clause may have hundreds of properties.
        return hash((self.properties, self.patterns, self.rest, self.evaluates, self.is_widest))

    def value(self, name: str) -> Conj:
        """Return the constraints on a property's value."""
        known = self._values.get(name)
        if known is None:
            known = self._values[name] = self._value(name)
        return known

    def _value(self, name: str) -> Conj:
        own = self._by_name.get(name)
        found = [] if own is None else [own]
        is_matched = own is not None
        for pattern, conj in self.patterns:
            is_matched = is_matched or pattern_matches(pattern, name, self.is_widest)
            if pattern_matches(pattern, name, not self.is_widest):
                found.append(conj)
        if not is_matched and self.rest is not None:
            found.append(self.rest)
        return found[0] if len(found) == 1 else ALWAYS.union(*found)

    @cached_property
    def _values(self) -> dict[str, Conj]:
        return {}

    @cached_property
    def _by_name(self) -> dict[str, Conj]:
        return dict(self.properties)


@dataclass(frozen=True)
class Objects:
    """Constraints on an object; every key satisfies `names` as a string."""

    clauses: tuple[ObjectClause, ...] = ()
    required: tuple[str, ...] = ()
    least: int = 0
    most: int | None = None
    names: Conj = ALWAYS

    def __and__(self, other: Objects) -> Objects:
        return Objects(
            _joined(self.clauses, other.clauses),
            _joined(self.required, other.required),
            max(self.least, other.least),
            _merged(self.most, other.most, min),
            self.names | other.names,
        )

    def value(self, name: str) -> Conj:
        """Return the constraints of all clauses on a property's value."""
        if len(self.clauses) == 1:
            return self.clauses[0].value(name)
        known = self._values.get(name)
        if known is None:
            known = self._values[name] = ALWAYS.union(*[clause.value(name) for clause in self.clauses])
        return known

    @cached_property
    def _values(self) -> dict[str, Conj]:
        return {}

    def declared(self) -> dict[str, None]:
        names = dict.fromkeys(name for clause in self.clauses for name, _ in clause.properties)
        return names | dict.fromkeys(self.required)


NO_NUMBERS, NO_STRINGS, NO_ARRAYS, NO_OBJECTS = Numbers(), Strings(), Arrays(), Objects()


@dataclass(frozen=True, slots=True)
class Alternative:
    """One alternative: a set of types (bits), and the constraints on each."""

    types: int = ALL_TYPES
    numbers: Numbers = NO_NUMBERS
    strings: Strings = NO_STRINGS
    arrays: Arrays = NO_ARRAYS
    objects: Objects = NO_OBJECTS

    def __and__(self, other: Alternative) -> Alternative:
        types = self.types & other.types
        return Alternative(
            types,
            _both(self.numbers, other.numbers, NO_NUMBERS) if types & NUMBER else NO_NUMBERS,
            _both(self.strings, other.strings, NO_STRINGS) if types & STRING else NO_STRINGS,
            _both(self.arrays, other.arrays, NO_ARRAYS) if types & ARRAY else NO_ARRAYS,
            _both(self.objects, other.objects, NO_OBJECTS) if types & OBJECT else NO_OBJECTS,
        )._pruned()

    def of(self, types: int) -> Alternative:
        return self & Alternative(types)

    def _pruned(self) -> Alternative:
        """Return the alternative without types that their own constraints rule out."""
        types = self.types
        if types & NUMBER and self.numbers is not NO_NUMBERS:
            types &= ~NUMBER | self.numbers.types()
        if types & STRING and self.strings is not NO_STRINGS and self.strings.is_empty():
            types &= ~STRING
        if types & ARRAY and self.arrays.most is not None and self.arrays.least > self.arrays.most:
            types &= ~ARRAY
        objects = self.objects
        if types & OBJECT and objects.most is not None and max(objects.least, len(objects.required)) > objects.most:
            types &= ~OBJECT
        return self if types == self.types else self.of(types)


ANYTHING = Alternative()


def widest(alternative: Alternative) -> Alternative:
    """Return an alternative that admits whatever any validator may, and more where that cannot be told exactly."""
    numbers, strings, objects = alternative.numbers, alternative.strings, alternative.objects
    if numbers.divisors or numbers.not_divisors:
        numbers = replace(numbers, multiple=None, divisors=frozenset(), not_divisors=frozenset())
    if strings.patterns or strings.not_patterns or strings.formats:
        strings = replace(strings, is_widest=True)
    if any(clause.patterns for clause in objects.clauses):
        objects = replace(objects, clauses=tuple(replace(c, is_widest=True) for c in objects.clauses))
    return Alternative(alternative.types, numbers, strings, alternative.arrays, objects)


def without_evaluation(alternative: Alternative) -> Alternative:
    """Return an alternative whose properties and items do not count as evaluated for ``unevaluated...``."""
    arrays, objects = alternative.arrays, alternative.objects
    if any(clause.evaluates for clause in arrays.clauses):
        arrays = replace(arrays, clauses=tuple(replace(c, evaluates=False) for c in arrays.clauses))
    if any(clause.evaluates for clause in objects.clauses):
        objects = replace(objects, clauses=tuple(replace(c, evaluates=False) for c in objects.clauses))
    if arrays is alternative.arrays and objects is alternative.objects:
        return alternative
    return Alternative(alternative.types, alternative.numbers, alternative.strings, arrays, objects)


def _both(a: _C, b: _C, nothing: _C) -> _C:
    # Most conjunctions have a constraint on one side alone: the other one needs no merge.
    return b if a is nothing else a if b is nothing else a & b


def _merged(a: _T | None, b: _T | None, merge: Callable[[_T, _T], _T]) -> _T | None:
    return b if a is None else a if b is None else merge(a, b)


def _joined(a: tuple[_T, ...], b: tuple[_T, ...]) -> tuple[_T, ...]:
    return a if not b else b if not a else tuple(dict.fromkeys((*a, *b)))


def _tighter(
    a: Decimal | None, a_open: bool, b: Decimal | None, b_open: bool, *, above: bool
) -> tuple[Decimal | None, bool]:
    """Return the stricter of two bounds, each open or closed."""
    if a is None or b is None:
        return (b, b_open) if a is None else (a, a_open)
    if a == b:
        return a, a_open or b_open
    return (a, a_open) if (a > b) == above else (b, b_open)


def _common_multiple(a: Fraction, b: Fraction) -> Fraction:
    scale = lcm(a.denominator, b.denominator)
    return Fraction(lcm(int(a * scale), int(b * scale)), scale)
