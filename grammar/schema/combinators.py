"""The keywords that combine schemas over the same value, as unions of worlds: when they hold, and when they fail."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import TYPE_CHECKING, Any, TypeAlias

from ..errors import GrammarError
from . import scalars
from .arrays_objects import forbids, has
from .constraints import OBJECT, Alternative, without_evaluation
from .document import pointer_join

if TYPE_CHECKING:
    from .analysis import Analysis

Alternatives: TypeAlias = "list[Alternative] | tuple[Alternative, ...]"
# A branch of oneOf that needs more pieces than this to keep it apart from the others loses the last ones.
MAX_PIECES = 48
# More branches of anyOf than this are not combined with each other for the sake of unevaluated properties.
MAX_TRACKED = 4


def _enum_holds(analysis: Analysis, number: int, values: list[Any]) -> list[Alternatives]:
    found = [scalars.scalar_values(values)]
    for value in values:
        if isinstance(value, dict | list):
            found += map(without_evaluation, analysis.alternatives(2 * _literal_node(analysis, number, value)))
    return [[alternative for alternative in found if alternative.types]]


def _enum_fails(analysis: Analysis, number: int, values: list[Any]) -> Alternatives:
    parts: list[Alternatives] = [[scalars.without_scalars(values)]]
    for value in values:
        if isinstance(value, dict | list):
            parts.append(analysis.alternatives(2 * _literal_node(analysis, number, value) + 1))
    return analysis.product(parts, ("enum", pointer_join(analysis.document.nodes[number].pointer, "enum")))


def _literal_node(analysis: Analysis, number: int, value: Any) -> int:
    """A schema of ours that only one array or object satisfies."""
    if isinstance(value, list):
        items = [{"const": item} for item in value]
        size = len(items)
        return analysis.document.synthetic(
            {"type": "array", "prefixItems": items, "minItems": size, "maxItems": size} if items
            else {"type": "array", "maxItems": 0}, number)  # fmt: skip
    properties = {name: {"const": item} for name, item in value.items()}
    schema = {"type": "object", "properties": properties, "required": list(value), "additionalProperties": False}
    return analysis.document.synthetic(schema, number)


def _all_of(analysis: Analysis, number: int) -> list[Alternatives]:
    return [_branch(analysis, number, item, "allOf", i) for i, item in enumerate(_get(analysis, number, "allOf"))]


def _not_all_of(analysis: Analysis, number: int) -> Alternatives:
    listed = enumerate(_get(analysis, number, "allOf"))
    return [
        alternative for i, item in listed for alternative in _branch(analysis, number, item, "allOf", i, negated=True)
    ]


def _any_of(analysis: Analysis, number: int) -> list[Alternatives]:
    listed = enumerate(_get(analysis, number, "anyOf"))
    branches = [_branch(analysis, number, item, "anyOf", i) for i, item in listed]
    found = [alternative for branch in branches for alternative in branch]
    if analysis.document.tracks_evaluation and len(branches) <= MAX_TRACKED:
        # Branches that hold together evaluate together.
        for size in range(2, len(branches) + 1):
            for chosen in combinations(branches, size):
                found += analysis.product(chosen, _blame(analysis, number, "anyOf"))
    return [found]


def _not_any_of(analysis: Analysis, number: int) -> Alternatives:
    listed = enumerate(_get(analysis, number, "anyOf"))
    parts = [_branch(analysis, number, item, "anyOf", i, negated=True) for i, item in listed]
    return analysis.product(parts, _blame(analysis, number, "anyOf"))


def _one_of(analysis: Analysis, number: int) -> list[Alternatives]:
    listed = _get(analysis, number, "oneOf")
    branches = [_branch(analysis, number, item, "oneOf", i) for i, item in enumerate(listed)]
    found: list[Alternative] = []
    for mine in range(len(branches)):
        found += _apart(analysis, number, branches, mine)
    return [found]


def _apart(analysis: Analysis, number: int, branches: list[Alternatives], mine: int) -> list[Alternative]:
    """The worlds of one branch of ``oneOf`` without what another branch admits too."""
    kept = list(branches[mine])
    for other, theirs in enumerate(branches):
        if other == mine or not _overlap(analysis, kept, theirs):
            continue
        schema = _get(analysis, number, "oneOf")[other]
        failing = _branch(analysis, number, schema, "oneOf", other, negated=True)
        pieces: list[Alternative] = []
        for alternative in kept:
            pieces += (
                _pieces(analysis, alternative, failing) if _overlap(analysis, [alternative], theirs) else [alternative]
            )
        if len(pieces) > MAX_PIECES:
            analysis.leave_out(number, "oneOf", f"branch {mine} needs more than {MAX_PIECES} alternatives")
        elif not pieces and _losses(analysis, number, schema, other):
            raise GrammarError(
                *_blame(analysis, number, "oneOf"),
                f"branches {mine} and {other} overlap, and what is in the first alone cannot be written as a grammar",
            )
        kept = list(dict.fromkeys(pieces))[:MAX_PIECES]
    return kept


def _overlap(analysis: Analysis, ours: Alternatives, theirs: Alternatives) -> bool:
    return any(analysis.prune(a & b).types for a in ours for b in theirs if a.types & b.types)


def _pieces(analysis: Analysis, alternative: Alternative, alternatives: Alternatives) -> list[Alternative]:
    merged = (analysis.prune(alternative & other) for other in alternatives if alternative.types & other.types)
    return [piece for piece in merged if piece.types]


def _losses(analysis: Analysis, number: int, schema: Any, index: int) -> bool:
    return bool(analysis.lost(analysis.literal(number, schema, "oneOf", index, negated=True)))


def _not_one_of(analysis: Analysis, number: int) -> Alternatives:
    listed = _get(analysis, number, "oneOf")
    holding = [_branch(analysis, number, item, "oneOf", i) for i, item in enumerate(listed)]
    failing = [_branch(analysis, number, item, "oneOf", i, negated=True) for i, item in enumerate(listed)]
    blame = _blame(analysis, number, "oneOf")
    found = analysis.product(failing, blame)
    for first in range(len(listed)):
        for second in range(first):
            found += analysis.product([holding[first], holding[second]], blame)
    return found


def _not(analysis: Analysis, number: int) -> list[Alternatives]:
    return [_branch(analysis, number, _get(analysis, number, "not"), "not", negated=True)]


def _not_not(analysis: Analysis, number: int) -> Alternatives:
    return _branch(analysis, number, _get(analysis, number, "not"), "not")


def _if(analysis: Analysis, number: int) -> list[Alternatives]:
    document = analysis.document
    schema = document.nodes[number].schema
    if "then" not in schema and "else" not in schema and not document.tracks_evaluation:
        return []
    return [_conditional(analysis, number, negated=False)]


def _conditional(analysis: Analysis, number: int, *, negated: bool) -> Alternatives:
    schema = analysis.document.nodes[number].schema
    blame = _blame(analysis, number, "if")
    found: list[Alternative] = []
    for keyword, failed in (("then", False), ("else", True)):
        condition = _branch(analysis, number, schema["if"], "if", negated=failed)
        outcome = _branch(analysis, number, schema.get(keyword, True), keyword, negated=negated)
        found += analysis.product([condition, outcome], blame)
    return found


def _ref(analysis: Analysis, number: int) -> list[Alternatives]:
    return [analysis.reference(number, "$ref", negated=False)]


def _not_ref(analysis: Analysis, number: int) -> Alternatives:
    return analysis.reference(number, "$ref", negated=True)


def _dynamic_ref(analysis: Analysis, number: int) -> list[Alternatives]:
    return [analysis.reference(number, _only_target(analysis, number), negated=False)]


def _not_dynamic_ref(analysis: Analysis, number: int) -> Alternatives:
    return analysis.reference(number, _only_target(analysis, number), negated=True)


def _only_target(analysis: Analysis, number: int) -> str:
    name = _get(analysis, number, "$dynamicRef").rpartition("#")[2]
    if not name.startswith("/") and analysis.document.dynamic_anchors(name) > 1:
        reason = f"there is more than one dynamic anchor {name[:100]!r}: the target depends on the path"
        raise GrammarError(*_blame(analysis, number, "$dynamicRef"), reason)
    return "$dynamicRef"


def _dependencies(keyword: str) -> Callable[[Analysis, int], list[Alternatives]]:
    def holds(analysis: Analysis, number: int) -> list[Alternatives]:
        parts: list[Alternatives] = []
        for name, need in _get(analysis, number, keyword).items():
            if isinstance(need, list):
                present: Alternatives = [has(name, *need)]
            else:
                branch = _branch(analysis, number, need, keyword, name)
                present = analysis.product([[has(name)], branch], _blame(analysis, number, keyword))
            parts.append([forbids(name), *present])
        return parts

    return holds


def _not_dependencies(keyword: str) -> Callable[[Analysis, int], Alternatives]:
    def fails(analysis: Analysis, number: int) -> Alternatives:
        found: list[Alternative] = []
        for name, need in _get(analysis, number, keyword).items():
            if isinstance(need, list):
                found += [has(name) & forbids(other) for other in need]
            else:
                branch = _branch(analysis, number, need, keyword, name, negated=True)
                found += analysis.product([[has(name)], branch], _blame(analysis, number, keyword))
        return [alternative.of(OBJECT) for alternative in found]

    return fails


def _get(analysis: Analysis, number: int, keyword: str) -> Any:
    return analysis.document.nodes[number].schema[keyword]


def _blame(analysis: Analysis, number: int, keyword: str) -> tuple[str, str]:
    return keyword, pointer_join(analysis.document.nodes[number].pointer, keyword)


def _branch(analysis: Analysis, number: int, schema: Any, *tokens: str | int, negated: bool = False) -> Alternatives:
    return analysis.branch(number, schema, *tokens, negated=negated)


HOLDS: dict[str, Callable[[Analysis, int], list[Alternatives]]] = {
    "enum": lambda analysis, number: _enum_holds(analysis, number, _get(analysis, number, "enum")),
    "const": lambda analysis, number: _enum_holds(analysis, number, [_get(analysis, number, "const")]),
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "if": _if,
    "$ref": _ref,
    "$dynamicRef": _dynamic_ref,
    "dependentRequired": _dependencies("dependentRequired"),
    "dependentSchemas": _dependencies("dependentSchemas"),
    "dependencies": _dependencies("dependencies"),
}

FAILS: dict[str, Callable[[Analysis, int], Alternatives]] = {
    "enum": lambda analysis, number: _enum_fails(analysis, number, _get(analysis, number, "enum")),
    "const": lambda analysis, number: _enum_fails(analysis, number, [_get(analysis, number, "const")]),
    "allOf": _not_all_of,
    "anyOf": _not_any_of,
    "oneOf": _not_one_of,
    "not": _not_not,
    "if": lambda analysis, number: _conditional(analysis, number, negated=True),
    "$ref": _not_ref,
    "$dynamicRef": _not_dynamic_ref,
    "dependentRequired": _not_dependencies("dependentRequired"),
    "dependentSchemas": _not_dependencies("dependentSchemas"),
    "dependencies": _not_dependencies("dependencies"),
}
