"""Tool grammar: builds the grammar of an answer with tools, and the plan for parsing its calls, from ``tool_choice``.

    named           the prompt ends with the head of the call; the answer is only its arguments
    required        a call as a JSON object, or an array of calls if parallel calls are allowed
    auto            free text in which the format's trigger opens calls; or calls, or the requested format
    none            as without tools: the answer is content

In formats in which a call is a JSON object, forced calls are plain JSON, because the grammar can close JSON within any
token budget. In other formats, forced calls have the model's own form, without other text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...engine.errors import RequestError
from ...grammar.argument_styles import PYTHON, XmlStyle, argument_types, xml_marks, xml_style
from ...grammar.errors import GrammarError
from ...grammar.schema.document import pointer_join
from ...grammar.schema.static_limits import check_limits
from ...grammar.spec import GrammarKind, GrammarSpec
from ..protocol.tools import CUSTOM_INPUT, CallableTool, Chosen, Function, OtherTool, TextTool, resolve_choice
from .output_format import OutputFormat, naming_field
from .tool_formats import NAME, WRITTEN_IDS, ToolFormat
from .tool_plan import Reading, ToolPlan

MAX_FORCED_CALLS = 16
# Texts before and after the input of a custom tool, by the style of arguments.
_BEFORE_INPUT = {"json": (f'{{"{CUSTOM_INPUT}": "', '"}'), PYTHON: (f'{CUSTOM_INPUT}="', '"')}
# For each type of tool, the field that defines the tool's arguments.
_FORMS = {"function": "function.parameters", "custom": "custom.format"}
# Schema of a function without parameters. It allows only {}.
_NO_ARGUMENTS: dict[str, Any] = {"const": {}}


def tool_output_format(
    tools: Sequence[CallableTool | OtherTool],
    choice: Chosen,
    form: ToolFormat,
    requested: OutputFormat | None,
    *,
    parallel: bool,
) -> OutputFormat | None:
    """Return the output format of an answer with tools; None for free text.

    Args:
        tools: the tools; those that cannot be called are ignored. Errors name a tool by its index among all tools.
        choice: ``tool_choice``, checked by ``check_tools``.
        form: the model's tool call format.
        requested: output format of answers without calls.
        parallel: whether several calls are allowed.

    Raises:
        RequestError: a tool's schema is malformed or beyond the limits, or the formats contradict each other.
    """
    found = _output_format(tools, choice, form, requested, parallel=parallel)
    custom = frozenset(tool.custom.name for tool in tools if isinstance(tool, TextTool))
    if found is None or found.tools is None or not custom:
        return found
    return replace(found, tools=replace(found.tools, custom=custom))


def _output_format(
    tools: Sequence[CallableTool | OtherTool],
    choice: Chosen,
    form: ToolFormat,
    requested: OutputFormat | None,
    *,
    parallel: bool,
) -> OutputFormat | None:
    mode, callable_tools = resolve_choice(tools, choice)
    if mode != "none":
        _check_names(callable_tools, tools, form)
    parallel = parallel and not form.single
    # Tools are found by identity, because comparing them takes time proportional to their size.
    places = {id(tool): number for number, tool in enumerate(tools)}
    fields = {tool.function.name: f"tools[{places[id(tool)]}].{_FORMS[tool.type]}" for tool in callable_tools}
    arguments = {tool.function.name: _arguments(tool.function, fields[tool.function.name]) for tool in callable_tools}
    if mode == "none":
        return requested
    larks = {tool.custom.name: tool.lark for tool in callable_tools if isinstance(tool, TextTool) and tool.lark}
    contents = {name: _content(spec, form, larks.get(name), fields[name]) for name, spec in arguments.items()}
    if mode != "auto" and (not form.is_object or (larks and mode == "required")):
        parallel = parallel and mode == "required"
        return _triggered(arguments, contents, fields, form, None, parallel=parallel, must_call=True)
    if mode == "named":
        [name] = arguments
        owners = (("/format" if larks else "", fields[name]),)
        plan = ToolPlan(form, Reading.ARGUMENTS, arguments, form.opening + form.head(name), name, owners)
        if larks:
            tag = _checked(GrammarSpec.structural_tag, {"format": contents[name]}, plan)
            return OutputFormat(tag, "tools", "tools", None, plan)
        return OutputFormat(arguments[name], "tools", "tools", None, plan)
    if mode == "required":
        return _required(arguments, fields, form, parallel=parallel)
    return _triggered(arguments, contents, fields, form, requested, parallel=parallel, must_call=False)


def _check_names(
    callable_tools: Sequence[CallableTool], tools: Sequence[CallableTool | OtherTool], form: ToolFormat
) -> None:
    """Refuse a function whose name the model uses as the recipient of its text."""
    for tool in callable_tools if form.recipient_mark else ():
        if form.head(tool.function.name).startswith(form.content_opening):
            field = f"tools[{tools.index(tool)}].{tool.type}.name"
            raise RequestError(
                f"'{field}' cannot be {tool.function.name!r} here: this model writes it before text for the user.",
                param=field,
            )


def _arguments(function: Function, name: str) -> GrammarSpec:
    schema = function.parameters
    with naming_field(name):
        spec = GrammarSpec.json_schema(_NO_ARGUMENTS if schema is None else {"type": "object"} | schema)
        check_limits(spec)
    return spec


def _content(spec: GrammarSpec, form: ToolFormat, lark: str | None, field: str) -> dict[str, Any]:
    """Return the structural tag for the arguments of a call.

    Raises:
        RequestError: a Lark grammar cannot be enforced, because the model's call format has no quotes around texts.
    """
    if lark is None:
        content: dict[str, Any] = {"type": "json_schema", "json_schema": spec.value()}
        if form.style != "json":
            content["style"] = xml_marks(form.style) if isinstance(form.style, XmlStyle) else form.style
        return content
    if form.style not in _BEFORE_INPUT:
        raise RequestError(
            f"'{field}' cannot be a Lark grammar here: this model writes arguments of calls without quotes. Give a "
            "regular expression ('regex') or free text.",
            param=field,
        )
    before, after = _BEFORE_INPUT[form.style]
    elements = [
        {"type": "const_string", "value": before},
        {"type": "json_lark", "grammar": lark},
        {"type": "const_string", "value": after},
    ]
    return {"type": "sequence", "elements": elements}


def _required(
    arguments: Mapping[str, GrammarSpec],
    fields: Mapping[str, str],
    form: ToolFormat,
    *,
    parallel: bool,
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
        prefill = form.opening.rstrip().removesuffix("[") if form.separator else ""
    schema_fields = _schema_fields(schema, {id(part): fields[name] for name, part in embedded.items()})
    plan = ToolPlan(form, Reading.JSON, arguments, prefill, schema_fields=schema_fields)
    spec = _checked(GrammarSpec.json_schema, schema, plan)
    return OutputFormat(spec, "tools", "tools", None, plan)


def _embedded(schema: dict[str, Any], index: int) -> dict[str, Any]:
    """Add an id to a schema, so that its references resolve within the schema and its ``$schema`` is observed.

    In drafts up to 7, an id beside ``$ref`` has no effect. So a schema with ``$ref`` is read as draft 2020-12, in which
    the keywords beside the reference, such as the type of the arguments, apply too.
    """
    if "$ref" in schema:
        schema = {key: value for key, value in schema.items() if key != "$schema"}
    return {_id_keyword(schema): f"http://tool-{index}.invalid/"} | schema


def _id_keyword(schema: Mapping[str, Any]) -> str:
    return "id" if "draft-04" in str(schema.get("$schema")) else "$id"


def _check_ids(schemas: Mapping[str, dict[str, Any]], fields: Mapping[str, str]) -> None:
    """Refuse equal ids, because references of one schema would resolve into the other schema."""
    owners: dict[str, str] = {}
    for name, schema in schemas.items():
        keyword = _id_keyword(schema)
        if owners.setdefault(str(schema[keyword]), name) != name:
            field = f"{fields[name]}.{keyword}"
            raise RequestError(f"'{field}' is that of another tool.", param=field)


def _triggered(
    arguments: Mapping[str, GrammarSpec],
    contents: Mapping[str, dict[str, Any]],
    fields: Mapping[str, str],
    form: ToolFormat,
    requested: OutputFormat | None,
    *,
    parallel: bool,
    must_call: bool,
) -> OutputFormat:
    schemas = {name: spec.value() for name, spec in arguments.items()}
    owners = {id(each.get("json_schema", each)): fields[name] for name, each in contents.items()}
    starts = _starts(form, schemas) if form.only_at_start else ()
    calls = _calls(contents, form, parallel=parallel)
    document = None if requested is None else _document(requested, form)
    if document is not None and requested is not None:
        owners[id(document["json_schema"])] = requested.field
    shape: dict[str, Any]
    if form.content_opening and not must_call:
        shape = _in_channels(calls, document or _text(contents, form, parallel=parallel), form)
    elif document is not None or must_call:
        if parallel and form.separator is None:
            calls = [{"type": "tags_with_separator", "tags": calls, "separator": form.between, "at_least_one": True}]
        shape = {"type": "or", "elements": [*calls, document] if document else calls}
    elif form.only_at_start:
        # Text that begins like a call is parsed as a call, so the grammar excludes it from free text.
        begin = form.trigger if form.is_object else form.opening + form.before_name
        name = "" if form.is_object else rf"[\w.-]+{re.escape(form.after_name)}"
        text = {"type": "regex", "pattern": rf"^(?!{re.escape(begin)}{name})[\s\S]*$"}
        shape = {"type": "or", "elements": [*calls, text]}
    else:
        once = not parallel or form.separator is not None
        shape = {"type": "triggered_tags", "triggers": [form.trigger], "tags": calls, "stop_after_first": once}
    schema_fields = _schema_fields({"format": shape}, owners)
    types = {name: argument_types(schema) for name, schema in schemas.items()} if xml_style(form.style) else {}
    plan = ToolPlan(form, Reading.TRIGGERED, arguments, types=types, schema_fields=schema_fields, starts=starts)
    spec = _checked(GrammarSpec.structural_tag, {"format": shape}, plan)
    return OutputFormat(spec, "tools", "tools", None if document is None or requested is None else requested.spec, plan)


def _checked(make: Callable[[Any], GrammarSpec], shape: Any, plan: ToolPlan) -> GrammarSpec:
    """Build the grammar of all tools together. Raises GrammarRefused, which names a field, if a limit is exceeded."""
    try:
        spec = make(shape)
        check_limits(spec)
    except GrammarError as error:
        raise plan.locate(error) from None
    return spec


def _starts(form: ToolFormat, functions: Iterable[str]) -> tuple[str, ...]:
    """Return the texts that begin a call, for formats in which calls can only be at the beginning of the answer."""
    return (form.trigger,) if form.is_object else tuple(form.opening + form.head(name) for name in functions)


def _calls(contents: Mapping[str, dict[str, Any]], form: ToolFormat, *, parallel: bool) -> list[dict[str, Any]]:
    """Return structural tags: one call in the model's format, or several calls. The answer matches one of the tags."""
    tags = [_call(name, content, form) for name, content in contents.items()]
    if (form.only_at_start or form.recipient_mark) and form.separator is not None:
        # The opening is joined with the beginning of the first call, because the lexer must distinguish them from free
        # text together.
        first = [tag | {"begin": form.opening + tag["begin"]} for tag in tags]
        more = [tag | {"begin": form.separator + tag["begin"]} for tag in tags] if parallel else []
        rest = [{"type": "tags_with_separator", "tags": more, "separator": ""}] if more else []
        closing = [{"type": "const_string", "value": form.closing}] if form.closing else []
        return [{"type": "sequence", "elements": [{"type": "or", "elements": first}, *rest, *closing]}]
    if not form.opening:
        return tags
    content: dict[str, Any] = {"type": "or", "elements": tags}
    if form.separator is not None and parallel:
        content = {"type": "tags_with_separator", "tags": tags, "separator": form.separator, "at_least_one": True}
    return [{"type": "tag", "begin": form.opening, "content": content, "end": form.closing}]


