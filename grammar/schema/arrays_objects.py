"""Array and object keywords (``items``, ``contains``, ``properties``): when they hold or fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ..errors import GrammarError
from ..regex.ecma_regex import pattern_matches, read_pattern
from ..regex.regex_parser import RegexError
from .constraints import (
    ALWAYS,
    ANYTHING,
    NEVER,
    NO_ARRAYS,
    NO_OBJECTS,
    Alternative,
    ArrayClause,
    Arrays,
    Conj,
    Contains,
    ObjectClause,
    Objects,
)
from .document import pointer_join
from .json_types import ARRAY, OBJECT
from .scalars import MAX_LENGTH
from .subschemas import Subschemas

_OF_ITEMS = ("items", "prefixItems", "additionalItems", "contains")
_OF_PROPERTIES = ("properties", "patternProperties", "additionalProperties", "propertyNames")


def forbids(name: str) -> Alternative:
    """Return the alternative of everything but objects with a property of this name."""
    clause = ObjectClause(((name, NEVER),), evaluates=False)
    return Alternative(objects=Objects((clause,)))


def has(*names: str) -> Alternative:
    return Alternative(OBJECT, objects=Objects(required=names))


# -- arrays


def array_clause(analysis: Subschemas, number: int) -> Arrays:
    """Return the constraints of ``prefixItems``, ``items``, ``additionalItems`` and ``contains`` of a node."""
    node = analysis.document.nodes[number]
    if node.schema.keys().isdisjoint(_OF_ITEMS):
        return NO_ARRAYS
    prefix, rest = _item_schemas(analysis, number)
    clauses = (ArrayClause(prefix, rest),) if prefix or rest is not None else ()
    contains = _contains(analysis, number)
    if contains and "unevaluatedItems" in node.schema:
        raise node.error("unevaluatedItems", "cannot be combined with contains")
    return Arrays(clauses, contains=contains)


def array_denials(analysis: Subschemas, number: int) -> Iterator[Alternative]:
    """Yield alternatives in which one of these keywords fails, if they can be written as a grammar."""
    prefix, rest = _item_schemas(analysis, number, negated=True)
    for index, item in enumerate(prefix):
        if item != NEVER:
            clause = ArrayClause((*(ALWAYS,) * index, item), evaluates=False)
            yield Alternative(ARRAY, arrays=Arrays((clause,), least=index + 1))
    if rest == ALWAYS:
        yield Alternative(ARRAY, arrays=Arrays(least=len(prefix) + 1))
    elif rest is not None and rest != NEVER:
        if prefix:
            analysis.narrow(number, "items", "a failure after the first items cannot be written as a grammar")
        else:
            held = _item_schemas(analysis, number)[1] or ALWAYS
            yield Alternative(ARRAY, arrays=Arrays(contains=(Contains(rest, 1, None, held),)))
    for entry in _contains(analysis, number):
        if entry.least == 1:
            yield Alternative(ARRAY, arrays=Arrays((ArrayClause((), entry.negated, evaluates=False),)))
        elif entry.least:
            yield Alternative(ARRAY, arrays=Arrays(contains=(Contains(entry.item, 0, entry.least - 1, entry.negated),)))
        if entry.most is not None:
            yield Alternative(
                ARRAY, arrays=Arrays(contains=(Contains(entry.item, entry.most + 1, None, entry.negated),))
            )


def _item_schemas(analysis: Subschemas, number: int, *, negated: bool = False) -> tuple[tuple[Conj, ...], Conj | None]:
    schema = analysis.document.nodes[number].schema
    items = schema.get("items")
    if isinstance(items, list):
        listed, keyword, rest_keyword = items, "items", "additionalItems"
    else:
        listed, keyword, rest_keyword = schema.get("prefixItems", []), "prefixItems", "items"
    prefix = tuple(analysis.literal(number, item, keyword, index, negated=negated) for index, item in enumerate(listed))
    if rest_keyword not in schema:
        return prefix, None
    return prefix, analysis.literal(number, schema[rest_keyword], rest_keyword, negated=negated)


def _contains(analysis: Subschemas, number: int) -> tuple[Contains, ...]:
    node = analysis.document.nodes[number]
    schema = node.schema
    if "contains" not in schema:
        return ()
    least, most = int(schema.get("minContains", 1)), schema.get("maxContains")
    if least > MAX_LENGTH:
        raise node.error("minContains", f"{least} is more than an answer can hold")
    if least == 0 and most is None:
        return ()
    item = analysis.literal(number, schema["contains"], "contains")
    negated = analysis.literal(number, schema["contains"], "contains", negated=True)
    return (Contains(item, least, None if most is None else int(most), negated),)


# -- objects


def object_clause(analysis: Subschemas, number: int) -> Objects:
    """Return the constraints of ``properties``, ``patternProperties``, ``additionalProperties``, ``propertyNames``."""
    schema = analysis.document.nodes[number].schema
    if schema.keys().isdisjoint(_OF_PROPERTIES):
        return NO_OBJECTS
    properties = tuple(
        (name, analysis.literal(number, item, "properties", name))
        for name, item in schema.get("properties", {}).items()
    )
    patterns = tuple(
        (_key_pattern(analysis, number, pattern), analysis.literal(number, item, "patternProperties", pattern))
        for pattern, item in schema.get("patternProperties", {}).items()
    )
    extra = schema.get("additionalProperties")
    rest = None if extra is None else analysis.literal(number, extra, "additionalProperties")
    clauses = (ObjectClause(properties, patterns, rest),) if properties or patterns or rest is not None else ()
    names = schema.get("propertyNames", True)
    return Objects(clauses, names=analysis.literal(number, names, "propertyNames"))


def object_denials(analysis: Subschemas, number: int) -> Iterator[Alternative]:
    """Yield alternatives in which one of these keywords or ``required`` fails, if they can be written."""
    schema = analysis.document.nodes[number].schema
    for name in schema.get("required", ()):
        yield forbids(name).of(OBJECT)
    for name, item in schema.get("properties", {}).items():
        failed = analysis.literal(number, item, "properties", name, negated=True)
        if failed != NEVER:
            clause = ObjectClause(((name, failed),), evaluates=False)
            yield Alternative(OBJECT, objects=Objects((clause,), required=(name,)))
    for keyword in ("patternProperties", "additionalProperties", "propertyNames"):
        value = schema.get(keyword, True)
        if value is not True and value != {}:
            analysis.narrow(number, keyword, "a failure over keys that are not listed cannot be written")


def referred(analysis: Subschemas, number: int) -> int:
    """Return the node to which a node refers, if it is nothing but a reference; else the node itself."""
    seen: set[int] = set()
    while number not in seen:
        seen.add(number)
        node = analysis.document.nodes[number]
        if "$ref" not in node.schema or (len(node.schema) > 1 and node.scope.draft > 7):
            break
        target = analysis.document.resolve(number, node.schema["$ref"])
        number = number if isinstance(target, bool) else target
    return number


def is_closed(objects: Objects) -> bool:
    """Return whether an object may only have keys that are listed."""
    return any(clause.rest == NEVER and not clause.patterns for clause in objects.clauses)


def key_denials(analysis: Subschemas, number: int, names: Iterable[str]) -> Iterator[Alternative]:
    """Yield alternatives in which one of ``names`` violates a node's constraints on keys that the node does not list.

    There are infinitely many possible keys, so only ``names`` are considered. The result is complete if other
    constraints permit no other keys.
    """
    schema = analysis.document.nodes[number].schema
    patterns, extra = schema.get("patternProperties", {}), schema.get("additionalProperties", True)
    for name in names:
        if name in schema.get("properties", {}):
            continue
        failed = [
            analysis.literal(number, item, "patternProperties", pattern, negated=True)
            for pattern, item in patterns.items()
            if pattern_matches(pattern, name)
        ]
        if not any(pattern_matches(pattern, name, wide=True) for pattern in patterns):
            failed.append(analysis.literal(number, extra, "additionalProperties", negated=True))
        for conj in failed:
            if conj != NEVER:
                clause = ObjectClause(((name, conj),), evaluates=False)
                yield Alternative(OBJECT, objects=Objects((clause,), required=(name,)))


def unevaluated(analysis: Subschemas, number: int, alternative: Alternative) -> Alternative:
    """Return the constraints of ``unevaluatedProperties`` and ``unevaluatedItems`` for an alternative of the node."""
    schema = analysis.document.nodes[number].schema
    objects, arrays = Objects(), Arrays()
    if "unevaluatedProperties" in schema:
        clauses = [clause for clause in alternative.objects.clauses if clause.evaluates]
        if not any(clause.rest is not None for clause in clauses):
            names = dict.fromkeys(name for clause in clauses for name, _ in clause.properties)
            patterns = dict.fromkeys(pattern for clause in clauses for pattern, _ in clause.patterns)
            rest = analysis.literal(number, schema["unevaluatedProperties"], "unevaluatedProperties")
            objects = Objects((ObjectClause(_unconstrained(names), _unconstrained(patterns), rest),))
    if "unevaluatedItems" in schema:
        if alternative.arrays.contains:
            raise analysis.document.nodes[number].error("unevaluatedItems", "cannot be combined with contains")
        evaluated = [clause for clause in alternative.arrays.clauses if clause.evaluates]
        if not any(clause.rest is not None for clause in evaluated):
            length = max((len(clause.prefix) for clause in evaluated), default=0)
            rest = analysis.literal(number, schema["unevaluatedItems"], "unevaluatedItems")
            arrays = Arrays((ArrayClause((ALWAYS,) * length, rest),))
    return Alternative(arrays=arrays, objects=objects) if objects.clauses or arrays.clauses else ANYTHING


def _unconstrained(names: dict[str, None]) -> tuple[tuple[str, Conj], ...]:
    return tuple((name, ALWAYS) for name in names)


def _key_pattern(analysis: Subschemas, number: int, pattern: str) -> str:
    try:
        read_pattern(pattern)
        read_pattern(pattern, wide=True)
    except RegexError as error:
        where = pointer_join(analysis.document.nodes[number].pointer, "patternProperties", pattern)
        raise GrammarError("patternProperties", where, f"the pattern cannot be used: {error}") from None
    return pattern
