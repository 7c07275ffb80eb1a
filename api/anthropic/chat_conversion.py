"""Chat conversion: translates Anthropic's requests to chats, and field names in errors back to Anthropic's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from ...engine.errors import RequestError
from ..generate.field_names import FieldNames
from ..protocol.cache_control import CacheControl
from ..protocol.chat import ChatRequest
from ..protocol.chat_messages import ChatMessage, FunctionCall, TextPart, ToolCall
from ..protocol.sampling import OPTION_NAMES
from ..protocol.tools import OtherTool
from .content_blocks import (
    AssistantMessage,
    Block,
    InputMessage,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    blocks_of,
    text_of_blocks,
)
from .message_request import CustomTool, MessagesRequest, OneToolChoice, PromptFields

_SAMPLING_FIELDS = (*OPTION_NAMES, "max_tokens", "seed", "prompt_cache_key", "priority", "field_probabilities")
_ACCOUNT_DATA = "x-anthropic-billing-header:"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def field_names(body: PromptFields) -> FieldNames:
    """Return the translation from the chat's field names to the names in this request."""
    form = "output_config.format" if body.output_format is None else "output_format"
    return FieldNames(
        (r"\bmessages\b.*", "messages"),
        (r"\bresponse_format(\.json_schema)?\b", form),
        (r"\b(tools\[\d+\])\.function\.parameters\b", r"\1.input_schema"),
        (r"\b(tools\[\d+\])\.function\b", r"\1"),
        (r"^stop$", "stop_sequences"),
        parts={"function": None, "parameters": "input_schema", "stop": "stop_sequences"},
    )


def as_chat(body: PromptFields) -> ChatRequest:
    """Translate a request to a chat.

    Raises:
        RequestValidationError: a tool is malformed.
        RequestError: the input of a call is nested too deeply.
    """
    thinking, form = body.thinking, body.form
    fields: dict[str, Any] = {
        "model": body.model,
        "messages": _messages(body),
        "tools": [_tool(tool) for tool in body.tools],
        "tool_choice": _tool_choice(body),
        "parallel_tool_calls": not body.tool_choice.disable_parallel_tool_use,
        "thinking": None if thinking is None else thinking.model_dump(exclude={"display"}),
        "include_reasoning": thinking is None or thinking.display != "omitted",
        "continue_final_message": isinstance(body.messages[-1], AssistantMessage),
        "cache_control": None if body.cache_control is None else body.cache_control.model_dump(),
        "cache_salt": body.cache_salt,
        "chat_template_kwargs": _template_kwargs(body),
    }
    if form is not None:
        fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.schema_}}
    if isinstance(body, MessagesRequest):
        fields |= {name: getattr(body, name) for name in _SAMPLING_FIELDS}
        fields["stop"] = body.stop_sequences
    with field_names(body).naming_invalid():
        return ChatRequest.model_validate(fields)


def _template_kwargs(body: PromptFields) -> dict[str, Any]:
    """Return the chat template's variables. ``effort`` concerns the whole answer, so it does not request reasoning."""
    effort = body.output_config.effort
    return body.chat_template_kwargs if effort is None else {"reasoning_effort": effort, **body.chat_template_kwargs}


def _tool(tool: CustomTool | OtherTool) -> dict[str, Any]:
    mark = None if tool.cache_control is None else tool.cache_control.model_dump()
    if isinstance(tool, OtherTool):
        # A custom tool of Anthropic's is not what OpenAI calls a custom tool.
        return {"type": tool.type, "name": tool.name, "cache_control": mark}
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function, "cache_control": mark}


def _tool_choice(body: PromptFields) -> Any:
    choice = body.tool_choice
    if isinstance(choice, OneToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _messages(body: PromptFields) -> list[ChatMessage]:
    """Translate ``system`` and ``messages`` to chat messages. Consecutive messages of one role form one turn."""
    system = _system(body.system)
    messages = [ChatMessage(role="system", content=system)] if system else []
    turn: list[Block] = []
    for number, message in enumerate(body.messages):
        turn += blocks_of(message)
        if number + 1 == len(body.messages) or body.messages[number + 1].role != message.role:
            messages += _turn(message, turn)
            turn = []
    return messages


def _system(content: str | list[TextBlock]) -> str | list[TextPart]:
    """Convert the instructions to the content of a chat message.

    The block that Claude Code puts before the instructions for Anthropic's accounting is left out. It changes with
    every request, so no prefix after it could be reused, and it contains no information for the model.
    """
    if isinstance(content, str):
        return content
    return _content([block for block in content if not block.text.startswith(_ACCOUNT_DATA)])


def _turn(message: InputMessage, blocks: list[Block]) -> list[ChatMessage]:
    if message.role == "assistant":
        return [_assistant(blocks)]
    messages: list[ChatMessage] = []
    texts: list[TextBlock] = []
    for block in blocks:
        if isinstance(block, TextBlock):
            texts.append(block)
        elif isinstance(block, ToolResultBlock):
            messages += _texts(message.role, texts)
            texts = []
            messages.append(_tool_message(block))
    return messages + _texts(message.role, texts, required=not messages)


def _texts(role: Any, texts: list[TextBlock], *, required: bool = False) -> list[ChatMessage]:
    return [ChatMessage(role=role, content=_content(texts))] if texts or required else []


def _content(texts: list[TextBlock]) -> str | list[TextPart]:
    """Return the texts as one text, or as parts if one of them has a ``cache_control``."""
    if all(block.cache_control is None for block in texts):
        return text_of_blocks(texts)
    *before, last = texts
    parts = [TextPart(type="text", text=f"{block.text}\n", cache_control=block.cache_control) for block in before]
    return [*parts, TextPart(type="text", text=last.text, cache_control=last.cache_control)]


def _longest(marks: Iterable[CacheControl | None]) -> CacheControl | None:
    return max((mark for mark in marks if mark is not None), key=lambda mark: mark.seconds, default=None)


def _tool_message(block: ToolResultBlock) -> ChatMessage:
    inner = [] if isinstance(block.content, str) else [text.cache_control for text in block.content]
    mark = _longest([block.cache_control, *inner])
    return ChatMessage(role="tool", content=_result(block), tool_call_id=block.tool_use_id, cache_control=mark)


def _result(block: ToolResultBlock) -> str:
    """Return the text of a tool result.

    Chat templates do not distinguish failed results, so the text of one says it.
    """
    text = text_of_blocks(block.content)
    return f"Error: {text}" if block.is_error else text


def _assistant(blocks: list[Block]) -> ChatMessage:
    texts = [block for block in blocks if isinstance(block, TextBlock)]
    thoughts = [block.thinking for block in blocks if isinstance(block, ThinkingBlock)]
    calls = [
        ToolCall(id=block.id, function=FunctionCall(name=block.name, arguments=_json(block.input)))
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    return ChatMessage(
        role="assistant",
        content=_content(texts) if texts or not calls else None,
        tool_calls=calls,
        reasoning_content="\n".join(thoughts) or None,
        cache_control=_longest(block.cache_control for block in blocks if isinstance(block, ToolUseBlock)),
    )


def _json(value: dict[str, Any]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False)
    except RecursionError:
        problem = "'messages' holds a tool_use whose input is nested too deeply."
        raise RequestError(problem, param="messages") from None
