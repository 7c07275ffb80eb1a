"""String automaton: a deterministic automaton of the strings that some expressions admit, with a length counter.

The expressions, with repeats written out, are made deterministic: states are sets of Glushkov's positions. The length
is not part of a state but is counted separately, so the number of states does not grow with the length. For each state
and length, `can_finish` tells whether the string can still match.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .char_classes import CharClasses, char_classes
from .regex_parser import Alt, Cat, Chars, RegexNode, Repeat

MAX_POSITIONS = 4_000
MAX_STATES = 8_000
# Steps of making an automaton deterministic; a second in Python takes some ten million.
MAX_STEPS = 4_000_000
# States times lengths.
MAX_CELLS = 8_000_000
DEAD, START = 0, 1


class AutomatonTooLarge(Exception):
    """An expression whose automaton has too many states."""


class Excluded(NamedTuple):
    """Excluded strings: they match all expressions ``all_of`` and no expression ``none_of``."""

    all_of: Sequence[RegexNode]
    none_of: Sequence[RegexNode] = ()

    @property
    def nodes(self) -> tuple[RegexNode, ...]:
        """All expressions of the group."""
        return (*self.all_of, *self.none_of)


def each_excluded(nodes: Sequence[RegexNode]) -> list[Excluded]:
    """Return one group for each expression, so that strings that match any of them are excluded."""
    return [Excluded((node,)) for node in nodes]


@dataclass(frozen=True)
class StringAutomaton:
    """States of a string's expressions with a counter of its characters.

    Attributes:
        classes: partition of the characters into classes.
        transitions: for each state and class, the next state; state 0 is dead, state 1 the start.
        accepting: whether the string may end in a state, as far as the expressions go.
        least: smallest length in code points.
        most: largest length; None: unlimited.
    """

    classes: CharClasses
    transitions: tuple[tuple[int, ...], ...]
    accepting: tuple[bool, ...]
    least: int = 0
    most: int | None = None

    @property
    def last_count(self) -> int:
        """The largest count that is told apart from others: one too many, or enough."""
        return self.least if self.most is None else self.most + 1

    @property
    def bytes_alone(self) -> int:
        """Estimated size in memory, without tables for masks."""
        return (
            2048 + len(self.accepting) * (2 * self.last_count + 16 * self.classes.num) + 72 * len(self.classes.starts)
        )

    @property
    def num_bytes(self) -> int:
        """Estimated size in memory, with tables of a few states for masks."""
        return (512 << 10) + len(self.accepting) * (2 * self.last_count + 80 * self.classes.num)

    @cached_property
    def can_finish(self) -> NDArray[np.bool_]:
        """Whether the string can still end well, bool [states, counts], the last count standing for all above."""
        delta = np.array(self.transitions, dtype=np.int32)
        accepting = np.array(self.accepting, dtype=np.bool_)
        last = self.last_count
        table = np.zeros((len(accepting), last + 1), dtype=np.bool_)
        if self.most is None:
            found, before = accepting, -1
            while found.sum() != before:
                before = int(found.sum())
                found = found | found[delta].any(axis=1)
            table[:, last] = found
        for count in range(last - 1, -1, -1):
            table[:, count] = table[:, count + 1][delta].any(axis=1)
            if count >= self.least:
                table[:, count] |= accepting
        return table

    @cached_property
    def num_ends(self) -> NDArray[np.float64]:
        """How many strings end well from each state and length, float64 [states, counts]; infinite where unlimited."""
        delta = np.array(self.transitions, dtype=np.int32)
        accepting = np.array(self.accepting, dtype=np.float64)
        sizes, last = self.classes.sizes, self.last_count
        table = np.zeros((len(accepting), last + 1))
        if self.most is None:
            live = self.can_finish[:, last]
            known = ~live
            while (ready := live & ~known & known[delta].all(axis=1)).any():
                table[ready, last] = accepting[ready] + table[:, last][delta[ready]] @ sizes
                known |= ready
            table[live & ~known, last] = np.inf
        with np.errstate(over="ignore"):
            for count in range(last - 1, -1, -1):
                table[:, count] = table[:, count + 1][delta] @ sizes + accepting * (count >= self.least)
        return table

    @cached_property
    def number_steps(self) -> list[list[tuple[str, int]]]:
        """The characters of numbers with which a text goes on to an end, and the next states, for each state."""
        classes = [(char, self.classes.of(ord(char))) for char in "0123456789.eE+-"]
        can_finish = self.can_finish[:, self.last_count].tolist()
        return [
            [(char, row[number]) for char, number in classes if can_finish[row[number]]] for row in self.transitions
        ]

    @cached_property
    def number_rests(self) -> list[int]:
        """The characters of a shortest end of a number, for each state; too many to count where there is none."""
        rests = [0 if ends else len(self.accepting) for ends in self.accepting]
        for _ in self.accepting:
            before = list(rests)
            for state, steps in enumerate(self.number_steps):
                rests[state] = min([rests[state], *(rests[after] + 1 for _, after in steps)])
            if rests == before:
                break
        return rests

    def may_end(self, state: int, count: int) -> bool:
        """Return whether the string is complete after `count` characters (at most `last_count`)."""
        return self.accepting[state] and count >= self.least and (self.most is None or count <= self.most)

    def rest(self, state: int, count: int) -> list[int] | None:
        """Return the classes of a shortest end, breadth first; None if there is none."""
        last = self.last_count
        table = self.can_finish
        if not table[state, count]:
            return None
        frontier: dict[int, tuple[Any, int]] = {state: (None, -1)}
        while True:
            for reached, path in frontier.items():
                if self.may_end(reached, count):
                    return _unlinked(path)
            count = min(count + 1, last)
            after: dict[int, tuple[Any, int]] = {}
            for reached, path in frontier.items():
                for number, target in enumerate(self.transitions[reached]):
                    if target not in after and table[target, count]:
                        after[target] = path, number
            frontier = after

    def strings(self, state: int = START, count: int = 0) -> Iterator[str]:
        """Yield all strings that end well from a state and length; only for those of which there are few."""
        if self.may_end(state, count):
            yield ""
        after = min(count + 1, self.last_count)
        for first, last, number in self.classes.intervals():
            target = self.transitions[state][number]
            if self.can_finish[target, after]:
                for code in range(first, last + 1):
                    for rest in self.strings(target, after):
                        yield chr(code) + rest

    def shortest_strings(self, most: int, longest: int, chars_of_a_class: int) -> list[str]:
        """Return up to `most` strings of the two smallest lengths for which there are any.

        Args:
            most: largest number of strings.
            longest: largest number of characters of a string.
            chars_of_a_class: number of characters of a class that are tried, the first ones of its intervals.
        """
        chars: dict[int, list[str]] = {}
        for first, last, number in self.classes.intervals():
            known = chars.setdefault(number, [])
            known += map(chr, range(first, min(last + 1, first + chars_of_a_class - len(known))))
        frontier, found, lengths = [("", START)], list[str](), 0
        for count in range(longest + 1):
            ended = [text for text, state in frontier if self.may_end(state, min(count, self.last_count))]
            found += ended
            lengths += bool(ended)
            if lengths == 2 or len(found) >= most:
                break
            after = min(count + 1, self.last_count)
            longer = [
                (text + char, target)
                for text, state in frontier
                for number, target in enumerate(self.transitions[state])
                if self.can_finish[target, after]
                for char in chars.get(number, ())
            ]
            frontier = longer[:: -(-len(longer) // (4 * most))] if longer else []
        return found[:most]

    def encode(self) -> list[Any]:
        """Return the automaton as JSON; `decode` reads it."""
        classes = self.classes
        return [
            [classes.starts, classes.classes, classes.num], self.transitions, self.accepting, self.least, self.most
        ]  # fmt: skip

    @classmethod
    def decode(cls, data: Sequence[Any]) -> StringAutomaton:
        """Return the automaton of its JSON."""
        (starts, classes, num), transitions, accepting, least, most = data
        partition = CharClasses(tuple(starts), tuple(classes), num)
        return cls(partition, tuple(map(tuple, transitions)), tuple(accepting), least, most)


def _unlinked(path: tuple[Any, int]) -> list[int]:
    found = []
    while path[0] is not None:
        path, number = path
        found.append(number)
    return found[::-1]


def string_automaton(
    must: Sequence[RegexNode], must_not: Sequence[Excluded], least: int = 0, most: int | None = None
) -> StringAutomaton:
    """Build the automaton of the strings that match all of some anchored expressions.

    Args:
        must: expressions that match.
        must_not: groups of strings that are left out.
        least: smallest length in code points.
        most: largest length, or None.

    Raises:
        AutomatonTooLarge: the automaton would have too many states.
    """
    nodes = [*must, *(node for group in must_not for node in group.nodes)]
    sets = list(dict.fromkeys(chars.chars for node in nodes for chars in _char_nodes(node)))
    classes, bits = char_classes(sets)
    members = dict(zip(sets, bits, strict=True))
    terms = []
    for node in nodes:
        positions = _Positions()
        nullable, first, last = positions.add(node)
        by_class = [
            sum(1 << at for at, chars in enumerate(positions.chars) if members[chars] >> number & 1)
            for number in range(classes.num)
        ]
        terms.append(_Term(first, last, nullable, positions.follow, positions.covers, by_class))
    groups = []
    at = len(must)
    for group in must_not:
        middle, end = at + len(group.all_of), at + len(group.all_of) + len(group.none_of)
        groups.append((range(at, middle), range(middle, end)))
        at = end
    return _Subsets(terms, len(must), groups).automaton(classes, least, most)


def _char_nodes(node: RegexNode) -> Iterator[Chars]:
    if isinstance(node, Chars):
        yield node
    elif isinstance(node, Alt | Cat):
        for item in node.items:
            yield from _char_nodes(item)
    elif isinstance(node, Repeat):
        yield from _char_nodes(node.item)


class _Positions:
    """Glushkov's positions of an expression: its characters in order, repeats written out, and what follows each.

    Attributes:
        chars: the set of each position.
        follow: the positions that may come after each, as bits.
        covers: positions from which every match is also possible from this position.
    """

    def __init__(self) -> None:
        self.chars: list[Any] = []
        self.follow: list[int] = []
        self.covers: list[int] = []

    def add(self, node: RegexNode) -> tuple[bool, int, int]:
        """Add the positions of an expression. Returns whether it may be empty, its first and its last positions."""
        if isinstance(node, Chars):
            if len(self.chars) >= MAX_POSITIONS:
                raise AutomatonTooLarge
            self.chars.append(node.chars)
            self.follow.append(0)
            self.covers.append(0)
            bit = 1 << len(self.chars) - 1
            return False, bit, bit
        if isinstance(node, Cat):
            return self._joined([self.add(item) for item in node.items])
        if isinstance(node, Alt):
            parts = [self.add(item) for item in node.items]
            return any(part[0] for part in parts), _union(p[1] for p in parts), _union(p[2] for p in parts)
        assert isinstance(node, Repeat)
        return self._repeat(node)

    def _joined(self, parts: list[tuple[bool, int, int]]) -> tuple[bool, int, int]:
        nullable, first, last = True, 0, 0
        for empty, begin, end in parts:
            self._link(last, begin)
            first |= begin if nullable else 0
            last = end | last if empty else end
            nullable = nullable and empty
        return nullable, first, last

    def _repeat(self, node: Repeat) -> tuple[bool, int, int]:
        """Write copies one after the other; once an optional one is left out, all later ones are."""
        copies = max(node.least, 1) if node.most is None else node.most
        nullable, first, last, ends = node.least == 0, 0, 0, 0
        starts = []
        for copy in range(copies):
            starts.append(len(self.chars))
            empty, begin, end = self.add(node.item)
            nullable = nullable or empty
            least = 0 if empty else node.least
            self._link(last, begin)
            first = first or begin
            last = end
            ends |= end if copy + 1 >= least else 0
        if node.most is None:
            self._link(last, begin)
        elif copies:
            self._cover(starts, len(self.chars) - starts[-1], 0 if empty else node.least)
        return nullable, first, ends

    def _cover(self, starts: list[int], size: int, least: int) -> None:
        """Record for each position the same position in all later copies of a repeated expression.

        Only copies beyond the least number of repeats count. Whatever may follow a later copy may also follow an
        earlier one, because at least as many repeats are left there.
        """
        later = [0] * size
        for copy in range(len(starts) - 1, max(least - 2, -1), -1):
            for offset in range(size):
                at = starts[copy] + offset
                self.covers[at] |= later[offset]
                later[offset] |= 1 << at

    def _link(self, last: int, begin: int) -> None:
        for at in _bits(last) if begin else ():
            self.follow[at] |= begin


def _union(masks: Iterator[int]) -> int:
    found = 0
    for mask in masks:
        found |= mask
    return found


def _bits(mask: int) -> Iterator[int]:
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


@dataclass(frozen=True, slots=True)
class _Term:
    """The positions of one expression, as bits; `by_class` are those whose set has a class."""

    first: int
    last: int
    nullable: bool
    follow: list[int]
    covers: list[int]
    by_class: list[int]

    def pruned(self, mask: int) -> int:
        """Leave out what other positions cover, which keeps the number of sets small."""
        for at in _bits(mask):
            if mask >> at & 1:
                mask &= ~self.covers[at]
        return mask


_BEGIN = -1  # the position before the first character
_State = tuple[int, ...]


class _Subsets:
    """The subset construction over all terms at once."""

    def __init__(self, terms: list[_Term], num_must: int, groups: list[tuple[range, range]]) -> None:
        self.terms = terms
        self.num_must = num_must
        self.groups = groups
        self.steps = 0
        self.known: list[dict[int, int]] = [{} for _ in terms]

    def automaton(self, classes: CharClasses, least: int, most: int | None) -> StringAutomaton:
        begin: _State = (_BEGIN,) * len(self.terms)
        numbers: dict[_State, int] = {begin: START}
        rows: list[list[int]] = [[DEAD] * classes.num]
        for state in (states := [begin]):
            row = []
            for number in range(classes.num):
                target = self._next(state, number)
                if target is None:
                    row.append(DEAD)
                    continue
                if target not in numbers:
                    numbers[target] = len(numbers) + 1
                    states.append(target)
                    if len(states) > MAX_STATES:
                        raise AutomatonTooLarge
                row.append(numbers[target])
            rows.append(row)
        accepting = [False, *map(self._accepts, states)]
        found = StringAutomaton(classes, *_trimmed(rows, accepting), least, most)
        if len(found.accepting) * (found.last_count + 1) > MAX_CELLS:
            raise AutomatonTooLarge
        return found

    def _next(self, state: _State, number: int) -> _State | None:
        found = []
        for at, mask in enumerate(state):
            term = self.terms[at]
            after = self._following(at, mask) & term.by_class[number]
            if not after and at < self.num_must:
                return None
            found.append(term.pruned(after))
        return tuple(found)

    def _following(self, at: int, mask: int) -> int:
        known = self.known[at].get(mask)
        if known is None:
            term = self.terms[at]
            known = term.first if mask == _BEGIN else 0
            for position in _bits(mask) if mask != _BEGIN else ():
                known |= term.follow[position]
                self.steps += 1
            if self.steps > MAX_STEPS:
                raise AutomatonTooLarge
            self.known[at][mask] = known
        return known

    def _matches(self, state: _State, at: int) -> bool:
        term, mask = self.terms[at], state[at]
        return term.nullable if mask == _BEGIN else bool(mask & term.last)

    def _accepts(self, state: _State) -> bool:
        return all(self._matches(state, at) for at in range(self.num_must)) and not any(
            all(self._matches(state, at) for at in all_of) and not any(self._matches(state, at) for at in none_of)
            for all_of, none_of in self.groups
        )


def _trimmed(rows: list[list[int]], accepting: list[bool]) -> tuple[tuple[tuple[int, ...], ...], tuple[bool, ...]]:
    """Drop the states that lead to no end, all but the start."""
    before: list[list[int]] = [[] for _ in rows]
    for state, row in enumerate(rows):
        for target in set(row):
            before[target].append(state)
    alive = [state for state, ends in enumerate(accepting) if ends]
    seen = set(alive)
    for state in alive:
        for source in before[state]:
            if source not in seen:
                seen.add(source)
                alive.append(source)
    kept = [DEAD, START, *sorted(seen - {START})]
    numbers = {state: number for number, state in enumerate(kept)}
    trimmed = tuple(tuple(numbers.get(target, DEAD) for target in rows[state]) for state in kept)
    return trimmed, tuple(accepting[state] for state in kept)
