"""String rules: strings of a schema that our own automata match, because llguidance's lexer would need too many states.

llguidance's lexer has one state for each pair of a place in a pattern and a length. A string rule's automaton has
states for places only, and counts the length separately (``StringAutomaton``). If such a string is possible at a
position of an answer, all other strings that are possible there become rules too. So at each position strings are
matched either only by our automata or only by the library.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from math import prod

from ..errors import GrammarError
from ..regex.ecma_regex import Pattern, read_pattern, repeat_product
from ..regex.regex_parser import Alt, Cat, Chars, RegexError, RegexNode, Repeat
from ..regex.string_automaton import (
    MAX_STATES,
    START,
    AutomatonTooLarge,
    StringAutomaton,
    each_excluded,
    string_automaton,
)
from ..regex.string_formats import FORMATS
from ..schema.constraints import ALWAYS, NO_STRINGS, Alternative, Arrays, Conj, Objects, Strings
from ..schema.document import SchemaNode
from ..schema.json_types import ARRAY, OBJECT, STRING
from ..schema.satisfiability import Satisfiability
from ..schema.scalars import MAX_LENGTH
from ..schema.string_language import expressions
from ..sized_cache import sized_cache
from .key_classes import key_classes

# The grammar admits two texts for a string rule that never occur in answers. Where the rule may begin it admits `PROBE`
# and the rule's number, which is how the matcher finds the possible rules. After the string's closing quote it admits
# `MATCHED` and a list of numbers, with which the matcher names the rules that the string matches, if the rule's own
# number is in the list.
PROBE, MATCHED = b"\x01", b"\x02"
# The lexer's states for a string are estimated as the product of its pattern's size, with repeats written out, and its
# length. A string with a larger estimate than `MAX_WEIGHT` becomes a rule. Strings above `MAX_SMALL_WEIGHT` become
# rules too if one above `MAX_WEIGHT` exists, or if the estimates of all strings add up to more than `MAX_TOTAL`.
MAX_WEIGHT = 1_000
MAX_SMALL_WEIGHT = 200
MAX_TOTAL = 10_000
MAX_RULES = 400
MAX_VALUE_CHARS = 2_000
# Largest number of value positions in a document that are distinguished.
MAX_POSITIONS = 3_000
# The states of a pattern are counted if its size, with repeats written out, lies between these bounds: smaller patterns
# have few states, and no automaton is built for larger ones.
MIN_BLOWUP, MAX_BLOWUP = 12, 4_000
TOO_LARGE = f"too complex to follow: its automaton has more than {MAX_STATES} states"

_Position = frozenset[Conj]


def probe_text(number: int) -> bytes:
    """Return the text that is admitted where a rule may begin."""
    return PROBE + b"%d;" % number


def matched_text(numbers: Iterable[int]) -> bytes:
    """Return the text that is admitted after the string of any of some rules."""
    return MATCHED + b"".join(b"%d," % number for number in numbers) + b";"


def marker_terminals(number: int) -> tuple[str, str]:
    """Return the terminals of a rule's two other spellings."""
    return rf"/\x01{number};/", rf"/\x02([0-9]+,)*{number},([0-9]+,)*;/"


def string_rules(
    satisfiability: Satisfiability, root: Conj, nodes: Sequence[SchemaNode], *, is_possible: bool = True
) -> dict[Strings, StringAutomaton]:
    """Return the automata of the strings that become rules; none if no string is too large for the lexer.

    Args:
        satisfiability: satisfiability of the schema.
        root: the conjunction of the whole schema.
        nodes: all subschemas.
        is_possible: whether rules can be distinguished from everything else in the grammar.

    Raises:
        GrammarError: a string is too large for the lexer and cannot become a rule.
    """
    for node in nodes:
        for keyword, sources in (("pattern", [node.schema.get("pattern")]), _key_patterns(node)):
            if any(isinstance(source, str) and is_too_large(source) for source in sources):
                raise node.error(keyword, TOO_LARGE)
    if not _may_be_heavy(nodes):
        return {}
    positions = _strings_by_position(satisfiability, root)
    if positions is None:
        return {}
    chosen = _heavy({strings for together in positions for strings in together})
    if not is_possible:
        _refuse(chosen, nodes, "too complex to follow where other text is also allowed")
        return {}
    while True:
        chosen = _with_neighbours(chosen, positions)
        ordered = dict.fromkeys(strings for together in positions for strings in together if strings in chosen)
        found: dict[Strings, StringAutomaton] = {}
        failed = set()
        for strings in ordered:
            try:
                each = automaton(strings)
            except AutomatonTooLarge:
                failed.add(strings)
                continue
            if each is not None:
                found[strings] = each
        if not failed and len(found) <= MAX_RULES:
            return found
        if not failed:
            _refuse(chosen, nodes, f"too complex to follow: more than {MAX_RULES} such strings")
            return {}
        left = _with_neighbours(failed, positions)
        _refuse(left, nodes, TOO_LARGE)
        chosen -= left


