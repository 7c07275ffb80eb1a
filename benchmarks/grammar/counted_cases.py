"""Generated schemas whose strings count words and characters, and tools with them, for `counted_strings`."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jsonschema_rs

from rootgraft.api.protocol.tools import Function, Tool
from rootgraft.api.structured.tool_formats import FORMATS, ToolFormat
from rootgraft.api.structured.tool_grammar import tool_output_format
from rootgraft.grammar.spec import GrammarSpec

WORDS = (
    "a",
    "the",
    "word",
    "Antidisestablishmentarianism",
    "naïve",
    "東京",
    "x1",
    'quote"d',
    "back\\slash",
    "🙂",
    "...",
)
BLANKS = (" ", " ", " ", "  ", "\n", "\t", "\u00a0")
FREE_TEXTS = ("", "\n", 'He said: "a b ", then "', 'naïve {[ \\" 東京: ', '{"name": "x", "a": ["b c')


@dataclass(frozen=True)
class Kind:
    """A family of strings: a schema, and a function that draws a string that probably satisfies it."""

    schema: dict[str, Any]
    draw: Callable[[random.Random], str]


def kinds(rng: random.Random) -> Kind:
    """Draw the schema of one string."""
    most = rng.choice((5, 9, 19, 29, 49, 49, 49, 80))
    length = rng.randrange(100, 501)
    drawn = rng.randrange(9)
    if drawn < 4:
        least = rng.choice((0, 0, 0, 2))
        pattern = rng.choice((rf"^(?:\S+\s+){{{least},{most}}}\S+$", rf"^\S+(?:\s+\S+){{{least},{most}}}$"))
        return Kind({"pattern": pattern, "maxLength": length}, lambda r: _words(r, least + 1, most + 1, length))
    if drawn == 4:
        schema = {"pattern": rf"^(?:[a-z]+\s?){{1,{most}}}$", "minLength": 3, "maxLength": length}
        return Kind(schema, lambda r: _joined(r, ("ab", "c", "defgh"), (" ", ""), 3, most)[:length])
    if drawn == 5:
        schema = {"pattern": rf"^(?:[^.!?]+[.!?]\s?){{1,{min(most, 9)}}}$", "maxLength": length}
        return Kind(
            schema, lambda r: "".join(f"{_words(r, 1, 4, 40).replace('.', '')}x. " for _ in range(r.randint(1, 2)))
        )
    if drawn == 6:
        schema = {"pattern": rf"^[a-z]{{1,20}}(?:,[a-z]{{1,20}}){{0,{most}}}$", "maxLength": length}
        return Kind(schema, lambda r: _joined(r, ("tag", "b", "longertag"), (",",), 1, min(most, 9)))
    if drawn == 7:
        schema = {"pattern": rf"^(?:red|green|blue)(?:\s(?:red|green|blue)){{0,{most}}}$", "maxLength": length}
        return Kind(schema, lambda r: _joined(r, ("red", "green", "blue"), (" ", "\n"), 1, min(most, 12)))
    schema = {"pattern": rf"^(?!.*secret)(?:\S+\s+){{0,{most}}}\S+$", "minLength": 2, "maxLength": length}
    return Kind(schema, lambda r: _words(r, 2, most + 1, length).replace("\n", " "))


def _words(rng: random.Random, least: int, most: int, length: int) -> str:
    """Draw words, sometimes as many or as long as may be."""
    count = rng.choice((least, most, rng.randint(least, most)))
    words = [rng.choice(WORDS) for _ in range(count)]
    text = "".join(word + rng.choice(BLANKS) for word in words[:-1]) + words[-1]
    if len(text) > length:
        text = text[:length].rstrip()
    elif rng.random() < 0.3:
        text += "z" * (length - len(text))
    return text


def _joined(rng: random.Random, words: tuple[str, ...], between: tuple[str, ...], least: int, most: int) -> str:
    words_ = [rng.choice(words) for _ in range(rng.randint(least, max(least, most)))]
    return "".join(word + rng.choice(between) for word in words_[:-1]) + words_[-1]


class Drawn(NamedTuple):
    """A text, and whether it is valid; of an odd one readers of patterns may differ."""

    text: str
    is_valid: bool
    is_odd: bool


@dataclass
class Case:
    """A schema and how to draw its instances."""

    schema: dict[str, Any]
    draws: dict[str, Callable[[random.Random], Any]] = field(default_factory=dict)

    @cached_property
    def validator(self) -> Any:
        return jsonschema_rs.Draft202012Validator(self.schema)

    def spec(self) -> GrammarSpec:
        return GrammarSpec.json_schema(self.schema)

    def drawn(self, rng: random.Random, *, spoiled: bool) -> Drawn:
        """Draw a text that is probably valid, or one that is wrong in one string."""
        instance = self.instance(rng)
        if spoiled:
            instance = _spoiled(instance, rng)
        text = json.dumps(instance, ensure_ascii=False)
        return Drawn(text, self.validator.is_valid(instance), _is_odd(text))

    def opening(self, rng: random.Random) -> str:
        """Draw what random answers begin with."""
        return ""

    def holds(self, opening: str, text: str) -> bool:
        """Whether a random answer is valid."""
        return bool(self.validator.is_valid(json.loads(text)))

    def instance(self, rng: random.Random) -> dict[str, Any]:
        required = self.schema["required"]
        return {name: draw(rng) for name, draw in self.draws.items() if name in required or rng.random() < 0.6}


def case(rng: random.Random) -> Case:
    """Draw a schema of 4 to 15 such strings: plain, in arrays, optional, in alternatives, in objects."""
    made = Case({"type": "object", "properties": {}, "required": [], "additionalProperties": rng.random() < 0.2})
    for number in range(rng.randint(4, 15)):
        name = f"field_{number}"
        schema, draw = _field(rng, kinds(rng))
        made.schema["properties"][name] = schema
        made.draws[name] = draw
        if rng.random() < 0.6:
            made.schema["required"].append(name)
    return made


def _field(rng: random.Random, kind: Kind) -> tuple[dict[str, Any], Callable[[random.Random], Any]]:
    text = {"type": "string", **kind.schema}
    shape = rng.randrange(8)
    if shape < 3:
        return text, kind.draw
    if shape == 3:
        most = rng.randint(1, 4)
        schema = {"type": "array", "items": text, "minItems": 1, "maxItems": most}
        return schema, lambda r: [kind.draw(r) for _ in range(r.randint(1, most))]
    if shape == 4:
        return {"anyOf": [text, {"type": "null"}]}, lambda r: r.choice((None, kind.draw(r)))
    if shape == 5:
        other = kinds(rng)
        options = [text, {"type": "string", **other.schema}, {"enum": ["none", "n/a"]}]
        return {"anyOf": options}, lambda r: r.choice((kind.draw(r), other.draw(r), "n/a"))
    if shape == 6:
        other = kinds(rng)
        first = {"properties": {"text": text, "kind": {"const": 1}}}
        second = {"properties": {"text": {"type": "string", **other.schema}, "kind": {"const": 2}}}
        common = {"type": "object", "required": ["text", "kind"], "additionalProperties": False}
        schema = {"anyOf": [{**first, **common}, {**second, **common}]}
        return schema, lambda r: r.choice(({"text": kind.draw(r), "kind": 1}, {"text": other.draw(r), "kind": 2}))
    inner = {"type": "object", "properties": {"note": text}, "additionalProperties": False}
    return inner, lambda r: r.choice(({}, {"note": kind.draw(r)}))


# Formats of calls in which heavy strings can be followed.
JSON_FORMATS = ("mistral", "hermes", "llama3_json", "generic")


@dataclass
class ToolCase(Case):
    """Tools with such schemas as parameters, in one of the formats of calls; `tool_choice` is ``auto``."""

    tools: dict[str, Case] = field(default_factory=dict)
    form: ToolFormat = FORMATS["hermes"]
    is_parallel: bool = True

    def spec(self) -> GrammarSpec:
        tools = [
            Tool(type="function", function=Function(name=name, parameters=each.schema))
            for name, each in self.tools.items()
        ]
        found = tool_output_format(tools, "auto", self.form, None, parallel=self.is_parallel)
        assert found is not None
        return found.spec

    def drawn(self, rng: random.Random, *, spoiled: bool) -> Drawn:
        form = self.form
        most = 3 if self.is_parallel and not form.single else 1
        parts = [(name, self.tools[name].drawn(rng, spoiled=False)) for name in rng.choices([*self.tools], k=most)]
        if spoiled:
            name = rng.choice([*self.tools])
            parts[rng.randrange(len(parts))] = name, self.tools[name].drawn(rng, spoiled=True)
        calls = [form.head(name) + drawn.text + form.after_arguments for name, drawn in parts]
        if form.separator is not None:
            text = form.opening + form.separator.join(calls) + form.closing
        else:
            text = rng.choice(FREE_TEXTS).join(form.opening + call + form.closing for call in calls)
        if not form.only_at_start:
            text = rng.choice(FREE_TEXTS) + text
        valid = all(drawn.is_valid for _, drawn in parts)
        return Drawn(text, valid, any(drawn.is_odd for _, drawn in parts))

    def opening(self, rng: random.Random) -> str:
        before = "" if self.form.only_at_start else rng.choice(FREE_TEXTS)
        return before + self.form.opening + self.form.head(rng.choice([*self.tools]))

    def holds(self, opening: str, text: str) -> bool:
        name = json.loads(opening[opening.rindex("{") :].partition(",")[0] + "}")["name"]
        arguments, _ = json.JSONDecoder().raw_decode(text)
        return bool(self.tools[name].validator.is_valid(arguments))


def tool_case(rng: random.Random) -> ToolCase:
    """Draw one to four tools and a format of calls."""
    tools = {f"tool_{number}": case(rng) for number in range(rng.randint(1, 4))}
    return ToolCase({}, {}, tools, FORMATS[rng.choice(JSON_FORMATS)], rng.random() < 0.7)


def _spoiled(instance: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Change one string: longer, with a blank at its end, empty, or cut."""
    strings = [name for name, value in instance.items() if isinstance(value, str)]
    if not strings:
        return {**instance, "field_0": 5}
    name = rng.choice(strings)
    text = instance[name]
    change = rng.randrange(5)
    new = (text + "y" * 500, text + " ", "", text + " w" * 60, text[: len(text) // 2])[change]
    return {**instance, name: new}


def _is_odd(text: str) -> bool:
    """Whether readers of patterns differ on a text: a newline at its end, or a blank of one reading only."""
    return bool(re.search(r'\\n"|[\x1c-\x1f\x85\ufeff]', text))
