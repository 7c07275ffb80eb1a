"""Tool dialects: detects the tool call format of a chat template, and adapts messages to templates without tools.

If the chat template does not support tools, ``for_dialect`` writes definitions, calls and results as plain text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ...engine.errors import RequestError
from ...engine.text.chat_template import TemplateStopped
from ...engine.text.reasoning_formats import reasoning_format_of
from ...engine.text.template_marks import MARK
from ...grammar.argument_styles import ALL_TYPES, argument_types
from ..exact_json import dumps_spaced
from .template_shape import (
    ANY_SHAPE,
    TemplateShape,
    as_taken,
    shape_of,
    takes_results,
)
from .tool_formats import ALIASES, FORMATS, ToolFormat, formats_of
from .tool_probe import probed_calls

if TYPE_CHECKING:
    from ...engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Dialect:
    """The support of one model's chat template for tools.

    Attributes:
        format: the model's tool call format.
        by_template: whether the chat template renders the results of calls; otherwise ``for_dialect`` writes
            definitions, calls and results into the messages as text.
        calls_by_template: whether the chat template renders calls.
        lists_tools: whether the chat template renders the definitions of tools; otherwise ``for_dialect`` writes them
            into the system message.
        takes_bare_parameters: whether the chat template accepts parameters without a description, and without a type or
            with several.
        arguments_as_text: whether the chat template requires the arguments of calls as JSON text, not as objects.
        shape: shapes of conversations that the template accepts unchanged.
        defaults: variables of the template for requests that do not set them.
    """

    format: ToolFormat
    by_template: bool
    calls_by_template: bool = True
    lists_tools: bool = True
    takes_bare_parameters: bool = True
    arguments_as_text: bool = False
    shape: TemplateShape = ANY_SHAPE
    defaults: Mapping[str, Any] = field(default_factory=dict)


_LONGEST_PROBE = 1 << 16  # Largest number of characters of a rendered probe.
_PROBE_NAME = "probe_tool"
_PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "Probe.",
        "parameters": {"type": "object", "properties": {"probe": {"type": "integer", "description": "A number."}}},
    },
}
# Parameters as clients send them: without a description, or with alternatives in place of a type.
_BARE_TOOLS = [
    {"type": "function", "function": _PROBE_TOOL["function"] | {"parameters": {"type": "object", "properties": each}}}
    for each in (
        {"probe": {"type": "integer"}},
        {"probe": {"anyOf": [{"type": "integer"}, {"type": "null"}], "description": "A number."}},
        {"probe": {"type": ["integer", "null"], "description": "A number."}},
        {"probe": {"type": "array", "items": {"enum": [1, 2]}, "description": "Numbers."}},
        {"probe": {"type": "object", "properties": {}, "description": "An object."}},
    )
]
_TYPES = ("string", "number", "boolean", "array", "object")
_DEEPEST = 64  # Largest depth of a schema whose properties are described.
_PROBE_MESSAGE: dict[str, Any] = {"role": "user", "content": "Probe."}


def dialect_of(tokenizer: Tokenizer, parser: str) -> Dialect:
    """Detect the tool call format and the conversation shapes of a chat template by rendering short test conversations.

    Args:
        parser: name of a format to use whatever the template renders, or ``auto`` (``--tool-call-parser``).

    Raises:
        TemplateStopped: the template takes too long.
        TemplateDeferred: see ``ChatTemplates.render``.
    """
    found = _calls_of(tokenizer, parser)
    tools = [_PROBE_TOOL] if found.by_template and found.lists_tools else []
    # If the template leaves out calls, ``for_dialect`` writes them as text.
    shows_calls = found.by_template and found.calls_by_template
    shape = shape_of(tokenizer, tools, shows_calls=shows_calls, arguments_as_text=found.arguments_as_text)
    takes_bare = not tools or all(_PROBE_NAME in _render(tokenizer, [_PROBE_MESSAGE], [tool]) for tool in _BARE_TOOLS)
    return replace(found, shape=shape, takes_bare_parameters=takes_bare)


def _calls_of(tokenizer: Tokenizer, parser: str) -> Dialect:
    """Detect the tool call format by rendering a test call.

    A format that is not in ``FORMATS`` is derived from the calls that the template renders (`tool_probe`). A template
    that drops tools, or shows no format, gets the generic dialect: the system message describes the tools and the call
    format in plain text.
    """
    possible = formats_of(parser)
    default = FORMATS["generic" if parser == "auto" else ALIASES.get(parser, parser)]
    if default.name == "generic" and parser != "auto":
        return Dialect(default, by_template=False)
    bare = _render(tokenizer, [_PROBE_MESSAGE])
    by_template = _PROBE_NAME in bare
    shows_calls = False
    for as_text in (False, True):
        # The definitions may contain a call too, in another form than the one that the model writes, so they are cut
        # off.
        rendered = _render(tokenizer, [_PROBE_MESSAGE, _probe_call(as_text=as_text)]).removeprefix(bare)
        found = next((form for form in possible if _is_shown(form, rendered, tokenizer, bare, parser)), None)
        if found is not None:
            return _with_results(Dialect(found, by_template, arguments_as_text=as_text), tokenizer)
        shows_calls = shows_calls or _PROBE_NAME in rendered
    if parser == "auto" and (probed := _probed(tokenizer)) is not None:
        return _with_results(replace(probed, by_template=by_template), tokenizer)
    mentioned = (form for form in possible if any(map(tokenizer.template_mentions, form.mentions)))
    if by_template and (form := next(mentioned, None)) is not None:
        return Dialect(form, by_template, calls_by_template=False)
    return Dialect(default, by_template and default.name != "generic", calls_by_template=shows_calls)


def _with_results(found: Dialect, tokenizer: Tokenizer) -> Dialect:
    """Return the dialect of a template that renders calls, and look whether one without definitions renders results."""
    if found.by_template or not takes_results(tokenizer, arguments_as_text=found.arguments_as_text):
        return found
    return replace(found, by_template=True, lists_tools=False)


def _is_shown(form: ToolFormat, rendered: str, tokenizer: Tokenizer, bare: str, parser: str) -> bool:
    """Return whether a rendered call has a format.

    Some formats have no mark, and their calls can only begin an answer. For such a format, the call must not follow
    another mark in the answer. If it does, the call has another format, which a probe derives.

    Args:
        rendered: the text that the template has rendered after ``bare``, which is the question.
    """
    found = re.search(form.rendered, rendered)
    if found is None or not form.only_at_start or parser != "auto":
        return found is not None
    header = _render(tokenizer, [_PROBE_MESSAGE], has_header=True).removeprefix(bare)
    thoughts = reasoning_format_of(tokenizer, "auto")
    before = rendered[: found.start()].rstrip()
    if not rendered.startswith(header) or (thoughts is not None and before.endswith(thoughts.end)):
        return True
    return MARK.search(before, len(header)) is None


def _probed(tokenizer: Tokenizer) -> Dialect | None:
    """Derive the dialect of a template whose call format is not in ``FORMATS``.

    Returns None if it renders no format.
    """

    def render(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], has_header: bool) -> str:
        return _render(tokenizer, messages, tools, has_header=has_header)

    thoughts = reasoning_format_of(tokenizer, "auto")
    ends = frozenset(tokenizer.decode([token], False) for token in tokenizer.eos_ids)
    found = probed_calls(render, thought_end="" if thoughts is None else thoughts.end, ends=ends)
    return None if found is None else Dialect(found.format, True, arguments_as_text=found.arguments_as_text)


def _probe_call(*, as_text: bool) -> dict[str, Any]:
    function = {"name": _PROBE_NAME, "arguments": '{"probe": 1}' if as_text else {"probe": 1}}
    call = {"id": "probe0000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _render(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: Sequence[dict[str, Any]] = (_PROBE_TOOL,),
    *,
    has_header: bool = False,
) -> str:
    """Render a conversation, with or without the header of the answer. Returns "" if the template refuses it."""
    try:
        text = tokenizer.render_chat(messages, add_generation_prompt=has_header, tools=tools)
        # Patterns are searched in this text. A template that renders so much text for a few words is not suitable for
        # tools.
        return text if len(text) <= _LONGEST_PROBE else ""
    except TemplateStopped:
        raise
    except RequestError:
        return ""


_INTRODUCTION = (
    "You can call functions. These are their definitions, one JSON object a line:\n{definitions}\n\n"
    "To call a function, write nothing but its name and its arguments in this form:\n{example}"
)


def for_dialect(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], dialect: Dialect
) -> list[dict[str, Any]]:
    """Convert the messages for the dialect's chat template, to a shape that the template accepts.

    Without template support, definitions are appended to the system message (which is added if missing), calls are
    appended to the assistant's text, and results become user messages. If the template renders all but the definitions,
    only these are written so.
    """
    if dialect.by_template:
        shown = [_for_template(message, dialect) for message in messages]
        if tools and not dialect.lists_tools:
            shown = _with_definitions(shown, tools, dialect.format)
        return as_taken(shown, dialect.shape)
    plain: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message["role"] == "tool"
        if is_result and after_result:
            # Consecutive results are joined to one message, because many templates require alternating roles.
            plain[-1]["content"] += "\n" + _result(message)
        elif is_result:
            plain.append({"role": "user", "content": _result(message)})
        else:
            plain.append(_with_calls(message, dialect.format))
        after_result = is_result
    return as_taken(_with_definitions(plain, tools, dialect.format) if tools else plain, dialect.shape)


def _result(message: dict[str, Any]) -> str:
    return f"<tool_response>\n{message['content']}\n</tool_response>"


def _for_template(message: dict[str, Any], dialect: Dialect) -> dict[str, Any]:
    if not dialect.calls_by_template:
        return _with_calls(message, dialect.format)
    calls = message.get("tool_calls")
    if not dialect.arguments_as_text or not calls:
        return message
    written = [call | {"function": call["function"] | {"arguments": _arguments(call["function"])}} for call in calls]
    return message | {"tool_calls": written}


def without_second_end(text: str, dialect: Dialect) -> str:
    """Remove a second end of the content from the rendered messages with calls.

    If calls begin with the end of the content, ``for_dialect`` writes this end into the content. A template that knows
    the mark then writes it again after the calls.
    """
    form = dialect.format
    if (dialect.by_template and dialect.calls_by_template) or not form.closes_content:
        return text
    return text.replace(form.closing + form.content_closing, form.closing)


def _with_calls(message: dict[str, Any], form: ToolFormat) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    text = form.calls([(call["function"]["name"], _arguments(call["function"])) for call in calls])
    lead = message.get("content") or ""
    # A mark that closes the content follows the content directly, as the model writes it.
    if lead and not form.closes_content:
        lead += "\n"
    return {key: value for key, value in message.items() if key != "tool_calls"} | {"content": lead + text}


def _arguments(function: dict[str, Any]) -> str:
    """Return the arguments of a call as text. Like ``tojson`` of templates, it has the spaces that models write."""
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else dumps_spaced(arguments).decode()


def definitions_for(tools: Sequence[dict[str, Any]], dialect: Dialect) -> list[dict[str, Any]] | None:
    """Return the definitions of tools for the dialect's chat template; None for a template that renders no tools.

    Parameters get one type and a description, if the template cannot do without.
    """
    if not tools or not dialect.by_template:
        return None
    if dialect.takes_bare_parameters:
        return list(tools)
    return [
        tool | {"function": tool["function"] | {"parameters": _described(tool["function"]["parameters"])}}
        for tool in tools
    ]


def _described(schema: Any, types: frozenset[str] = ALL_TYPES, depth: int = 0) -> Any:
    """Return a schema in which each property and each item, at any depth, has one type and a description.

    Args:
        types: types of the values that the schema accepts.
    """
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return schema
    described = dict(schema)
    if not isinstance(schema.get("type"), str):
        described["type"] = next((name for name in _TYPES if name in types), _TYPES[0])
    if depth:
        described.setdefault("description", "")
    if described["type"] == "object":
        described.setdefault("additionalProperties", {})
    if isinstance(properties := schema.get("properties"), dict):
        known = argument_types(schema)
        described["properties"] = {
            name: _described(value, known[name], depth + 1) for name, value in properties.items()
        }
    if isinstance(items := schema.get("items"), dict):
        [types] = argument_types({"properties": {"items": items}}).values()
        described["items"] = _described(items, types, depth + 1)
    return described


def _with_definitions(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    definitions = "\n".join(json.dumps(tool["function"], ensure_ascii=False, separators=(",", ":")) for tool in tools)
    example = form.calls([("NAME", "{...}" if form.style == "json" else '{"PARAMETER": "VALUE"}')])
    text = _INTRODUCTION.format(definitions=definitions, example=example)
    if messages[0]["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
