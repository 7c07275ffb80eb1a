"""What a JSON Schema permits, decided before any grammar is built.

`Analysis.alternatives` turns a subschema, or its negation, into a union of `Alternative`s: references followed,
``allOf`` multiplied out, ``oneOf``, ``not``, ``if`` and the dependencies turned into alternatives that exclude each
other.
Each rewriting keeps the set of permitted values or makes it smaller, never larger, so what the grammar lets through
validates. Where it makes it smaller it says so in `Analysis.narrowings`; where nothing would be left it refuses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import GrammarError
from . import scalars
from .arrays_objects import array_clause, array_denials, object_clause, object_denials, unevaluated
from .combinators import FAILS, HOLDS
from .constraints import (
    ALWAYS,
    ANYTHING,
    ARRAY,
    NEVER,
    NO_ARRAYS,
    OBJECT,
    STRING,
    Alternative,
    Conj,
    Strings,
    without_evaluation,
)
from .document import Document, SchemaNode, pointer_join
from .keywords import DRAFTED, KEYWORDS, Treatment, draft_error, shape_error

MAX_WORLDS = 256
MAX_LITERALS = 20_000
_APPLICATORS = ("anyOf", "oneOf", "allOf", "if", "dependencies", "dependentSchemas", "not", "$ref")


@dataclass(frozen=True, slots=True)
class Narrowing:
    """A place where the grammar permits less than the schema: keyword, JSON Pointer, reason."""

    keyword: str
    pointer: str
    reason: str


class _Pending(Exception):
    """A schema is asked for whose worlds are being worked out: it recurs through a property or an item."""


class Analysis:
    """The worlds of every subschema of one document, found as they are asked for.

    Attributes:
        document: the schema.
        narrowings: what was left out so far.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.narrowings: list[Narrowing] = []
        self._worlds: dict[int, tuple[Alternative, ...]] = {}
        self._conjs: dict[Conj, tuple[Alternative, ...]] = {}
        self._lost: dict[int, tuple[Narrowing, ...]] = {}
        self._open: list[int] = []
        self._empty: dict[Conj, bool] = {}
        self._frame = 0

    # -- conjunctions

    def literal(self, parent: int, schema: Any, *tokens: str | int, negated: bool = False) -> Conj:
        """The conjunction that is one subschema, or its negation."""
        if isinstance(schema, bool):
            return NEVER if schema == negated else ALWAYS
        return frozenset((2 * self.document.child(parent, schema, *tokens) + negated,))

    def conjunction(self, conj: Conj) -> tuple[Alternative, ...]:
        """The worlds of a conjunction; none if nothing satisfies it.

        Raises:
            GrammarError: if a part of it cannot be analysed.
        """
        known = self._conjs.get(conj)
        if known is None:
            if len(self._conjs) > MAX_LITERALS:
                reason = f"makes more than {MAX_LITERALS} parts when written out"
                raise GrammarError(*self._blame(conj), reason)
            parts = [self.alternatives(literal) for literal in sorted(conj)]
            known = self._conjs[conj] = tuple(self._alive(parts[0]) if len(parts) == 1 else self.product(parts, conj))
        return known

    def is_empty(self, conj: Conj) -> bool:
        """Whether surely nothing satisfies a conjunction; a recursion counts as satisfiable until shown otherwise."""
        if -1 in conj:
            return True
        if len(conj) < 2:
            return False
        known = self._empty.get(conj)
        if known is not None:
            return known
        frame, self._frame = self._frame, len(self._open)
        try:
            known = self._empty[conj] = not self.conjunction(conj)
        except _Pending:
            return False
        finally:
            self._frame = frame
        return known

    def admits_name(self, names: Conj, name: str) -> bool:
        """Whether a key satisfies ``propertyNames`` (yes, while that is still being worked out)."""
        if names == ALWAYS:
            return True
        only = Alternative(STRING, strings=Strings(values=(name,)))
        frame, self._frame = self._frame, len(self._open)
        try:
            return any((alternative & only).types for alternative in self.conjunction(names))
        except _Pending:
            return True
        finally:
            self._frame = frame

    def lost(self, conj: Conj) -> tuple[Narrowing, ...]:
        """What was left out on the way to a conjunction's worlds."""
        return tuple(loss for literal in conj for loss in self._lost.get(literal, ()))

    # -- worlds

    def alternatives(self, literal: int) -> tuple[Alternative, ...]:
        """The worlds of a subschema (even) or of its negation (odd)."""
        if literal == -1:
            return ()
        known = self._worlds.get(literal)
        if known is not None:
            self._carry(self._lost.get(literal, ()))
            return known
        node = self.document.nodes[literal // 2]
        if literal in self._open:
            if literal not in self._open[self._frame :]:
                raise _Pending
            raise GrammarError("$ref", pointer_join(node.pointer, "$ref"), "refers to itself without any step between")
        self._open.append(literal)
        try:
            self._check_keywords(node)
            found = self._denied(literal // 2) if literal % 2 else self._held(literal // 2)
        finally:
            self._open.pop()
        self._worlds[literal] = tuple(_distinct(found))
        self._carry(self._lost.get(literal, ()))
        return self._worlds[literal]

    def product(self, parts: Iterable[Iterable[Alternative]], blame: tuple[str, str] | Conj) -> list[Alternative]:
        """Every combination of one world from each part that is not plainly empty.

        Args:
            blame: the keyword and its pointer, or whose keyword, should there be too many.
        """
        result: list[Alternative] | None = None
        for part in sorted((list(part) for part in parts), key=len):
            merged = part if result is None else [a & b for a in result for b in part if a.types & b.types]
            result = self._alive(merged)
            if len(result) > MAX_WORLDS:
                place = self._blame(blame) if isinstance(blame, frozenset) else blame
                raise GrammarError(*place, f"more than {MAX_WORLDS} combinations of alternatives")
        return [ANYTHING] if result is None else result

    def _alive(self, alternatives: Iterable[Alternative]) -> list[Alternative]:
        """Each world that is not plainly empty once, in order."""
        return _distinct([alternative for alternative in map(self.prune, alternatives) if alternative.types])

    def prune(self, alternative: Alternative) -> Alternative:
        """A world without the types whose required parts cannot exist."""
        types = alternative.types
        arrays = alternative.arrays
        if types & ARRAY and arrays is not NO_ARRAYS:
            needed = {arrays.item(index) for index in range(min(arrays.least, arrays.num_prefix + 1))}
            needed |= {entry.item for entry in arrays.contains if entry.least}
            if any(map(self.is_empty, needed)):
                types &= ~ARRAY
        objects = alternative.objects
        if types & OBJECT and objects.required and any(map(self.is_empty, map(objects.value, objects.required))):
            types &= ~OBJECT
        if types & OBJECT and objects.names and not all(self.admits_name(objects.names, n) for n in objects.required):
            types &= ~OBJECT
        return alternative if types == alternative.types else Alternative(types) & alternative

    def leave_out(self, number: int, keyword: str, reason: str) -> None:
        """Record that the alternatives of a keyword are not all offered."""
        loss = Narrowing(keyword, pointer_join(self.document.nodes[number].pointer, keyword), reason)
        if loss not in self.narrowings:
            self.narrowings.append(loss)
        self._carry((loss,))

    def _carry(self, losses: tuple[Narrowing, ...]) -> None:
        if losses:
            for literal in self._open:
                self._lost[literal] = tuple(dict.fromkeys((*self._lost.get(literal, ()), *losses)))

    def _blame(self, conj: Conj) -> tuple[str, str]:
        """The keyword that is likeliest to have made many alternatives: one that applies schemas, or else any."""
        nodes = self.document.nodes
        near = [nodes[literal // 2] for literal in sorted(conj) if literal >= 0] or nodes
        for keywords in (_APPLICATORS, KEYWORDS):
            for node in near:
                for keyword in keywords:
                    if keyword in node.schema:
                        return keyword, pointer_join(node.pointer, keyword)
        return "schema", ""

    def _check_keywords(self, node: SchemaNode) -> None:
        for keyword, value in node.schema.items():
            row = KEYWORDS.get(keyword)
            if row is None:
                continue  # an unknown keyword is an annotation by the specification
            refused = row.treatment is Treatment.REFUSED
            wrong = f"is not supported: {row.note}" if refused else shape_error(keyword, value)
            if keyword in DRAFTED and not wrong:
                document = self.document
                wrong = draft_error(keyword, node.schema, document.draft, negates=document.may_negate(node))
            if wrong:
                raise GrammarError(keyword, pointer_join(node.pointer, keyword), wrong)

    # -- what a schema says

    def _held(self, number: int) -> list[Alternative]:
        node = self.document.nodes[number]
        schema = node.schema
        if "$ref" in schema and self.document.draft <= 7:
            return list(self.reference(number, "$ref", negated=False))
        clauses = Alternative(arrays=array_clause(self, number), objects=object_clause(self, number))
        parts: list[Iterable[Alternative]] = [[scalars.holds(node) & clauses]]
        for keyword in schema:
            handler = HOLDS.get(keyword)
            if handler:
                parts.extend(handler(self, number))
        found = self._alive(parts[0]) if len(parts) == 1 else self.product(parts, frozenset((2 * number,)))
        if "unevaluatedProperties" not in schema and "unevaluatedItems" not in schema:
            return found
        return [self.prune(alternative & unevaluated(self, number, alternative)) for alternative in found]

    def _denied(self, number: int) -> list[Alternative]:
        node = self.document.nodes[number]
        schema = node.schema
        if "$ref" in schema and self.document.draft <= 7:
            return list(self.reference(number, "$ref", negated=True))
        found = [*scalars.denials(node), *array_denials(self, number), *object_denials(self, number)]
        missing = scalars.undeniable(schema)
        if missing:
            self.leave_out(number, missing, "its failure cannot be written as a grammar")
        for keyword in schema:
            handler = FAILS.get(keyword)
            if handler:
                found.extend(handler(self, number))
        found = [without_evaluation(self.prune(alternative)) for alternative in found]
        if len(found) > MAX_WORLDS:
            raise GrammarError(*self._blame(frozenset((2 * number,))), f"more than {MAX_WORLDS} ways to fail")
        return [alternative for alternative in found if alternative.types]

    def reference(self, number: int, keyword: str, *, negated: bool) -> tuple[Alternative, ...]:
        """The worlds of what a reference leads to, or of its negation."""
        schema = self.document.nodes[number].schema
        target = self.document.resolve(number, schema[keyword], keyword)
        if isinstance(target, bool):
            return (ANYTHING,) if target != negated else ()
        return self.alternatives(2 * target + negated)

    def branch(self, number: int, schema: Any, *tokens: str | int, negated: bool = False) -> tuple[Alternative, ...]:
        """The worlds of a subschema that applies to the same value."""
        if isinstance(schema, bool):
            return (ANYTHING,) if schema != negated else ()
        return self.alternatives(2 * self.document.child(number, schema, *tokens) + negated)


def _distinct(alternatives: list[Alternative]) -> list[Alternative]:
    """Each world once, in order; the hash of a world is that of all its parts."""
    return list(dict.fromkeys(alternatives)) if len(alternatives) > 1 else alternatives
