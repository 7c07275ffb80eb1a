"""Shortest instances of the parts of a schema, from a cheap search, for closing within the budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate, islice

from ..regex.charset import json_string
from ..regex.ecma_regex import read_pattern
from ..regex.number_ranges import EXACT, spelling
from ..regex.string_formats import FORMATS
from ..vocabulary import Vocabulary
from .constraints import ALWAYS, Alternative, Arrays, Conj, Numbers, Objects, Strings
from .fewest_tokens import string_of_fewest_tokens
from .json_types import ARRAY, INTEGER, NUMBER, OBJECT, STRING, WORDS
from .satisfiability import Satisfiability
from .string_language import automaton_of, short_strings
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
# Largest number of tokens of a string, its quotes included, for which no string of fewer tokens is searched.
FEW_TOKENS = 3
# Smallest lengths up to which it is, and characters by which it may be longer than the smallest one.
MAX_LEAST, MAX_LONGER = 200, 60
# Items that are written out of an array of distinct items, to end an answer with.
SOME_DISTINCT = 12


class ShortestInstance:
    """Short JSON texts that satisfy the parts of one analysed schema; None if none was found.

    Args:
        analysis: analysis of the schema.
        satisfiability: satisfiability of its parts.
        distinct: returns the JSON texts of some different items of an array, or None.
        vocabulary: vocabulary of the answer's tokens, if it is known.
        remembers: whether the matcher remembers the keys of objects, so that several unlisted keys may count towards
            ``minProperties``; without such a memory only one may.
    """

    def __init__(
        self,
        analysis: Subschemas,
        satisfiability: Satisfiability,
        distinct: Callable[[Arrays, int], list[str] | None] | None = None,
        vocabulary: Vocabulary | None = None,
        *,
        remembers: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._distinct = distinct
        self._remembers = remembers
        self._analysis = analysis
        self._satisfiability = satisfiability
        self._texts: dict[Conj, str | None] = {ALWAYS: "0"}
        self._open: set[Conj] = set()
        self._fewest: dict[Strings, str | None] = {}

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
        """Return short texts that can complete an answer: properties, values, and the longest text that may be begun.

        The properties are required ones, and the values may be needed anywhere below the root. Once a property or value
        has begun, it must be completed even if a shorter one would have been possible. So the third result is the
        longest short text over all optional properties, kinds of values and listed values.
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

    def optional_properties(self) -> list[str]:
        """Return short properties that no object needs: whose key is begun must be completed."""
        found: dict[str, None] = {}
        for conj in self._satisfiability.satisfiable():
            for alternative in self._analysis.conjunction(conj) if conj != ALWAYS else ():
                if alternative.types & OBJECT:
                    required = alternative.objects.required
                    written = self._properties(alternative.objects, self._pattern_names(alternative.objects))
                    found |= {text: None for name, text in written.items() if name not in required}
        return _shortest(found)

    def scalars(self) -> list[tuple[str, ...]]:
        """Return groups of short scalars. Where one scalar of a group is valid, all others of the group are valid too.

        Which scalar of a group takes the fewest tokens depends on the vocabulary and on the punctuation around it.
        """
        groups: dict[tuple[str, ...], None] = {}
        for conj in self._satisfiability.satisfiable():
            found: dict[str, None] = {}
            for alternative in self._satisfiability.satisfiable_alternatives(conj) if conj != ALWAYS else ():
                found |= dict.fromkeys(word for bit, word in WORDS if alternative.types & bit)
                found |= dict.fromkeys(_numbers(alternative) if alternative.types & NUMBER else ())
                found |= dict.fromkeys(self._strings(alternative.strings) if alternative.types & STRING else ())
            fewest = set(self._fewest.values())
            order = sorted(found, key=lambda text: (text not in fewest, len(text)))
            group = [text for text in order if len(text) <= MAX_SCALAR_TEXT][:MAX_KINDS]
            if len(group) > 1:
                groups[tuple(group)] = None
        return list(islice(groups, MAX_PLACES))

    def containers(self) -> list[tuple[str, ...]]:
        """Return groups of short arrays and objects that may be the value of one place.

        A group has the shortest container of each kind. It also has an object with each optional member, because the
        key of this member may have begun. Which container takes the fewest tokens depends on the vocabulary.
        """
        groups: dict[tuple[str, ...], None] = {}
        left = MAX_CONTAINERS_TEXT
        for conj in self._satisfiability.satisfiable():
            alternatives = self._satisfiability.satisfiable_alternatives(conj) if conj != ALWAYS else ()
            kinds = [texts for each in alternatives for texts in self._containers(each)]
            if len(kinds) < 2:
                continue
            least, longer = (dict.fromkeys(text for texts in kinds for text in texts[at]) for at in range(2))
            order = [*sorted(least, key=len), *sorted(longer.keys() - least.keys(), key=lambda text: (len(text), text))]
            group = [text for text in order if len(text) <= MAX_CONTAINER_TEXT][:MAX_KINDS]
            sizes = zip(group, accumulate(map(len, group)), strict=True)
            group = sorted((text for text, size in sizes if size <= left), key=len)
            if len(group) > 1 and tuple(group) not in groups:
                groups[tuple(group)] = None
                left -= sum(map(len, group))
        return list(groups)

    def _containers(self, alternative: Alternative) -> list[tuple[list[str], list[str]]]:
        """Return the shortest array and object of an alternative, each with those of one more member."""
        found = list[tuple[list[str], list[str]]]()
        if alternative.types & ARRAY and (array := self._array(alternative.arrays)) is not None:
            found.append(([array], []))
        if alternative.types & OBJECT and (least := self._object(alternative.objects)) is not None:
            found.append(([least], self._longer_objects(alternative.objects)))
        return found

    def _longer_objects(self, objects: Objects) -> list[str]:
        """Return for each member that may be added the shortest object that has it."""
        found = (self._object(objects, (name,)) for name in self._more_names(objects))
        return [text for text in found if text is not None]

    def _properties(self, objects: Objects, more: Iterable[str] = ()) -> dict[str, str]:
        texts = {name: self.text(objects.value(name)) for name in (*objects.declared(), *more)}
        return {name: f"{json_string(name)}:{text}" for name, text in texts.items() if text is not None}

    def _each_kind(self, alternative: Alternative) -> list[str]:
        """Return a short value of each type, and of strings and numbers that are listed each one."""
        found = [text for text in self._of_types(alternative) if text is not None]
        if alternative.types & NUMBER and alternative.numbers.values is not None:
            found += map(spelling, alternative.numbers.values)
        if alternative.types & STRING and alternative.strings.values is not None:
            found += map(json_string, alternative.strings.values)
        return found

    def _strings(self, strings: Strings) -> list[str]:
        """Return the listed strings; without a list, some short strings and the string with the fewest tokens."""
        if strings.values is not None:
            return list(map(json_string, strings.values))
        found = {text for text in (_string(strings), self._fewest_tokens(strings)) if text is not None}
        return [*_pattern_texts(strings), *map(json_string, short_strings(strings)), *sorted(found, key=len)]

    def _fewest_tokens(self, strings: Strings) -> str | None:
        """Return the string with the fewest tokens; None if it is hard to find or a short one is known."""
        known = _string(strings)
        if self._vocabulary is None or (known and len(self._vocabulary.fewest(known.encode())) <= FEW_TOKENS):
            return None
        if strings not in self._fewest:
            most = strings.least + MAX_LONGER if strings.most is None else min(strings.most, strings.least + MAX_LONGER)
            is_tried = len(self._fewest) < MAX_PLACES and strings.least <= MAX_LEAST
            automaton = automaton_of(replace(strings, most=most)) if is_tried else None
            found = None if automaton is None else string_of_fewest_tokens(automaton, self._vocabulary)
            self._fewest[strings] = None if found is None else json_string(found)
        return self._fewest[strings]

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
        if arrays.contains:
            return self._array_that_contains(arrays)
        items = [self.text(arrays.item(index)) for index in range(arrays.least)]
        return None if None in items else f"[{','.join(map(str, items))}]"

    def _array_that_contains(self, arrays: Arrays) -> str | None:
        """Return the shortest array whose items meet ``contains`` often enough and not too often; None if unknown."""
        entry = arrays.contains[0]
        count = max(arrays.least, entry.least)
        if len(arrays.contains) > 1 or arrays.num_prefix or (arrays.unique and count > 1):
            return None
        item = arrays.item(0)
        holding = self.text(item | entry.item)
        other = self.text(item if entry.most is None else item | entry.negated)
        num_holding = entry.least
        if entry.most is not None and holding is not None and (other is None or len(holding) < len(other)):
            num_holding = min(count, entry.most)
        items = [holding] * num_holding + [other] * (count - num_holding)
        return None if None in items else f"[{','.join(map(str, items))}]"

    def _different(self, arrays: Arrays, count: int) -> list[str]:
        return (self._distinct(arrays, count) if self._distinct else None) or []

    def _object(self, objects: Objects, more: tuple[str, ...] = ()) -> str | None:
        """Return the shortest object that has all required members and those of some ``more`` names."""
        texts = {name: self.text(objects.value(name)) for name in (*objects.required, *more)}
        for name in self._more_names(objects) if len(texts) < objects.least else ():
            texts.setdefault(name, self.text(objects.value(name)))
            if len(texts) == objects.least:
                break
        too_many = objects.most is not None and len(texts) > objects.most
        if None in texts.values() or len(texts) < objects.least or too_many:
            return None
        listed = list(objects.declared())
        order = sorted(texts, key=lambda name: listed.index(name) if name in listed else len(listed))
        return "{" + ",".join(f"{json_string(name)}:{texts[name]}" for name in order) + "}"

    def _more_names(self, objects: Objects) -> list[str]:
        """Return keys that may be added to reach ``minProperties``: listed ones in order, then others."""
        listed = [name for name in objects.declared() if name not in objects.required]
        tries = [*self._pattern_names(objects), "", "a", "key"]
        tries += [f"k{index}" for index in range(objects.least if self._remembers else 0)]
        most = len(tries) if self._remembers else 1
        other = [name for name in dict.fromkeys(tries) if name not in objects.declared()]
        fits = [name for name in (*listed, *other) if self._analysis.admits_name(objects.names, name)]
        fits = [name for name in fits if self.text(objects.value(name)) is not None]
        return [name for name in fits if name in listed] + [name for name in fits if name in other][:most]

    def _pattern_names(self, objects: Objects) -> list[str]:
        """Return some keys that match the patterns of an object's members, and that it admits."""
        patterns = [pattern for clause in objects.clauses for pattern, _ in clause.patterns]
        found = dict.fromkeys(text for pattern in patterns for text in read_pattern(pattern).examples)
        return [name for name in found if self._analysis.admits_name(objects.names, name)]


def _pattern_texts(strings: Strings) -> list[str]:
    found = [text for source in strings.patterns for text in read_pattern(source).examples]
    return [json_string(text) for text in found if strings.admits(text)]


def _numbers(alternative: Alternative) -> list[str]:
    if alternative.numbers.values is not None:
        return [spelling(value) for value in alternative.numbers.values]
    text = _number(alternative.types, alternative.numbers)
    return [] if text is None else [text]


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
