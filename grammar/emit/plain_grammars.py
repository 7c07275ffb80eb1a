"""Regular expressions, choices and Lark grammars translated to llguidance's dialect."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from ..errors import GrammarError
from ..regex.charset import rust_literal
from ..regex.ecma_regex import parse, to_rust
from ..regex.regex_parser import RegexError
from ..regex.string_automaton import AutomatonTooLarge, StringAutomaton, each_excluded, string_automaton
from ..schema.string_language import has_string
from ..spec import GrammarKind, GrammarSpec
from .lark_dialect import in_dialect
from .lark_rules import FREE
from .lark_text import COMMON, check_lark
from .string_rules import TOO_LARGE, has_too_many_states

MAX_ANSWERS = 40
# Options of rules that would end an answer early, prevent a rollback, or change the sampling.
_OPTIONS = re.compile(r"\b(max_tokens|temperature|stop|stop_capture)\s*=")
_DIRECTIVE = re.compile(r"%(json|llguidance|lark|regex)\b")
_TOKEN_REFERENCE = re.compile(r"<\[[\d^*]")
# What the library's lexer reads as one piece, in which the patterns above mean nothing; and references to tokens, in
# which they do, and which may hold a quote.
_PIECE = re.compile(r"""(?P<plain>(?:\#|//)[^\n]*|"(?:\\.|[^"\\\n])*"|/(?:\\[\s\S]|[^/\\])+/)|<[^<>\s]+>""")
_STRING = "ESCAPED_STRING"
_IMPORT = re.compile(
    _PIECE.pattern
    + rf"|(?P<one>%import\s+common\s*\.\s*{_STRING}\b(?:[ \t]*->[ \t]*(?P<alias>\w+))?)"
    + r"|%import\s+common\s*\((?P<several>[^()]*)\)"
)


class Translation(NamedTuple):
    """A grammar's text, short answers if any are known, and the set of all answers as in ``GrammarArtifact``."""

    source: str
    answers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    language: StringAutomaton | None = None


def _regex(spec: GrammarSpec) -> Translation:
    try:
        pattern = parse(spec.text, whole=True)
        pattern.check_repeats()
        if has_too_many_states(pattern):
            raise GrammarError("regex", "", TOO_LARGE)
        terms = [f"/{to_rust(node)}/" for node in pattern.must]
        terms += [f"~/{to_rust(node)}/" for node in pattern.must_not]
    except RegexError as error:
        raise GrammarError("regex", "", f"cannot be used: {error}") from None
    answers = [text for text in pattern.examples if pattern.matches(text)]
    if not answers and not has_string(pattern.must, each_excluded(pattern.must_not)):
        raise GrammarError("regex", "", "matches no text")
    language = None
    with suppress(AutomatonTooLarge):
        language = string_automaton(pattern.must, each_excluded(pattern.must_not))
    source = f"{FREE}start: TEXT\nTEXT: {' & '.join(terms)}\n"
    return Translation(source, tuple(sorted(answers, key=len)), language=language)


def _choice(spec: GrammarSpec) -> Translation:
    options = spec.value()
    shortest = tuple(sorted(options, key=len)[:MAX_ANSWERS])
    source = f"{FREE}start: TEXT\nTEXT: /{'|'.join(map(rust_literal, options))}/\n"
    return Translation(source, shortest, tuple(options))


def _lark(spec: GrammarSpec) -> Translation:
    check_source(spec.text)
    return Translation(f"{in_dialect(_IMPORT.sub(_imported, spec.text))}\n{FREE}")


def _imported(found: re.Match[str]) -> str:
    """Return what takes the place of an import of ``common.ESCAPED_STRING``; any other text is returned as it is.

    The library's terminal of that name admits line breaks, Lark's does not.
    """
    listed = [name.strip() for name in (found["several"] or "").split(",")]
    if not found["one"] and _STRING not in listed:
        return found[0]
    others = ", ".join(name for name in listed if name and name != _STRING)
    definition = f"{found['alias'] or _STRING}: /{COMMON[_STRING]}/"
    return f"%import common ({others})\n{definition}" if others else definition


def check_source(text: str) -> None:
    """Raise GrammarError for a Lark grammar with parts that are not supported, or that derives no finite text."""
    outside = _PIECE.sub(lambda piece: " " if piece["plain"] else piece[0], text)
    for pattern, reason in (
        (_OPTIONS, "options of a rule other than lazy, suffix and capture are not supported"),
        (_DIRECTIVE, "is not supported inside of a grammar; use a JSON schema or a structural tag"),
        (_TOKEN_REFERENCE, "tokens by number are not supported"),
    ):
        match = pattern.search(outside)
        if match:
            raise GrammarError("lark", "", f"{match[0].strip()!r}: {reason}")
    check_lark(text)


TRANSLATE: dict[GrammarKind, Callable[[GrammarSpec], Translation]] = {
    GrammarKind.REGEX: _regex,
    GrammarKind.CHOICE: _choice,
    GrammarKind.LARK: _lark,
}
