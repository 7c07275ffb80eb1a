"""Chat translation: translates response requests to chat requests, and field names for error messages."""

from __future__ import annotations

from typing import Any

from ..generate.field_names import FieldNames
from ..protocol.chat import ChatRequest
from ..protocol.chat_messages import ChatMessage
from ..protocol.responses import (
    AllowedFunctions,
    NamedCustom,
    NamedFunction,
    ResponsePrompt,
    ResponseRequest,
    TextFormat,
)
from ..protocol.sampling import OPTION_NAMES
from ..protocol.tools import OtherChoice

FIELD_NAMES = FieldNames(
    (r"\bmessages\b(?=$|['.\[])", "input"),
    (r"\bresponse_format(\.json_schema)?\b", "text.format"),
    (r"\bmax_(completion_)?tokens\b", "max_output_tokens"),
    (r"\breasoning_effort\b", "reasoning.effort"),
    (r"\b(tools\[\d+\])\.function\b", r"\1"),
    (r"\b(tools\[\d+\])\.custom\b(\.format)?(\.grammar)?", r"\1\2"),
    parts={"function": None, "custom": None, "grammar": None},
)
_PROMPT_FIELDS = (
    *("model", "parallel_tool_calls", "cache_salt", "chat_template_kwargs", "prompt_cache_key"),
    "thinking_token_budget",
)
_SAMPLING_FIELDS = (*OPTION_NAMES, "seed", "stop", "ignore_eos", "priority", "field_probabilities")


def chat_request_of(body: ResponsePrompt, messages: list[ChatMessage]) -> ChatRequest:
    """Translate a response request to a chat request. Raises RequestValidationError for malformed tools."""
    fields: dict[str, Any] = {
        **{name: getattr(body, name) for name in _PROMPT_FIELDS},
        "messages": messages,
        "response_format": _response_format(body.text.format),
        "tools": [_tool(tool.model_dump(exclude_none=True)) for tool in body.tools],
        "tool_choice": _tool_choice(body.tool_choice),
        "reasoning_effort": body.reasoning.effort,
    }
    if isinstance(body, ResponseRequest):
        fields |= {name: getattr(body, name) for name in _SAMPLING_FIELDS}
        fields |= {
            "cache_control": None if body.cache_control is None else body.cache_control.model_dump(),
            "kv_hints": None if body.kv_hints is None else body.kv_hints.model_dump(exclude_none=True),
            "max_completion_tokens": body.max_output_tokens if body.generate else 0,
            "logprobs": body.num_logprobs is not None,
            "top_logprobs": body.num_logprobs,
        }
    with FIELD_NAMES.naming_invalid():
        return ChatRequest.model_validate(fields)


def _response_format(text_format: TextFormat) -> dict[str, Any]:
    if text_format.type != "json_schema":
        return {"type": text_format.type}
    return {"type": "json_schema", "json_schema": {"name": text_format.name, "schema": text_format.schema_}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool["type"] == "custom":
        form = tool.pop("format")
        if form["type"] == "grammar":
            form = {"type": form.pop("type"), "grammar": form}
        return {"type": tool.pop("type"), "custom": {**tool, "format": form}}
    if tool["type"] != "function":
        return tool
    return {"type": tool.pop("type"), "function": tool}


def _tool_choice(choice: str | NamedFunction | NamedCustom | AllowedFunctions) -> Any:
    if isinstance(choice, NamedFunction | NamedCustom):
        return _named(choice)
    if isinstance(choice, AllowedFunctions):
        allowed = {"mode": choice.mode, "tools": [_named(tool) for tool in choice.tools]}
        return {"type": "allowed_tools", "allowed_tools": allowed}
    return choice


def _named(function: NamedFunction | NamedCustom | OtherChoice) -> dict[str, Any]:
    if isinstance(function, NamedCustom):
        return {"type": "custom", "custom": {"name": function.name}}
    if isinstance(function, OtherChoice):
        return {"type": function.type}
    return {"type": "function", "function": {"name": function.name}}
