"""Rules of a GBNF grammar: which of them derive no finite text, so that an answer that reaches one could never end."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator

from ..errors import GrammarError

FORMAT = "v16"
"""Of the library's serialised grammars, as it is read here."""

# Kinds of expressions in that format: [kind, number of operands, operand, ...]. All others are text of some length.
_CLASS, _RULE, _SEQUENCE, _CHOICES, _DISPATCH, _REPEAT = 1, 4, 5, 6, 7, 8
_NAME = re.compile(r"([\w.-]+)\s*::=")


def check_ends(text: str) -> None:
    """Raise GrammarError for a rule that the root reaches and that derives no finite text.

    Args:
        text: a grammar that is well formed; GrammarError of its own is left to the compiler otherwise.
    """
    import xgrammar

    try:
        serialised = json.loads(xgrammar.Grammar.from_ebnf(text).serialize_json())
    except RuntimeError:
        return
    if serialised["__VERSION__"] != FORMAT:
        return
    if names := _Rules(serialised).endless():
        own = set(_NAME.findall(text))  # others are of parts that the library has made rules of
        name = next((each for each in reversed(names) if each in own), names[-1])
        raise GrammarError(
            "ebnf",
            "",
            f"the rule {name!r} derives no finite text, so an answer that reaches it could never end: give it an "
            "alternative that comes to an end without it",
        )


class _Rules:
    """The rules of a serialised grammar."""

    def __init__(self, serialised: dict[str, list[int]]) -> None:
        data, starts = serialised["grammar_expr_data"], serialised["grammar_expr_indptr"]
        self._expressions = [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
        self._rules: list[list[int]] = serialised["rules"]  # type: ignore[assignment]
        self._root: int = serialised["root_rule_id"]  # type: ignore[assignment]
        self._used = [list(self._next(rule)) for rule in range(len(self._rules))]

    def endless(self) -> list[str]:
        """Return rules without a finite text that the root comes to, each going on with the next; [] for none."""
        finite = self._finite()
        first = next((rule for rule in self._reached() if rule not in finite), None)
        path: dict[int, None] = {}
        while first is not None:
            path[first] = None
            first = next((rule for rule in self._used[first] if rule not in finite and rule not in path), None)
        return [str(self._rules[rule][0]) for rule in path]

    def _finite(self) -> set[int]:
        """Return the rules that derive a finite text."""
        users: dict[int, set[int]] = defaultdict(set)
        for rule, used in enumerate(self._used):
            for each in used:
                users[each].add(rule)
        finite: set[int] = set()
        waiting = list(range(len(self._rules)))
        while waiting:
            rule = waiting.pop()
            if rule not in finite and self._derives(self._rules[rule][1], finite):
                finite.add(rule)
                waiting += users[rule]
        return finite

    def _derives(self, number: int, finite: set[int]) -> bool:
        """Return whether an expression derives a text in which no rule but the finite ones is used."""
        kind, _, *operands = self._expressions[number]
        if kind == _SEQUENCE:
            return all(self._derives(each, finite) for each in operands)
        if kind == _CHOICES:
            return any(self._derives(each, finite) for each in operands)
        if kind in (_RULE, _REPEAT):
            return operands[0] in finite or (kind == _REPEAT and operands[1] == 0)
        return kind != _CLASS or operands != [0]  # a class of no characters

    def _next(self, rule: int) -> Iterator[int]:
        """Yield the rules that a rule may go on with."""
        numbers = [self._rules[rule][1]]
        for number in numbers:
            kind, _, *operands = self._expressions[number]
            if kind in (_SEQUENCE, _CHOICES):
                numbers += operands
            elif kind == _RULE or (kind == _REPEAT and operands[2] != 0):
                yield operands[0]
            elif kind == _DISPATCH:  # pairs of tag and rule, then two options
                yield from operands[1:-2:2]

    def _reached(self) -> list[int]:
        """Return the rules that an answer may come to, in the order in which the root leads to them."""
        found = {self._root: None}
        waiting = [self._root]
        for rule in waiting:
            new = [each for each in self._used[rule] if each not in found]
            found.update(dict.fromkeys(new))
            waiting += dict.fromkeys(new)
        return waiting
