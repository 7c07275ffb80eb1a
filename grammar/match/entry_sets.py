"""Entry sets: the entries that an array or object has so far, and whether the beginning of an entry may become new."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple

from ..emit.entry_languages import EntryLanguage, is_endless, number_spellings
from ..regex.charset import ESCAPED, json_spelling
from ..regex.string_automaton import DEAD, START, StringAutomaton
from .json_chars import BACKSLASH, CLEAN, INVALID, NOTHING, json_chars

_FIRST_OF_NUMBER = frozenset(b"-0123456789")
_SPELLED = [(json_spelling(chr(code)).encode(), code) for code in ESCAPED]
_LIKELY = "0123456789abcdefghijklmnopqrstuvwxyz"


class Outlook(IntEnum):
    """What the beginning of an entry may become: no entry of the language, only known entries, or a new one."""

    OTHER = 0
    SEEN = 1
    NEW = 2


class Entries(NamedTuple):
    """The entries that one container has so far.

    Attributes:
        values: for strings, null, true and false, the spelling in bytes; for numbers, the value; for arrays and
            objects, their contents.
        strings: spellings of the strings, with quotes.
    """

    values: frozenset[Any] = frozenset()
    strings: frozenset[bytes] = frozenset()

    def add(self, value: Any) -> Entries:
        is_string = isinstance(value, bytes) and value[:1] == b'"'
        return Entries(self.values | {value}, self.strings | {value} if is_string else self.strings)

    def containers(self) -> tuple[Any, ...]:
        """Return the entries that are arrays or objects."""
        return tuple(each for each in self.values if isinstance(each, frozenset | tuple))

    def rivals(self, beginning: bytes) -> list[bytes]:
        """Return the strings that start with ``beginning``."""
        return [each for each in self.strings if each.startswith(beginning)]


def scalar_value(text: bytes) -> Any:
    """Return a value that is equal for all spellings of the same scalar: for a number, its numeric value."""
    return json.loads(text) if text[0] in _FIRST_OF_NUMBER else text


class EntryCounter:
    """The language of the entries of a container. It is shared by all answers."""

    def __init__(self, language: EntryLanguage) -> None:
        self._words = tuple(word.encode() for word in language.words)
        self._numbers = language.numbers
        self._whole = {id(each) for each in self._numbers if _is_whole(each)}
        self._strings = [_StringCounter(automaton) for automaton in language.strings]
        self.has_containers = language.has_containers
        self.has_limited = language.has_limited
        self.of_keys = language.of_keys
        self.is_endless = all(map(is_endless, language.strings))
        has_others = language.words or language.numbers or language.has_containers
        self.is_plain = self.is_endless and bool(language.strings) and not has_others

    @property
    def shared(self) -> list[tuple[object, int]]:
        """Return the tables that other counters with the same character classes share, and their sizes in bytes."""
        return [(each.chars, each.chars.num_bytes) for each in self._strings]

    def outlook(self, beginning: bytes, entries: Entries) -> Outlook:
        """Return what the beginning of an entry may become, given the entries so far."""
        if not beginning:
            if self.has_containers:
                return Outlook.NEW
            return max(self._word(b"", entries), self._number("", entries), self._string(b'"', entries))
        if beginning[0] == 0x22:
            return self._string(beginning, entries)
        if beginning[0] in _FIRST_OF_NUMBER:
            return self._number(beginning.decode(), entries)
        return self._word(beginning, entries)

    def accepts(self, entry: bytes) -> bool:
        """Return whether a complete scalar belongs to the language."""
        if entry[0] == 0x22:
            return any(each.accepts(entry[1:-1]) for each in self._strings)
        if entry[0] in _FIRST_OF_NUMBER:
            return any(each.accepting[_walked(each, entry.decode())] for each in self._numbers)
        return entry in self._words

    def _word(self, beginning: bytes, entries: Entries) -> Outlook:
        found = [word for word in self._words if word.startswith(beginning)]
        if not found:
            return Outlook.OTHER
        return Outlook.SEEN if entries.values.issuperset(found) else Outlook.NEW

    def _number(self, beginning: str, entries: Entries) -> Outlook:
        states = [(each, _walked(each, beginning)) for each in self._numbers]
        states = [(each, state) for each, state in states if state != DEAD and each.can_finish[state, 0]]
        if not states:
            return Outlook.OTHER
        # Integers have one spelling each, except zero (0 and -0): there is at most one number fewer than spellings.
        least = max((each.num_ends[state, 0] - 1 for each, state in states if id(each) in self._whole), default=0)
        if least > len(entries.values):
            return Outlook.NEW
        spelled = number_spellings((automaton, state, beginning) for automaton, state in states)
        is_new = any(json.loads(text) not in entries.values for text in spelled)
        return Outlook.NEW if is_new else Outlook.SEEN

    def _string(self, beginning: bytes, entries: Entries) -> Outlook:
        counts = [(each, each.num_ends(beginning[1:])) for each in self._strings]
        counts = [(each, count) for each, count in counts if count]
        if not counts:
            return Outlook.OTHER
        rivals = entries.rivals(beginning)
        if any(count > len(rivals) for _, count in counts):
            return Outlook.NEW
        ends = (beginning + end for each, _ in counts for end in each.ends(beginning[1:]))
        return Outlook.SEEN if all(end in entries.strings for end in ends) else Outlook.NEW

    def shortest_rest(self, beginning: bytes, entries: Entries) -> bytes:
        """Return the rest of a number such that the number is a new entry; if no entry has begun, a whole new entry.

        Returns no bytes if the beginning is a complete number, or if no such rest is easily found.
        """
        if beginning and beginning[0] not in _FIRST_OF_NUMBER:
            return b""
        text = beginning.decode()
        spelled = number_spellings((each, _walked(each, text), text) for each in self._numbers)
        number = next((each for each in spelled if json.loads(each) not in entries.values), None)
        found = [] if number is None else [number.encode()[len(beginning) :]]
        if not beginning:
            found += [word for word in self._words if word not in entries.values]
            end = self.shortest_end(b'"', entries)
            found += [b'"' + end] if end else []
        return min(found, key=len, default=b"")

    def shortest_end(self, beginning: bytes, entries: Entries) -> bytes:
        """Return a shortest end, with the quote, of a string that has begun and must differ from all entries.

        Returns no bytes if no such end is easily found.
        """
        rivals = entries.rivals(beginning)
        found = [end for each in self._strings for end in each.unseen_ends(beginning[1:], rivals)]
        return min(found, key=len, default=b"")


def _is_whole(automaton: StringAutomaton) -> bool:
    """Return whether the automaton's numbers are integers without a point or an exponent."""
    return not any(char in ".eE" for steps in automaton.number_steps for char, _ in steps)


