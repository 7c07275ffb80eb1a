"""Argument styles: how models write the arguments of a call other than as JSON, and what is a string without quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

MAX_REFERENCES = 32
# What the text of each type begins with, or is, as a regular expression; strings are written as they are.
_SPELLINGS = {
    "null": "null",
    "boolean": "true|false",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+\-]?[0-9]+)?",
    "array": r"\[(?s:.*)",
    "object": r"\{(?s:.*)",
}
_BLANKS = r"[ \t\r\n]*"
ALL_TYPES = frozenset((*_SPELLINGS, "string"))
TYPE = "{type}"
"""Stands for the type of a value in the text before it."""


@dataclass(frozen=True, slots=True)
class XmlStyle:
    """Arguments between marks: strings unchanged, all other values as JSON.

    Attributes:
        name: XGrammar's name of the style, for ``style`` of a structural tag.
        key_begin: mark before a parameter's name.
        key_end: all text between a parameter's name and its value; ``{type}`` in it stands for the value's type.
        mark: text that ends a value; no string contains it.
        before_mark: text before the mark that is not part of the value.
        after_mark: text after the mark.
        capitals: whether models also write True and False, as their templates do.
        text_key_end: all text between a parameter's name and a string, if that differs from ``key_end``.
        empty: text in place of all parameters, if there are none.
    """

    name: str
    key_begin: str
    key_end: str
    mark: str
    before_mark: str = ""
    after_mark: str = ""
    capitals: bool = False
    text_key_end: str = ""
    empty: str = ""

    @property
    def value_end(self) -> str:
        return self.before_mark + self.mark + self.after_mark

    @property
    def tells_strings(self) -> bool:
        """Whether the text before a value says if it is a string."""
        return bool(self.text_key_end) or TYPE in self.key_end

    def key_end_of(self, kind: str) -> str:
        """Return all text between a parameter's name and a value of a type of JSON."""
        return (self.text_key_end if kind == "string" else "") or self.key_end.replace(TYPE, kind)

    def spelled_as_json(self, types: frozenset[str]) -> str | None:
        """Return a regular expression of the texts that are read as JSON in a style whose strings have no quotes.

        Args:
            types: types that a parameter accepts.

        Returns:
            The expression; None if ``types`` has only strings, or if the style marks strings in another way.
        """
        if self.tells_strings:
            return None
        others = "|".join(pattern for name, pattern in _SPELLINGS.items() if name in types)
        others += "|True|False" if self.capitals and "boolean" in types else ""
        return f"{_BLANKS}(?:{others}){_BLANKS}" if others else None

    def written(self, name: str, value: str, *, is_text: bool) -> str:
        """Return a parameter with its value, a string as it is or JSON."""
        key_end = self.key_end_of("string" if is_text else _type_of_text(value))
        return f"{self.key_begin}{name}{key_end}{value}{self.value_end}"

    def is_plain_text(self, value: str, types: frozenset[str]) -> bool:
        """Return whether a whole value of a parameter that takes these types is a string, not JSON."""
        if "string" not in types:
            return False
        others = self.spelled_as_json(types)
        return others is None or not re.fullmatch(others, value)


XML_STYLES = {
    style.name: style
    for style in (
        XmlStyle("qwen_xml", "<parameter=", ">\n", "</parameter>", "\n", "\n", capitals=True),
        XmlStyle("seed_xml", "<parameter=", ">", "</parameter>", after_mark="\n", capitals=True),
        XmlStyle("minimax_xml", '<parameter name="', '">', "</parameter>", after_mark="\n"),
        XmlStyle("glm_xml", "<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", after_mark="\n"),
        XmlStyle("glm47_xml", "<arg_key>", "</arg_key><arg_value>", "</arg_value>"),
        XmlStyle(
            "deepseek_xml", '<｜DSML｜parameter name="', '" string="false">', "</｜DSML｜parameter>", after_mark="\n",
            text_key_end='" string="true">', empty="\n",
        ),
        XmlStyle(
            "deepseek_v4_1_xml", '<｜DSML｜ parameter name="', '" string="false">', "</｜DSML｜ parameter>",
            after_mark="\n", text_key_end='" string="true">', empty="\n",
        ),
        XmlStyle("atem_xml", '<atem:parameter name="', '">', "</atem:parameter>", after_mark="\n"),
        XmlStyle(
            "kimi_k3_xml", '<|open|>argument key="', f'" type="{TYPE}"<|sep|>', "<|close|>argument<|sep|>",
        ),
    )
}  # fmt: skip
PYTHON = "python"  # keyword arguments with literals of Python
GEMMA = "gemma"  # an object with names as they are, and strings as they are between quote marks
GEMMA_QUOTE = '<|"|>'
STYLES = ("json", PYTHON, GEMMA, *XML_STYLES)
_MARKS = tuple(each.name for each in fields(XmlStyle) if each.name not in ("name", "capitals"))
_LONGEST_MARK = 200  # characters


