"""Chat messages of a request, and their conversion for the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ..config import RESERVED_TEMPLATE_KWARGS
from .base import StrictModel, rejected, string_or_list

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_CALLS = 128
MAX_TEMPLATE_KWARGS = 32
MAX_NAME = 256

Name = Annotated[str, Field(max_length=MAX_NAME)]

_PART_KINDS = {"image_url": "images", "input_audio": "audio", "file": "files", "refusal": "refusals"}


def _check_part(value: Any) -> Any:
    if isinstance(value, dict) and (kind := value.get("type")) != "text" and isinstance(kind, str):
        name = _PART_KINDS.get(kind, "this kind of part")
        raise rejected(f"must be 'text': {name} cannot be taken", "type")
    return value


class CacheBreakpoint(StrictModel):
    """OpenAI's mark of a reusable prefix. Ignored: the prefix cache reuses every prefix, to the token."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(StrictModel):
    """A text part. The parts of a message are concatenated."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Content = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[Annotated[TextPart, BeforeValidator(_check_part)]], Field(max_length=MAX_PARTS), Tag("<list>")],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of text parts"
    ),
]


class FunctionCall(StrictModel):
    """A function call of an earlier turn. ``arguments`` is the generated text."""

    name: Name
    arguments: str = ""

    def for_template(self) -> dict[str, Any]:
        """Arguments as an object for the chat template; as text if they are not a JSON object."""
        try:
            arguments = orjson.loads(self.arguments or "{}")
        except orjson.JSONDecodeError:
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(StrictModel):
    """A tool call of an earlier turn. Clients may send back the ``index`` of streamed calls."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(StrictModel):
    """A message. All fields of our answers may be sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] = Field(default_factory=list)
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise rejected("may only be in messages of the assistant", "tool_calls")
        if self.content is None and not (self.tool_calls or self.thought):
            raise rejected("is required", "content")
        if self.role == "tool" and self.tool_call_id is None:
            raise rejected("is required in messages of a tool", "tool_call_id")
        return self

    @property
    def text(self) -> str | None:
        return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content

    @property
    def thought(self) -> str | None:
        """The thought of an earlier turn, by the newer name or by the older one."""
        return self.reasoning_content if self.reasoning is None else self.reasoning

    def for_template(self) -> dict[str, Any]:
        """The message for the chat template; ``developer`` is OpenAI's newer name of ``system``.

        Templates know thoughts by either name, and keep or drop those of earlier turns.
        """
        is_thought = self.thought is not None and not self.tool_calls
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": (self.text or "") if is_thought else self.text,
        }
        for key in ("name", "tool_call_id"):
            if (value := getattr(self, key)) is not None:
                message[key] = value
        if self.thought is not None:
            message |= {"reasoning_content": self.thought, "reasoning": self.thought}
            if self.tool_calls and not self.text:
                message["thinking"] = self.thought  # the name in gpt-oss's template, which takes it or content
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": call.function.for_template()} | ({"id": call.id} if call.id else {})
                for call in self.tool_calls
            ]
        return message


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse names that the server sets, and values other than scalars, which templates may not handle safely."""
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise rejected(f"must have at most {MAX_TEMPLATE_KWARGS} entries")
    for key, value in kwargs.items():
        if key in RESERVED_TEMPLATE_KWARGS:
            raise rejected("cannot be set here", key)
        if not isinstance(value, bool | int | float | str):
            raise rejected("must be a string, a number or a boolean", key)
    return kwargs


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """All messages for the chat template. Tool results get the names of their calls, which some templates need."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls if call.id}
    rendered = [message.for_template() for message in messages]
    for message in rendered:
        if message["role"] == "tool" and (name := names.get(message["tool_call_id"])):
            message.setdefault("name", name)
    return rendered
