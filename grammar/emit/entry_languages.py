"""Entry languages: the possible distinct entries of a container: the items of an array or the keys of an object.

A grammar without a memory cannot express that two values differ. So if there are too many values to list, the grammar
permits repeats, and the matcher remembers what was written (``match/memory_state.py``). The matcher also needs the
language of the entries: if few entries have a common beginning, it must not accept that beginning after all of these
entries are used.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any

from ..regex.charset import json_string
from ..regex.string_automaton import START, StringAutomaton
from ..schema.constraints import Arrays

# The grammar admits a container whose entries are remembered also in a second spelling, which never occurs in answers:
# `ENTRIES`, the container's number and a semicolon. The matcher uses it to find out whether the container may begin.
# The number `JSON_PART` stands for the beginning of JSON within other text.
ENTRIES = b"\x03"
JSON_PART = 0
# Largest number of spellings of numbers that are tried.
MAX_SPELLINGS = 50_000
# Largest number of texts of one length that the search for short strings extends.
MAX_TEXTS = 200
# Largest number of characters of a short string.
MAX_SHORT = 300
_LIKELY = [*"0123456789abcdefghijklmnopqrstuvwxyz"]
_Spelled = tuple[StringAutomaton, int, str]


@dataclass(frozen=True)
class EntryLanguage:
    """The entries of one container.

    Attributes:
        words: those of null, true and false that are possible entries.
        numbers: automata of the spellings of numbers.
        strings: automata of strings; a string may match several of them.
        has_containers: whether entries may be arrays or objects.
        has_limited: whether some of these arrays or objects have finitely many values, all of which may be used up.
        of_keys: whether the entries are the keys of an object; otherwise they are the items of an array.
    """

    words: tuple[str, ...] = ()
    numbers: tuple[StringAutomaton, ...] = ()
    strings: tuple[StringAutomaton, ...] = ()
    has_containers: bool = False
    has_limited: bool = False
    of_keys: bool = False

    @property
    def num_bytes(self) -> int:
        """Estimated size in memory."""
        return sum(
            len(each.accepting) * (16 * (each.last_count + 1) + 80 * each.classes.num)
            for each in (*self.numbers, *self.strings)
        )

    def encode(self) -> list[Any]:
        """Return the language as JSON; `decode` reads it."""
        automata = [[each.encode() for each in listed] for listed in (self.numbers, self.strings)]
        return [self.words, *automata, self.has_containers, self.has_limited, self.of_keys]

    @classmethod
    def decode(cls, data: Sequence[Any]) -> EntryLanguage:
        """Return the language that `encode` wrote as JSON."""
        words, numbers, strings, has_containers, has_limited, of_keys = data
        decoded = [tuple(map(StringAutomaton.decode, listed)) for listed in (numbers, strings)]
        return cls(tuple(words), decoded[0], decoded[1], has_containers, has_limited, of_keys)


class EntryRules:
    """The part of a grammar that the matcher's memory of containers' entries enforces.

    Attributes:
        languages: languages of the entries of the containers, in the order of the containers' numbers.
        distinct: the languages of those containers that are arrays.
        has_open_objects: whether some object may have keys that are not listed.
        marks_objects: whether each object with unlisted keys is marked as the beginning of JSON.

    Args:
        first: number of the first container.
    """

    def __init__(self, first: int = 1, *, marks_objects: bool = False) -> None:
        self.languages: list[EntryLanguage] = []
        self.distinct: dict[Arrays, EntryLanguage] = {}
        self.has_open_objects, self.marks_objects = False, marks_objects
        self._first = first

    @property
    def is_used(self) -> bool:
        return self.has_open_objects or bool(self.languages)

    def limit(self, language: EntryLanguage) -> None:
        """Have the ends of arrays and objects of a language searched, because others may be at their position."""
        limited = replace(language, has_limited=True)
        self.languages = [limited if each == language else each for each in self.languages]
        self.distinct = {arrays: limited if each == language else each for arrays, each in self.distinct.items()}

    def mark(self, language: EntryLanguage) -> str:
        """Return the mark of a container whose entries have a language, which is added."""
        if language not in self.languages:
            self.languages.append(language)
        return container_mark(self._first + self.languages.index(language))


def container_mark(number: int) -> str:
    """Return the body of the terminal for a container's other spelling."""
    return rf"/\x03{number};/"


def number_spellings(begun: Iterable[_Spelled]) -> Iterator[str]:
    """Yield spellings of numbers, the shortest first.

    Args:
        begun: for each automaton, the state after a text, and this text: the beginning of the spellings.
    """
    # The text that needs the fewest characters in all is extended first, and among equals the longest text. With bounds
    # of many digits, few texts can be completed, but there are as many beginnings as there are numbers.
    order = itertools.count()
    todo = [
        (len(text) + each.number_rests[state], -len(text), next(order), each, state, text)
        for each, state, text in begun
    ]
    heapify(todo)
    for _ in range(MAX_SPELLINGS):
        if not todo:
            return
        *_, automaton, state, text = heappop(todo)
        if automaton.accepting[state]:
            yield text
        for char, after in automaton.number_steps[state]:
            least = len(text) + 1 + automaton.number_rests[after]
            heappush(todo, (least, -len(text) - 1, next(order), automaton, after, text + char))


def is_endless(automaton: StringAutomaton) -> bool:
    """Return whether each beginning of a string has infinitely many ends."""
    return bool((automaton.num_ends[automaton.can_finish] == float("inf")).all())


def shortest_entries(language: EntryLanguage, count: int) -> list[str]:
    """Return the JSON of some different entries, short ones first; fewer than ``count`` if no more are found."""
    found: dict[Any, str] = {word: word for word in language.words}
    numbers = number_spellings((automaton, START, "") for automaton in language.numbers)
    for text in numbers if language.numbers else ():
        if len(found) >= count + len(language.words):
            break
        found.setdefault((json.loads(text),), text)
    for automaton in language.strings:
        for text in islice(_short_strings(automaton), count):
            found.setdefault((text,), json_string(text))
    return sorted(found.values(), key=len)[:count]


def _short_strings(automaton: StringAutomaton) -> Iterator[str]:
    """Yield some strings of an automaton, the shortest first."""
    frontier = {"": START}
    chars = [*_LIKELY, *(chr(first) for first, _, _ in automaton.classes.intervals())]
    for length in range(MAX_SHORT):
        yield from (
            text for text, state in frontier.items() if automaton.may_end(state, min(length, automaton.last_count))
        )
        after, count = dict[str, int](), min(length + 1, automaton.last_count)
        for text, state in frontier.items():
            for char in chars:
                target = automaton.transitions[state][automaton.classes.of(ord(char))]
                if automaton.can_finish[target, count]:
                    after[text + char] = target
            if len(after) > MAX_TEXTS:
                break
        frontier = after


def has_entries(language: EntryLanguage, count: int) -> bool:
    """Return whether at least ``count`` different entries are known to exist."""
    strings = max((float(each.num_ends[START, 0]) for each in language.strings), default=0.0)
    if language.has_containers or strings + len(language.words) >= count:
        return True
    numbers = number_spellings((automaton, START, "") for automaton in language.numbers)
    values = set()
    for text in numbers:
        values.add(json.loads(text))
        if len(values) + strings + len(language.words) >= count:
            return True
    return False
