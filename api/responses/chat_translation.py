"""A response as a chat: everything below the protocol is shared, and errors name the fields of the response."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from ...engine.errors import RequestError
from ..protocol.chat import ChatRequest
from ..protocol.chat_messages import ChatMessage
from ..protocol.responses import AllowedFunctions, NamedFunction, ResponseRequest, TextFormat
from ..structured.output_format import OutputFormat

# Fields of a chat, and what they are called in a response.
_NAMES = (
    (re.compile(r"\bmessages\b(?=$|['.\[])"), "input"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
)
_SAME = (
    *("model", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos"),
    *("parallel_tool_calls", "cache_salt", "priority", "chat_template_kwargs", "prompt_cache_key"),
)


def chat_request_of(body: ResponseRequest, messages: list[ChatMessage]) -> ChatRequest:
    """The chat that a response stands for. Raises RequestValidationError for tools that are malformed."""
    asked = body.num_logprobs
    fields: dict[str, Any] = {
        **{name: getattr(body, name) for name in _SAME},
        "messages": messages,
        "cache_control": None if body.cache_control is None else body.cache_control.model_dump(),
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _format(body.text.format),
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools],
        "tool_choice": _choice(body.tool_choice),
        "logprobs": asked is not None,
        "top_logprobs": asked,
    }
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([_renamed_error(dict(found)) for found in error.errors()]) from None


def _format(asked: TextFormat) -> dict[str, Any]:
    if asked.type != "json_schema":
        return {"type": asked.type}
    return {"type": "json_schema", "json_schema": {"name": asked.name, "schema": asked.schema_}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.pop("type"), "function": tool}


def _choice(choice: str | NamedFunction | AllowedFunctions) -> Any:
    if isinstance(choice, NamedFunction):
        return _named(choice)
    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_named(function) for function in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(function: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function.name}}


def _renamed_error(error: dict[str, Any]) -> dict[str, Any]:
    """An error of pydantic's about a chat as one about the body of a response."""
    context = dict(error.get("ctx", {}))
    location: Sequence[Any] = (*error["loc"], *context.pop("field", ()))
    location = [part for part in location if part != "function"]
    return {**error, "loc": ("body", *location), "ctx": context}


def _renamed(text: str) -> str:
    for pattern, name in _NAMES:
        text = pattern.sub(name, text)
    return text


def with_response_fields(output_format: OutputFormat | None) -> OutputFormat | None:
    """The promise, blaming the fields of a response."""
    if output_format is None:
        return None
    plan = output_format.tools
    if plan is not None:
        plan = replace(plan, schema_fields=tuple((pointer, _renamed(field)) for pointer, field in plan.schema_fields))
    return replace(output_format, field=_renamed(output_format.field), tools=plan)


@contextmanager
def naming_response_fields() -> Iterator[None]:
    """Errors about a chat's fields name those of the response."""
    try:
        yield
    except RequestError as error:
        if error.param is None or (param := _renamed(error.param)) == error.param:
            raise
        raise RequestError(str(error).replace(error.param, param), param=param, code=error.code) from None
