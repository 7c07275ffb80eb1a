"""Raw strings: terminals of strings and names that are written without escapes and end at a mark.

The mark is part of the terminal, so that the lexer distinguishes a string from other values by the whole text. A
terminal cannot contain special tokens. If a mark has some, only its text before the first one is part of the terminal.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from ..regex.charset import rust_literal
from ..regex.ecma_regex import read_pattern, to_rust
from ..regex.string_formats import FORMATS
from ..schema.constraints import Strings
from .lark_rules import token_literal

_ANY = "(?s:.*)"


class Mark(NamedTuple):
    """The end mark of a raw string or a name.

    Attributes:
        regex: regular expression of the mark's text up to the first special token.
        rest: a blank and the expression of the rest of the mark, from the first special token on; empty without a rest.
    """

    regex: str
    rest: str


def mark_of(parts: Sequence[str | int]) -> Mark:
    """Return the end mark of a raw string, which is made of texts and ids of special tokens."""
    head, rest = ("", parts) if parts and isinstance(parts[0], int) else ("".join(map(str, parts[:1])), parts[1:])
    return Mark(rust_literal(head), f" {token_literal(rest)}" if rest else "")


class RawString(NamedTuple):
    """The raw strings that satisfy some constraints.

    Attributes:
        body: body of the strings' terminal, without the rest of the mark; None if there is no such string.
        examples: some of the strings.
    """

    body: str | None
    examples: list[str]


def raw_string(strings: Strings, end: str, *, without: str, taken: str | None = None) -> RawString:
    """Write the strings that satisfy some constraints.

    Args:
        end: regular expression of the part of the mark that belongs to the terminal.
        without: the mark, which no string may contain.
        taken: regular expression of the texts that represent other values, such as numbers; None if absent.
    """
    if strings.values is not None:
        usable = [value for value in strings.values if without not in value]
        if taken is not None:
            usable = [value for value in usable if not re.fullmatch(taken, value)]
        return RawString(f"/(?:{'|'.join(map(rust_literal, usable))}){end}/" if usable else None, usable)
    terms = [f"/{_ANY}{end}/"]
    if strings.least or strings.most is not None:
        most = "" if strings.most is None else strings.most
        terms = [f"/(?s:.{{{strings.least},{most}}}){end}/"]
    complements = [f"{_ANY}{rust_literal(without)}{_ANY}"]
    complements += [] if taken is None else [taken]
    for name in sorted(strings.formats):
        terms += [f"/(?:{to_rust(node)}){end}/" for node in FORMATS[name].must]
    examples = [text for source in sorted(strings.patterns) for text in read_pattern(source).examples]
    complements += map(rust_literal, sorted(strings.excluded))
    body = " & ".join([*terms, *(f"~/(?:{each}){end}/" for each in complements)])
    body += _conditions(sorted(strings.patterns), sorted(strings.not_patterns), end)
    return RawString(body, [text for text in examples if strings.admits(text)])


def raw_name(pattern: str, end: str, *, listed: Sequence[str], matched: Sequence[str], rest: Sequence[str]) -> str:
    """Write the terminal's body of names that are not listed.

    Args:
        pattern: regular expression of all names.
        end: as in `raw_string`.
        matched: patterns that the names must match.
        rest: patterns that the names must not match.
    """
    names = "|".join(map(rust_literal, listed))
    body = f"/{pattern}{end}/{_conditions(matched, rest, end)}"
    return body + (f" & ~/(?:{names}){end}/" if listed else "")


def _conditions(patterns: Sequence[str], not_patterns: Sequence[str], end: str) -> str:
    """Write further terms of a terminal: patterns that its text must match, and patterns that it must not match."""
    terms = []
    for source in patterns:
        pattern = read_pattern(source)
        terms += [f"/(?:{to_rust(node)}){end}/" for node in pattern.must]
        terms += [f"~/(?:{to_rust(node)}){end}/" for node in pattern.must_not]
    for source in not_patterns:
        pattern = read_pattern(source, wide=True)
        inner = [f"/(?:{to_rust(node)}){end}/" for node in pattern.must]
        inner += [f"~/(?:{to_rust(node)}){end}/" for node in pattern.must_not]
        terms.append(f"~({' & '.join(inner)})")
    return "".join(f" & {term}" for term in terms)
