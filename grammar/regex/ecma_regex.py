"""ECMA-262 patterns (JSON Schema's ``pattern``): parsed, anchored, matched, translated to Rust regex.

A pattern is *searched*: it holds if any part of the string matches. `parse` returns expressions over the whole string,
with anchors resolved, which the grammar can intersect and complement:

    ^(?!x)[a-z]+$   ->   must match  [a-z]+     must not match  x.*

ECMA-262 and common validators differ in some points, such as the characters of ``\\d`` or ``.``, and whether ``$``
matches before a final newline. So there are two readings of a pattern: the *narrow* reading matches only what all of
them match, and the *wide* reading matches what any of them matches. The narrow reading is used for a pattern that must
match, the wide one for a pattern that must not match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from ..sized_cache import sized_cache
from .charset import CharSet
from .regex_parser import Alt, Anchor, Cat, Chars, Lookahead, RegexError, RegexNode, Repeat, parse_nodes

ANY = Chars(CharSet(negated=True))
ANYTHING = Repeat(ANY, 0, None)
EMPTY = Cat(())
MAX_EXPANSION = 64
PATTERN_BYTES = 800  # Memory of a pattern per character, as it was read, with its derived forms.
MAX_EXAMPLES = 16
MAX_REPEAT_PRODUCT = 10_000
# Patterns in use have 15 at most; of hundreds in a row the backend loses count.
MAX_REPEATS = 200
_COMMON = "a0A1_- .:/"


@dataclass(frozen=True)
class Pattern:
    """A pattern as conditions on the whole string; derived forms are cached.

    Attributes:
        must: expressions all of which the string matches.
        must_not: expressions none of which the string matches.
    """

    must: tuple[RegexNode, ...]
    must_not: tuple[RegexNode, ...] = ()

    def matches(self, text: str) -> bool:
        """Return whether a string satisfies the pattern, in time polynomial in its length."""
        return all(fullmatch(node, text) for node in self.must) and not any(
            fullmatch(node, text) for node in self.must_not
        )

    def check_repeats(self) -> None:
        """Raise a RegexError if the pattern has more, or larger, repeats than the backend handles well."""
        if any(repeat_product(node) > MAX_REPEAT_PRODUCT for node in self.must):
            raise RegexError(f"repeats multiply to more than {MAX_REPEAT_PRODUCT}")
        if sum(map(num_repeats, (*self.must, *self.must_not))) > MAX_REPEATS:
            raise RegexError(f"more than {MAX_REPEATS} repeats")

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
        """Short strings for the alternatives of each condition that must match; see `examples`."""
        return tuple(text for node in self.must for text in examples(node))


def parse(pattern: str, *, wide: bool = False, whole: bool = False) -> Pattern:
    """Read a pattern.

    Args:
        pattern: the pattern in ECMA-262 syntax.
        wide: whether to use the wide reading, for patterns that must not match.
        whole: whether the pattern must match the whole string, as if written ``^(?:...)$``.

    Raises:
        RegexError: the pattern is refused: for bad syntax, for what is not regular (back-references), and for what is
            not supported (lookbehind, word boundaries, lookahead other than at the beginning).
    """
    node = parse_nodes(pattern, wide=wide)
    looks, body = _split_lookaheads(node)
    tail = _newline_tail() if wide else EMPTY
    must = [_anchor(body, tail, whole=whole)]
    must_not: list[RegexNode] = []
    for look in looks:
        target = must_not if look.negative else must
        # A negative lookahead must be read the other way round.
        inner = parse_nodes(look.source, wide=look.negative != wide, fold=look.fold)
        anchored = Cat((Anchor.START, inner))
        target.append(_anchor(anchored, _newline_tail() if look.negative != wide else EMPTY, whole=False))
    if any(map(_is_unresolved, (*must, *must_not))):
        raise RegexError("an anchor or lookahead in the middle of a pattern")
    return Pattern(tuple(must), tuple(must_not))


@sized_cache(16 << 20, lambda _, source, *wide: PATTERN_BYTES * (4 + len(source)))
def read_pattern(source: str, wide: bool = False) -> Pattern:
    return parse(source, wide=wide)


def pattern_matches(source: str, text: str, wide: bool = False) -> bool:
    return read_pattern(source, wide).matches(text)


def to_json(node: RegexNode) -> str:
    """Return the Rust regex of the JSON spellings, without quotes, of an anchored expression's strings."""
    return _translate(node, CharSet.to_json)


def to_rust(node: RegexNode) -> str:
    """Return the Rust regex of an anchored expression's strings."""
    return _translate(node, CharSet.to_rust)


def _translate(node: RegexNode, spell: Callable[[CharSet], str]) -> str:
    if isinstance(node, Chars):
        return spell(node.chars)
    if isinstance(node, Alt):
        return "(?:" + "|".join(_translate(item, spell) for item in node.items) + ")"
    if isinstance(node, Cat):
        return "".join(_translate(item, spell) for item in node.items) or "(?:)"
    if isinstance(node, Repeat):
        return f"(?:{_translate(node.item, spell)}){_bounds(node.least, node.most)}"
    raise TypeError("the expression is not anchored")


def fullmatch(node: RegexNode, text: str) -> bool:
    return len(text) in _ends(node, text, {0})


