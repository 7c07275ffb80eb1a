"""Argument rules: the arguments of a call in a style other than JSON, from the schema of the function's parameters.

In XML styles a string is written without escapes and ends at a mark such as a closing tag. The mark is part of the
string's terminal, so that for a parameter that accepts strings and other values, the lexer distinguishes them by the
whole value.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..argument_styles import ALL_TYPES, PYTHON_WORDS, XmlStyle, argument_types
from ..regex.charset import rust_literal
from ..schema.analysis import Analysis
from ..schema.constraints import ALWAYS, Alternative, Conj, Objects, Strings
from ..schema.json_types import ARRAY, NUMBER, OBJECT, STRING
from ..schema.shortest_instance import MAX_TEXT_BYTES, ShortestInstance
from .container_members import Field
from .distinct_arrays import check_distinct
from .entry_languages import EntryLanguage, EntryRules
from .key_classes import key_classes, key_patterns
from .lark_rules import LarkRules, lark_string, token_literal
from .lark_writer import alternatives_of, checked_root, to_lark, write_bodies
from .number_terminals import number_terminal
from .raw_strings import mark_of, raw_name, raw_string
from .string_rules import string_rules

PartsOf = Callable[[str], Sequence[str | int]]
_XML_KEY = r"[^<>\x00-\x1F\x22\x27=\/]+"
_PYTHON_KEY = "[A-Za-z_][A-Za-z0-9_]*"
_IS_XML_KEY, _IS_PYTHON_KEY = re.compile(r"[^<>\x00-\x1F\"'=/]+"), re.compile(_PYTHON_KEY)


class ArgumentGrammar(NamedTuple):
    """The grammar of a call's arguments.

    Attributes:
        start: expression of the arguments.
        rules: bodies of rules by name, to be added to the grammar that contains the arguments.
        grammars: Lark grammars of JSON values, by name.
        texts: short texts of the grammar's parts, for closing within the budget.
        ends: texts that complete the arguments from the middle, or the beginning, of a parameter's value.
        entries: languages of the containers whose entries are remembered, in the order of their numbers.
        has_memory: whether a memory of the written values, not the grammar, excludes some repetitions.
    """

    start: str
    rules: dict[str, str]
    grammars: dict[str, str]
    texts: list[str]
    ends: list[str]
    entries: list[EntryLanguage]
    has_memory: bool


def xml_arguments(
    analysis: Analysis, style: XmlStyle, prefix: str, parts_of: PartsOf, first_entry: int | None = None
) -> ArgumentGrammar:
    """Write the arguments of a call between marks.

    Args:
        analysis: analysis of the function's schema.
        style: marks of the style.
        prefix: a small letter before all names, as in `LarkRules`.
        parts_of: divides a text into plain parts and ids of special tokens.
        first_entry: as in `to_lark`.

    Raises:
        GrammarError: the schema is unsatisfiable, or this style cannot express it.
    """
    return _XmlWriter(analysis, style, prefix, parts_of, first_entry).write()


class _Arguments(ABC):
    """The parameters of a function in order, then unlisted ones; subclasses write keys and values."""

    key_pattern: re.Pattern[str]
    separator = ""

    def __init__(self, rules: LarkRules) -> None:
        self.rules = rules
        self._num_objects = 0

    @abstractmethod
    def listed(self, name: str, conj: Conj) -> str:
        """Write one listed parameter."""

    @abstractmethod
    def unlisted(self, matched: Sequence[str], rest: Sequence[str], conj: Conj, listed: Sequence[str]) -> str:
        """Write a parameter that is not listed, from the patterns that its name matches and does not match."""

    def options(self, root: Conj) -> str:
        """Write all alternatives of the arguments."""
        found = [
            self._object(alternative.objects)
            for alternative in alternatives_of(self.rules, root)
            if alternative.types & OBJECT and self.rules.satisfiability.object_is_satisfiable(alternative.objects)
        ]
        if not found:
            raise self.rules.unsatisfiable(root)
        return f"({' | '.join(dict.fromkeys(found))})"

    def _object(self, objects: Objects) -> str:
        if objects.most is not None or objects.least > len(objects.required):
            raise self.rules.unsupported(
                ("minProperties", "maxProperties"), "cannot be counted in the arguments of this tool call format"
            )
        if objects.names != ALWAYS:
            raise self.rules.unsupported(("propertyNames",), "cannot be enforced in this tool call format")
        fields = [self._field(objects, name) for name in objects.declared()]
        extra = self._extras(objects, [field.name for field in fields])
        possible = [field for field in fields if field.rule is not None]
        self.note(objects, possible)
        return self._in_order(possible, extra)

    def note(self, objects: Objects, fields: Sequence[Field]) -> None:  # noqa: B027  # not every style keeps something
        """Keep the data about the parameters that closing within the budget needs."""

    def _field(self, objects: Objects, name: str) -> Field:
        conj = objects.value(name)
        if not self.rules.satisfiability.is_satisfiable(conj):
            self.rules.check_not_narrowed(conj)
            return Field(name, None, required=False)
        if not self.key_pattern.fullmatch(name):
            raise self.rules.unsupported(
                ("properties", "required"), f"the name {name[:60]!r} cannot be written in this tool call format"
            )
        return Field(name, self.listed(name, conj), name in objects.required)

    def _extras(self, objects: Objects, listed: list[str]) -> str:
        patterns = key_patterns(objects)
        items = []
        for matched, conj in key_classes(objects):
            if not self.rules.satisfiability.is_satisfiable(conj):
                self.rules.check_not_narrowed(conj)
                continue
            rest = [pattern for pattern in patterns if pattern not in matched]
            items.append(self.unlisted(matched, rest, conj, listed))
        return f"({' | '.join(items)})" if items else ""

    def _in_order(self, fields: list[Field], extra: str) -> str:
        """Write parameters in order, optional ones as optional: like the members of an object, without braces."""
        if not self.separator:
            parts = [str(field.rule) if field.required else f"({field.rule})?" for field in fields]
            return " ".join([*parts, f"{extra}*" if extra else ""]).strip() or '""'
        comma = lark_string(self.separator)
        self._num_objects += 1
        tail = f"({comma} {extra})*" if extra else '""'
        options: list[str] = [f"{extra} ({comma} {extra})*"] if extra else []
        for index, field in reversed([*enumerate(fields)]):
            # Each parameter gets a rule for all parameters after it. Without these rules the text of the grammar would
            # grow with the square of the number of parameters.
            name = self.rules.define(f"{self.rules.prefix}p{self._num_objects}_{index}", tail)
            options = [f"{field.rule} {name}"] if field.required else [f"{field.rule} {name}", *options]
            item = f"{comma} {field.rule} {name}"
            tail = item if field.required else f"{item} | {name}"
        needs_one = any(field.required for field in fields)
        return f"({' | '.join(options)}){'' if needs_one else '?'}" if options else '""'


class _XmlWriter(_Arguments):
    key_pattern = _IS_XML_KEY

    def __init__(
        self, analysis: Analysis, style: XmlStyle, prefix: str, parts_of: PartsOf, first_entry: int | None
    ) -> None:
        self._first_entry, self._entries, self._has_memory = first_entry, list[EntryLanguage](), False
        super().__init__(LarkRules(analysis, prefix))
        self._analysis, self._style, self._prefix, self._parts_of = analysis, style, prefix, parts_of
        self._types = argument_types(analysis.document.nodes[analysis.document.root].schema)
        self._values: dict[tuple[Conj, frozenset[str]], _Values] = {}
        self._grammars: dict[str, str] = {}
        self._texts: dict[str, None] = {}
        self._ends: dict[str, None] = {}
        self._end = mark_of(parts_of(style.value_end))
        # White space may follow a value that is JSON; a part of it is the newline before the mark.
        before = f"(?:{rust_literal(style.before_mark)})?" if style.before_mark else ""
        end = mark_of(parts_of(style.mark + style.after_mark))
        self._json_end = end._replace(regex=before + end.regex)

    def write(self) -> ArgumentGrammar:
        root = checked_root(self.rules)
        nodes = self._analysis.document.nodes
        string_rules(self.rules.satisfiability, root, nodes, is_possible=False)
        self._instances = ShortestInstance(self._analysis, self.rules.satisfiability)
        start = self.options(root)
        if self._style.empty:
            start = f"({start} | {self._literal(self._style.empty)})" if self._may_be_empty(root) else start
        return ArgumentGrammar(
            start,
            self.rules.all_bodies(),
            self._grammars,
            [*self._texts],
            [*self._ends],
            self._entries,
            self._has_memory,
        )

    def _may_be_empty(self, root: Conj) -> bool:
        found = alternatives_of(self.rules, root)
        return any(each.types & OBJECT and not each.objects.required for each in found)

    def _literal(self, text: str) -> str:
        return token_literal(self._parts_of(text))

    def note(self, objects: Objects, fields: Sequence[Field]) -> None:
        """Keep the shortest rest of the arguments after each parameter, because inside a string any text may follow."""
        style, rest = self._style, ""
        self._ends[style.value_end] = None
        for field in reversed(fields):
            value, is_text = self._shortest(objects.value(field.name))
            if value is None:
                continue
            whole = style.written(field.name, value, is_text=is_text) + rest
            written = value + style.value_end + rest
            if len(written) <= MAX_TEXT_BYTES:
                self._ends |= dict.fromkeys((style.value_end + rest, written, whole.removeprefix(style.key_begin)))
            if field.required and len(rest) <= MAX_TEXT_BYTES:
                rest = whole

    def _shortest(self, conj: Conj) -> tuple[str | None, bool]:
        """Return a short value as it is written, and whether it is a string."""
        text = self._instances.text(conj)
        return (json.loads(text), True) if text is not None and text.startswith('"') else (text, False)

    def listed(self, name: str, conj: Conj) -> str:
        values = self._value(conj, self._types.get(name, ALL_TYPES))
        return self._parameter(name, lambda end: self._literal(name + end), values)

    def unlisted(self, matched: Sequence[str], rest: Sequence[str], conj: Conj, listed: Sequence[str]) -> str:
        def key(end: str) -> str:
            mark = mark_of(self._parts_of(end))
            body = raw_name(_XML_KEY, mark.regex, listed=listed, matched=matched, rest=rest)
            return self.rules.terminal(body) + mark.rest

        return self._parameter("key", key, self._value(conj, ALL_TYPES))

    def _parameter(self, name: str, key: Callable[[str], str], values: _Values) -> str:
        """Write a parameter: a name with its end mark, and a value that is allowed after that mark."""
        style = self._style
        ends: dict[str, list[str]] = {}
        for kind, options in (("string", values.texts), *values.others.items()):
            if options:
                ends.setdefault(style.key_end_of(kind), []).extend(options)
        self._texts |= {name + end: None for end in ends}
        written = [f"{key(end)} ({' | '.join(options)})" for end, options in ends.items()]
        return f"{self._literal(style.key_begin)} ({' | '.join(written)})"

    def _value(self, conj: Conj, types: frozenset[str]) -> _Values:
        known = self._values.get((conj, types))
        if known is None:
            known = self._values[conj, types] = self._written(conj, types)
        return known

    def _written(self, conj: Conj, types: frozenset[str]) -> _Values:
        rules, style, end = self.rules, self._style, self._json_end
        rules.current = conj
        found = alternatives_of(rules, conj)
        values = _Values({}, {})
        for each in found:
            scalars = self._words(each.types)
            if each.types & NUMBER:
                scalars.append(("number", number_terminal(rules, each.types & NUMBER, each.numbers)))
            for kind, scalar in scalars:
                values.add(kind, rules.terminal(f"{scalar} /[ \\t\\r\\n]*{end.regex}/") + end.rest)
            text = self._text(each.strings, types) if each.types & STRING else None
            if text is not None:
                values.texts[text] = None
        for kind, types_within in self._container_types(found):
            name = f"g{self._prefix}{len(self._grammars)}"
            self._grammars[name] = self._containers(conj, types_within, is_text=bool(values.texts))
            after = rules.terminal(f"/{end.regex}/") if end.regex else ""
            values.add(kind, f"@{name} {after}{end.rest}")
        text, _ = self._shortest(conj)
        if text is not None:
            self._texts[text + style.value_end] = None
        if not values.texts and not values.others:
            reason = f"no value can be written: a string cannot contain {style.mark}"
            raise rules.unsupported(("enum", "const", "pattern"), reason)
        return values

    def _words(self, types: int) -> list[tuple[str, str]]:
        """Return terminals of the constants of some types, each preceded by its type if necessary."""
        words = self.rules.words(types)
        words += [word.capitalize() for word in words if self._style.capitals and word != "null"]
        by_end: dict[str, tuple[str, list[str]]] = {}
        for word in words:
            kind = "null" if word == "null" else "boolean"
            by_end.setdefault(self._style.key_end_of(kind), (kind, []))[1].append(word)
        return [(kind, self.rules.terminal(f"/{'|'.join(found)}/")) for kind, found in by_end.values()]

    def _container_types(self, found: Sequence[Alternative]) -> list[tuple[str, int]]:
        """Return the types of containers that a value may have; separately if text before it names the type."""
        types = [
            (kind, bit) for kind, bit in (("array", ARRAY), ("object", OBJECT)) if any(e.types & bit for e in found)
        ]
        is_told = len({self._style.key_end_of(kind) for kind, _ in types}) > 1
        return types if is_told else [(kind, ARRAY | OBJECT) for kind, _ in types[:1]]

    def _containers(self, conj: Conj, types: int, *, is_text: bool) -> str:
        """Write the arrays and objects of a value; if strings are possible, a text beginning so may be a string."""
        is_remembered = self._first_entry is not None and not is_text
        first = (self._first_entry or 0) + len(self._entries) if is_remembered else None
        found = to_lark(self._analysis, root=conj, types=types, first_entry=first, is_part=True)
        self._entries += found.entries
        self._has_memory = self._has_memory or found.has_memory
        return found.text

    def _text(self, strings: Strings, types: frozenset[str]) -> str | None:
        """Write the strings that satisfy some constraints, with the end of their value; None if there is none."""
        taken = self._style.spelled_as_json(types)
        found = raw_string(strings, self._end.regex, without=self._style.mark, taken=taken)
        self._texts |= {text + self._style.value_end: None for text in found.examples}
        return None if found.body is None else self.rules.terminal(found.body) + self._end.rest


class _Values(NamedTuple):
    """Expressions of the values of a parameter with the marks that end them, in order: strings, and JSON by type."""

    texts: dict[str, None]
    others: dict[str, dict[str, None]]

    def add(self, kind: str, expression: str) -> None:
        """Add values that are JSON of a type."""
        self.others.setdefault(kind, {})[expression] = None


class PythonArguments(NamedTuple):
    """The grammar of a call's arguments as Python.

    Attributes:
        text: one Lark grammar.
        texts, entries, has_memory: as in `ArgumentGrammar`.
    """

    text: str
    texts: list[str]
    entries: list[EntryLanguage]
    has_memory: bool


def python_arguments(analysis: Analysis, first_entry: int | None = None) -> PythonArguments:
    """Write the arguments of a call as keyword arguments of Python, as one Lark grammar.

    Strings are spelled in double quotes as in JSON, which is valid in Python.

    Args:
        analysis: analysis of the function's schema.
        first_entry: as in `to_lark`.

    Raises:
        GrammarError: the schema is unsatisfiable, or this style cannot express it.
    """
    rules = LarkRules(analysis, words=PYTHON_WORDS)
    root = checked_root(rules)
    string_rules(rules.satisfiability, root, analysis.document.nodes, is_possible=False)
    if first_entry is not None:
        rules.entries = EntryRules(first_entry, marks_objects=True)
    rules.define("start", _PythonWriter(rules).options(root))
    write_bodies(rules)
    check_distinct(rules, root)
    entries = [] if rules.entries is None else rules.entries.languages
    if any(language.has_containers for language in entries):
        raise rules.unsupported(("uniqueItems",), "arrays and objects cannot be compared in this tool call format")
    instances = ShortestInstance(analysis, rules.satisfiability)
    properties, values, _ = instances.closing_texts(root)
    texts = [PYTHON_WORDS.get(text, text) for text in values]
    names = [name for each in alternatives_of(rules, root) for name in each.objects.declared()]
    has_memory = rules.entries is not None and rules.entries.is_used
    texts = [*(f"{name}=" for name in names), *properties, *texts]
    return PythonArguments(rules.text(), texts, entries, has_memory)


class _PythonWriter(_Arguments):
    key_pattern = _IS_PYTHON_KEY
    separator = ","

    def listed(self, name: str, conj: Conj) -> str:
        return f"{lark_string(name + '=')} {self.rules.rule(conj)}"

    def unlisted(self, matched: Sequence[str], rest: Sequence[str], conj: Conj, listed: Sequence[str]) -> str:
        body = raw_name(_PYTHON_KEY, "=", listed=listed, matched=matched, rest=rest)
        return f"{self.rules.terminal(body)} {self.rules.rule(conj)}"