def _walked(automaton: StringAutomaton, text: str) -> int:
    state = START
    for char in text:
        state = automaton.transitions[state][automaton.classes.of(ord(char))]
    return state


class _Reached(NamedTuple):
    """A place in a string: automaton state, number of characters so far, and the bytes of an incomplete character."""

    state: int
    length: int
    partial: bytes


class _StringCounter:
    """Counts the possible ends of a string that has begun in JSON spelling."""

    def __init__(self, automaton: StringAutomaton) -> None:
        self._automaton = automaton
        self.chars = json_chars(automaton.classes)
        self._num_ends = automaton.num_ends
        self._last = automaton.last_count

    def accepts(self, content: bytes) -> bool:
        reached = self._reach(content)
        return reached is not None and not reached.partial and self._automaton.may_end(reached.state, reached.length)

    def num_ends(self, beginning: bytes) -> float:
        """Return the number of strings of the language that start with ``beginning``."""
        reached = self._reach(beginning)
        if reached is None:
            return 0
        state, count, partial = reached
        if not partial:
            return float(self._num_ends[state, count])
        after = min(count + 1, self._last)
        transitions = self._automaton.transitions[state]
        return float(
            sum(
                (last - first + 1) * self._num_ends[transitions[number], after]
                for first, last, number in self._possible(partial)
                if self._num_ends[transitions[number], after]
            )
        )

    def _reach(self, content: bytes) -> _Reached | None:
        state, count, decoder, begun = START, 0, CLEAN, 0
        rows, next_rows, emits_rows = self._automaton.transitions, self.chars.next_rows, self.chars.emits_rows
        for at, byte in enumerate(content):
            emitted, decoder = emits_rows[decoder][byte], next_rows[decoder][byte]
            if decoder == INVALID:
                return None
            if emitted != NOTHING:
                state, count, begun = rows[state][emitted], min(count + 1, self._last), at + 1
                if state == DEAD:
                    return None
        return _Reached(state, count, content[begun:])

    def _possible(self, partial: bytes) -> Iterator[tuple[int, int, int]]:
        """Yield the code points whose JSON spelling starts with ``partial``, as (first, last, class)."""
        classes = self._automaton.classes
        if partial[0] == BACKSLASH:
            for spelled, code in _SPELLED:
                if spelled.startswith(partial):
                    yield code, code, classes.of(code)
            return
        lead = partial[0]
        length = 1 if lead < 0xE0 else 2 if lead < 0xF0 else 3
        bits = lead & (0x1F, 0x0F, 0x07)[length - 1]
        for byte in partial[1:]:
            bits = bits << 6 | byte & 0x3F
        left = 6 * (length + 1 - len(partial))
        least = (0x80, 0x800, 0x10000)[length - 1]
        yield from classes.intervals(max(bits << left, least), min(((bits + 1) << left) - 1, 0x10FFFF))

    def ends(self, beginning: bytes) -> Iterator[bytes]:
        """Yield all ends of a string that has begun, each with the quote. The caller makes sure that they are few."""
        reached = self._reach(beginning)
        assert reached is not None
        state, count, partial = reached
        if partial:
            for code, target in self._steps(state, count, self._possible(partial)):
                for end in self._ends(target, min(count + 1, self._last)):
                    yield (json_spelling(chr(code)).encode() + end)[len(partial) :]
        else:
            yield from self._ends(state, count)

    def _ends(self, state: int, count: int) -> Iterator[bytes]:
        if self._automaton.may_end(state, count):
            yield b'"'
        for code, target in self._steps(state, count, self._automaton.classes.intervals()):
            for end in self._ends(target, min(count + 1, self._last)):
                yield json_spelling(chr(code)).encode() + end

    def _steps(self, state: int, count: int, intervals: Iterator[tuple[int, int, int]]) -> Iterator[tuple[int, int]]:
        """Yield each character after which the string can still end, as its code point, with the state after it."""
        after = min(count + 1, self._last)
        for first, last, number in intervals:
            target = self._automaton.transitions[state][number]
            if self._num_ends[target, after]:
                for code in range(first, last + 1):
                    yield code, target

    def unseen_ends(self, beginning: bytes, rivals: list[bytes]) -> Iterator[bytes]:
        """Yield short ends that make the string differ from its rivals, one for each place where it can differ."""
        reached = self._reach(beginning)
        if reached is None:
            return
        contents = [rival[1:-1] for rival in rivals]
        places = {beginning}
        for content in contents:
            places |= {content[:at] for at in range(len(beginning), len(content) + 1)}
        for place in sorted(places, key=len)[:200]:
            reached = self._reach(place)
            if reached is None:
                continue
            so_far = place[len(beginning) :]
            if not reached.partial and self._automaton.may_end(reached.state, reached.length) and place not in contents:
                yield so_far + b'"'
            for spelled, target in self._leaving(reached, place, contents):
                rest = self._automaton.rest(target, min(reached.length + 1, self._last))
                if rest is not None:
                    yield so_far + spelled + b"".join(map(self.chars.spelling, rest)) + b'"'

    def _leaving(self, reached: _Reached, place: bytes, contents: list[bytes]) -> Iterator[tuple[bytes, int]]:
        """Yield, for each class, one character that makes the string differ from the contents that begin like it."""
        state, count, partial = reached
        after = min(count + 1, self._last)
        done: set[int] = set()
        intervals = self._possible(partial) if partial else self._automaton.classes.intervals()
        common = (
            [(ord(char), ord(char), self._automaton.classes.of(ord(char))) for char in _LIKELY] if not partial else []
        )
        for first, last, number in (*common, *intervals):
            target = self._automaton.transitions[state][number]
            if number in done or not self._num_ends[target, after]:
                continue
            for code in range(first, min(last, first + len(contents)) + 1):
                spelled = json_spelling(chr(code)).encode()[len(partial) :]
                if not any(content.startswith(place + spelled) for content in contents):
                    done.add(number)
                    yield spelled, target
                    break
