"""Output format: converts a request's format (response_format, guided_*, structured_outputs, ...) to a grammar."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from ...engine.errors import GrammarRefused
from ...grammar.errors import GrammarError
from ...grammar.schema.static_limits import check_limits
from ...grammar.spec import GrammarSpec
from ..large_bodies import beside_loop
from ..protocol.structured import ResponseFormat, StructuredFields, StructuredOutputs
from .tool_parser import ToolParser
from .tool_plan import ToolPlan

_EBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
_LARK_RULE = re.compile(r"^[ \t]*[?!]?\w+(?:\.\d+)?[ \t]*:", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The output format of an answer.

    Attributes:
        spec: the grammar of the whole answer.
        field: field of the request that sets the format, for error messages.
        kind: label for metrics: a kind of grammar, or ``tools``.
        form: grammar of the text outside of tool calls: ``spec``, or a part of ``spec`` if there are ``tools``; None
            for free text.
        tools: rules for parsing tool calls out of the answer; None without tools.
    """

    spec: GrammarSpec
    field: str
    kind: str
    form: GrammarSpec | None
    tools: ToolPlan | None = None

    @contextmanager
    def locating_errors(self) -> Iterator[None]:
        """Context manager: a ``GrammarRefused`` raised in the block names a field and a pointer of the request."""
        try:
            yield
        except GrammarRefused as error:
            if self.tools is not None:
                raise self.tools.locate(error) from None
            raise GrammarRefused(error.keyword, error.pointer, error.reason, param=self.field) from None


def tool_parser(output_format: OutputFormat | None) -> ToolParser | None:
    """Create a parser for the tool calls of one answer. Returns None without tools."""
    return None if output_format is None or output_format.tools is None else ToolParser(output_format.tools)


def requested_format(body: StructuredFields) -> OutputFormat | None:
    """Return the output format that the body requests; None for free text.

    Raises:
        GrammarRefused: the format is malformed or beyond the limits; the error names the field.
    """
    if not body.format_fields:
        return None
    name = field = body.format_fields[0]
    if body.structured_outputs is not None:
        field = f"{name}.{body.structured_outputs.given[0]}"
    with naming_field(field):
        spec = _spec(body, name)
        check_limits(spec)
    return OutputFormat(spec, field, spec.kind.value, spec)


async def checked_format(body: StructuredFields) -> OutputFormat | None:
    """Like ``requested_format``, but off the event loop if the request's body is large."""
    return await beside_loop(partial(requested_format, body))


@contextmanager
def naming_field(field: str) -> Iterator[None]:
    """Context manager: convert a ``GrammarError`` that the block raises to ``GrammarRefused`` for this field."""
    try:
        yield
    except GrammarError as error:
        raise GrammarRefused(error.keyword, error.pointer, error.reason, param=field) from None


def _spec(body: StructuredFields, field: str) -> GrammarSpec:
    value = getattr(body, field)
    match field:
        case "response_format":
            return _response_format_spec(value)
        case "structured_outputs":
            return _structured_outputs_spec(value)
        case "guided_json":
            return GrammarSpec.json_schema(value)
        case "guided_choice":
            return GrammarSpec.choice(value)
        case "guided_grammar":
            return grammar_of_text(value)
        case "ebnf":
            return GrammarSpec.ebnf(value)
    return GrammarSpec.regex(value)


def _response_format_spec(value: ResponseFormat) -> GrammarSpec:
    if value.json_schema is not None:
        return GrammarSpec.json_schema(value.json_schema.schema_)
    return GrammarSpec.json_object() if value.type == "json_object" else GrammarSpec.structural_tag(value.tag())


def _structured_outputs_spec(value: StructuredOutputs) -> GrammarSpec:
    match value.given[0]:
        case "json":
            return GrammarSpec.json_schema(value.json_)
        case "regex":
            return GrammarSpec.regex(str(value.regex))
        case "choice":
            return GrammarSpec.choice(value.choice or [])
        case "grammar":
            return grammar_of_text(str(value.grammar))
        case "json_object":
            return GrammarSpec.json_object()
    return GrammarSpec.structural_tag(value.structural_tag)


def grammar_of_text(text: str) -> GrammarSpec:
    """Return the grammar in a text: EBNF if the text has a rule ``name ::= ...``, else Lark (``name: ...``).

    Raises:
        GrammarError: the text has neither kind of rule.
    """
    if _EBNF_RULE.search(text):
        return GrammarSpec.ebnf(text)
    if text and not _LARK_RULE.search(text):
        raise GrammarError("grammar", "", "must be EBNF with a rule 'root ::= ...' or Lark with a rule 'start: ...'")
    return GrammarSpec.lark(text)
