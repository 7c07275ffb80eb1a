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
from .combinators import FAILS, HOLDS, MAX_TRACKED
from .constraints import Alternative, widest, without_evaluation
from .document import Document, SchemaNode
from .json_types import ARRAY, NUMBER, OBJECT, STRING
from .keywords import DRAFTED, KEYWORDS, draft_error, shape_error
from .subschemas import MAX_ALTERNATIVES, Subschemas

_UNEVALUATED = ("unevaluatedProperties", "unevaluatedItems")
# Types of the values that a keyword constrains whose failure may be left out.
_TYPES_OF = {
    "multipleOf": NUMBER,
    "format": STRING,
    **dict.fromkeys(("items", "uniqueItems", "unevaluatedItems"), ARRAY),
    **dict.fromkeys(("patternProperties", "additionalProperties", "propertyNames", "unevaluatedProperties"), OBJECT),
}


class Analysis(Subschemas):
    """The alternatives of all subschemas of one document, by the keywords of JSON Schema."""

    _handlers = HOLDS
    # Whether the alternatives tell all that is evaluated, or less, which leaves values out.
    _tracks_evaluation = True

    def __init__(self, document: Document) -> None:
        super().__init__(document)
        self._widest: WidestAnalysis | None = None

    def widest(self) -> Subschemas:
        """Return the analysis of the same document that admits at least what each subschema admits."""
        if self._widest is None:
            self._widest = WidestAnalysis(self.document)
        return self._widest

    def _holds(self, number: int) -> list[Alternative]:
        node = self.document.nodes[number]
        schema = node.schema
        self._check_keywords(node)
        if "$ref" in schema and node.scope.draft <= 7:
            return list(self.reference(number, "$ref", negated=False))
        found = self._held(number)
        if schema.keys().isdisjoint(_UNEVALUATED) or not self._tracks_evaluation:
            return found
        return [self.prune(each & self._own(unevaluated(self, number, each))) for each in found]

    def _own(self, alternative: Alternative) -> Alternative:
        """Return an alternative of a node's own keywords by the reading of this analysis."""
        return alternative

    def _held(self, number: int) -> list[Alternative]:
        """Return the alternatives of all keywords of a node but those on what is unevaluated."""
        node = self.document.nodes[number]
        clauses = Alternative(arrays=array_clause(self, number), objects=object_clause(self, number))
        parts: list[Iterable[Alternative]] = [[self._own(scalars.holds(node)) & self._own(clauses)]]
        for keyword in node.schema:
            handler = self._handlers.get(keyword)
            if handler:
                parts.extend(handler(self, number, keyword))
        return self._nonempty(parts[0]) if len(parts) == 1 else self.product(parts, frozenset((2 * number,)))

    def _fails(self, number: int) -> list[Alternative]:
        node = self.document.nodes[number]
        schema = node.schema
        self._check_keywords(node)
        if "$ref" in schema and node.scope.draft <= 7:
            return list(self.reference(number, "$ref", negated=True))
        found = [*map(self._own, scalars.denials(node)), *array_denials(self, number), *object_denials(self, number)]
        unevaluated_items_or_keys = (each for each in _UNEVALUATED if schema.get(each, True) is not True)
        for keyword in (*scalars.undeniable(schema), *unevaluated_items_or_keys):
            self.narrow(number, keyword, "its failure cannot be written as a grammar")
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
                wrong = draft_error(
                    keyword,
                    node.schema,
                    node.scope.draft,
                    negates=self.document.may_negate(node),
                    tracks_evaluation=self.document.tracks_evaluation,
                )
            if wrong:
                raise node.error(keyword, wrong)


class WidestAnalysis(Analysis):
    """The same with no value left out: what any validator admits is in an alternative, and perhaps more.

    It tells which values a branch of ``oneOf`` may hold for, so that another branch leaves them out.
    """

    _handlers = HOLDS | {"oneOf": HOLDS["anyOf"]}

    def __init__(self, document: Document) -> None:
        super().__init__(document)
        self._left_out: list[int] = []
        self._tracks_evaluation = document.most_any_of <= MAX_TRACKED

    def widest(self) -> Subschemas:
        return self

    def _own(self, alternative: Alternative) -> Alternative:
        return widest(alternative)

    def _fails(self, number: int) -> list[Alternative]:
        self._left_out.append(0)
        try:
            found = super()._fails(number)
        finally:
            types = self._left_out.pop()
        return [*found, Alternative(types)] if types else found

    def narrow(self, number: int, keyword: str, reason: str) -> None:
        """Allow all values of the types that a keyword restricts, because the keyword cannot be written exactly."""
        self._left_out[-1] |= _TYPES_OF[keyword]
