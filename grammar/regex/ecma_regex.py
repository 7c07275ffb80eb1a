"""ECMA-262 regular expressions, as JSON Schema's ``pattern`` writes them: parsed, anchored, matched, re-spelled.

A pattern *searches*: it holds if any part of the string matches. `parse` returns it as expressions over the whole
string, with anchors resolved, so that the grammar can intersect and complement them:

    ^(?!x)[a-z]+$   ->   must match  [a-z]+     must not match  x.*

Where ECMA-262 and common validators differ (what ``\\d`` or ``.`` holds, whether ``$`` stands before a last newline)
a pattern is read twice: *narrow* admits what all of them admit, *wide* what any of them admits. What must match is
read narrow, what must not match wide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from .charset import CharSet
from .regex_parser import Alt, Cat, Chars, Look, Mark, RegexError, RegexNode, Repeat, parse_nodes

ANY = Chars(CharSet(negated=True))
ANYTHING = Repeat(ANY, 0, None)
EMPTY = Cat(())
MAX_EXPANSION = 64
MAX_EXAMPLES = 16
_FRIENDLY = "a0A1_- .:/"


@dataclass(frozen=True)
class Pattern:
    """A pattern as conditions on the whole string. What is made of it is worked out once.

    Attributes:
        must: the string matches all of these.
        must_not: and none of these.
    """

    must: tuple[RegexNode, ...]
    must_not: tuple[RegexNode, ...] = ()

    def matches(self, text: str) -> bool:
        """Whether a string satisfies the pattern (polynomial in its length)."""
        return all(fullmatch(node, text) for node in self.must) and not any(
            fullmatch(node, text) for node in self.must_not
        )

    @cached_property
    def json_must(self) -> tuple[str, ...]:
        """Rust regexes for the JSON spellings, without quotes, that must match."""
        return tuple(map(to_json, self.must))

    @cached_property
    def json_must_not(self) -> tuple[str, ...]:
        """Rust regexes for the JSON spellings, without quotes, that must not match."""
        return tuple(map(to_json, self.must_not))

    @cached_property
    def shortest(self) -> tuple[str, ...]:
        """A shortest string for each condition that must match; it may not satisfy the others."""
        return tuple(map(shortest, self.must))

    @cached_property
    def examples(self) -> tuple[str, ...]:
        """Short strings for the different ways of each condition that must match; see `examples`."""
        return tuple(text for node in self.must for text in examples(node))


def parse(pattern: str, *, wide: bool = False, whole: bool = False) -> Pattern:
    """Read a pattern.

    Args:
        pattern: in ECMA-262 syntax.
        wide: read ambiguous parts generously (for patterns that must not match).
        whole: the pattern describes the whole string, as if written ``^(?:...)$``.

    Raises:
        RegexError: for bad syntax, and by name for what has no regular language (back-references) or is not done
            here (lookbehind, word boundaries, lookahead but at the beginning).
    """
    node = parse_nodes(pattern, wide=wide)
    looks, body = _split_looks(node)
    tail = _newline_tail() if wide else EMPTY
    must = [_anchor(body, tail, whole=whole)]
    must_not: list[RegexNode] = []
    for look in looks:
        target = must_not if look.negative else must
        # A negative lookahead must be read the other way round.
        inner = parse_nodes(look.source, wide=look.negative != wide)
        anchored = Cat((Mark.START, inner))
        target.append(_anchor(anchored, _newline_tail() if look.negative != wide else EMPTY, whole=False))
    if must_not and wide:
        raise RegexError("a negative lookahead in a pattern that must not match")
    if any(map(_is_unresolved, (*must, *must_not))):
        raise RegexError("an anchor or lookahead in the middle of a pattern")
    return Pattern(tuple(must), tuple(must_not))


def to_json(node: RegexNode) -> str:
    """Rust regex for the JSON spelling (without quotes) of the strings that an anchored expression matches."""
    if isinstance(node, Chars):
        return node.chars.to_json()
    if isinstance(node, Alt):
        return "(?:" + "|".join(map(to_json, node.items)) + ")"
    if isinstance(node, Cat):
        return "".join(map(to_json, node.items)) or "(?:)"
    if isinstance(node, Repeat):
        return f"(?:{to_json(node.item)}){_bounds(node.least, node.most)}"
    raise TypeError("the expression is not anchored")


def to_rust(node: RegexNode) -> str:
    """Rust regex for the strings themselves."""
    if isinstance(node, Chars):
        return node.chars.to_rust()
    if isinstance(node, Alt):
        return "(?:" + "|".join(map(to_rust, node.items)) + ")"
    if isinstance(node, Cat):
        return "".join(map(to_rust, node.items)) or "(?:)"
    if isinstance(node, Repeat):
        return f"(?:{to_rust(node.item)}){_bounds(node.least, node.most)}"
    raise TypeError("the expression is not anchored")


def fullmatch(node: RegexNode, text: str) -> bool:
    """Whether an anchored expression matches the whole text."""
    return len(text) in _ends(node, text, {0})


def shortest(node: RegexNode) -> str:
    """A shortest string that an anchored expression matches, of friendly characters where there is a choice."""
    if isinstance(node, Chars):
        return next((char for char in _FRIENDLY if char in node.chars), "") or _any_char(node.chars)
    if isinstance(node, Alt):
        return min(map(shortest, node.items), key=len)
    if isinstance(node, Cat):
        return "".join(map(shortest, node.items))
    return shortest(node.item) * node.least if isinstance(node, Repeat) else ""


def examples(node: RegexNode) -> list[str]:
    """Short strings for the different ways in which an anchored expression can match, at most `MAX_EXAMPLES`."""
    found = [shortest(node)]
    if isinstance(node, Alt):
        found += [text for item in node.items for text in examples(item)]
    elif isinstance(node, Cat):
        parts = [shortest(item) for item in node.items]
        for place, item in enumerate(node.items):
            before, after = "".join(parts[:place]), "".join(parts[place + 1 :])
            found += [before + text + after for text in examples(item)]
    elif isinstance(node, Repeat) and node.most != 0:
        found += [text * max(1, node.least) for text in examples(node.item)]
    return list(dict.fromkeys(found))[:MAX_EXAMPLES]


def _any_char(chars: CharSet) -> str:
    return chr(chars.ranges[0][0]) if chars.ranges and not chars.negated else ""


def repeat_product(node: RegexNode) -> int:
    """The product of nested repeat counts along the worst path: how large the pattern is when written out."""
    if isinstance(node, Repeat):
        return max(1, node.least, node.most or 0) * repeat_product(node.item)
    if isinstance(node, Alt | Cat):
        return sum(map(repeat_product, node.items)) or 1
    return 1


def num_repeats(node: RegexNode) -> int:
    """Repeats in an expression, however they are nested."""
    if isinstance(node, Repeat):
        return 1 + num_repeats(node.item)
    return sum(map(num_repeats, node.items)) if isinstance(node, Alt | Cat) else 0


def _bounds(least: int, most: int | None) -> str:
    if (least, most) == (0, 1):
        return "?"
    if most is None and least < 2:
        return "+" if least else "*"
    return f"{{{least},{'' if most is None else most}}}"


def _newline_tail() -> RegexNode:
    return Repeat(Chars(CharSet(((10, 10),))), 0, 1)


def _split_looks(node: RegexNode) -> tuple[list[Look], RegexNode]:
    """Lookaheads at the very beginning (after ``^``), and the rest."""
    items = list(node.items) if isinstance(node, Cat) else [node]
    if not items or items[0] is not Mark.START:
        return [], node
    looks: list[Look] = []
    while len(items) > 1 and isinstance(look := items[1], Look):
        looks.append(look)
        del items[1]
    return looks, Cat(tuple(items))


def _anchor(node: RegexNode, tail: RegexNode, *, whole: bool) -> RegexNode:
    """The expression over the whole string: ``^`` and ``$`` resolved, ANYTHING where a search may go on."""
    options = []
    for at_start, middle in _edge(node, Mark.START):
        for at_end, body in _edge(middle, Mark.END):
            before = EMPTY if at_start or whole else ANYTHING
            after = EMPTY if whole else tail if at_end else ANYTHING
            options.append(Cat((before, body, after)))
            if len(options) > MAX_EXPANSION:
                raise RegexError("too many anchored alternatives")
    return options[0] if len(options) == 1 else Alt(tuple(options))


def _edge(node: RegexNode, mark: Mark) -> Iterator[tuple[bool, RegexNode]]:
    """The alternatives of an expression at one edge: is the anchor there, and what is left without it."""
    if node is mark:
        yield True, EMPTY
    elif not _has_mark(node, mark):
        yield False, node
    elif isinstance(node, Alt):
        for item in node.items:
            yield from _edge(item, mark)
    elif isinstance(node, Cat):
        yield from _edge_cat(node, mark)
    elif isinstance(node, Repeat) and (node.least, node.most) == (0, 1):
        yield False, EMPTY
        yield from _edge(node.item, mark)
    elif isinstance(node, Repeat) and (node.least, node.most) == (1, 1):
        yield from _edge(node.item, mark)
    else:
        raise RegexError(f"the anchor {mark.value!r} inside a repeat")


def _edge_cat(node: Cat, mark: Mark) -> Iterator[tuple[bool, RegexNode]]:
    start = mark is Mark.START
    items = node.items if start else node.items[::-1]
    first, rest = items[0], items[1:]
    for anchored, edge in _edge(first, mark):
        if edge == EMPTY and anchored and rest and _has_mark(Cat(rest), mark):
            others = Cat(rest if start else rest[::-1])
            for _, body in _edge(others, mark):
                yield True, body
        elif any(_has_mark(item, mark) for item in rest):
            raise RegexError(f"the anchor {mark.value!r} in the middle of a pattern")
        else:
            yield anchored, Cat((edge, *rest) if start else (*rest[::-1], edge))


def _is_unresolved(node: RegexNode) -> bool:
    if isinstance(node, Alt | Cat):
        return any(map(_is_unresolved, node.items))
    return _is_unresolved(node.item) if isinstance(node, Repeat) else isinstance(node, Mark | Look)


def _has_mark(node: RegexNode, mark: Mark) -> bool:
    if isinstance(node, Alt | Cat):
        return any(_has_mark(item, mark) for item in node.items)
    return _has_mark(node.item, mark) if isinstance(node, Repeat) else node is mark


def _ends(node: RegexNode, text: str, starts: set[int]) -> set[int]:
    """Positions where a match may end that begins at one of `starts`."""
    if isinstance(node, Chars):
        return {at + 1 for at in starts if at < len(text) and text[at] in node.chars}
    if isinstance(node, Alt):
        return set().union(*(_ends(item, text, starts) for item in node.items))
    if isinstance(node, Cat):
        for item in node.items:
            if not starts:
                break
            starts = _ends(item, text, starts)
        return starts
    if isinstance(node, Repeat):
        return _repeat_ends(node, text, starts)
    raise TypeError("the expression is not anchored")


def _repeat_ends(node: Repeat, text: str, starts: set[int]) -> set[int]:
    reached = starts if node.least == 0 else set()
    for count in range(1, (node.most or node.least + len(text) + 1) + 1):
        starts = _ends(node.item, text, starts)
        if count >= node.least:
            if starts <= reached:
                break
            reached = reached | starts
        if not starts:
            break
    return reached
