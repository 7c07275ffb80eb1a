"""Gemma arguments: an object whose names are unquoted, and whose strings are unescaped between quote marks.

    {city:<|"|>Ulm<|"|>,days:3,tags:[<|"|>a<|"|>]}

There is no white space between the parts: after a quote mark it would be part of the string. Names are in alphabetical
order, as Gemma's chat template writes and declares them.
"""

from __future__ import annotations

import json
import re

from ..argument_styles import GEMMA_QUOTE, gemma_text
from ..schema.analysis import Analysis
from ..schema.constraints import ALWAYS, Conj, Objects, Strings
from ..schema.json_types import ARRAY, NUMBER, OBJECT, STRING
from ..schema.shortest_instance import ShortestInstance
from .argument_rules import PartsOf
from .container_members import Field, array_fields, object_fields
from .key_classes import key_classes, key_patterns
from .lark_rules import LarkRules, token_literal
from .lark_writer import alternatives_of, checked_root
from .number_terminals import number_terminal
from .raw_strings import mark_of, raw_name, raw_string
from .string_rules import string_rules

_KEY_CHAR = r"[^:,{}\[\]<>|\x22\x00-\x20]"
_KEY = f"{_KEY_CHAR}+(?: +{_KEY_CHAR}+)*"
_IS_KEY = re.compile(_KEY)


def gemma_arguments(analysis: Analysis, parts_of: PartsOf) -> tuple[str, list[str]]:
    """Write the arguments of a call as one Lark grammar, and its closing texts.

    Args:
        analysis: analysis of the function's schema.
        parts_of: divides a text into plain parts and ids of special tokens.

    Raises:
        GrammarError: the schema is unsatisfiable, or this style cannot express it.
    """
    writer = _GemmaWriter(analysis, parts_of)
    rules = writer.rules
    root = checked_root(rules)
    string_rules(rules.satisfiability, root, analysis.document.nodes, is_possible=False)
    rules.define("start", writer.body(root, "start", OBJECT))
    while (conj := rules.next_pending()) is not None:
        rules.define(rules.rule(conj), writer.body(conj, rules.rule(conj)))
    properties, values, _ = ShortestInstance(analysis, rules.satisfiability).closing_texts(root)
    texts = dict.fromkeys(writer.texts)
    texts |= dict.fromkeys(gemma_text(json.loads("{" + text + "}"))[1:-1] for text in properties)
    texts |= dict.fromkeys(gemma_text(json.loads(text)) for text in values)
    return rules.text(blanks=False), [*texts]


class _GemmaWriter:
    def __init__(self, analysis: Analysis, parts_of: PartsOf) -> None:
        self._quote = token_literal(parts_of(GEMMA_QUOTE))
        self._end = mark_of(parts_of(GEMMA_QUOTE))
        self.rules = LarkRules(analysis, literal_string=lambda text: self._string(Strings(values=(text,))) or '""')
        self.texts: list[str] = []

    def body(self, conj: Conj, name: str, types: int = ~0) -> str:
        """Write the alternatives of a conjunction, or only their values of some types."""
        rules = self.rules
        rules.current = conj
        options: dict[str, None] = {}
        for index, each in enumerate(alternatives_of(rules, conj)):
            kept = each.types & types
            words = rules.words(kept)
            options |= {rules.terminal(f"/{'|'.join(words)}/"): None} if words else {}
            if kept & NUMBER:
                options[number_terminal(rules, kept & NUMBER, each.numbers)] = None
            string = self._string(each.strings) if kept & STRING else None
            options |= {} if string is None else {string: None}
            if kept & ARRAY and rules.satisfiability.array_is_satisfiable(each.arrays):
                options[array_fields(rules, each.arrays, f"{name}_{index}a")] = None
            if kept & OBJECT and rules.satisfiability.object_is_satisfiable(each.objects):
                options[self._object(each.objects, f"{name}_{index}o")] = None
        if not options:
            reason = f"no value can be written: a string cannot contain {GEMMA_QUOTE}"
            raise rules.unsupported(("enum", "const", "pattern", "type"), reason)
        return " | ".join(options)

    def _string(self, strings: Strings) -> str | None:
        found = raw_string(strings, self._end.regex, without=GEMMA_QUOTE)
        self.texts += [f"{GEMMA_QUOTE}{text}{GEMMA_QUOTE}" for text in found.examples]
        return None if found.body is None else f"{self._quote} {self.rules.terminal(found.body)}{self._end.rest}"

    def _object(self, objects: Objects, name: str) -> str:
        rules = self.rules
        if objects.names != ALWAYS:
            raise rules.unsupported(("propertyNames",), "cannot be enforced in this tool call format")
        fields = []
        for key in sorted(objects.declared(), key=str.lower):
            conj = objects.value(key)
            if not rules.satisfiability.is_satisfiable(conj):
                rules.check_not_narrowed(conj)
                continue
            if not _IS_KEY.fullmatch(key):
                raise rules.unsupported(
                    ("properties", "required"), f"the name {key[:60]!r} cannot be written in this tool call format"
                )
            self.texts.append(f"{key}:")
            fields.append(Field(key, f"{token_literal([key + ':'])} {rules.rule(conj)}", key in objects.required))
        return object_fields(rules, objects, fields, self._extras(objects), name)

    def _extras(self, objects: Objects) -> list[str]:
        """Write one item for each class of unlisted names, by the patterns that they match."""
        patterns, items = key_patterns(objects), []
        for matched, conj in key_classes(objects):
            if not self.rules.satisfiability.is_satisfiable(conj):
                self.rules.check_not_narrowed(conj)
                continue
            rest = [pattern for pattern in patterns if pattern not in matched]
            body = raw_name(_KEY, ":", listed=[*objects.declared()], matched=matched, rest=rest)
            items.append(f"{self.rules.terminal(body)} {self.rules.rule(conj)}")
        return items