def _call(name: str, content: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    """Return the structural tag of a call, without opening and closing."""
    begin = form.head(name)
    if form.id_lead:
        written = {"type": "regex", "pattern": WRITTEN_IDS[form.ids]}
        between = {"type": "const_string", "value": form.before_name + name + form.after_name.replace(NAME, name)}
        begin, content = form.id_lead, {"type": "sequence", "elements": [written, between, content]}
    elif form.ids in WRITTEN_IDS:
        begin = form.before_name + name + form.id_begin
        written = {"type": "regex", "pattern": WRITTEN_IDS[form.ids]}
        between = {"type": "const_string", "value": form.after_name}
        content = {"type": "sequence", "elements": [written, between, content]}
    return {"type": "tag", "begin": begin, "content": content, "end": form.after_arguments}


def _text(contents: Mapping[str, dict[str, Any]], form: ToolFormat, *, parallel: bool) -> dict[str, Any]:
    """Return the structural tag of text in a separate channel. If parts have recipients, calls begin in this text."""
    if not form.recipient_mark:
        return {"type": "any_text"}
    tags = [_call(name, content, form) for name, content in contents.items()]
    tags = [tag | {"begin": form.recipient_mark + tag["begin"]} for tag in tags]
    triggers = [tag["begin"] for tag in tags]
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags, "stop_after_first": not parallel}


