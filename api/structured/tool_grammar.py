"""Output format for tools and ``tool_choice``: the grammar of the answer and the plan to parse its calls.

    named           the prompt ends with the head of the call; the answer is its arguments alone
    required        a call as a JSON object, or an array of calls if parallel calls are allowed
    auto            free text in which the format's trigger opens calls; or calls, or the requested format
    none            as without tools: the answer is content

Forced calls are plain JSON, because the grammar can close JSON within any token budget.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...engine.errors import RequestError
from ...grammar.schema.document import pointer_join
from ...grammar.schema.static_limits import check_limits
from ...grammar.spec import GrammarKind, GrammarSpec
from ..protocol.tools import AllowedChoice, NamedChoice, Tool, resolve_choice
from .output_format import OutputFormat, naming_field
from .tool_formats import ToolFormat
from .tool_parser import Reading, ToolPlan

MAX_FORCED_CALLS = 16
# Schema of a function without parameters: exactly {}.
_NO_ARGUMENTS: dict[str, Any] = {"const": {}}


def tool_output_format(
    tools: Sequence[Tool],
    choice: str | NamedChoice | AllowedChoice,
    form: ToolFormat,
    requested: OutputFormat | None,
    *,
    parallel: bool,
) -> OutputFormat | None:
    """Return the output format of an answer with tools; None for free text.

    Args:
        choice: ``tool_choice``, checked by ``check_tools``.
        form: the model's tool call format.
        requested: output format of answers without calls.
        parallel: whether several calls are allowed.

    Raises:
        RequestError: a tool's schema is malformed or beyond the limits, or the formats contradict each other.
    """
    mode, callable_tools = resolve_choice(tools, choice)
    parallel = parallel and not form.only_at_start
    fields = {tool.function.name: f"tools[{tools.index(tool)}].function.parameters" for tool in callable_tools}
    arguments = {tool.function.name: _arguments(tool, fields[tool.function.name]) for tool in callable_tools}
    if mode == "none":
        return requested
    if mode == "named":
        [name] = arguments
        plan = ToolPlan(form, Reading.ARGUMENTS, arguments, form.opening + form.head(name), name, (("", fields[name]),))
        return OutputFormat(arguments[name], "tools", "tools", None, plan)
    if mode == "required":
        return _required(arguments, fields, form, parallel=parallel)
    return _triggered(arguments, fields, form, requested, parallel=parallel)


def _arguments(tool: Tool, name: str) -> GrammarSpec:
    schema = tool.function.parameters
    with naming_field(name):
        spec = GrammarSpec.json_schema(_NO_ARGUMENTS if schema is None else {"type": "object"} | schema)
        check_limits(spec)
    return spec


def _required(
    arguments: Mapping[str, GrammarSpec], fields: Mapping[str, str], form: ToolFormat, *, parallel: bool
) -> OutputFormat:
    embedded = {name: _embedded(spec.value(), index) for index, (name, spec) in enumerate(arguments.items())}
    _check_ids(embedded, fields)
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, form.arguments_key: schema},
            "required": ["name", form.arguments_key],
            "additionalProperties": False,
        }
        for name, schema in embedded.items()
    ]
    schema: Any = {"anyOf": calls}
    prefill = form.opening
    if parallel:
        schema = {"type": "array", "items": schema, "minItems": 1, "maxItems": MAX_FORCED_CALLS}
        prefill = form.opening.removesuffix("[") if form.separator else ""
    schema_fields = _schema_fields(schema, {id(part): fields[name] for name, part in embedded.items()})
    plan = ToolPlan(form, Reading.JSON, arguments, prefill, schema_fields=schema_fields)
    with naming_field("tools"):
        spec = GrammarSpec.json_schema(schema)
        check_limits(spec)
    return OutputFormat(spec, "tools", "tools", None, plan)


def _embedded(schema: dict[str, Any], index: int) -> dict[str, Any]:
    """Give the schema an ``$id`` of its own, so that its references resolve within it."""
    return {"$id": f"http://tool-{index}.invalid/"} | {key: value for key, value in schema.items() if key != "$schema"}


def _check_ids(schemas: Mapping[str, dict[str, Any]], fields: Mapping[str, str]) -> None:
    """Refuse equal ``$id``s: references of one schema would resolve into the other."""
    owners: dict[str, str] = {}
    for name, schema in schemas.items():
        if owners.setdefault(str(schema["$id"]), name) != name:
            raise RequestError(f"'{fields[name]}.$id' is that of another tool.", param=f"{fields[name]}.$id")


def _triggered(
    arguments: Mapping[str, GrammarSpec],
    fields: Mapping[str, str],
    form: ToolFormat,
    requested: OutputFormat | None,
    *,
    parallel: bool,
) -> OutputFormat:
    schemas = {name: spec.value() for name, spec in arguments.items()}
    owners = {id(schema): fields[name] for name, schema in schemas.items()}
    calls = _calls(schemas, form, parallel=parallel)
    shape: dict[str, Any]
    if requested is not None:
        document = _document(requested, form)
        owners[id(document["json_schema"])] = requested.field
        if parallel and form.separator is None:
            calls = {"type": "tags_with_separator", "tags": [calls], "separator": "\n", "at_least_one": True}
        shape = {"type": "or", "elements": [calls, document]}
    elif form.only_at_start:
        # Text that begins with the trigger is parsed as a call, so free text may not.
        text = {"type": "regex", "pattern": rf"^(?!{re.escape(form.trigger)})[\s\S]*$"}
        shape = {"type": "or", "elements": [calls, text]}
    else:
        once = not parallel or form.separator is not None
        shape = {"type": "triggered_tags", "triggers": [form.trigger], "tags": [calls], "stop_after_first": once}
    schema_fields = _schema_fields({"format": shape}, owners)
    with naming_field("tools"):
        spec = GrammarSpec.structural_tag({"format": shape})
        check_limits(spec)
    plan = ToolPlan(form, Reading.TRIGGERED, arguments, schema_fields=schema_fields)
    return OutputFormat(spec, "tools", "tools", None if requested is None else requested.spec, plan)


def _calls(schemas: Mapping[str, Any], form: ToolFormat, *, parallel: bool) -> dict[str, Any]:
    """Structural tag of a call in the model's format, or of several calls after one opening."""
    tags = [
        {"type": "tag", "begin": form.head(name), "content": {"type": "json_schema", "json_schema": schema}, "end": "}"}
        for name, schema in schemas.items()
    ]
    content: dict[str, Any] = {"type": "or", "elements": tags}
    if form.separator is not None and parallel:
        content = {"type": "tags_with_separator", "tags": tags, "separator": form.separator, "at_least_one": True}
    if not form.opening:
        return content
    return {"type": "tag", "begin": form.opening, "content": content, "end": form.closing}


