"""What a request asks of its answer's form, whichever field it came in, as a grammar for the engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ...engine.errors import GrammarRefused
from ...grammar.errors import GrammarError
from ...grammar.schema.static_limits import check_limits
from ...grammar.spec import GrammarSpec
from ..protocol.structured import ResponseFormat, StructuredFields, StructuredOutputs
from .tool_parser import ToolPlan

_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_LARK_RULE = re.compile(r"^[ \t]*[?!]?\w+(?:\.\d+)?[ \t]*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The form that an answer will have.

    Attributes:
        spec: the grammar of the whole answer.
        field: the field that asked for it, for errors.
        kind: the same for metrics: a kind of grammar, or ``tools``.
        form: what free text must follow for itself: ``spec``, or a part of it where ``tools`` are at hand; None for
            text of any form.
        tools: how tool calls are read out of the answer; None where there are none.
    """

    spec: GrammarSpec
    field: str
    kind: str
    form: GrammarSpec | None
    tools: ToolPlan | None = None

    @contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Errors of the engine about the grammar name the field that asked for it."""
        try:
            yield
        except GrammarRefused as error:
            field, pointer = self.field, error.pointer
            if self.tools is not None:
                field, pointer = self.tools.locate(pointer)
            raise GrammarRefused(error.keyword, pointer, error.reason, param=field) from None


def requested_format(body: StructuredFields) -> OutputFormat | None:
    """The form that the body asks for, None for text of any form.

    Raises:
        GrammarRefused: it is malformed or beyond the limits; it names the field.
    """
    if not body.form_fields:
        return None
    name = field = body.form_fields[0]
    if body.structured_outputs is not None:
        field = f"{name}.{body.structured_outputs.given[0]}"
    with naming_field(field):
        spec = _spec(body, name)
        check_limits(spec)
    return OutputFormat(spec, field, spec.kind.value, spec)


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """A ``GrammarError`` becomes a ``GrammarRefused`` that names the field."""
    try:
        yield
    except GrammarError as error:
        raise GrammarRefused(error.keyword, error.pointer, error.reason, param=field) from None


def _spec(body: StructuredFields, field: str) -> GrammarSpec:
    value = getattr(body, field)
    match field:
        case "response_format":
            return _of_response_format(value)
        case "structured_outputs":
            return _of_outputs(value)
        case "guided_json":
            return GrammarSpec.json_schema(value)
        case "guided_choice":
            return GrammarSpec.choice(value)
        case "guided_grammar":
            return grammar_of_text(value)
        case "ebnf":
            return GrammarSpec.ebnf(value)
    return GrammarSpec.regex(value)


def _of_response_format(given: ResponseFormat) -> GrammarSpec:
    if given.json_schema is not None:
        return GrammarSpec.json_schema(given.json_schema.schema_)
    return GrammarSpec.json_object() if given.type == "json_object" else GrammarSpec.structural_tag(given.tag())


def _of_outputs(given: StructuredOutputs) -> GrammarSpec:
    match given.given[0]:
        case "json":
            return GrammarSpec.json_schema(given.json_)
        case "regex":
            return GrammarSpec.regex(str(given.regex))
        case "choice":
            return GrammarSpec.choice(given.choice or [])
        case "grammar":
            return grammar_of_text(str(given.grammar))
        case "json_object":
            return GrammarSpec.json_object()
    return GrammarSpec.structural_tag(given.structural_tag)


def grammar_of_text(text: str) -> GrammarSpec:
    """A grammar in EBNF (its rules are written ``name ::= ...``) or else in Lark (``name: ...``).

    Raises:
        GrammarError: the text has rules of neither kind.
    """
    if _EBNF_RULE.search(text):
        return GrammarSpec.ebnf(text)
    if text and not _LARK_RULE.search(text):
        raise GrammarError("grammar", "", "must be EBNF with a rule 'root ::= ...' or Lark with a rule 'start: ...'")
    return GrammarSpec.lark(text)
