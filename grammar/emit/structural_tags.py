"""Structural tags: free text in which a trigger opens a structured part, as in tool calls.

The module translates XGrammar's format of structural tags to llguidance's dialect, so that the schemas in tags are
analysed like all other schemas. Free text before a trigger ends at the first trigger. Free text at the end of an answer
must not contain a trigger.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..argument_styles import GEMMA, GEMMA_QUOTE, PYTHON, STYLES, xml_style
from ..errors import GrammarError
from ..regex.charset import rust_literal
from ..regex.ecma_regex import parse, to_rust
from ..regex.regex_parser import RegexError
from ..regex.string_automaton import StringAutomaton
from ..schema.analysis import Analysis
from ..schema.document import Document, pointer_join
from ..schema.error_location import relocated
from ..schema.shortest_instance import MAX_PLACES, MAX_TEXT_BYTES
from ..schema.subschemas import Narrowing
from ..vocabulary import Vocabulary
from .argument_rules import ArgumentGrammar, PythonArguments, python_arguments, xml_arguments
from .gemma_arguments import gemma_arguments
from .grammar_artifact import Backend, GrammarArtifact
from .json_lark import ends_in_json_string, in_json_string
from .lark_rules import FREE, token_literal
from .lark_writer import LarkGrammar, to_lark
from .string_rules import MAX_RULES
from .tag_choices import is_unambiguous

# Largest number of bytes of all ends together, as a search tries each of them.
MAX_END_BYTES = 32 << 10
# Placeholder for any text while rules are written: without the markers of string rules, if there are any.
_ANY_TEXT = "\0"
# Characters that are allowed before a JSON value.
_BLANKS = " \t\r\n"


def structural_tag_grammar(
    tag: dict[str, Any], vocabulary: Vocabulary, *, with_string_rules: bool = False, with_memory: bool = False
) -> GrammarArtifact:
    """Translate a structural tag in XGrammar's current form (``format``) or older form (``structures``).

    Args:
        tag: the structural tag.
        vocabulary: vocabulary of the model, which names the special tokens.
        with_string_rules: whether strings that are too large for the lexer become rules, as in ``to_lark``, if no other
            part of the tag can be confused with one.
        with_memory: whether a memory of the written values keeps keys and items distinct, under the same condition.

    Raises:
        GrammarError: the tag is refused; the message has a pointer into the tag.
    """
    if "structures" in tag:
        tags = [
            {"begin": item.get("begin"), "content": {"type": "json_schema", "json_schema": item.get("schema")},
             "end": item.get("end")} if isinstance(item, dict) else item
            for item in _list(tag, "structures", "")
        ]  # fmt: skip
        form: Any = {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}
    else:
        form = tag.get("format")
    writer = _TagWriter(
        vocabulary,
        with_string_rules=with_string_rules and is_unambiguous(form),
        with_memory=with_memory and is_unambiguous(form, by_brackets=True),
    )
    start = writer.element(form, "/format")
    lines = [FREE.strip(), f"start: {start}", *(f"{name}: {body}" for name, body in writer.rules.items())]
    text = "\n".join(lines) + "\n"
    has_memory = any(grammar.has_memory for grammar in writer.remembered)
    if writer.strings or has_memory:
        text = text.replace(_ANY_TEXT, r"[^\x01-\x03]*")
    else:
        text = text.replace(f" & /{_ANY_TEXT}/", "").replace(_ANY_TEXT, "(?s:.*)")
    grammars = [{"lark_grammar": text}, *writer.grammars]
    source = json.dumps({"grammars": grammars})
    free = isinstance(form, dict) and form.get("type") in ("any_text", "triggered_tags")
    closing = writer.closing
    return GrammarArtifact(
        Backend.LLGUIDANCE,
        source,
        properties=tuple(sorted(closing.properties, key=len)),
        values=tuple(sorted(closing.values, key=len)),
        optional=tuple(sorted(closing.optional, key=len)),
        detour=max(
            (text for text in (*closing.wholes, *closing.begun) if len(text) <= MAX_TEXT_BYTES), key=len, default=""
        ),
        is_json=True,
        texts=tuple(sorted(closing.texts, key=closing.texts.__getitem__)),
        ends=tuple(sorted(closing.ends, key=len)),
        narrowings=tuple(writer.narrowings),
        open_ended=free,
        lead_ins="".join(sorted({",", *writer.lead_ins})),
        strings=tuple(writer.strings),
        entries=tuple(language for grammar in writer.remembered for language in grammar.entries),
        has_memory=has_memory,
        scalars=tuple(closing.scalars)[:MAX_PLACES],
        containers=tuple(closing.containers)[:MAX_PLACES],
    )


@dataclass(slots=True)
class _TagTexts:
    """Closing texts inside of tags.

    Attributes:
        properties: short properties of all schemas.
        values: short values of all schemas.
        optional: short properties of all schemas that may be begun although none is needed.
        scalars: groups of short scalars that may replace one another.
        containers: groups of short arrays and objects; if one of a group is possible, the others could be too.
        texts: beginnings of tags and examples of expressions, each with its nesting depth in tags and the size of the
            whole tag.
        ends: texts that end a tag and all tags that contain it.
        wholes: short texts of the parts translated so far, in order.
        begun: texts that may begin within a part although the part has a shorter text.
    """

    properties: dict[str, None] = field(default_factory=dict)
    values: dict[str, None] = field(default_factory=dict)
    optional: dict[str, None] = field(default_factory=dict)
    scalars: dict[tuple[str, ...], None] = field(default_factory=dict)
    containers: dict[tuple[str, ...], None] = field(default_factory=dict)
    texts: dict[str, tuple[int, int]] = field(default_factory=dict)
    ends: dict[str, None] = field(default_factory=dict)
    wholes: list[str] = field(default_factory=list)
    begun: list[str] = field(default_factory=list)


class _TagWriter:
    def __init__(self, vocabulary: Vocabulary, *, with_string_rules: bool, with_memory: bool) -> None:
        self.with_string_rules, self.with_memory = with_string_rules, with_memory
        self.strings: list[StringAutomaton] = []
        self.remembered: list[LarkGrammar | ArgumentGrammar | PythonArguments] = []
        self.lead_ins: set[str] = set()
        self.rules: dict[str, str] = {}
        self.grammars: list[dict[str, str]] = []
        self.narrowings: list[Narrowing] = []
        self.closing = _TagTexts()
        self.enclosing = ""
        self.depth = 0
        self.parts_of = vocabulary.named_parts
        self._vocabulary = vocabulary

    def next_entry(self) -> int | None:
        """Return the number of the next container whose entries are remembered; None if none are."""
        return 1 + sum(len(grammar.entries) for grammar in self.remembered) if self.with_memory else None

    def element(self, form: Any, pointer: str) -> str:
        """Write the grammar expression of one format."""
        if not isinstance(form, dict) or not isinstance(form.get("type"), str):
            raise GrammarError("format", pointer, "must be an object with a type")
        handler = _FORMS.get(form["type"])
        if handler is None:
            known = ", ".join(sorted(_FORMS))
            raise GrammarError("type", pointer_join(pointer, "type"), f"{form['type'][:60]!r} is not one of {known}")
        return handler(self, form, pointer)

    def named(self, body: str, options: str = "", *, terminal: bool = False) -> str:
        """Add an auxiliary rule or terminal. Returns its name."""
        name = f"{'T' if terminal else 'r'}{len(self.rules)}"
        self.rules[name + options] = body
        return name

    def text(self, text: Any, keyword: str, pointer: str) -> str:
        if not isinstance(text, str) or not text:
            raise GrammarError(keyword, pointer_join(pointer, keyword), "must be a string that is not empty")
        return self.fixed(text)

    def fixed(self, text: str) -> str:
        """Write a fixed text, special tokens by their ids."""
        self.lead_ins.update(text.rstrip(_BLANKS)[-1:])
        return token_literal(self.parts_of(text))

    def names_special(self, text: str) -> bool:
        return any(isinstance(part, int) for part in self.parts_of(text))

    def schema(self, form: dict[str, Any], pointer: str) -> str:
        """Write JSON as a separate grammar, with its own white space."""
        schema, style = form.get("json_schema"), form.get("style", "json")
        if style != "json":
            return self._arguments(schema, style, pointer)
        where = pointer_join(pointer, "json_schema")
        if not isinstance(schema, dict | bool):
            raise GrammarError("json_schema", where, "must be a schema")
        try:
            analysis = Analysis(Document({} if schema is True else {"not": {}} if schema is False else schema))
            rules = self.with_string_rules and len(self.strings) < MAX_RULES
            grammar = to_lark(
                analysis,
                self._vocabulary,
                with_string_rules=rules,
                first_rule=len(self.strings),
                first_entry=self.next_entry(),
                is_part=True,
            )
        except GrammarError as found:
            error = relocated(found, schema)
            raise GrammarError(error.keyword, where + error.pointer, error.reason) from None
        self.narrowings += [Narrowing(n.keyword, where + n.pointer, n.reason) for n in analysis.narrowings]
        self.closing.properties |= dict.fromkeys(grammar.properties)
        self.closing.optional |= dict.fromkeys(grammar.optional)
        self.closing.values |= dict.fromkeys((*grammar.values, *filter(None, [grammar.shortest])))
        self.closing.wholes.append(grammar.shortest)
        self.closing.begun.append(grammar.detour)
        self.closing.scalars |= dict.fromkeys(grammar.scalars)
        self.closing.containers |= dict.fromkeys(grammar.containers)
        self.strings += grammar.strings
        self.remembered.append(grammar)
        return self._grammar(grammar.text)

    def _grammar(self, text: str, name: str = "") -> str:
        name = name or f"g{len(self.grammars)}"
        self.grammars.append({"name": name, "lark_grammar": text})
        return f"@{name}"

    def _arguments(self, schema: Any, style: Any, pointer: str) -> str:
        """Write an object as the arguments of a call, in another style than JSON's."""
        try:
            xml = xml_style(style)
        except ValueError as error:
            raise GrammarError("style", pointer_join(pointer, "style"), str(error)) from None
        if xml is None and style not in (PYTHON, GEMMA):
            raise GrammarError("style", pointer_join(pointer, "style"), f"must be one of {', '.join(STYLES)}")
        where = pointer_join(pointer, "json_schema")
        if not isinstance(schema, dict):
            raise GrammarError("json_schema", where, "must be the schema of an object")
        try:
            analysis = Analysis(Document(schema))
            if xml is None:
                if style == PYTHON:
                    written = python_arguments(analysis, self.next_entry())
                    self.remembered.append(written)
                    lark, texts = written.text, written.texts
                else:
                    lark, texts = gemma_arguments(analysis, self.parts_of)
                start = self._grammar(lark)
                # Within a string of Gemma's style, all text but the closing quote continues the string.
                if style == GEMMA:
                    self.closing.ends[GEMMA_QUOTE] = None
            else:
                prefix = f"a{len(self.rules)}_"
                found = xml_arguments(analysis, xml, prefix, self.parts_of, self.next_entry())
                self.remembered.append(found)
                for name, lark in found.grammars.items():
                    self._grammar(lark, name)
                start, texts = self.named(found.start), found.texts
                self.rules |= found.rules
                size = sum(map(len, self.closing.ends))
                for end in (text + self.enclosing for text in found.ends):
                    size += len(end)
                    if size < MAX_END_BYTES:
                        self.closing.ends[end] = None
                self.note_shared(xml.key_begin)
        except GrammarError as error:
            located = relocated(error, schema)
            raise GrammarError(located.keyword, where + located.pointer, located.reason) from None
        self.narrowings += [Narrowing(n.keyword, where + n.pointer, n.reason) for n in analysis.narrowings]
        self.closing.texts |= {text: (self.depth, len(text)) for text in texts}
        self.closing.wholes.append("".join(texts)[:MAX_TEXT_BYTES])
        return start

    def note_shared(self, begin: str) -> None:
        """Keep the ends after each of the letters that another part, of this begin, and what ends all parts share."""
        shared = range(1, min(len(begin), len(self.enclosing)))
        ends = (self.enclosing[at:] for at in shared if self.enclosing.startswith(begin[:at]))
        self.closing.ends |= dict.fromkeys(ends)

    def regex(self, form: dict[str, Any], pointer: str) -> str:
        try:
            pattern = parse(str(form.get("pattern")), whole=True)
        except RegexError as error:
            raise GrammarError("pattern", pointer_join(pointer, "pattern"), f"cannot be used: {error}") from None
        answers = [text for text in pattern.examples if pattern.matches(text)]
        self.closing.texts |= {text: (self.depth, len(text)) for text in answers}
        self.closing.wholes.append(min(answers, key=len, default=""))
        self.closing.begun += answers
        terms = [f"/{to_rust(node)}/" for node in pattern.must] + [f"/{_ANY_TEXT}/"] * (
            self.with_string_rules or self.with_memory
        )
        terms += [f"~/{to_rust(node)}/" for node in pattern.must_not]
        return self.named(" & ".join(terms), terminal=True)

    def json_lark(self, form: dict[str, Any], pointer: str) -> str:
        """Write the text of a Lark grammar as it appears between the quotes of a JSON string."""
        text = form.get("grammar")
        if not isinstance(text, str):
            raise GrammarError("grammar", pointer_join(pointer, "grammar"), "must be a Lark grammar")
        try:
            written = in_json_string(text)
        except GrammarError as error:
            raise GrammarError("lark", pointer_join(pointer, "grammar"), error.reason) from None
        found = ends_in_json_string(text, self._count, self._vocabulary)
        self.closing.wholes.append(found.shortest)
        self.closing.begun += found.ends
        for end in found.ends:
            self.closing.ends[end + self.enclosing] = None
            self.closing.texts.setdefault(end + self.enclosing, (self.depth, len(end)))
        return self._grammar(f"{FREE}{written}\n")

    def _count(self, text: str) -> int:
        return self._vocabulary.fewest_counts(text.encode())[0]

    def anything(self, form: dict[str, Any], pointer: str) -> str:
        return self.named(f"/{_ANY_TEXT}/", terminal=True)

    def constant(self, form: dict[str, Any], pointer: str) -> str:
        text = self.text(form.get("value"), "value", pointer)
        self.closing.texts.setdefault(form["value"], (self.depth, len(form["value"])))
        return text

    def sequence(self, form: dict[str, Any], pointer: str) -> str:
        listed = _list(form, "elements", pointer)
        outside, written = self.enclosing, list[str]()
        for index, item in enumerate(listed):
            self.enclosing = _shortest_rest(listed[index + 1 :]) + outside
            written.append(self.element(item, pointer_join(pointer, "elements", index)))
        self.enclosing = outside
        return " ".join(written)

    def either(self, form: dict[str, Any], pointer: str) -> str:
        listed = _list(form, "elements", pointer)
        options = [self.element(item, pointer_join(pointer, "elements", i)) for i, item in enumerate(listed)]
        return f"({' | '.join(options)})"

    def tag(self, form: dict[str, Any], pointer: str) -> str:
        begin, rest = self.parts(form, pointer)
        return f"{self.text(begin, 'begin', pointer)} {rest}"

    def parts(self, form: dict[str, Any], pointer: str) -> tuple[str, str]:
        """Return the begin of a tag as text, and the grammar expression of the rest."""
        begin, end = form.get("begin"), form.get("end")
        self.text(begin, "begin", pointer)
        if not isinstance(end, str):
            raise GrammarError("end", pointer_join(pointer, "end"), "must be a string")
        content = form.get("content")
        outside, first = self.enclosing, len(self.closing.wholes)
        self.enclosing = end + outside
        self.depth += 1
        if self.enclosing:
            self.closing.ends[self.enclosing] = None
        if isinstance(content, dict) and content.get("type") == "any_text" and end:
            rest = self.until([end])
        else:
            rest = f"{self.element(content, pointer_join(pointer, 'content'))} {self.fixed(end)}"
        self.enclosing = outside
        self.depth -= 1
        longest = max(self.closing.wholes[first:], key=len, default="")
        self.closing.wholes.append(f"{begin}{longest}{end}")
        self.closing.texts[str(begin)] = (self.depth, len(self.closing.wholes[-1]))
        return str(begin), rest

    def until(self, stops: list[str]) -> str:
        """Write any text up to and including the first of some stops."""
        options = []
        plain = [stop for stop in stops if not self.names_special(stop)]
        self.lead_ins.update("".join(stop.rstrip(_BLANKS)[-1:] for stop in plain))
        if plain:
            body = f"/{_ANY_TEXT}(?:{'|'.join(map(rust_literal, plain))})/"
            options.append(self.named(body, "[lazy]"))
        options += [f"{self.named(f'/{_ANY_TEXT}/', terminal=True)} {self.fixed(s)}" for s in stops if s not in plain]
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def without(self, stops: list[str]) -> str:
        """Write any text that does not contain any of these stops."""
        plain = [stop for stop in stops if not self.names_special(stop)]
        body = f"/{_ANY_TEXT}/"
        if plain:
            body += f" & ~/{_ANY_TEXT}(?:{'|'.join(map(rust_literal, plain))}){_ANY_TEXT}/"
        return self.named(body, terminal=True)

    def triggered(self, form: dict[str, Any], pointer: str) -> str:
        """Write free text in which each trigger opens one of the tags that begin with it."""
        triggers = _list(form, "triggers", pointer)
        if not all(isinstance(trigger, str) and trigger for trigger in triggers):
            raise GrammarError("triggers", pointer_join(pointer, "triggers"), "must be strings that are not empty")
        listed = _list(form, "tags", pointer)
        by_trigger: dict[str, list[str]] = {}
        for index, item in enumerate(listed):
            where = pointer_join(pointer, "tags", index)
            if not isinstance(item, dict):
                raise GrammarError("tags", where, "must be an object")
            begin, rest = self.parts(item, where)
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise GrammarError("begin", pointer_join(where, "begin"), "does not begin with any of the triggers")
            by_trigger.setdefault(trigger, []).append(f"{self.fixed(begin[len(trigger) :])} {rest}")
        calls = [f"{self.until([trigger])} ({' | '.join(rests)})" for trigger, rests in by_trigger.items()]
        call = self.named(" | ".join(calls))
        end = self.without(list(triggers))
        if form.get("stop_after_first"):
            return call if form.get("at_least_one") else f"({call} | {end})"
        return f"{call}{'+' if form.get('at_least_one') else '*'} {end}"

    def separated(self, form: dict[str, Any], pointer: str) -> str:
        listed = _list(form, "tags", pointer)
        options = [self.tag(item, pointer_join(pointer, "tags", i)) for i, item in enumerate(listed)]
        one = self.named(" | ".join(options))
        if form.get("stop_after_first"):
            return one if form.get("at_least_one") else f"{one}?"
        separator = self.fixed(str(form.get("separator", "")))
        for begin in {str(item.get("begin")): None for item in listed}:
            self.note_shared(str(form.get("separator", "")) + begin)
        more = f"{one} ({separator} {one})*"
        return more if form.get("at_least_one") else f"({more})?"


_FORMS: dict[str, Callable[[_TagWriter, dict[str, Any], str], str]] = {
    "any_text": _TagWriter.anything,
    "const_string": _TagWriter.constant,
    "json_lark": _TagWriter.json_lark,
    "json_schema": _TagWriter.schema,
    "or": _TagWriter.either,
    "regex": _TagWriter.regex,
    "sequence": _TagWriter.sequence,
    "tag": _TagWriter.tag,
    "tags_with_separator": _TagWriter.separated,
    "triggered_tags": _TagWriter.triggered,
}


def _shortest_rest(elements: list[Any]) -> str:
    """Return what must follow in a sequence, as far as it is fixed text."""
    fixed = [item for item in elements if isinstance(item, dict) and item.get("type") == "const_string"]
    return "".join(str(item.get("value", "")) for item in fixed)


def _list(form: dict[str, Any], keyword: str, pointer: str) -> list[Any]:
    listed = form.get(keyword)
    if not isinstance(listed, list) or not listed:
        raise GrammarError(keyword, pointer_join(pointer, keyword), "must be a list that is not empty")
    return listed
