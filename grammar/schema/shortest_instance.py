"""Shortest instances of the parts of a schema, from a cheap search, for closing within the budget."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, islice

from ..regex.charset import json_string
from ..regex.ecma_regex import read_pattern
from ..regex.number_ranges import EXACT, spelling
from ..regex.string_formats import FORMATS
from .constraints import ALWAYS, Alternative, Arrays, Conj, Numbers, Objects, Strings
from .json_types import ARRAY, INTEGER, NUMBER, OBJECT, STRING, WORDS
from .satisfiability import Satisfiability
from .string_language import short_strings
from .subschemas import Subschemas

MAX_TEXTS = 400
MAX_TEXT_BYTES = 4_096
MAX_ANSWER = 256 << 10
_NEAR = (Decimal(1), Decimal(-1), Decimal("0.5"))
# Values of one place that may stand for another, their characters in JSON, and places with such values.
MAX_KINDS = 32
MAX_SCALAR_TEXT = 64
MAX_PLACES = 64
# Characters of one array or object that may stand for another, and of all of them.
MAX_CONTAINER_TEXT = 1_024
MAX_CONTAINERS_TEXT = 4_096
# Items that are written out of an array of distinct items, to end an answer with.
SOME_DISTINCT = 12


class ShortestInstance:
    """Short JSON texts that satisfy the parts of one analysed schema; None where none was found.

    Args:
        analysis: of the schema.
        satisfiability: of its parts.
        distinct: returns the JSON of some different items of an array, or None.
        remembers: any number of unlisted keys counts towards ``minProperties``, and not only one.
    """

    def __init__(
        self,
        analysis: Subschemas,
        satisfiability: Satisfiability,
        distinct: Callable[[Arrays, int], list[str] | None] | None = None,
        *,
        remembers: bool = False,
    ) -> None:
        self._distinct = distinct
        self._remembers = remembers
        self._analysis = analysis
        self._satisfiability = satisfiability
        self._texts: dict[Conj, str | None] = {ALWAYS: "0"}
        self._open: set[Conj] = set()

    def text(self, conj: Conj) -> str | None:
        """Return a short value of a conjunction as JSON, or None if none was found."""
        if conj in self._texts:
            return self._texts[conj]
        if -1 in conj or conj in self._open:
            return None
        self._open.add(conj)
        alternatives = self._satisfiability.satisfiable_alternatives(conj)
        found = [text for each in alternatives for text in self._of_types(each) if text is not None]
        self._open.discard(conj)
        text = min(found, key=len, default=None)
        self._texts[conj] = None if text is None or len(text) > MAX_ANSWER else text
        return self._texts[conj]

    def closing_texts(self, root: Conj) -> tuple[list[str], list[str], str]:
        """Return short properties and values that may be needed below the root, and the longest of what may be begun.

        A property that is optional counts, and each kind of value and each listed one, not only the shortest: once it
        is begun it must be completed.
        """
        values: dict[str, None] = {}
        properties: dict[str, None] = {}
        begun: list[str] = []
        for conj in self._satisfiability.satisfiable():
            text = self.text(conj)
            if text is not None and conj != root:
                values[text] = None
            for alternative in self._analysis.conjunction(conj) if conj != ALWAYS else ():
                values |= dict.fromkeys(_pattern_texts(alternative.strings) if alternative.types & STRING else ())
                if alternative.types & ARRAY and alternative.arrays.unique:
                    values |= dict.fromkeys(self._different(alternative.arrays, SOME_DISTINCT))
                if alternative.types & OBJECT:
                    written = self._properties(alternative.objects)
                    properties |= {written[name]: None for name in alternative.objects.required if name in written}
                    begun += written.values()
                begun += self._each_kind(alternative)
        longest = max((text for text in begun if len(text) <= MAX_TEXT_BYTES), key=len, default="")
        return _shortest(properties), _shortest(values | {"0": None}), longest

    def scalars(self) -> list[tuple[str, ...]]:
        """Return groups of short scalars; where one of a group is a value, each of the others could be.

        Which of them takes the fewest tokens depends on the vocabulary, and on the marks before and after it.
        """
        groups: dict[tuple[str, ...], None] = {}
        for conj in self._satisfiability.satisfiable():
            found: dict[str, None] = {}
            for alternative in self._satisfiability.satisfiable_alternatives(conj) if conj != ALWAYS else ():
                found |= dict.fromkeys(word for bit, word in WORDS if alternative.types & bit)
                found |= dict.fromkeys(_numbers(alternative) if alternative.types & NUMBER else ())
                found |= dict.fromkeys(_strings(alternative.strings) if alternative.types & STRING else ())
            group = [text for text in sorted(found, key=len) if len(text) <= MAX_SCALAR_TEXT][:MAX_KINDS]
            if len(group) > 1:
                groups[tuple(group)] = None
        return list(islice(groups, MAX_PLACES))

    def containers(self) -> list[tuple[str, ...]]:
        """Return groups of short arrays and objects, one of each kind that may be the value of one place.

        Which of them takes the fewest tokens depends on the vocabulary, and another one may have been begun.
        """
        groups: dict[tuple[str, ...], None] = {}
        left = MAX_CONTAINERS_TEXT
        for conj in self._satisfiability.satisfiable():
            alternatives = self._satisfiability.satisfiable_alternatives(conj) if conj != ALWAYS else ()
            found = dict.fromkeys(text for each in alternatives for text in self._containers(each))
            group = tuple(text for text in sorted(found, key=len) if len(text) <= MAX_CONTAINER_TEXT)[:MAX_KINDS]
            group = tuple(text for text, size in zip(group, accumulate(map(len, group)), strict=True) if size <= left)
            if len(group) > 1 and group not in groups:
                groups[group] = None
                left -= sum(map(len, group))
        return list(groups)

    def _containers(self, alternative: Alternative) -> list[str]:
        array = self._array(alternative.arrays) if alternative.types & ARRAY else None
        found = self._object(alternative.objects) if alternative.types & OBJECT else None
        return [text for text in (array, found) if text is not None]

    def _properties(self, objects: Objects) -> dict[str, str]:
        texts = {name: self.text(objects.value(name)) for name in objects.declared()}
        return {name: f"{json_string(name)}:{text}" for name, text in texts.items() if text is not None}

    def _each_kind(self, alternative: Alternative) -> list[str]:
        """Return a short value of each type, and of strings and numbers that are listed each one."""
        found = [text for text in self._of_types(alternative) if text is not None]
        if alternative.types & NUMBER and alternative.numbers.values is not None:
            found += map(spelling, alternative.numbers.values)
        if alternative.types & STRING and alternative.strings.values is not None:
            found += map(json_string, alternative.strings.values)
        return found

    def _of_types(self, alternative: Alternative) -> list[str | None]:
        found: list[str | None] = [word for bit, word in WORDS if alternative.types & bit]
        if alternative.types & NUMBER:
            found.append(_number(alternative.types, alternative.numbers))
        if alternative.types & STRING:
            found.append(_string(alternative.strings))
        if alternative.types & ARRAY:
            found.append(self._array(alternative.arrays))
        if alternative.types & OBJECT:
            found.append(self._object(alternative.objects))
        return found

    def _array(self, arrays: Arrays) -> str | None:
        if arrays.unique and arrays.least > 1:
            distinct = self._different(arrays, arrays.least)
            return f"[{','.join(distinct)}]" if distinct else None
        needed = [arrays.item(index) for index in range(arrays.least)]
        for entry in arrays.contains:
            if entry.least > 1 or entry.most is not None or arrays.num_prefix:
                return None
            needed[:1] = [arrays.item(0) | entry.item] if entry.least else needed[:1]
        items = [self.text(conj) for conj in needed]
        return None if None in items else f"[{','.join(map(str, items))}]"

    def _different(self, arrays: Arrays, count: int) -> list[str]:
        return (self._distinct(arrays, count) if self._distinct else None) or []

    def _object(self, objects: Objects) -> str | None:
        texts = {name: self.text(objects.value(name)) for name in objects.required}
        for name in self._more_names(objects) if len(texts) < objects.least else ():
            texts.setdefault(name, self.text(objects.value(name)))
            if len(texts) == objects.least:
                break
        if None in texts.values() or len(texts) < objects.least:
            return None
        listed = list(objects.declared())
        order = sorted(texts, key=lambda name: listed.index(name) if name in listed else len(listed))
        return "{" + ",".join(f"{json_string(name)}:{texts[name]}" for name in order) + "}"

    def _more_names(self, objects: Objects) -> list[str]:
        """Return keys that may be added to reach ``minProperties``: listed ones in order, then others."""
        listed = [name for name in objects.declared() if name not in objects.required]
        patterns = [pattern for clause in objects.clauses for pattern, _ in clause.patterns]
        tries = [*(text for p in patterns for text in read_pattern(p).examples), "", "a", "key"]
        tries += [f"k{index}" for index in range(objects.least if self._remembers else 0)]
        most = len(tries) if self._remembers else 1
        other = [name for name in dict.fromkeys(tries) if name not in objects.declared()]
        fits = [name for name in (*listed, *other) if self._analysis.admits_name(objects.names, name)]
        fits = [name for name in fits if self.text(objects.value(name)) is not None]
        return [name for name in fits if name in listed] + [name for name in fits if name in other][:most]


def _pattern_texts(strings: Strings) -> list[str]:
    found = [text for source in strings.patterns for text in read_pattern(source).examples]
    return [json_string(text) for text in found if strings.admits(text)]


def _numbers(alternative: Alternative) -> list[str]:
    if alternative.numbers.values is not None:
        return [spelling(value) for value in alternative.numbers.values]
    text = _number(alternative.types, alternative.numbers)
    return [] if text is None else [text]


def _strings(strings: Strings) -> list[str]:
    if strings.values is not None:
        return list(map(json_string, strings.values))
    found = _string(strings)
    return [*_pattern_texts(strings), *map(json_string, short_strings(strings)), *([found] if found else [])]


def _shortest(texts: dict[str, None]) -> list[str]:
    ordered = sorted(texts, key=lambda text: (len(text), text))
    return [text for text in ordered if len(text) <= MAX_TEXT_BYTES][:MAX_TEXTS]


def _number(types: int, numbers: Numbers) -> str | None:
    if numbers.values is not None:
        return min((spelling(value) for value in numbers.values), key=len, default=None)
    bounds = [bound for bound in (numbers.low, numbers.high) if bound is not None]
    tries = [Decimal(0), *bounds, *(EXACT.add(bound, step) for bound in bounds for step in _NEAR)]
    if numbers.multiple is not None:
        near = (Fraction(bound) // numbers.multiple for bound in bounds)
        counts = [count + shift for count in near for shift in (0, 1, -1, 2, -2)]
        numerator, denominator = numbers.multiple.as_integer_ratio()
        tries += [EXACT.divide(Decimal(count * numerator), Decimal(denominator)) for count in counts]
    for value in (*tries, Decimal("0.5")):
        if types & (INTEGER if value == value.to_integral_value() else NUMBER & ~INTEGER) and numbers.admits(value):
            return spelling(value)
    return None


def _string(strings: Strings) -> str | None:
    if strings.values is not None:
        return min(map(json_string, strings.values), key=len, default=None)
    tries = ["a" * strings.least, "b" * strings.least]
    tries += [text for name in strings.formats for text in FORMATS[name].shortest]
    tries += [text for source in strings.patterns for text in read_pattern(source).shortest]
    tries += [text + "a" * (strings.least - len(text)) for text in tries if len(text) < strings.least]
    found = next((text for text in tries if strings.admits(text)), None)
    return None if found is None else json_string(found)
