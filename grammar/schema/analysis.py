"""JSON Schema analysis: each subschema as a union of alternatives, before any grammar is built.

`Analysis.alternatives` turns a subschema, or its negation, into a union of `Alternative`s. It follows references,
multiplies ``allOf`` out, and turns ``oneOf``, ``not``, ``if`` and the dependencies into alternatives that exclude each
other. Each rewriting keeps the set of permitted values or makes it smaller, never larger, so every text that the
grammar admits is valid. ``Analysis.narrowings`` lists the places where the set became smaller. If the set would become
empty, a ``GrammarError`` is raised.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import GrammarError
from . import scalars
from .arrays_objects import array_clause, array_denials, object_clause, object_denials, unevaluated
from .combinators import FAILS, HOLDS
from .constraints import Alternative, without_evaluation
from .document import SchemaNode
from .keywords import DRAFTED, KEYWORDS, draft_error, shape_error
from .subschemas import MAX_ALTERNATIVES, Subschemas


class Analysis(Subschemas):
    """The alternatives of all subschemas of one document, by the keywords of JSON Schema."""

    def _holds(self, number: int) -> list[Alternative]:
        node = self.document.nodes[number]
        schema = node.schema
        self._check_keywords(node)
        if "$ref" in schema and node.scope.draft <= 7:
            return list(self.reference(number, "$ref", negated=False))
        clauses = Alternative(arrays=array_clause(self, number), objects=object_clause(self, number))
        parts: list[Iterable[Alternative]] = [[scalars.holds(node) & clauses]]
        for keyword in schema:
            handler = HOLDS.get(keyword)
            if handler:
                parts.extend(handler(self, number, keyword))
        found = self._nonempty(parts[0]) if len(parts) == 1 else self.product(parts, frozenset((2 * number,)))
        if "unevaluatedProperties" not in schema and "unevaluatedItems" not in schema:
            return found
        return [self.prune(alternative & unevaluated(self, number, alternative)) for alternative in found]

    def _fails(self, number: int) -> list[Alternative]:
        node = self.document.nodes[number]
        schema = node.schema
        self._check_keywords(node)
        if "$ref" in schema and node.scope.draft <= 7:
            return list(self.reference(number, "$ref", negated=True))
        found = [*scalars.denials(node), *array_denials(self, number), *object_denials(self, number)]
        missing = scalars.undeniable(schema)
        if missing:
            self.narrow(number, missing, "its failure cannot be written as a grammar")
        for keyword in schema:
            handler = FAILS.get(keyword)
            if handler:
                found.extend(handler(self, number, keyword))
        found = [without_evaluation(self.prune(alternative)) for alternative in found]
        if len(found) > MAX_ALTERNATIVES:
            location = self._likely_keyword(frozenset((2 * number,)))
            raise GrammarError(*location, f"more than {MAX_ALTERNATIVES} ways to fail")
        return [alternative for alternative in found if alternative.types]

    def _check_keywords(self, node: SchemaNode) -> None:
        for keyword, value in node.schema.items():
            row = KEYWORDS.get(keyword)
            if row is None:
                continue  # an unknown keyword is an annotation by the specification
            wrong = shape_error(keyword, value)
            if keyword in DRAFTED and not wrong:
                negates = self.document.may_negate(node)
                wrong = draft_error(keyword, node.schema, node.scope.draft, negates=negates)
            if wrong:
                raise node.error(keyword, wrong)
