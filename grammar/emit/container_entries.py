"""Container entries: the languages of the items and keys that a matcher remembers, from the parts of a schema."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ..errors import GrammarError
from ..regex.ecma_regex import parse, repeat_product
from ..regex.regex_parser import RegexNode
from ..regex.string_automaton import AutomatonTooLarge, Excluded, StringAutomaton, string_automaton
from ..schema.constraints import ALWAYS, Alternative, Conj, Objects, Strings
from ..schema.json_types import ARRAY, NUMBER, OBJECT, STRING
from ..schema.string_language import MAX_PLACES, expressions
from .entry_languages import EntryLanguage, is_endless
from .key_classes import key_classes, key_patterns
from .lark_rules import LarkRules
from .listed_values import listed_strings
from .number_terminals import number_terminal
from .string_rules import automaton

# Number of an automaton's states times lengths; its table has eight bytes for each.
MAX_CELLS = 1_000_000
_TERM = re.compile(r"(~?)/((?:[^/\\]|\\.)*)/")
_HEXADECIMAL = re.compile(r"\\x\{([0-9A-F]+)\}")


def item_language(rules: LarkRules, conj: Conj) -> EntryLanguage:
    """Return the language of the items of an array.

    Raises:
        GrammarError: the items are too complex for automata.
    """
    words: dict[str, None] = {}
    numbers: list[StringAutomaton] = []
    strings: list[StringAutomaton] = []
    has_containers = has_limited = False
    for each in _alternatives(rules, conj):
        words |= dict.fromkeys(rules.words(each.types))
        if each.types & NUMBER:
            numbers.append(_number_automaton(rules, each))
        if each.types & STRING:
            strings += _string_automata(rules, [each.strings])
        if each.types & (ARRAY | OBJECT):
            has_containers = True
            has_limited = has_limited or not _is_open(rules, each)
    return EntryLanguage(tuple(words), tuple(numbers), tuple(strings), has_containers, has_limited)


def key_language(rules: LarkRules, objects: Objects, listed: Iterable[str]) -> EntryLanguage | None:
    """Return the language of the unlisted keys of an object; None if each beginning of a key has infinitely many ends.

    Raises:
        GrammarError: the keys are too complex for automata.
    """
    found = _unlisted(rules, objects, listed)
    if found is None:
        return None
    if any(sum(map(repeat_product, _nodes(keys))) > MAX_PLACES for keys in found):
        return None
    try:
        language = EntryLanguage(strings=tuple(_string_automata(rules, found)), of_keys=True)
    except GrammarError:
        return None
    return None if language.strings and all(map(is_endless, language.strings)) else language


def few_keys(rules: LarkRules, objects: Objects) -> list[str] | None:
    """Return the unlisted keys of an object; None if they are too many to list."""
    found = _unlisted(rules, objects, objects.declared())
    return None if found is None else listed_strings(found)


def _unlisted(rules: LarkRules, objects: Objects, listed: Iterable[str]) -> list[Strings] | None:
    """Return the constraints on unlisted keys, each of which may hold; None if there are no such keys."""
    patterns = key_patterns(objects)
    if not patterns and objects.names == ALWAYS:
        return None
    names = _alternatives(rules, objects.names)
    permitted = [each.strings for each in names if each.types & STRING]
    found = []
    for matched, conj in key_classes(objects):
        rest = frozenset(pattern for pattern in patterns if pattern not in matched)
        keys = Strings(patterns=frozenset(matched), not_patterns=rest, excluded=frozenset(listed))
        if rules.satisfiability.is_satisfiable(conj):
            found += [keys & strings for strings in permitted]
    return found


def _nodes(strings: Strings) -> list[RegexNode]:
    must, must_not = expressions(strings)
    return [*must, *(node for group in must_not for node in group.nodes)]


def _alternatives(rules: LarkRules, conj: Conj) -> Sequence[Alternative]:
    if conj == ALWAYS:
        return [Alternative()]
    rules.satisfiability.min_size(conj)
    return rules.satisfiability.satisfiable_alternatives(conj)


def _string_automata(rules: LarkRules, found: Iterable[Strings]) -> list[StringAutomaton]:
    automata = []
    for strings in dict.fromkeys(found):
        if strings.is_empty():
            continue
        try:
            each = automaton(strings)
        except AutomatonTooLarge:
            each = None
        else:
            if each is None:
                continue
        if each is None or len(each.accepting) * (each.last_count + 1) > MAX_CELLS:
            raise rules.unsupported(("uniqueItems",), "the strings are too complex to follow")
        automata.append(each)
    return automata


def _number_automaton(rules: LarkRules, alternative: Alternative) -> StringAutomaton:
    """Return the automaton of the spellings that the terminal for some numbers accepts."""
    body = rules.body_of(number_terminal(rules, alternative.types & NUMBER, alternative.numbers))
    must, must_not = [], []
    # A text that is not a character in Rust's syntax is a set of other characters in ours.
    text = _HEXADECIMAL.sub(lambda match: rf"\u{int(match[1], 16):04x}", body).replace("[ab&&c]", r"\u0000")
    if body.startswith("%") or "~(" in body:
        raise rules.unsupported(("uniqueItems",), "multiples of this number are too complex to follow")
    for sign, source in _TERM.findall(text):
        nodes = list(parse(source, whole=True).must)
        if sign:
            must_not.append(Excluded(nodes))
        else:
            must += nodes
    try:
        return string_automaton(must, must_not)
    except AutomatonTooLarge:
        raise rules.unsupported(("uniqueItems",), "the numbers are too complex to follow") from None


def _is_open(rules: LarkRules, alternative: Alternative) -> bool:
    """Return whether each array and object of an alternative can always be extended by one more member."""
    if alternative.types & ARRAY:
        arrays = alternative.arrays
        items = map(arrays.item, range(arrays.num_prefix + 1))
        if arrays.most is not None or arrays.contains or arrays.unique:
            return False
        if not all(map(rules.satisfiability.is_satisfiable, items)):
            return False
    if alternative.types & OBJECT:
        objects = alternative.objects
        if objects.most is not None or key_language(rules, objects, objects.declared()) is not None:
            return False
        classes = [conj for _, conj in key_classes(objects) if rules.satisfiability.is_satisfiable(conj)]
        return bool(classes)
    return True