@sized_cache(1 << 20, lambda _, source: len(source))
def is_too_large(source: str) -> bool:
    """Return whether the automaton of a pattern alone has too many states, as that of ``.*a.{20}`` has.

    The library's lexer would create these states one by one during an answer, and would fail in the middle of it.
    """
    try:
        pattern = read_pattern(source)
    except RegexError:
        return False
    return has_too_many_states(pattern)


def has_too_many_states(pattern: Pattern) -> bool:
    """Return whether an automaton of a pattern alone has too many states."""
    nodes = (*pattern.must, *pattern.must_not)
    size = sum(map(repeat_product, nodes))
    # Without a loop before it, or with a small loop, a repeat has about as many states as its size.
    if not MIN_BLOWUP <= size <= MAX_BLOWUP or not any(map(_has_loop, nodes)):
        return False
    try:
        string_automaton(pattern.must, each_excluded(pattern.must_not))
    except AutomatonTooLarge:
        return True
    return False


def _has_loop(node: RegexNode) -> bool:
    if isinstance(node, Repeat):
        return node.most is None or _has_loop(node.item)
    return any(map(_has_loop, node.items)) if isinstance(node, Alt | Cat) else False


def _key_patterns(node: SchemaNode) -> tuple[str, list[str]]:
    found = node.schema.get("patternProperties")
    return "patternProperties", list(found) if isinstance(found, dict) else []


def _refuse(found: Iterable[Strings], nodes: Sequence[SchemaNode], reason: str) -> None:
    """Raise a GrammarError at the keyword of the heaviest of some strings, if any is too large for the lexer."""
    heaviest = max(found, key=weight, default=NO_STRINGS)
    if weight(heaviest) <= MAX_WEIGHT:
        return
    sources = heaviest.patterns | heaviest.not_patterns
    for keyword, values in (("pattern", sources), ("format", heaviest.formats)):
        for node in nodes:
            value = node.schema.get(keyword)
            if isinstance(value, str) and value in values:
                raise node.error(keyword, reason)
    raise GrammarError("pattern", "", reason)


def weight(strings: Strings) -> int:
    """Estimate the states of a string in a lexer that counts the length in its states."""
    if strings is NO_STRINGS or strings.values is not None:
        return 0
    patterns = [*map(read_pattern, strings.patterns)]
    nodes = [node for pattern in patterns for node in (*pattern.must, *pattern.must_not)]
    left_out = [read_pattern(source, True) for source in strings.not_patterns]
    nodes += [node for pattern in left_out for node in (*pattern.must, *pattern.must_not)]
    nodes += [node for name in strings.formats for node in FORMATS[name].must]
    if len(nodes) < 2 and all(map(_is_in_step, nodes)):
        return 0
    return max(strings.least, strings.most or 0, 1) * prod(map(repeat_product, nodes))


def _is_in_step(node: RegexNode) -> bool:
    """Return whether a place in an expression determines the length so far, except for one repeat of a character."""
    if isinstance(node, Cat):
        uneven = [item for item in node.items if not _is_even(item)]
        return not uneven or (len(uneven) == 1 and _is_in_step(uneven[0]))
    if isinstance(node, Alt):
        return all(map(_is_in_step, node.items))
    return _is_even(node.item) if isinstance(node, Repeat) else True


def _is_even(node: RegexNode) -> bool:
    """Return whether all strings of an expression have the same length."""
    if isinstance(node, Repeat):
        return node.least == node.most and _is_even(node.item)
    if isinstance(node, Cat):
        return all(map(_is_even, node.items))
    return isinstance(node, Chars)