def _in_channels(calls: list[dict[str, Any]], text: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    """Return the structural tag of an answer whose content, free text or a document, is in a separate channel."""
    content = {"type": "tag", "begin": form.content_opening, "content": text, "end": form.content_closing}
    options = [*calls, content]
    if form.preamble is not None:
        begin, end = form.preamble
        before = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": end}
        options = [*options, {"type": "sequence", "elements": [before, {"type": "or", "elements": options}]}]
    return {"type": "or", "elements": options}


def _document(requested: OutputFormat, form: ToolFormat) -> dict[str, Any]:
    """Return the structural tag element for an answer without calls. Raises RequestError if the format is not JSON."""
    if not requested.spec.kind.is_json:
        raise RequestError(
            f"'{requested.field}' must be JSON beside 'tools': set 'tool_choice' to 'none' for other forms.",
            param=requested.field,
        )
    if form.only_at_start:
        raise RequestError(
            f"'{requested.field}' cannot go with 'tools' here: this model writes calls without marks, which could be "
            "either. Set 'tool_choice' to 'none' or 'required'.",
            param=requested.field,
        )
    is_object = requested.spec.kind is GrammarKind.JSON_OBJECT
    return {"type": "json_schema", "json_schema": {"type": "object"} if is_object else requested.spec.value()}


def _schema_fields(shape: Any, owners: Mapping[int, str]) -> tuple[tuple[str, str], ...]:
    """Find the request's schemas within a grammar, by identity. Returns pairs (pointer, request field)."""

    def walk(node: Any, pointer: str) -> Iterator[tuple[str, str]]:
        if id(node) in owners:
            yield pointer, owners[id(node)]
        elif isinstance(node, dict | list):
            for step, value in node.items() if isinstance(node, dict) else enumerate(node):
                yield from walk(value, pointer_join(pointer, step))

    return tuple(walk(shape, ""))
