"""Short ends of the texts of a Lark grammar, from each place between parts of its rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

from ..regex.ecma_regex import shortest
from ..regex.regex_parser import RegexError, RegexNode
from ..rule_ends import OneOf, RulePart, RuleRef, Terminal
from .lark_text import COMMON, LarkUnread, lark_expression, lark_literal, lark_rules

# Limits for the bytes of an end and for the number of ends of a grammar. Further ends are left out, because a search
# tries every end.
MAX_END = 400
MAX_ENDS = 120
# Limits for the rules of a grammar, for the rounds over all rules, and for the texts whose cost is computed.
MAX_RULES = 500
MAX_ROUNDS = 30
MAX_COSTS = 4_096
# Limits for the number of expressions whose cheapest text is searched, and for repeat counts in them. Beyond these
# limits the search would take most of the time for a grammar, because its automata would have many states.
MAX_CHEAP = 16
MAX_COUNT = 8
# Limit for the parts that a search visits: a longer search finds no ends.
MAX_VISITS = 200_000
# Limit for the places of a rule's use for which the following rest is kept.
MAX_PLACES = 8


# A rule that uses another one, and the number of the use.
_Place: TypeAlias = tuple[str, int]


class LarkEnds(NamedTuple):
    """The short ends of one grammar.

    Attributes:
        shortest: a short text of the grammar; "" if none is known.
        ends: texts that lead from a place between two parts of a text to its end, the cheapest first.
    """

    shortest: str = ""
    ends: tuple[str, ...] = ()


def lark_ends(
    text: str,
    cost: Callable[[str], int],
    spell: Callable[[str], str] = str,
    cheap: Callable[[RegexNode], str] = shortest,
) -> LarkEnds:
    """Return the ends of a grammar; no ends for a grammar that this module cannot read.

    Args:
        text: the grammar.
        cost: returns the cost of a text in tokens; the cost of a sum is about the sum of the costs.
        spell: converts the text of a terminal to its form in answers.
        cheap: returns a text of an expression that costs few tokens, not necessarily the fewest.
    """
    try:
        rules = lark_rules(text)
    except LarkUnread:
        return LarkEnds()
    if len(rules) > MAX_RULES:
        return LarkEnds()
    try:
        return _Ends(rules, cost, spell, cheap).found()
    except _TooMuchWork:
        return LarkEnds()


class _TooMuchWork(Exception):
    """The search has visited the largest number of parts."""


class _Ends:
    """Ends of rules by name; rules without a known end are missing."""

    def __init__(
        self,
        rules: Mapping[str, RulePart],
        cost: Callable[[str], int],
        spell: Callable[[str], str],
        cheap: Callable[[RegexNode], str],
    ) -> None:
        self._rules = rules
        self._cheap = cheap
        self._num_cheap = 0
        self._num_visits = 0
        self._cost_of = cost
        self._costs: dict[str, int] = {}
        self._spell = spell
        self._text_of = lru_cache(MAX_COSTS)(self._terminal)
        self._wholes: dict[str, tuple[int, str]] = {}
        self._rests: dict[str, dict[_Place, tuple[int, str]]] = {}

    def found(self) -> LarkEnds:
        """Return the ends of the rules that ``start`` reaches."""
        self._find_wholes()
        if "start" not in self._wholes:
            return LarkEnds()
        self._rests["start"] = {("", 0): (0, "")}
        self._find_rests()
        ends: dict[str, None] = {}
        for name, rests in self._rests.items():
            for _, rest in rests.values():
                ends |= dict.fromkeys(self._between(self._rules[name], rest))
        ends.pop("", None)
        short = sorted((end for end in ends if len(end) <= MAX_END), key=lambda end: (self._cost(end), end))
        return LarkEnds(self._wholes["start"][1], tuple(short[:MAX_ENDS]))

    def _cost(self, text: str) -> int:
        """Return the cost of a text; after many requests its length in UTF-8, which is at least the cost."""
        if (known := self._costs.get(text)) is not None:
            return known
        if len(self._costs) >= MAX_COSTS:
            return len(text.encode())
        self._costs[text] = found = self._cost_of(text)
        return found

    def _find_wholes(self) -> None:
        """Keep each text that costs less than the text known for its rule, until no cheaper one is found."""
        for _ in range(MAX_ROUNDS):
            improved = False
            for name, part in self._rules.items():
                text = self._shortest(part)
                cost = None if text is None or len(text) > MAX_END else self._cost(text)
                if cost is not None and text is not None and (name not in self._wholes or cost < self._wholes[name][0]):
                    self._wholes[name] = cost, text
                    improved = True
            if not improved:
                return

    def _find_rests(self) -> None:
        """Find, for each place where a rule is used, the cheapest text that may follow the rule there.

        Places are kept apart because a text that may follow a rule in one place may be wrong in another place.
        """
        for _ in range(MAX_ROUNDS):
            improved = False
            for name, rests in list(self._rests.items()):
                _, rest = min(rests.values())
                for number, (used, behind) in enumerate(self._uses(self._rules[name], rest)):
                    places, place = self._rests.get(used, {}), (name, number)
                    known = places.get(place)
                    if len(behind) > MAX_END or (known is None and len(places) >= MAX_PLACES):
                        continue
                    cost = self._cost(behind)
                    if known is None or cost < known[0]:
                        self._rests[used] = places | {place: (cost, behind)}
                        improved = True
            if not improved:
                return

    def _shortest(self, part: RulePart) -> str | None:
        """Return a short text of a part from the known texts of rules; None if there is none yet."""
        self._num_visits += 1
        if self._num_visits > MAX_VISITS:
            raise _TooMuchWork
        name = part.name if isinstance(part, RuleRef) else part.text if isinstance(part, Terminal) else ""
        if name in self._rules:
            return self._wholes[name][1] if name in self._wholes else None
        if isinstance(part, RuleRef | Terminal):
            return self._text_of(name)
        texts = [self._shortest(each) for each in part.parts]
        known = [text for text in texts if text is not None]
        if isinstance(part, OneOf):
            return min(known, key=self._cost, default=None)
        return "".join(known) if len(known) == len(texts) else None

    def _terminal(self, text: str) -> str | None:
        """Return a short text of a terminal that is not a rule; None if it is not read here."""
        if text[:1] == '"':
            return self._spell(lark_literal(text.removesuffix("i")))
        if text[:1] == "/":
            pattern, _, flags = text[1:].rpartition("/")
        elif text in COMMON:
            pattern, flags = COMMON[text], ""
        else:
            return None
        try:
            node = lark_expression(pattern.replace("\\/", "/"), flags)
        except RegexError:
            return None
        least = self._spell(shortest(node))
        counts = re.findall(r"\d+", " ".join(re.findall(r"\{[\d,]*\}", pattern)))
        if self._num_cheap >= MAX_CHEAP or any(int(count) > MAX_COUNT for count in counts):
            return least
        self._num_cheap += 1
        return min(least, self._spell(self._cheap(node)), key=self._cost)

    def _uses(self, part: RulePart, rest: str) -> Iterator[tuple[str, str]]:
        """Yield each rule used within a part, with the text that follows it; ``rest`` follows the part."""
        if isinstance(part, RuleRef):
            yield part.name, rest
        elif isinstance(part, OneOf):
            for each in part.parts:
                yield from self._uses(each, rest)
        elif not isinstance(part, Terminal):
            for each in reversed(part.parts):
                yield from self._uses(each, rest)
                text = self._shortest(each)
                if text is None or len(text) + len(rest) > MAX_END:
                    return
                rest = text + rest

    def _between(self, part: RulePart, rest: str) -> Iterator[str]:
        """Yield the ends before, between and after the parts of a part that ``rest`` follows."""
        yield rest
        text = self._shortest(part)
        if text is not None:
            yield text + rest
        if isinstance(part, RuleRef | Terminal):
            return
        for each in reversed(part.parts):
            yield from self._between(each, rest)
            text = "" if isinstance(part, OneOf) else self._shortest(each)
            if text is None or len(text) + len(rest) > MAX_END:
                return
            rest = text + rest
