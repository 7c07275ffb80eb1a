"""The messages of a conversation, and their form for the chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import orjson
from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

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
        what = _PART_KINDS.get(kind, "this kind of part")
        raise rejected(f"must be 'text': {what} cannot be taken", "type")
    return value


class CacheBreakpoint(StrictModel):
    """OpenAI's mark of a reusable prefix. Left alone: every prefix is reusable here, to the token."""

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(StrictModel):
    """A piece of text. The pieces of one message are joined with nothing between them."""

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
    """A function that the model called in an earlier turn. ``arguments`` is the text that it wrote."""

    name: Name
    arguments: str = ""

    def for_template(self) -> dict[str, Any]:
        """Arguments as an object, as templates want them; as text where the model wrote no JSON object."""
        try:
            arguments = orjson.loads(self.arguments or "{}")
        except orjson.JSONDecodeError:
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class ToolCall(StrictModel):
    """A tool call of an earlier turn. Streams number calls by ``index``, which clients may send back."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class ChatMessage(StrictModel):
    """One message. What an earlier answer of ours held may be sent back as it was."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] = Field(default_factory=list)
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    annotations: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.tool_calls and self.role != "assistant":
            raise rejected("may only be in messages of the assistant", "tool_calls")
        if self.content is None and not self.tool_calls:
            raise rejected("is required", "content")
        if self.role == "tool" and self.tool_call_id is None:
            raise rejected("is required in messages of a tool", "tool_call_id")
        return self

    @property
    def text(self) -> str | None:
        """The content as one string."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it; ``developer`` is OpenAI's newer name of ``system``."""
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        for key in ("name", "tool_call_id", "reasoning_content"):
            if (value := getattr(self, key)) is not None:
                message[key] = value
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": call.function.for_template()} | ({"id": call.id} if call.id else {})
                for call in self.tool_calls
            ]
        return message


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse what a template gets from elsewhere, and anything but scalars: a template need not be safe with those."""
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise rejected(f"must have at most {MAX_TEMPLATE_KWARGS} entries")
    for key, value in kwargs.items():
        if key in _RESERVED:
            raise rejected("cannot be set here", key)
        if not isinstance(value, bool | int | float | str):
            raise rejected("must be a string, a number or a boolean", key)
    return kwargs


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]

_RESERVED = {
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template",
    "bos_token",
    "eos_token",
}


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """All messages as chat templates know them. Results get the names of their calls, which some templates need."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls if call.id}
    rendered = [message.for_template() for message in messages]
    for message in rendered:
        if message["role"] == "tool" and (name := names.get(message["tool_call_id"])):
            message.setdefault("name", name)
    return rendered
