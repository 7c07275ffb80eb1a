"""Combining keywords (``allOf``, ``anyOf``, ``oneOf``, ``not``, ``if``, ``$ref``): when they hold or fail.

For each keyword, `HOLDS` returns the unions of alternatives that must all hold for the keyword to hold, and `FAILS`
returns the union of alternatives in which it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any, TypeAlias

from ..errors import GrammarError
from . import scalars
from .arrays_objects import forbids, has, is_closed, key_denials, referred
from .constraints import Alternative, without_evaluation
from .document import pointer_join
from .json_types import OBJECT
from .literal_unions import merged, of_one_branch
from .subschemas import Alternatives, Narrowing, Subschemas

# Largest number of alternatives of a oneOf branch that excludes the other branches; further ones are dropped.
MAX_BRANCH_ALTERNATIVES = 48
# Largest number of anyOf branches that are combined with each other for unevaluated properties.
MAX_TRACKED = 4

_Holds: TypeAlias = Callable[[Subschemas, int, str], list[Alternatives]]
_Fails: TypeAlias = Callable[[Subschemas, int, str], Alternatives]


def _enum(analysis: Subschemas, number: int, keyword: str) -> list[Alternatives]:
    values = _values(analysis, number, keyword)
    found = [scalars.scalar_values(values)]
    for value in values:
        if isinstance(value, dict | list):
            found += map(without_evaluation, analysis.alternatives(2 * _literal_node(analysis, number, value)))
    return [[alternative for alternative in found if alternative.types]]


def _not_enum(analysis: Subschemas, number: int, keyword: str) -> Alternatives:
    values = _values(analysis, number, keyword)
    parts: list[Alternatives] = [[scalars.without_scalars(values)]]
    for value in values:
        if isinstance(value, dict | list):
            parts.append(analysis.alternatives(2 * _literal_node(analysis, number, value) + 1))
    return analysis.product(parts, _location(analysis, number, "enum"))


def _values(analysis: Subschemas, number: int, keyword: str) -> list[Any]:
    value = _get(analysis, number, keyword)
    return [value] if keyword == "const" else list(value)


def _literal_node(analysis: Subschemas, number: int, value: Any) -> int:
    """Return a synthetic schema that only one array or object satisfies."""
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        size = len(items)
        return analysis.document.synthetic(
            {"type": "array", "prefixItems": items, "minItems": size, "maxItems": size} if items
            else {"type": "array", "maxItems": 0}, number)  # fmt: skip
    properties = {name: {"const": item} for name, item in value.items()}
    schema = {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}
    return analysis.document.synthetic(schema, number)


def _not_all_of(analysis: Subschemas, number: int, keyword: str) -> Alternatives:
    return [alternative for branch in _branches(analysis, number, keyword, negated=True) for alternative in branch]


def _any_of(analysis: Subschemas, number: int, keyword: str) -> list[Alternatives]:
    branches = _branches(analysis, number, keyword)
    found = [alternative for branch in branches for alternative in branch]
    if analysis.document.tracks_evaluation and len(branches) <= MAX_TRACKED:
        # Branches that hold together evaluate together.
        for size in range(2, len(branches) + 1):
            for chosen in combinations(branches, size):
                found += analysis.product(chosen, _location(analysis, number, keyword))
    return [found]


def _not_any_of(analysis: Subschemas, number: int, keyword: str) -> Alternatives:
    return analysis.product(_branches(analysis, number, keyword, negated=True), _location(analysis, number, keyword))


def _one_of(analysis: Subschemas, number: int, keyword: str) -> list[Alternatives]:
    branches = _branches(analysis, number, keyword)
    found: list[Alternative] = []
    for index in range(len(branches)):
        found += _exclusive(analysis, number, branches, index)
    return [found]


def _exclusive(analysis: Subschemas, number: int, branches: list[Alternatives], index: int) -> list[Alternative]:
    """Return the alternatives of one branch of ``oneOf`` without the values that another branch admits too."""
    kept = list(branches[index])
    for other in range(len(branches)):
        theirs = _possible(analysis, number, other) if other != index else ()
        if not _overlap(analysis, kept, theirs):
            continue
        failing, narrowings = _failures(analysis, number, other, kept)
        found: list[Alternative] = []
        for each in kept:
            found += _intersections(analysis, each, failing) if _overlap(analysis, [each], theirs) else [each]
        if len(found) > MAX_BRANCH_ALTERNATIVES:
            analysis.narrow(number, "oneOf", f"branch {index} needs more than {MAX_BRANCH_ALTERNATIVES} alternatives")
        elif not found and narrowings:
            reason = "overlap, and the part that only the first allows cannot be written as a grammar"
            raise GrammarError(*_location(analysis, number, "oneOf"), f"branches {index} and {other} {reason}")
        kept = list(dict.fromkeys(found))[:MAX_BRANCH_ALTERNATIVES]
    return kept


def _possible(analysis: Subschemas, number: int, index: int) -> Alternatives | None:
    """Return alternatives of all values that a branch of ``oneOf`` may hold for to any validator; None if unknown.

    Its own alternatives do not tell: they leave out what a grammar cannot say, and what validators disagree on.
    """
    try:
        return analysis.widest().branch(number, _get(analysis, number, "oneOf")[index], "oneOf", index)
    except GrammarError:
        return None


def _failures(
    analysis: Subschemas, number: int, other: int, kept: Alternatives
) -> tuple[list[Alternative], tuple[Narrowing, ...]]:
    """Return alternatives in which a branch of ``oneOf`` fails, and narrowings for the failures that are left out.

    Args:
        number: number of the node with the ``oneOf``.
        other: index of the branch that fails.
        kept: alternatives of the branch that holds. The result is intersected with them, so the keys that they declare
            may distinguish the two branches.
    """
    schema = _get(analysis, number, "oneOf")[other]
    found = [*analysis.branch(number, schema, "oneOf", other, negated=True)]
    narrowings = analysis.narrowings_of(analysis.literal(number, schema, "oneOf", other, negated=True))
    if isinstance(schema, dict):
        objects = [each.objects for each in kept if each.types & OBJECT]
        target = referred(analysis, analysis.document.child(number, schema, "oneOf", other))
        found += key_denials(analysis, target, dict.fromkeys(name for each in objects for name in each.declared()))
        if all(map(is_closed, objects)):
            at = analysis.document.nodes[target].pointer
            denied = [pointer_join(at, keyword) for keyword in ("additionalProperties", "patternProperties")]
            narrowings = tuple(each for each in narrowings if each.pointer not in denied)
    return found, narrowings


def _overlap(analysis: Subschemas, ours: Alternatives, theirs: Alternatives | None) -> bool:
    """Return whether some of our values may be among theirs, which are of the widest reading; None for any values."""
    if theirs is None:
        return bool(ours)
    return any(analysis.widest().prune(a & b).types for a in ours for b in theirs if a.types & b.types)


def _intersections(analysis: Subschemas, alternative: Alternative, others: Alternatives) -> list[Alternative]:
    merged = (analysis.prune(alternative & other) for other in others if alternative.types & other.types)
    return [each for each in merged if each.types]


def _not_one_of(analysis: Subschemas, number: int, keyword: str) -> Alternatives:
    holding = _branches(analysis, number, keyword)
    location = _location(analysis, number, keyword)
    found = analysis.product(_branches(analysis, number, keyword, negated=True), location)
    for first in range(len(holding)):
        for second in range(first):
            found += analysis.product([holding[first], holding[second]], location)
    return found


def _not(analysis: Subschemas, number: int, keyword: str) -> list[Alternatives]:
    return [analysis.branch(number, _get(analysis, number, keyword), keyword, negated=True)]


def _not_not(analysis: Subschemas, number: int, keyword: str) -> Alternatives:
    return analysis.branch(number, _get(analysis, number, keyword), keyword)


def _if(analysis: Subschemas, number: int, keyword: str) -> list[Alternatives]:
    schema = analysis.document.nodes[number].schema
    if "then" not in schema and "else" not in schema and not analysis.document.tracks_evaluation:
        return []
    return [_conditional(analysis, number, negated=False)]


def _not_if(analysis: Subschemas, number: int, keyword: str) -> Alternatives:
    return _conditional(analysis, number, negated=True)


def _conditional(analysis: Subschemas, number: int, *, negated: bool) -> Alternatives:
    schema = analysis.document.nodes[number].schema
    found: list[Alternative] = []
    for keyword, failed in (("then", False), ("else", True)):
        condition = analysis.branch(number, schema["if"], "if", negated=failed)
        outcome = analysis.branch(number, schema.get(keyword, True), keyword, negated=negated)
        found += analysis.product([condition, outcome], _location(analysis, number, "if"))
    return found


def _ref(analysis: Subschemas, number: int, keyword: str) -> list[Alternatives]:
    return [_reference(analysis, number, keyword, negated=False)]


def _not_ref(analysis: Subschemas, number: int, keyword: str) -> Alternatives:
    return _reference(analysis, number, keyword, negated=True)


def _reference(analysis: Subschemas, number: int, keyword: str, *, negated: bool) -> Alternatives:
    reference = _get(analysis, number, keyword)
    if keyword == "$ref":
        target = analysis.document.resolve(number, reference)
    else:
        target = analysis.document.dynamic_target(number, reference, keyword)
    return analysis.referred(target, negated=negated)


def _dependencies(analysis: Subschemas, number: int, keyword: str) -> list[Alternatives]:
    parts: list[Alternatives] = []
    for name, need in _get(analysis, number, keyword).items():
        if isinstance(need, list):
            present: Alternatives = [has(name, *need)]
        else:
            branch = analysis.branch(number, need, keyword, name)
            present = analysis.product([[has(name)], branch], _location(analysis, number, keyword))
        parts.append([forbids(name), *present])
    return parts


def _not_dependencies(analysis: Subschemas, number: int, keyword: str) -> Alternatives:
    found: list[Alternative] = []
    for name, need in _get(analysis, number, keyword).items():
        if isinstance(need, list):
            found += [has(name) & forbids(other) for other in need]
        else:
            branch = analysis.branch(number, need, keyword, name, negated=True)
            found += analysis.product([[has(name)], branch], _location(analysis, number, keyword))
    return [alternative.of(OBJECT) for alternative in found]


def _branches(analysis: Subschemas, number: int, keyword: str, *, negated: bool = False) -> list[Alternatives]:
    """Return the alternatives of each branch; branches of one literal each are merged to an enumeration."""
    schemas: Any = enumerate(_get(analysis, number, keyword))
    union = _union(analysis, number, keyword)
    if union is not None:
        schemas, values = union
        enumeration = analysis.alternatives(2 * values + negated)
    found: list[Alternatives] = [
        analysis.branch(number, schema, keyword, index, negated=negated) for index, schema in schemas
    ]
    return found if union is None else [*found, enumeration]


def _union(analysis: Subschemas, number: int, keyword: str) -> tuple[list[tuple[int, Any]], int] | None:
    """Return the branches of a union that are not literals, and the node of one ``enum`` that merges the literals.

    Returns None if literals are not merged: if there are fewer than two, if the draft has no ``const``, or if a
    ``oneOf`` has other branches too, because then a value must not be in two branches.
    """
    if keyword not in ("anyOf", "oneOf"):
        return None
    known = analysis.unions.get((number, keyword))
    if known is None:
        node = analysis.document.nodes[number]
        others, literals = merged(node.schema[keyword])
        # In draft 4 `const` is a keyword of another draft.
        if len(literals) < 2 or node.scope.draft <= 4 or (keyword == "oneOf" and others):
            return None
        values = of_one_branch(literals) if keyword == "oneOf" else [value for each in literals for value in each]
        known = analysis.unions[number, keyword] = others, analysis.document.synthetic({"enum": values}, number)
    return known


def _get(analysis: Subschemas, number: int, keyword: str) -> Any:
    return analysis.document.nodes[number].schema[keyword]


def _location(analysis: Subschemas, number: int, keyword: str) -> tuple[str, str]:
    return keyword, pointer_join(analysis.document.nodes[number].pointer, keyword)


_DEPENDENCIES = ("dependentRequired", "dependentSchemas", "dependencies")

HOLDS: dict[str, _Holds] = {
    **dict.fromkeys(("enum", "const"), _enum),
    "allOf": _branches,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _ref),
    **dict.fromkeys(_DEPENDENCIES, _dependencies),
}

FAILS: dict[str, _Fails] = {
    **dict.fromkeys(("enum", "const"), _not_enum),
    "allOf": _not_all_of,
    "anyOf": _not_any_of,
    "oneOf": _not_one_of,
    "not": _not_not,
    "if": _not_if,
    **dict.fromkeys(("$ref", "$dynamicRef", "$recursiveRef"), _not_ref),
    **dict.fromkeys(_DEPENDENCIES, _not_dependencies),
}
