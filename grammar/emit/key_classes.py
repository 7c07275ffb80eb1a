"""Classes of an object's unlisted keys by the patterns that they match, and the constraints on each class's values."""

from __future__ import annotations

from collections.abc import Iterator

from ..schema.constraints import ALWAYS, Conj, ObjectClause, Objects

MAX_PATTERN_SETS = 4


def key_patterns(objects: Objects) -> list[str]:
    return list(dict.fromkeys(pattern for clause in objects.clauses for pattern, _ in clause.patterns))


def key_classes(objects: Objects) -> Iterator[tuple[list[str], Conj]]:
    """Yield for each class the patterns that its keys match, and the constraints on the values."""
    for matched in _subsets(key_patterns(objects)):
        yield matched, ALWAYS.union(*(_clause_value(clause, matched) for clause in objects.clauses))


def _subsets(patterns: list[str]) -> list[list[str]]:
    """Return the sets of patterns that a key may match; for many patterns only the sets with one and with none."""
    if len(patterns) >= MAX_PATTERN_SETS:
        return [[], *([pattern] for pattern in patterns)]
    return [[p for i, p in enumerate(patterns) if bits >> i & 1] for bits in range(1 << len(patterns))]


def _clause_value(clause: ObjectClause, matched: list[str]) -> Conj:
    found = [conj for pattern, conj in clause.patterns if pattern in matched]
    return ALWAYS.union(*found) if found else clause.rest or ALWAYS
