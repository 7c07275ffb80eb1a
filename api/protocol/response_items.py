"""Response items: input items of the responses API, such as messages, calls, results and references to stored items.

Items of tools that run elsewhere or cannot be called here are accepted, and left out of the prompt.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from .base import Id, StrictModel, rejected, string_or_list
from .chat_messages import MAX_PARTS, Arguments, CacheBreakpoint, arguments_of_input

MAX_ITEMS = 4096

_PART_KINDS = {"input_image": "images", "input_file": "files", "input_audio": "audio", "refusal": "refusals"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_ITEM_TAGS = {
    "message": "<message>",
    "function_call": "<call>",
    "function_call_output": "<output>",
    "custom_tool_call": "<custom>",
    "custom_tool_call_output": "<output>",
    "item_reference": "<reference>",
    "reasoning": "<reasoning>",
}

# For example local_shell_call_output, web_search_call, tool_search_output and mcp_list_tools.
_OF_OTHER_TOOLS = re.compile(
    r"[a-z][a-z_]{0,48}_(call|call_output|tools|tools_output|search_output|screenshot)|mcp_[a-z_]{1,48}"
)

Status = Literal["in_progress", "completed", "incomplete"]


def _check_part(value: Any) -> Any:
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind not in _TEXT_PARTS:
        name = _PART_KINDS.get(kind, "this kind of part")
        raise rejected(f"must be 'input_text' or 'output_text'; {name} is not supported", "type")
    return value


class ResponseTextPart(StrictModel):
    """A text part. Annotations and logprobs of this server's answers may be sent back, and are ignored."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Texts = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[
        list[Annotated[ResponseTextPart, BeforeValidator(_check_part)]], Field(max_length=MAX_PARTS), Tag("<list>")
    ],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of text parts"
    ),
]


def text_of(content: str | list[ResponseTextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


class MessageItem(StrictModel):
    """A message. ``phase`` is meant for OpenAI's models and is ignored."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Texts
    id: Id | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(StrictModel):
    """A function call of an earlier turn."""

    type: Literal["function_call"]
    call_id: Id
    name: Id
    arguments: Arguments
    id: Id | None = None
    status: Status | None = None


class CustomCallItem(StrictModel):
    """A call of a custom tool in an earlier turn."""

    type: Literal["custom_tool_call"]
    call_id: Id
    name: Id
    input: str
    id: Id | None = None
    status: Status | None = None

    @property
    def arguments(self) -> str:
        """The arguments of the function call that represents this call."""
        return arguments_of_input(self.input)


class OutputItem(StrictModel):
    """The result of a call of a function or a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Id
    output: Texts
    id: Id | None = None
    status: Status | None = None


class ReasoningText(StrictModel):
    """A piece of the reasoning, or of its summary."""

    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(StrictModel):
    """The reasoning before an earlier answer. If it has no text, its summary is used."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_ITEMS)] = Field(default_factory=list)
    content: Annotated[list[ReasoningText], Field(max_length=MAX_ITEMS)] = Field(default_factory=list)
    encrypted_content: str | None = None
    id: Id | None = None
    status: Status | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


class OtherItem(BaseModel):
    """A call of a tool that is not one of the client's functions, or its result. It is left out of the prompt."""

    model_config = ConfigDict(strict=True, extra="allow")

    type: Id
    id: Id | None = None
    call_id: Id | None = None


class ReferenceItem(StrictModel):
    """A reference to an item of a stored response, by its id."""

    type: Literal["item_reference"] = "item_reference"
    id: Id


def _item_form(value: Any) -> str | None:
    """Discriminator of items. An item without a type is a message if it has a role, or a reference if it has an id."""
    if not isinstance(value, dict):
        return None
    if value.get("type") is None:
        return "<message>" if "role" in value else "<reference>" if "id" in value else None
    kind = value["type"]
    if not isinstance(kind, str):
        return None
    return _ITEM_TAGS.get(kind) or ("<other>" if _OF_OTHER_TOOLS.fullmatch(kind) else None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[CallItem, Tag("<call>")]
    | Annotated[CustomCallItem, Tag("<custom>")]
    | Annotated[OutputItem, Tag("<output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[ReferenceItem, Tag("<reference>")]
    | Annotated[OtherItem, Tag("<other>")],
    Discriminator(
        _item_form,
        custom_error_type="rejected",
        custom_error_message="must be a message, a function_call, a function_call_output, a custom_tool_call, a "
        "custom_tool_call_output, a reasoning item, an item_reference or an item of another tool",
    ),
]

Input = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[list[InputItem], Tag("<list>"), Field(max_length=MAX_ITEMS)],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of items"
    ),
]


def items_left_out(given: str | list[InputItem]) -> list[str]:
    """Return places and types of the items of tools that cannot be called, so that the client is told about them."""
    items = [] if isinstance(given, str) else given
    return [f"input[{index}] {item.type}" for index, item in enumerate(items) if isinstance(item, OtherItem)]