def _may_be_heavy(nodes: Iterable[SchemaNode]) -> bool:
    """Return whether any string of a schema can be too large, from its keywords alone, which is fast."""
    repeats, longest = 0, 1
    for node in nodes:
        schema = node.schema
        for keyword in ("maxLength", "minLength"):
            if keyword in schema:
                longest = max(longest, min(int(schema[keyword]), MAX_LENGTH))
        patterns = [FORMATS[schema["format"]]] if schema.get("format") in FORMATS else []
        if "pattern" in schema:
            with suppress(RegexError):
                patterns.append(read_pattern(schema["pattern"]))
        repeats += sum(repeat_product(part) for pattern in patterns for part in (*pattern.must, *pattern.must_not))
    return repeats * longest > MAX_SMALL_WEIGHT


def _heavy(found: set[Strings]) -> set[Strings]:
    weights = {strings: weight(strings) for strings in found}
    heavy = {strings for strings, size in weights.items() if size > MAX_WEIGHT}
    if heavy or sum(weights.values()) > MAX_TOTAL:
        heavy |= {strings for strings, size in weights.items() if size > MAX_SMALL_WEIGHT}
    return heavy


def _with_neighbours(chosen: set[Strings], positions: list[dict[Strings, None]]) -> set[Strings]:
    """Return some strings together with all strings that are possible at the same position, transitively."""
    chosen = set(chosen)
    grown = True
    while grown:
        before = len(chosen)
        for together in positions:
            if not chosen.isdisjoint(together):
                chosen.update(together)
        grown = len(chosen) > before
    return chosen


@sized_cache(32 << 20, lambda found, strings: strings.num_bytes + (found.bytes_alone if found else 0))
def automaton(strings: Strings) -> StringAutomaton | None:
    """Return the automaton of a string, or None if it admits nothing.

    Raises:
        AutomatonTooLarge: the automaton would have too many states.
    """
    if strings.values is not None and sum(map(len, strings.values)) > MAX_VALUE_CHARS:
        raise AutomatonTooLarge
    must, must_not = expressions(strings)
    found = string_automaton(must, must_not, strings.least, strings.most)
    return found if found.can_finish[START, 0] else None


def _strings_by_position(satisfiability: Satisfiability, root: Conj) -> list[dict[Strings, None]] | None:
    """Return the strings that are possible together, for each position of a document; None if there are too many."""
    positions = alternatives_by_position(satisfiability, root)
    if positions is None:
        return None
    return [dict.fromkeys(each.strings for each in listed if each.types & STRING) for listed in positions]


def alternatives_by_position(satisfiability: Satisfiability, root: Conj) -> list[list[Alternative]] | None:
    """Return the alternatives that are possible together, for each position of a document; None if there are too many.

    With ``anyOf`` the text so far may fit several alternatives, so a position has a set of conjunctions.
    """
    seen: set[_Position] = {frozenset((root,))}
    todo = list(seen)
    found = []
    for position in todo:
        alternatives = [
            alternative
            for conj in position
            for alternative in (satisfiability.satisfiable_alternatives(conj) if conj != ALWAYS else [Alternative()])
        ]
        found.append(alternatives)
        parts = _items([each.arrays for each in alternatives if each.types & ARRAY])
        for part in (*parts, *_values([each.objects for each in alternatives if each.types & OBJECT])):
            kept = frozenset(conj for conj in part if satisfiability.is_satisfiable(conj))
            if kept and kept not in seen:
                seen.add(kept)
                todo.append(kept)
        if len(todo) > MAX_POSITIONS:
            return None
    return found


def _items(arrays: list[Arrays]) -> Iterator[set[Conj]]:
    for index in range(max((each.num_prefix for each in arrays), default=-1) + 1):
        items: set[Conj] = set()
        for each in arrays:
            item = each.item(index)
            items |= {item, *(item | entry.item for entry in each.contains)}
            items |= {item | entry.negated for entry in each.contains}
        yield items


def _values(objects: list[Objects]) -> Iterator[set[Conj]]:
    names = dict.fromkeys(name for each in objects for name in each.declared())
    for name in names:
        yield {each.value(name) for each in objects}
    if objects:
        yield {conj for each in objects for _, conj in key_classes(each)}
