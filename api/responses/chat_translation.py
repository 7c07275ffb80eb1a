"""Translation of response requests to chat requests, and of chat field names in errors back to response fields."""

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

# Field names in chat requests, and in response requests.
_FIELD_NAMES = (
    (re.compile(r"\bmessages\b(?=$|['.\[])"), "input"),
    (re.compile(r"\bresponse_format(\.json_schema)?\b"), "text.format"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\b(tools\[\d+\])\.function\b"), r"\1"),
)
_SHARED_FIELDS = (
    *("model", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "ignore_eos"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("parallel_tool_calls", "cache_salt", "priority", "chat_template_kwargs", "prompt_cache_key"),
    "thinking_token_budget",
)


def chat_request_of(body: ResponseRequest, messages: list[ChatMessage]) -> ChatRequest:
    """Translate a response request to a chat request. Raises RequestValidationError for malformed tools."""
    fields: dict[str, Any] = {
        **{name: getattr(body, name) for name in _SHARED_FIELDS},
        "messages": messages,
        "cache_control": None if body.cache_control is None else body.cache_control.model_dump(),
        "max_completion_tokens": body.max_output_tokens,
        "response_format": _response_format(body.text.format),
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools],
        "tool_choice": _tool_choice(body.tool_choice),
        "reasoning_effort": body.reasoning.effort,
        "logprobs": body.num_logprobs is not None,
        "top_logprobs": body.num_logprobs,
    }
    try:
        return ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestValidationError([_translated_error(dict(each)) for each in error.errors()]) from None


def _response_format(text_format: TextFormat) -> dict[str, Any]:
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    return {"type": "json_schema", "json_schema": {"name": text_format.name, "schema": text_format.schema_}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": tool.pop("type"), "function": tool}


def _tool_choice(choice: str | NamedFunction | AllowedFunctions) -> Any:
    if isinstance(choice, NamedFunction):
        return _named(choice)
    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_named(function) for function in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(function: NamedFunction) -> dict[str, Any]:
    return {"type": "function", "function": {"name": function.name}}


def _translated_error(error: dict[str, Any]) -> dict[str, Any]:
    """Translate pydantic's error about a chat request to one about the response request."""
    context = dict(error.get("ctx", {}))
    location: Sequence[Any] = (*error["loc"], *context.pop("field", ()))
    location = [part for part in location if part != "function"]
    return {**error, "loc": ("body", *location), "ctx": context}


def _translated(text: str) -> str:
    for pattern, name in _FIELD_NAMES:
        text = pattern.sub(name, text)
    return text


def with_response_fields(output_format: OutputFormat | None) -> OutputFormat | None:
    """Return the output format with the response's field names for errors."""
    if output_format is None:
        return None
    plan = output_format.tools
    if plan is not None:
        plan = replace(plan, schema_fields=tuple((root, _translated(field)) for root, field in plan.schema_fields))
    return replace(output_format, field=_translated(output_format.field), tools=plan)


@contextmanager
def naming_response_fields() -> Iterator[None]:
    """Within the block, a ``RequestError`` about a chat field names the response field."""
    try:
        yield
    except RequestError as error:
        if error.param is None or (param := _translated(error.param)) == error.param:
            raise
        raise RequestError(str(error).replace(error.param, param), param=param, code=error.code) from None
