"""Lark grammars in JSON strings: rewrites a grammar so that its texts are escaped as in a JSON string.

Each character of a terminal is replaced by its spelling between the quotes of a JSON string. So a tool call with JSON
arguments can contain a text of the grammar in one of its strings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from ..errors import GrammarError
from ..regex.char_classes import code_ranges
from ..regex.charset import ESCAPED, json_spelling, json_string, rust_literal
from ..regex.ecma_regex import to_json
from ..regex.regex_parser import Alt, Cat, Chars, RegexError, RegexNode, Repeat
from ..schema.fewest_tokens import text_of_fewest_tokens
from ..vocabulary import Vocabulary
from .lark_dialect import layout
from .lark_ends import LarkEnds, lark_ends
from .lark_text import COMMON, lark_expression, lark_literal
from .plain_grammars import check_source

_TOKEN = re.compile(
    r"""(?P<skip>\s+|(?://|\#)[^\n]*)
    |%import\s+common\s*\.\s*(?P<imported>\w+)(?:[ \t]*->[ \t]*(?P<as>\w+))?
    |%import\s+common\s*\(\s*(?P<several>\w+(?:\s*,\s*\w+)*)\s*\)
    |(?P<directive>%\w+)
    |(?P<low>"(?:\\.|[^"\\\n])")\s*\.\.\s*(?P<high>"(?:\\.|[^"\\\n])")
    |(?P<text>"(?:\\.|[^"\\\n])*")(?P<fold>i?)
    |/(?P<regex>(?:\\.|[^/\\\n])+)/(?P<flags>[a-z]*)
    |(?P<rule>[!?]*\w+(?:\.-?\d+)?(?:\[[^\]\n]*=[^\]\n]*\])?(?:\{[^}:]*\})?\s*:)
    |(?P<other>->\s*\w+|~\s*\d+(?:\s*\.\.\s*\d+)?|\{\s*\d*\s*,?\s*\d*\s*\}|\w[\w-]*|[|()\[\]?*+])""",
    re.VERBOSE,
)


def ends_in_json_string(text: str, cost: Callable[[str], int], vocabulary: Vocabulary) -> LarkEnds:
    """Return the short ends of a Lark grammar's texts in their JSON spellings, without quotes; see ``lark_ends``."""
    cheap = partial(text_of_fewest_tokens, vocabulary=vocabulary)
    return lark_ends(text, cost, lambda plain: json_string(plain)[1:-1], cheap)


def in_json_string(text: str) -> str:
    """Return the grammar of the JSON spellings, without quotes, of all texts of a Lark grammar.

    The lexer consumes as much text as a terminal matches, byte by byte. After a backslash it does not know yet whether
    the escaped character belongs to the terminal or to the next one. So a terminal that repeats characters with escapes
    becomes a rule that matches one character at a time.

    Raises:
        GrammarError: a part of the grammar has no such form: directives other than ``%ignore`` and imports of common
            terminals, special tokens, regular expressions that look ahead, and ``&`` and a ``~`` before a terminal.
    """
    check_source(text)
    pieces = list(_pieces(text))
    rules = _terminals_as_rules(pieces)
    if (rules or any(piece.is_rule and not piece.within for piece in pieces)) and any(
        piece.text == "%ignore" for piece in pieces
    ):
        raise GrammarError(
            "lark", "", "'%ignore' is not supported beside terminals that repeat quotes, backslashes or line breaks"
        )
    names = {piece.name for piece in pieces}
    prefix = "json_"
    while any(f"{prefix}{name.lower()}" in names for name in rules):
        prefix += "_"
    return layout("".join(_renamed(piece, rules, prefix) for piece in pieces))


class _Piece(NamedTuple):
    """A part of the rewritten grammar.

    Attributes:
        text: text of the piece.
        name: name of the rule or terminal that the piece defines or refers to; "" for other text.
        within: name of the terminal whose definition contains the piece; "" in the definition of a rule.
        is_rule: whether the piece is a rewritten expression that cannot be part of a terminal.
    """

    text: str
    name: str = ""
    within: str = ""
    is_rule: bool = False


def _terminals_as_rules(pieces: Sequence[_Piece]) -> set[str]:
    """Return the terminals that become rules, including terminals that contain them."""
    found = {piece.within for piece in pieces if piece.is_rule and piece.within}
    while more := {piece.within for piece in pieces if piece.name in found and piece.within} - found:
        found |= more
    return found


def _renamed(piece: _Piece, rules: Collection[str], prefix: str) -> str:
    return piece.text.replace(piece.name, f"{prefix}{piece.name.lower()}", 1) if piece.name in rules else piece.text


