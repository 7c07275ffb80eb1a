"""JSON Schema to Lark: the alternatives of a schema written as one grammar in llguidance's Lark dialect.

Every conjunction of literals becomes one rule, so a recursive schema becomes a recursive grammar. Strings, keys and
numbers become terminals: patterns are re-spelled over JSON text, intersected with ``&`` and complemented with ``~``.
Each character has one spelling (no ``\\u0061`` for ``a``), so a key has no second spelling that escapes its rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from ..regex.charset import JSON_CHAR, json_string, rust_literal
from ..regex.ecma_regex import read_pattern
from ..regex.string_automaton import StringAutomaton
from ..regex.string_formats import FORMATS
from ..schema.constraints import ALWAYS, NO_STRINGS, Alternative, Conj, Objects, Strings
from ..schema.json_types import ALL_TYPES, ARRAY, NUMBER, OBJECT, STRING
from ..schema.shortest_instance import MAX_ANSWER, ShortestInstance
from ..schema.string_language import admits_any
from ..schema.subschemas import Subschemas
from ..vocabulary import Vocabulary
from .container_entries import few_keys, key_language
from .container_members import Field, array_fields, object_fields
from .distinct_arrays import check_distinct, distinct_texts
from .entry_languages import JSON_PART, EntryLanguage, EntryRules, container_mark, has_entries
from .key_classes import MAX_PATTERN_SETS, key_classes, key_patterns
from .lark_rules import LarkRules, literal_string
from .number_terminals import number_terminal
from .string_rules import marker_terminals, string_rules

ANY_STRING = f'"{JSON_CHAR}*"'


@dataclass(frozen=True, slots=True)
class LarkGrammar:
    """A schema as a grammar.

    Attributes:
        text: the grammar.
        shortest: the shortest answer, ``""`` if none was found.
        properties: short properties to end an object with, shortest first.
        values: short values to end anything with, shortest first.
        optional: short properties that may be begun although none is needed, shortest first.
        detour: the longest property or value that may be begun although a shorter one exists or none is needed.
        strings: the automata of its string rules, in the order of their numbers.
        entries: the languages of the containers whose entries are remembered, in the order of their numbers.
        has_memory: whether a memory of the written values, not the grammar, excludes some repetitions.
        scalars: groups of short scalars; if one of a group is possible at a position, the others could be too.
        containers: groups of short arrays and objects; if one of a group is possible, the others could be too.
    """

    text: str
    shortest: str
    properties: tuple[str, ...]
    values: tuple[str, ...]
    detour: str
    strings: tuple[StringAutomaton, ...] = ()
    entries: tuple[EntryLanguage, ...] = ()
    has_memory: bool = False
    scalars: tuple[tuple[str, ...], ...] = ()
    containers: tuple[tuple[str, ...], ...] = ()
    optional: tuple[str, ...] = ()


def to_lark(
    analysis: Subschemas,
    vocabulary: Vocabulary | None = None,
    *,
    with_string_rules: bool = False,
    first_rule: int = 0,
    first_entry: int | None = None,
    is_part: bool = False,
    root: Conj | None = None,
    types: int = ALL_TYPES,
) -> LarkGrammar:
    """Write the grammar of a whole schema.

    Args:
        analysis: analysis of the schema.
        vocabulary: vocabulary of the answer's tokens, used to choose the texts that end an answer.
        with_string_rules: whether strings that are too large for the lexer become rules; else they are refused.
        first_rule: number of the first string rule.
        first_entry: number of the first container whose entries are remembered; None without such a memory.
        is_part: whether other text surrounds the JSON.
        root: part of the schema whose values are written; None for the whole schema.
        types: write only values of these types.

    Raises:
        GrammarError: the schema is unsatisfiable, cannot be written as a grammar, or has a string that neither the
            lexer nor an automaton can match.
    """
    rules = LarkRules(analysis)
    root = checked_root(rules, root)
    nodes = analysis.document.nodes
    automata = string_rules(rules.satisfiability, root, nodes, is_possible=with_string_rules)
    rules.string_rules = {strings: number for number, strings in enumerate(automata, first_rule)}
    if first_entry is not None:
        rules.entries = EntryRules(first_entry)
    rules.define("start", rules.rule(root) if types == ALL_TYPES else _body(rules, root, types))
    write_bodies(rules)
    check_distinct(rules, root)
    has_memory = rules.entries is not None and rules.entries.is_used
    if has_memory and is_part:
        rules.bodies["start"] += f" | {rules.terminal(container_mark(JSON_PART))}"
    instances = ShortestInstance(
        analysis,
        rules.satisfiability,
        partial(distinct_texts, rules),
        vocabulary,
        remembers=rules.entries is not None,
    )
    properties, values, detour = instances.closing_texts(root)
    texts = instances.text(root) or "", tuple(properties), tuple(values), detour
    entries = () if rules.entries is None else tuple(rules.entries.languages)
    values_alike = tuple(instances.scalars()), tuple(instances.containers())
    optional = tuple(instances.optional_properties())
    return LarkGrammar(rules.text(), *texts, tuple(automata.values()), entries, has_memory, *values_alike, optional)


def checked_root(rules: LarkRules, root: Conj | None = None) -> Conj:
    """Return the conjunction of the whole schema, or of a part of it, after its satisfiability was determined.

    Raises:
        GrammarError: no text satisfies it, or only texts that are too long.
    """
    if root is None:
        root = frozenset((2 * rules.analysis.document.root,))
    rules.satisfiability.explore(root)
    if not rules.satisfiability.is_satisfiable(root):
        raise rules.unsatisfiable(root)
    size = rules.satisfiability.min_size(root)
    if size > MAX_ANSWER:
        raise rules.unsupported(("required", "minItems", "minLength"), f"the shortest answer takes {size:.0f} bytes")
    return root


def write_bodies(rules: LarkRules) -> None:
    """Write the bodies of all rules that have a name but no body yet."""
    while (conj := rules.next_pending()) is not None:
        rules.define(rules.rule(conj), _body(rules, conj))


def alternatives_of(rules: LarkRules, conj: Conj) -> list[Alternative]:
    """Return the alternatives of an explored conjunction that have a finite value."""
    return rules.satisfiability.satisfiable_alternatives(conj) if conj != ALWAYS else [Alternative()]


def _body(rules: LarkRules, conj: Conj, types: int = ALL_TYPES) -> str:
    """Write all alternatives of a conjunction, or only their values of some types."""
    options: dict[str, None] = {}
    satisfiability = rules.satisfiability
    for index, alternative in enumerate(alternatives_of(rules, conj)):
        options |= dict.fromkeys(_scalars(rules, alternative, types))
        name = f"{rules.rule(conj)}_{index}"
        kept = alternative.types & types
        if kept & ARRAY and satisfiability.array_is_satisfiable(alternative.arrays):
            options[array_fields(rules, alternative.arrays, f"{name}a")] = None
        if kept & OBJECT and satisfiability.object_is_satisfiable(alternative.objects):
            options[_object(rules, alternative.objects, f"{name}o")] = None
    if not options:
        raise rules.unsatisfiable(conj)
    return " | ".join(options)


def _scalars(rules: LarkRules, alternative: Alternative, types: int) -> list[str]:
    types &= alternative.types
    words = rules.words(types)
    options = [rules.terminal(f"/{'|'.join(words)}/")] if words else []
    if types & NUMBER:
        options.append(number_terminal(rules, types & NUMBER, alternative.numbers))
    if types & STRING and admits_any(alternative.strings):
        options.append(_string_value(rules, alternative.strings))
    return options


# -- strings


def _string_value(rules: LarkRules, strings: Strings) -> str:
    """Write the strings of a value: a terminal, or any string with the spellings that identify its rule."""
    number = rules.string_rules.get(strings)
    if number is None:
        return rules.terminal(_string(rules, strings))
    name = f"s{number}"
    if name not in rules.bodies:
        any_string = rules.terminal(f"/{ANY_STRING}/")
        probe, matched = map(rules.terminal, marker_terminals(number))
        rules.define(name, f"{any_string} | {any_string} {matched} | {probe}")
    return name


def _string(rules: LarkRules, strings: Strings) -> str:
    """Write the terminal expression of the strings that satisfy some constraints."""
    if strings is NO_STRINGS:
        return f"/{ANY_STRING}/"
    if strings.values is not None:
        return "/" + _any_of(strings.values) + "/"
    terms = []
    if strings.least or strings.most is not None:
        most = "" if strings.most is None else strings.most
        terms.append(f'/"{JSON_CHAR}{{{strings.least},{most}}}"/')
    for name in sorted(strings.formats):
        terms += [rules.terminal(_quoted(term)) for term in FORMATS[name].json_must]
    terms += _pattern_terms(sorted(strings.patterns), sorted(strings.not_patterns))
    if strings.excluded:
        terms.append(f"~/{_any_of(sorted(strings.excluded))}/")
    if not terms or terms[0].startswith("~"):
        terms.insert(0, f"/{ANY_STRING}/")
    return " & ".join(terms)


def _pattern_terms(patterns: list[str], not_patterns: list[str]) -> list[str]:
    """Write terms for patterns that must match and, last, complements of patterns that must not match."""
    terms: list[str] = []
    complements: list[str] = []
    for source in patterns:
        pattern = read_pattern(source)
        terms += map(_quoted, pattern.json_must)
        complements += [f"~{_quoted(term)}" for term in pattern.json_must_not]
    for source in not_patterns:
        pattern = read_pattern(source, wide=True)
        inner = [*map(_quoted, pattern.json_must), *(f"~{_quoted(term)}" for term in pattern.json_must_not)]
        complements.append(f"~({' & '.join(inner)})")
    return terms + complements


def _quoted(regex: str) -> str:
    return f'/"(?:{regex})"/'


def _any_of(strings: Iterable[str]) -> str:
    return "|".join(rust_literal(json_string(value)) for value in strings)


# -- objects


def _object(rules: LarkRules, objects: Objects, name: str) -> str:
    fields, closed = _declared(rules, objects)
    names = [field.name for field in fields]
    extra = [] if closed else _extras(rules, objects, names)
    body = object_fields(rules, objects, [field for field in fields if field.rule is not None], extra, name)
    entries = rules.entries
    if not extra or entries is None:
        return body
    entries.has_open_objects = True
    if entries.marks_objects:
        body += f" | {rules.terminal(container_mark(JSON_PART))}"
    language = key_language(rules, objects, names)
    if language is None:
        return body
    if not has_entries(language, objects.least - len(names)):
        raise rules.unsupported(("minProperties",), f"there are fewer than {objects.least} different keys")
    return f"{body} | {rules.terminal(entries.mark(language))}"


def _declared(rules: LarkRules, objects: Objects) -> tuple[list[Field], bool]:
    """Return the listed properties in order, and whether there can be no others."""
    names, closed = objects.declared(), False
    finite = _enumerated_names(rules, objects.names)
    if finite is None:
        finite = few_keys(rules, objects)
        finite = None if finite is None else [*names, *finite]
    if finite is not None:
        names, closed = {n: None for n in names if n in finite} | dict.fromkeys(finite), True
    fields = []
    for name in names:
        conj = objects.value(name)
        possible = rules.satisfiability.is_satisfiable(conj) and rules.analysis.admits_name(objects.names, name)
        if not possible:
            rules.check_not_narrowed(conj)
        rule = f'{literal_string(name)} ":" {rules.rule(conj)}' if possible else None
        fields.append(Field(name, rule, name in objects.required))
    return fields, closed


def _enumerated_names(rules: LarkRules, conj: Conj) -> list[str] | None:
    """Return all keys that ``propertyNames`` permits, or None if they cannot be enumerated."""
    if conj == ALWAYS:
        return None
    values = [alternative.strings.values for alternative in _of_strings(rules, conj)]
    if None in values:
        return None
    return list(dict.fromkeys(value for listed in values for value in listed or ()))


def _of_strings(rules: LarkRules, conj: Conj) -> list[Alternative]:
    return [alternative for alternative in rules.analysis.conjunction(conj) if alternative.types & STRING]


def _extras(rules: LarkRules, objects: Objects, listed: list[str]) -> list[str]:
    """Write one item for each class of unlisted keys, by the patterns that they match."""
    patterns = key_patterns(objects)
    by_value: dict[Conj, list[str]] = {}
    for matched, conj in key_classes(objects):
        rest = [pattern for pattern in patterns if pattern not in matched]
        keys = Strings(patterns=frozenset(matched), not_patterns=frozenset(rest), excluded=frozenset(listed))
        if not _has_keys(rules, objects.names, keys):
            continue
        if rules.satisfiability.is_satisfiable(conj):
            by_value.setdefault(conj, []).append(" & ".join(_pattern_terms(matched, rest)))
        else:
            rules.check_not_narrowed(conj)
    base = _key_base(rules, objects.names, listed)
    items = []
    for conj, classes in by_value.items() if base is not None else ():
        all_keys = len(by_value) == 1 and (len(patterns) < MAX_PATTERN_SETS and len(classes) == 2 ** len(patterns))
        joined = "" if all_keys or "" in classes else " & (" + " | ".join(classes) + ")"
        items.append(f'{rules.terminal(f"{base}{joined}")} ":" {rules.rule(conj)}')
    return items


def _has_keys(rules: LarkRules, names: Conj, keys: Strings) -> bool:
    """Return whether any of these keys is permitted."""
    permitted = [alternative.strings for alternative in _of_strings(rules, names)] if names != ALWAYS else [NO_STRINGS]
    return any(admits_any(keys & strings) for strings in permitted)


def _key_base(rules: LarkRules, names: Conj, listed: list[str]) -> str | None:
    """Write the terminal expression of the unlisted keys; None if there are none."""
    base = f"/{ANY_STRING}/"
    if names != ALWAYS:
        alternatives = _of_strings(rules, names)
        if not alternatives:
            return None
        base = "(" + " | ".join(f"({_string(rules, alternative.strings)})" for alternative in alternatives) + ")"
    return f"{base} & ~/{_any_of(listed)}/" if listed else base
