"""Worlds written as one grammar in llguidance's Lark dialect.

Every conjunction of literals becomes one rule, so a recursive schema becomes a recursive grammar. Strings, keys and
numbers are terminals of our own: patterns are re-spelled over JSON text, intersected with ``&`` and complemented with
``~``. Each character has one spelling (no ``\\u0061`` for ``a``), so a key cannot hide behind another spelling.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from decimal import Decimal

from ..errors import GrammarError
from ..regex.charset import JSON_CHAR, json_string, rust_literal
from ..regex.number_ranges import spelling
from ..regex.pattern_cache import read_pattern
from ..regex.string_formats import FORMATS
from ..schema.analysis import Analysis
from ..schema.constraints import (
    ALWAYS,
    ARRAY,
    FALSE,
    NO_STRINGS,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    TRUE,
    Alternative,
    Conj,
    ObjectClause,
    Objects,
    Strings,
)
from ..schema.document import pointer_join
from ..schema.satisfiability import Satisfiability
from ..schema.shortest_instance import MAX_ANSWER, ShortestInstance
from .json_whitespace import WHITESPACE
from .members import Field, array_fields, object_fields
from .number_terminals import number_terminal

MAX_PATTERN_SETS = 4
ANY_STRING = f'"{JSON_CHAR}*"'
_encode = json.JSONEncoder(ensure_ascii=False).encode
# Every division of a forced text into tokens stays allowed: the model chooses.
_HEADER = f'%llguidance {{"ignore_once": true, "no_forcing": true}}\n%ignore /{WHITESPACE}/\n'


@dataclass(frozen=True, slots=True)
class LarkGrammar:
    """A schema as a grammar.

    Attributes:
        text: the grammar.
        whole: the shortest answer, ``""`` if none was found.
        properties: short properties to end an object with, shortest first.
        values: short values to end anything with, shortest first.
        detour: the longest property that one may begin without need, with a short value.
    """

    text: str
    whole: str
    properties: tuple[str, ...]
    values: tuple[str, ...]
    detour: str


def to_lark(analysis: Analysis) -> LarkGrammar:
    """The grammar of a whole schema.

    Raises:
        GrammarError: if the schema cannot be promised.
    """
    writer = Writer(analysis)
    text = writer.write()
    root: Conj = frozenset((2 * analysis.document.root,))
    shortest_instance = ShortestInstance(analysis, writer.completion)
    properties, values, detour = shortest_instance.pieces(root)
    return LarkGrammar(text, shortest_instance.text(root) or "", tuple(properties), tuple(values), detour)


class Writer:
    """The grammar while it is being written: rules, shared terminals, and what is still to do."""

    def __init__(self, analysis: Analysis) -> None:
        self.analysis = analysis
        self.completion = Satisfiability(analysis)
        self.rules: dict[str, str] = {}
        self.terminals: dict[str, str] = {}
        self.names: dict[Conj, str] = {}
        self.todo: list[Conj] = []
        self.current: Conj = ALWAYS

    def write(self) -> str:
        """The text of the whole grammar."""
        root: Conj = frozenset((2 * self.analysis.document.root,))
        self.completion.explore(root)
        if not self.completion.possible(root):
            raise self.impossible(root)
        size = self.completion.size(root)
        if size > MAX_ANSWER:
            raise self.refusal(("required", "minItems", "minLength"), f"the shortest answer takes {size:.0f} bytes")
        self.rules["start"] = self.rule(root)
        while self.todo:
            conj = self.current = self.todo.pop()
            self.rules[self.names[conj]] = self.body(conj)
        lines = [f"{name}: {body}" for name, body in self.rules.items()]
        lines += [f"{name}: {body}" for body, name in self.terminals.items()]
        return _HEADER + "\n".join(lines) + "\n"

    def impossible(self, conj: Conj) -> GrammarError:
        """Why nothing satisfies a conjunction."""
        for loss in self.analysis.lost(conj):
            return GrammarError(loss.keyword, loss.pointer, loss.reason)
        node = self.analysis.document.nodes[max(conj) // 2]
        likely = ("not", "enum", "oneOf", "allOf", "$ref", "required", *node.schema, "schema")
        keyword = next(key for key in likely if key in node.schema or key == "schema")
        return GrammarError(keyword, pointer_join(node.pointer, keyword), "no finite value satisfies the schema")

    def refusal(self, keywords: tuple[str, ...], reason: str) -> GrammarError:
        """An error that blames the first of some keywords that stands near what is being written."""
        nodes = self.analysis.document.nodes
        near = [nodes[literal // 2] for literal in sorted(self.current) if literal >= 0]
        for node in (*near, *nodes):
            for keyword in keywords:
                if keyword in node.schema:
                    return GrammarError(keyword, pointer_join(node.pointer, keyword), reason)
        return GrammarError(keywords[0], "", reason)

    def rule(self, conj: Conj) -> str:
        """The name of the rule for a conjunction."""
        if conj not in self.names:
            self.names[conj] = f"v{len(self.names)}"
            self.todo.append(conj)
        return self.names[conj]

    def named(self, name: str, body: str) -> str:
        """Enter a rule of its own."""
        self.rules[name] = body
        return name

    def terminal(self, body: str) -> str:
        """The name of a terminal, shared by all that need the same."""
        return self.terminals.setdefault(body, f"T{len(self.terminals)}")

    def body(self, conj: Conj) -> str:
        """All alternatives of a conjunction."""
        options: dict[str, None] = {}
        alternatives = self.completion.live(conj) if conj != ALWAYS else [Alternative()]
        for index, alternative in enumerate(alternatives):
            options |= dict.fromkeys(self.scalars(alternative))
            name = f"{self.names[conj]}_{index}"
            if alternative.types & ARRAY and self.completion.array_possible(alternative.arrays):
                options[array_fields(self, alternative.arrays, f"{name}a")] = None
            if alternative.types & OBJECT and self.completion.object_possible(alternative.objects):
                options[self.object(alternative.objects, f"{name}o")] = None
        if not options:
            raise self.impossible(conj)
        return " | ".join(options)

    def scalars(self, alternative: Alternative) -> list[str]:
        """The alternatives of a world that are single terminals."""
        words = [word for bit, word in ((NULL, "null"), (TRUE, "true"), (FALSE, "false")) if alternative.types & bit]
        options = [self.terminal(f"/{'|'.join(words)}/")] if words else []
        if alternative.types & NUMBER:
            options += number_terminal(self, alternative.types & NUMBER, alternative.numbers)
        if alternative.types & STRING:
            options.append(self.terminal(self.string(alternative.strings)))
        return options

    def literal_string(self, value: str) -> str:
        """A string value as a literal of the grammar."""
        return _encode(json_string(value))

    def literal_number(self, value: Decimal) -> str:
        """A number as a literal of the grammar."""
        return f'"{spelling(value)}"'

    # -- strings

    def string(self, strings: Strings) -> str:
        """The terminal expression of the strings that satisfy some constraints."""
        if strings is NO_STRINGS:
            return f"/{ANY_STRING}/"
        if strings.values is not None:
            return "/" + "|".join(rust_literal(json_string(value)) for value in strings.values) + "/"
        terms = []
        if strings.least or strings.most is not None:
            most = "" if strings.most is None else strings.most
            terms.append(f'/"{JSON_CHAR}{{{strings.least},{most}}}"/')
        for name in sorted(strings.formats):
            terms += [self.terminal(_quoted(term)) for term in FORMATS[name].json_must]
        terms += self.pattern_terms(sorted(strings.patterns), sorted(strings.not_patterns))
        if strings.excluded:
            taken = "|".join(rust_literal(json_string(value)) for value in sorted(strings.excluded))
            terms.append(f"~/{taken}/")
        if not terms or terms[0].startswith("~"):
            terms.insert(0, f"/{ANY_STRING}/")
        return " & ".join(terms)

    def pattern_terms(self, patterns: list[str], not_patterns: list[str]) -> list[str]:
        """Terms for patterns that must match, and for patterns that must not, complements last."""
        terms: list[str] = []
        complements: list[str] = []
        for source in patterns:
            pattern = read_pattern(source)
            terms += map(_quoted, pattern.json_must)
            complements += [f"~{_quoted(term)}" for term in pattern.json_must_not]
        for source in not_patterns:
            pattern = read_pattern(source, wide=True)
            inner = " & ".join(map(_quoted, pattern.json_must))
            complements.append(f"~({inner})")
        return terms + complements

    # -- objects

    def object(self, objects: Objects, name: str) -> str:
        """The alternative for the objects that satisfy some constraints."""
        fields, closed = self.declared(objects)
        extra = [] if closed else self.extras(objects, [field.name for field in fields], name)
        return object_fields(self, objects, [f for f in fields if f.rule is not None], extra, name)

    def declared(self, objects: Objects) -> tuple[list[Field], bool]:
        """The properties that are listed by name, in order, and whether there can be no others."""
        names, closed = objects.declared(), False
        finite = self.finite_names(objects.names)
        if finite is not None:
            names, closed = {n: None for n in names if n in finite} | dict.fromkeys(finite), True
        fields = []
        for name in names:
            conj = objects.value(name)
            fine = self.completion.possible(conj) and self.analysis.admits_name(objects.names, name)
            if not fine:
                self.refuse_lost(conj)
            rule = f'{self.literal_string(name)} ":" {self.rule(conj)}' if fine else None
            fields.append(Field(name, rule, name in objects.required))
        return fields, closed

    def refuse_lost(self, conj: Conj) -> None:
        """A property must not vanish because of what we cannot write."""
        losses = self.analysis.lost(conj)
        if losses and not conj >= frozenset((-1,)):
            raise GrammarError(losses[0].keyword, losses[0].pointer, losses[0].reason)

    def finite_names(self, conj: Conj) -> list[str] | None:
        """All keys that ``propertyNames`` permits, if they are enumerated."""
        if conj == ALWAYS:
            return None
        alternatives = [alternative for alternative in self.analysis.conjunction(conj) if alternative.types & STRING]
        if any(alternative.strings.values is None for alternative in alternatives):
            return None
        return list(dict.fromkeys(value for alternative in alternatives for value in alternative.strings.values or ()))

    def extras(self, objects: Objects, taken: list[str], name: str) -> list[str]:
        """One item for each class of keys that are not listed, by the patterns that they match."""
        patterns = list(dict.fromkeys(pattern for clause in objects.clauses for pattern, _ in clause.patterns))
        by_value: dict[Conj, list[str]] = {}
        for matched in _subsets(patterns):
            conj = ALWAYS.union(*(_clause_value(clause, matched) for clause in objects.clauses))
            if self.completion.possible(conj):
                rest = [pattern for pattern in patterns if pattern not in matched]
                by_value.setdefault(conj, []).append(" & ".join(self.pattern_terms(matched, rest)))
            else:
                self.refuse_lost(conj)
        base = self.key_base(objects.names, taken)
        items = []
        for conj, classes in by_value.items():
            if base is None:
                continue
            whole = len(by_value) == 1 and (len(patterns) < MAX_PATTERN_SETS and len(classes) == 2 ** len(patterns))
            joined = "" if whole or "" in classes else " & (" + " | ".join(classes) + ")"
            items.append(f'{self.terminal(base + joined)} ":" {self.rule(conj)}')
        return items

    def key_base(self, names: Conj, taken: list[str]) -> str | None:
        """The terminal expression of the keys that are not listed, or None if there are none."""
        base = f"/{ANY_STRING}/"
        if names != ALWAYS:
            alternatives = [
                alternative for alternative in self.analysis.conjunction(names) if alternative.types & STRING
            ]
            if not alternatives:
                return None
            base = "(" + " | ".join(f"({self.string(alternative.strings)})" for alternative in alternatives) + ")"
        if taken:
            base += " & ~/" + "|".join(rust_literal(json_string(name)) for name in taken) + "/"
        return base


def _quoted(regex: str) -> str:
    return f'/"(?:{regex})"/'


def _subsets(patterns: list[str]) -> list[list[str]]:
    """The sets of patterns that a key may match; of many patterns only the sets of one and none."""
    if len(patterns) >= MAX_PATTERN_SETS:
        return [[], *([pattern] for pattern in patterns)]
    return [[p for i, p in enumerate(patterns) if bits >> i & 1] for bits in range(1 << len(patterns))]


def _clause_value(clause: ObjectClause, matched: list[str]) -> Conj:
    found = [conj for pattern, conj in clause.patterns if pattern in matched]
    return ALWAYS.union(*found) if found else clause.rest or ALWAYS
