"""Alternatives of every subschema and of every conjunction of subschemas, computed on demand and memoised.

This is the algebra that `analysis` uses: products, pruning, recursion, and the record of narrowings. The subclass
defines how the keywords of one subschema become alternatives.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from ..errors import GrammarError
from .constraints import ALWAYS, ANYTHING, NEVER, NO_ARRAYS, Alternative, Conj, Strings
from .document import Document, pointer_join
from .json_types import ARRAY, OBJECT, STRING
from .keywords import KEYWORDS

MAX_ALTERNATIVES = 256
MAX_LITERALS = 20_000
# Limit of the questions whether a conjunction is empty that are asked inside each other. Behind references each one may
# be about another conjunction than the one before; further ones count as satisfiable.
MAX_ASKED = 40
_APPLICATORS = ("anyOf", "oneOf", "allOf", "if", "dependencies", "dependentSchemas", "not", "$ref")
Alternatives: TypeAlias = "list[Alternative] | tuple[Alternative, ...]"


@dataclass(frozen=True, slots=True)
class Narrowing:
    """A place where the grammar permits less than the schema: keyword, JSON Pointer, reason."""

    keyword: str
    pointer: str
    reason: str


class _Recursion(Exception):
    """The alternatives being computed depend on themselves through a property or an item."""


class Subschemas(ABC):
    """The alternatives of all subschemas of one document.

    Attributes:
        document: the schema.
        narrowings: descriptions of the places where permitted values were left out so far.
        unions: for a node and keyword, the branches that are not literals, and the node that enumerates the literals.
    """

    def __init__(self, document: Document) -> None:
        self.document = document
        self.narrowings: list[Narrowing] = []
        self.unions: dict[tuple[int, str], tuple[list[tuple[int, Any]], int]] = {}
        self._by_literal: dict[int, tuple[Alternative, ...]] = {}
        self._by_conj: dict[Conj, tuple[Alternative, ...]] = {}
        self._narrowed: dict[int, tuple[Narrowing, ...]] = {}
        self._open: list[int] = []
        self._empty: dict[Conj, bool] = {}
        self._asked: set[Conj] = set()  # whether they are empty, or admit a name
        self._frame = 0

    @abstractmethod
    def _holds(self, number: int) -> list[Alternative]:
        """Return the alternatives in which a node's keywords all hold."""

    @abstractmethod
    def _fails(self, number: int) -> list[Alternative]:
        """Return the alternatives in which one of a node's keywords fails."""

    @abstractmethod
    def widest(self) -> Subschemas:
        """Return the analysis of the same document whose alternatives leave out no value that any validator admits."""

    # -- conjunctions

    def literal(self, parent: int, schema: Any, *tokens: str | int, negated: bool = False) -> Conj:
        """Return the conjunction that is one subschema, or its negation."""
        if isinstance(schema, bool):
            return NEVER if schema == negated else ALWAYS
        return frozenset((2 * self.document.child(parent, schema, *tokens) + negated,))

    def conjunction(self, conj: Conj) -> tuple[Alternative, ...]:
        """Return the alternatives of a conjunction; none if no value satisfies it.

        Raises:
            GrammarError: a part of the conjunction cannot be analysed.
        """
        known = self._by_conj.get(conj)
        if known is None:
            if len(self._by_conj) > MAX_LITERALS:
                reason = f"makes more than {MAX_LITERALS} parts when written out"
                raise GrammarError(*self._likely_keyword(conj), reason)
            known = self._by_conj[conj] = () if _is_contradiction(conj) else tuple(self._combined(conj))
        return known

    def _combined(self, conj: Conj) -> list[Alternative]:
        parts = [self.alternatives(literal) for literal in sorted(conj)]
        return self._nonempty(parts[0]) if len(parts) == 1 else self.product(parts, conj)

    def is_empty(self, conj: Conj) -> bool:
        """Return whether surely nothing satisfies a conjunction; a deep or endless question counts as satisfiable."""
        if -1 in conj or _is_contradiction(conj):
            return True
        if len(conj) < 2 or conj in self._asked:
            return False
        known = self._empty.get(conj)
        if known is not None:
            return known
        if len(self._asked) >= MAX_ASKED:
            return False
        frame, self._frame = self._frame, len(self._open)
        self._asked.add(conj)
        try:
            known = self._empty[conj] = not self.conjunction(conj)
        except _Recursion:
            return False
        finally:
            self._frame = frame
            self._asked.discard(conj)
        return known

    def admits_name(self, names: Conj, name: str) -> bool:
        """Return whether a key satisfies ``propertyNames`` (true while that is still being computed)."""
        if names == ALWAYS or names in self._asked:
            return True
        only = Alternative(STRING, strings=Strings(values=(name,)))
        frame, self._frame = self._frame, len(self._open)
        self._asked.add(names)
        try:
            return any((alternative & only).types for alternative in self.conjunction(names))
        except _Recursion:
            return True
        finally:
            self._frame = frame
            self._asked.discard(names)

    def narrowings_of(self, conj: Conj) -> tuple[Narrowing, ...]:
        return tuple(each for literal in conj for each in self._narrowed.get(literal, ()))

    # -- alternatives

    def alternatives(self, literal: int) -> tuple[Alternative, ...]:
        """Return the alternatives of a subschema (even) or of its negation (odd)."""
        if literal == -1:
            return ()
        known = self._by_literal.get(literal)
        if known is not None:
            self._propagate(self._narrowed.get(literal, ()))
            return known
        if literal in self._open:
            if literal not in self._open[self._frame :]:
                raise _Recursion
            raise self.document.nodes[literal // 2].error("$ref", "refers to itself directly")
        self._open.append(literal)
        try:
            found = self._fails(literal // 2) if literal % 2 else self._holds(literal // 2)
        finally:
            self._open.pop()
        self._by_literal[literal] = tuple(_distinct(found))
        self._propagate(self._narrowed.get(literal, ()))
        return self._by_literal[literal]

    def product(self, parts: Iterable[Iterable[Alternative]], location: tuple[str, str] | Conj) -> list[Alternative]:
        """Return every combination of one alternative from each part that is not plainly empty.

        Args:
            location: place that an error about too many alternatives names: keyword and pointer, or a conjunction from
                which they are derived.
        """
        result: list[Alternative] | None = None
        for part in sorted((list(part) for part in parts), key=len):
            merged = part if result is None else [a & b for a in result for b in part if a.types & b.types]
            result = self._nonempty(merged)
            if len(result) > MAX_ALTERNATIVES:
                keyword = self._likely_keyword(location) if isinstance(location, frozenset) else location
                raise GrammarError(*keyword, f"more than {MAX_ALTERNATIVES} combinations of alternatives")
        return [ANYTHING] if result is None else result

    def prune(self, alternative: Alternative) -> Alternative:
        """Return an alternative without the types whose required parts cannot exist."""
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

    def reference(self, number: int, keyword: str, *, negated: bool) -> tuple[Alternative, ...]:
        """Return the alternatives of a reference's target, or of its negation."""
        schema = self.document.nodes[number].schema
        return self.referred(self.document.resolve(number, schema[keyword], keyword), negated=negated)

    def referred(self, target: int | bool, *, negated: bool) -> tuple[Alternative, ...]:
        """Return the alternatives of a node, or of a boolean schema, or of its negation."""
        if isinstance(target, bool):
            return (ANYTHING,) if target != negated else ()
        return self.alternatives(2 * target + negated)

    def branch(self, number: int, schema: Any, *tokens: str | int, negated: bool = False) -> tuple[Alternative, ...]:
        """Return the alternatives of a subschema that applies to the same value."""
        if isinstance(schema, bool):
            return (ANYTHING,) if schema != negated else ()
        return self.alternatives(2 * self.document.child(number, schema, *tokens) + negated)

    def narrow(self, number: int, keyword: str, reason: str) -> None:
        """Record that the alternatives of a keyword are not all offered."""
        narrowing = Narrowing(keyword, pointer_join(self.document.nodes[number].pointer, keyword), reason)
        if narrowing not in self.narrowings:
            self.narrowings.append(narrowing)
        self._propagate((narrowing,))

    def _propagate(self, narrowings: tuple[Narrowing, ...]) -> None:
        if narrowings:
            for literal in self._open:
                self._narrowed[literal] = tuple(dict.fromkeys((*self._narrowed.get(literal, ()), *narrowings)))

    def _nonempty(self, alternatives: Iterable[Alternative]) -> list[Alternative]:
        """Prune alternatives; drop empty and repeated ones, keep the order."""
        return _distinct([alternative for alternative in map(self.prune, alternatives) if alternative.types])

    def _likely_keyword(self, conj: Conj) -> tuple[str, str]:
        """Return keyword and pointer of what likely made many alternatives: an applicator, or else any keyword."""
        nodes = self.document.nodes
        near = [nodes[literal // 2] for literal in sorted(conj) if literal >= 0] or nodes
        for keywords in (_APPLICATORS, KEYWORDS):
            for node in near:
                for keyword in keywords:
                    if keyword in node.schema:
                        return keyword, pointer_join(node.pointer, keyword)
        return "schema", ""


def _is_contradiction(conj: Conj) -> bool:
    """Return whether a schema must hold and must fail; where it is recursive, its parts are asked the same again."""
    return any(literal ^ 1 in conj for literal in conj if literal >= 0)


def _distinct(alternatives: list[Alternative]) -> list[Alternative]:
    # Hashing an alternative hashes all its parts, so one alone is left unhashed.
    return list(dict.fromkeys(alternatives)) if len(alternatives) > 1 else alternatives