def xml_style(style: Any) -> XmlStyle | None:
    """Return the marks of a style; None for the name of a style without marks, or of no style.

    Args:
        style: the name of a style, an `XmlStyle`, or an object with a style's marks as made by `xml_marks`.

    Raises:
        ValueError: the object is not a valid style; the message gives the fault.
    """
    if isinstance(style, XmlStyle):
        return style
    if not isinstance(style, dict):
        return XML_STYLES.get(style) if isinstance(style, str) else None
    if unknown := sorted(map(str, style.keys() - {*_MARKS, "capitals"})):
        raise ValueError(f"has no {unknown[0]!r}; it has {', '.join((*_MARKS, 'capitals'))}")
    marks = {name: style.get(name, "") for name in _MARKS}
    wrong = [name for name, mark in marks.items() if not isinstance(mark, str) or len(mark) > _LONGEST_MARK]
    if wrong or not isinstance(style.get("capitals", False), bool):
        raise ValueError(f"must have strings of at most {_LONGEST_MARK} characters as marks, and a boolean 'capitals'")
    if not all(marks[name].strip() for name in ("key_begin", "key_end", "mark")):
        raise ValueError("must have 'key_begin', 'key_end' and 'mark'")
    return XmlStyle("given", capitals=style.get("capitals", False), **marks)


def xml_marks(style: XmlStyle) -> dict[str, Any]:
    """Return a style as an object for a structural tag."""
    marks = {name: getattr(style, name) for name in (*_MARKS, "capitals")}
    return {name: mark for name, mark in marks.items() if mark}


# Constants of JSON as Python writes them; numbers and strings in double quotes are the same.
PYTHON_WORDS = {"null": "None", "true": "True", "false": "False"}


def gemma_text(value: Any) -> str:
    """Write a value of JSON in the style of Gemma, names in its order: by their letters, capital or not."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{gemma_text(value[name])}" for name in sorted(value, key=str.lower)) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(gemma_text, value))}]"
    return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}" if isinstance(value, str) else json.dumps(value)


def argument_types(schema: Any) -> dict[str, frozenset[str]]:
    """Return, for each listed parameter of a function, the types that it may have.

    Unlisted parameters may have any type. The types are derived only from a few keywords of the schema, so that the
    grammar and the parser of its answers always agree on them.
    """
    listed = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(listed, Mapping):
        return {}
    known: dict[int, frozenset[str]] = {}
    return {name: _types(value, schema, known, 0) for name, value in listed.items()}


def _types(schema: Any, root: Mapping[str, Any], known: dict[int, frozenset[str]], depth: int) -> frozenset[str]:
    """Return the types of a subschema, found once: ``known`` has those of earlier ones, by their identity."""
    if not isinstance(schema, Mapping) or depth > MAX_REFERENCES:
        return ALL_TYPES
    if id(schema) in known:
        return known[id(schema)]
    types = known[id(schema)] = ALL_TYPES  # what a reference to it finds while it is under way
    if "$ref" in schema:
        # In older drafts other keywords beside a reference do not count.
        types = _types(_referred(schema["$ref"], root), root, known, depth + 1)
    else:
        for keyword, value in schema.items():
            types &= _types_of_keyword(keyword, value, root, known, depth)
    known[id(schema)] = types
    return types


def _types_of_keyword(
    keyword: str, value: Any, root: Mapping[str, Any], known: dict[int, frozenset[str]], depth: int
) -> frozenset[str]:
    if keyword == "type":
        names = value if isinstance(value, list) else [value]
        return frozenset("number" if name == "integer" else name for name in names)
    if keyword == "const":
        return frozenset((_type_of(value),))
    if keyword == "enum" and isinstance(value, list):
        return frozenset(map(_type_of, value))
    if keyword in ("anyOf", "oneOf") and isinstance(value, list):
        return frozenset[str]().union(*(_types(each, root, known, depth + 1) for each in value))
    if keyword == "allOf" and isinstance(value, list):
        return ALL_TYPES.intersection(*(_types(each, root, known, depth + 1) for each in value))
    return ALL_TYPES


def _type_of_text(text: str) -> str:
    """Return the type of a value that is written as JSON, by what it begins with."""
    beginnings = {"{": "object", "[": "array", '"': "string", "t": "boolean", "f": "boolean", "n": "null"}
    return beginnings.get(text[:1], "number")


def _type_of(value: Any) -> str:
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _referred(reference: Any, root: Mapping[str, Any]) -> Any:
    """Follow a reference by JSON Pointer; True for any other, and where a part of the way has a name of its own."""
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return True
    found: Any = root
    for token in reference[2:].split("/"):
        name = token.replace("~1", "/").replace("~0", "~")
        if not isinstance(found, Mapping) or name not in found:
            return True
        found = found[name]
        if isinstance(found, Mapping) and "$id" in found:
            return True
    return found