def _document(requested: OutputFormat, form: ToolFormat) -> dict[str, Any]:
    """Structural tag element for an answer without calls."""
    if not requested.spec.kind.is_json:
        raise RequestError(
            f"'{requested.field}' must be JSON beside 'tools': set 'tool_choice' to 'none' for other forms.",
            param=requested.field,
        )
    if form.only_at_start:
        raise RequestError(
            f"'{requested.field}' cannot go with 'tools' here: this model writes calls as bare JSON, which could be "
            "either. Set 'tool_choice' to 'none' or 'required'.",
            param=requested.field,
        )
    is_object = requested.spec.kind is GrammarKind.JSON_OBJECT
    return {"type": "json_schema", "json_schema": {"type": "object"} if is_object else requested.spec.value()}


def _schema_fields(shape: Any, owners: Mapping[int, str]) -> tuple[tuple[str, str], ...]:
    """Find the request's schemas inside a grammar by identity: (pointer, request field)."""

    def walk(node: Any, pointer: str) -> Iterator[tuple[str, str]]:
        if id(node) in owners:
            yield pointer, owners[id(node)]
        elif isinstance(node, dict | list):
            for step, value in node.items() if isinstance(node, dict) else enumerate(node):
                yield from walk(value, pointer_join(pointer, step))

    return tuple(walk(shape, ""))