def _pieces(text: str) -> Iterator[_Piece]:
    at, within = 0, ""
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            shown = text[at : at + 20].split("\n")[0]
            raise GrammarError("lark", "", f"{shown!r} is not supported in the input of a tool (at character {at})")
        at = match.end()
        if match["directive"]:
            within = ""
        if match["rule"]:
            found = _NAME.search(match["rule"])
            name = found[0] if found is not None else ""
            within = name if name.isupper() else ""
            yield _Piece(match["rule"], name, within)
        elif match["imported"]:
            yield from _imported(match["imported"], match["as"] or match["imported"])
        elif match["several"]:
            for each in match["several"].split(","):
                yield from _imported(each.strip(), each.strip())
        else:
            yield _written(match, within)


def _written(match: re.Match[str], within: str) -> _Piece:
    """Return a part of a definition in its new form."""
    if match["low"]:
        low, high = (re.escape(lark_literal(match[each])) for each in ("low", "high"))
        return _expression(f"[{low}-{high}]", within=within)
    if match["text"]:
        plain = lark_literal(match["text"])
        return _expression(re.escape(plain), "i" if match["fold"] else "", within) if plain else _Piece('""')
    if match["regex"]:
        return _expression(match["regex"].replace("\\/", "/"), match["flags"], within)
    if match["directive"] and match[0] != "%ignore":
        raise GrammarError("lark", "", f"{match[0]!r} is not supported in the input of a tool")
    if match["skip"]:
        return _Piece("\n" if "\n" in match[0] else " ")
    name = match[0] if match[0].isidentifier() else ""
    return _Piece(match[0], name, within)


def _imported(name: str, alias: str) -> Iterator[_Piece]:
    if name not in COMMON:
        raise GrammarError("lark", "", f"'common.{name}' is not one of {', '.join(COMMON)}")
    yield _Piece(f"\n{alias}:", alias, alias)
    yield _expression(COMMON[name], within=alias)
    yield _Piece("\n")


def _expression(pattern: str, flags: str = "", within: str = "") -> _Piece:
    """Return the form of a regular expression's JSON spellings."""
    if not set(flags) <= set("isu"):
        raise GrammarError("lark", "", f"the flags {flags!r} of a regular expression: 'i' and 's' are supported")
    try:
        node = lark_expression(pattern, flags)
    except RegexError as error:
        raise GrammarError("lark", "", f"/{pattern[:100]}/ cannot be used: {error}") from None
    # A repeat of an expression may follow, and a repeat cannot follow a repeat.
    return _Piece(f" ({_rule(node)})", "", within, _repeats_escapes(node))


def _walk(node: RegexNode) -> Iterator[RegexNode]:
    yield node
    for item in [node.item] if isinstance(node, Repeat) else node.items if isinstance(node, Alt | Cat) else ():
        yield from _walk(item)


def _has_escapes(node: RegexNode) -> bool:
    return any(isinstance(each, Chars) and any(chr(code) in each.chars for code in ESCAPED) for each in _walk(node))


def _repeats_escapes(node: RegexNode) -> bool:
    return any(isinstance(each, Repeat) and _has_escapes(each.item) for each in _walk(node))


def _rule(node: RegexNode) -> str:
    if not _repeats_escapes(node):
        return f"/{to_json(node)}/" if any(isinstance(each, Chars) for each in _walk(node)) else '""'
    if isinstance(node, Alt | Cat):
        return "(" + (" | " if isinstance(node, Alt) else " ").join(map(_rule, node.items)) + ")"
    assert isinstance(node, Repeat)
    is_endless = node.most is None and node.least < 2
    count = "*+"[node.least] if is_endless else f"{{{node.least},{'' if node.most is None else node.most}}}"
    if not isinstance(node.item, Chars):
        return f"({_rule(node.item)}){count}"
    chars = node.item.chars
    options = ["|".join(rust_literal(json_spelling(chr(code))) for code in ESCAPED if chr(code) in chars)]
    if any(high >= 0x20 and (low, high) not in _ONE_ESCAPE for low, high in code_ranges(chars)):
        # Plain characters are matched by one expression.
        options.insert(0, f"[{chars.to_rust()}&&[^\\x22\\x5C\\x00-\\x1F]]{'+' if is_endless else ''}")
    return "(" + " | ".join(f"/{option}/" for option in options) + f"){count}"


_ONE_ESCAPE = ((0x22, 0x22), (0x5C, 0x5C))
_NAME = re.compile(r"\w+")
