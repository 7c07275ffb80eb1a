"""Rules of a GBNF grammar, as XGrammar reads them, checked for rules that derive no finite text."""

from __future__ import annotations

import json
import re
from typing import Any

from ..rule_ends import TEXT, AllOf, OneOf, RulePart, RuleRef, check_ends, optional

FORMATS = ("v16", "v18")
"""Versions of the library's serialised grammars that are read here; their expressions are the same."""

# Kinds of expressions in that format: [kind, number of operands, operand, ...]. All others are text of some length.
_CLASS, _RULE, _SEQUENCE, _CHOICES, _DISPATCH, _REPEAT = 1, 4, 5, 6, 7, 8
_NAME = re.compile(r"([\w.-]+)\s*::=")


def check_ebnf(text: str) -> None:
    """Raise GrammarError for a rule that the root reaches and that derives no finite text.

    A text that is not a valid grammar, or is in a format of later versions of the library, is not checked here: the
    library's own compiler reports its faults.
    """
    import xgrammar

    try:
        serialised = json.loads(xgrammar.Grammar.from_ebnf(text).serialize_json())
    except RuntimeError:
        return
    if serialised["__VERSION__"] in FORMATS:
        rules = _Rules(serialised)
        # Other errors concern parts for which the library has made rules.
        check_ends("ebnf", rules.all(), rules.root, frozenset(_NAME.findall(text)))


class _Rules:
    """The rules of a serialised grammar."""

    def __init__(self, serialised: dict[str, Any]) -> None:
        data, starts = serialised["grammar_expr_data"], serialised["grammar_expr_indptr"]
        self._expressions = [data[start:end] for start, end in zip(starts, [*starts[1:], len(data)], strict=True)]
        self._rules = [(str(name), int(body)) for name, body, *_ in serialised["rules"]]
        self.root = self._rules[serialised["root_rule_id"]][0]

    def all(self) -> dict[str, RulePart]:
        """Return all rules by name."""
        return {name: self._part(body) for name, body in self._rules}

    def _part(self, number: int) -> RulePart:
        kind, _, *operands = self._expressions[number]
        if kind == _SEQUENCE:
            return AllOf(tuple(map(self._part, operands)))
        if kind == _CHOICES:
            return OneOf(tuple(map(self._part, operands)))
        if kind == _RULE:
            return self._ref(operands[0])
        if kind == _REPEAT:
            rule, least, most = operands
            return self._ref(rule) if least else optional(self._ref(rule)) if most else TEXT
        # A dispatch holds pairs of a tag and a rule, and then two options.
        if kind == _DISPATCH:
            return AllOf(tuple(optional(self._ref(rule)) for rule in operands[1:-2:2]))
        is_empty_class = kind == _CLASS and operands == [0]
        return OneOf() if is_empty_class else TEXT

    def _ref(self, rule: int) -> RuleRef:
        return RuleRef(self._rules[rule][0])