def shortest(node: RegexNode) -> str:
    """Return a shortest string that an anchored expression matches, with common characters if possible."""
    if isinstance(node, Chars):
        return next((char for char in _COMMON if char in node.chars), "") or _any_char(node.chars)
    if isinstance(node, Alt):
        return min(map(shortest, node.items), key=len)
    if isinstance(node, Cat):
        return "".join(map(shortest, node.items))
    return shortest(node.item) * node.least if isinstance(node, Repeat) else ""


def examples(node: RegexNode) -> list[str]:
    """Return short strings for the alternatives of an anchored expression, at most `MAX_EXAMPLES`."""
    found = [shortest(node)]
    if isinstance(node, Alt):
        found += [text for item in node.items for text in examples(item)]
    elif isinstance(node, Cat):
        parts = [shortest(item) for item in node.items]
        for index, item in enumerate(node.items):
            before, after = "".join(parts[:index]), "".join(parts[index + 1 :])
            found += [before + text + after for text in examples(item)]
    elif isinstance(node, Repeat) and node.most != 0:
        found += [text * max(1, node.least) for text in examples(node.item)]
    return list(dict.fromkeys(found))[:MAX_EXAMPLES]


def _any_char(chars: CharSet) -> str:
    return chr(chars.ranges[0][0]) if chars.ranges and not chars.negated else ""


def repeat_product(node: RegexNode) -> int:
    """Return the size of a pattern when its repeats are written out: nested counts multiplied, siblings added."""
    if isinstance(node, Repeat):
        return max(1, node.least, node.most or 0) * repeat_product(node.item)
    if isinstance(node, Alt | Cat):
        return sum(map(repeat_product, node.items)) or 1
    return 1


def num_repeats(node: RegexNode) -> int:
    """Count the repeats of a pattern, nested ones included."""
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


def _split_lookaheads(node: RegexNode) -> tuple[list[Lookahead], RegexNode]:
    """Return the lookaheads at the very beginning (after ``^``), and the rest."""
    items = list(node.items) if isinstance(node, Cat) else [node]
    if not items or items[0] is not Anchor.START:
        return [], node
    looks: list[Lookahead] = []
    while len(items) > 1 and isinstance(look := items[1], Lookahead):
        looks.append(look)
        del items[1]
    return looks, Cat(tuple(items))


def _anchor(node: RegexNode, tail: RegexNode, *, whole: bool) -> RegexNode:
    """Return the expression over the whole string: ``^`` and ``$`` resolved, `ANYTHING` where they are missing."""
    options = []
    for at_start, middle in _edge(node, Anchor.START):
        for at_end, body in _edge(middle, Anchor.END):
            before = EMPTY if at_start or whole else ANYTHING
            after = EMPTY if whole else tail if at_end else ANYTHING
            options.append(Cat((before, body, after)))
            if len(options) > MAX_EXPANSION:
                raise RegexError("too many anchored alternatives")
    return options[0] if len(options) == 1 else Alt(tuple(options))


def _edge(node: RegexNode, anchor: Anchor) -> Iterator[tuple[bool, RegexNode]]:
    """Yield the alternatives of an expression at one edge: whether anchored, and the expression without anchor."""
    if node is anchor:
        yield True, EMPTY
    elif not _has_anchor(node, anchor):
        yield False, node
    elif isinstance(node, Alt):
        for item in node.items:
            yield from _edge(item, anchor)
    elif isinstance(node, Cat):
        yield from _edge_cat(node, anchor)
    elif isinstance(node, Repeat) and (node.least, node.most) == (0, 1):
        yield False, EMPTY
        yield from _edge(node.item, anchor)
    elif isinstance(node, Repeat) and (node.least, node.most) == (1, 1):
        yield from _edge(node.item, anchor)
    else:
        raise RegexError(f"the anchor {anchor.value!r} inside a repeat")


def _edge_cat(node: Cat, anchor: Anchor) -> Iterator[tuple[bool, RegexNode]]:
    start = anchor is Anchor.START
    items = node.items if start else node.items[::-1]
    first, rest = items[0], items[1:]
    for anchored, edge in _edge(first, anchor):
        if edge == EMPTY and anchored and rest and _has_anchor(Cat(rest), anchor):
            others = Cat(rest if start else rest[::-1])
            for _, body in _edge(others, anchor):
                yield True, body
        elif any(_has_anchor(item, anchor) for item in rest):
            raise RegexError(f"the anchor {anchor.value!r} in the middle of a pattern")
        else:
            yield anchored, Cat((edge, *rest) if start else (*rest[::-1], edge))


def _is_unresolved(node: RegexNode) -> bool:
    if isinstance(node, Alt | Cat):
        return any(map(_is_unresolved, node.items))
    return _is_unresolved(node.item) if isinstance(node, Repeat) else isinstance(node, Anchor | Lookahead)


def _has_anchor(node: RegexNode, anchor: Anchor) -> bool:
    if isinstance(node, Alt | Cat):
        return any(_has_anchor(item, anchor) for item in node.items)
    return _has_anchor(node.item, anchor) if isinstance(node, Repeat) else node is anchor


def _ends(node: RegexNode, text: str, starts: set[int]) -> set[int]:
    """Return the positions at which matches that begin at one of `starts` may end."""
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
    most = node.least + len(text) + 1 if node.most is None else node.most
    for count in range(1, most + 1):
        starts = _ends(node.item, text, starts)
        if count >= node.least:
            if starts <= reached:
                break
            reached = reached | starts
        if not starts:
            break
    return reached
