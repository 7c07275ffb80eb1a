"""Content blocks of Anthropic's messages: text, thinking, tool_use and tool_result. Other kinds are refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from ..protocol.base import Id, StrictModel, rejected, string_or_list
from ..protocol.cache_control import CacheControl
from ..protocol.chat_messages import MAX_CALLS, MAX_PARTS, Name

_REFUSED_KINDS = {
    "image": "images",
    "document": "documents",
    "search_result": "search results",
    "tool_reference": "references to tools",
    "container_upload": "files in containers",
}
_NO_TEXT = "must be a string or a list of text blocks"


class TextBlock(StrictModel):
    """A text block. Its citations are ignored, because the cited text is part of the text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] = Field(default_factory=list)


def _refuse_kinds(value: Any, *kinds: str) -> Any:
    if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind not in kinds:
        name = _REFUSED_KINDS.get(kind, "this kind of block")
        raise rejected(f"must be {' or '.join(repr(each) for each in kinds)}; {name} is not supported", "type")
    return value


def _check_text(value: Any) -> Any:
    return _refuse_kinds(value, "text")


def _check_user(value: Any) -> Any:
    return _refuse_kinds(value, "text", "tool_result")


def _check_assistant(value: Any) -> Any:
    return value if _is_of_server(value) else _refuse_kinds(value, "text", "thinking", "redacted_thinking", "tool_use")


def _is_of_server(value: Any) -> bool:
    """Return whether a block is a call or a result of a tool that Anthropic's server or an MCP server has run."""
    kind = value.get("type") if isinstance(value, dict) else None
    return isinstance(kind, str) and (kind in ("server_tool_use", "mcp_tool_use") or kind.endswith("_tool_result"))


Texts = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[Annotated[TextBlock, BeforeValidator(_check_text)]], Field(max_length=MAX_PARTS), Tag("<list>")],
    Discriminator(string_or_list, custom_error_type="rejected", custom_error_message=_NO_TEXT),
]


class ThinkingBlock(StrictModel):
    """The reasoning of an earlier turn. Any ``signature`` is accepted."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class RedactedThinkingBlock(StrictModel):
    """Encrypted reasoning from another server. It is left out."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(StrictModel):
    """A tool call of an earlier turn. ``caller``, which responses contain, may be sent back and is ignored."""

    type: Literal["tool_use"]
    id: Name
    name: Name
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None


class ToolResultBlock(StrictModel):
    """The result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: Texts = ""
    is_error: bool = False
    cache_control: CacheControl | None = None


class OtherBlock(BaseModel):
    """A call or a result of a tool that another server has run. It is left out."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Id
    cache_control: CacheControl | None = None


def _kind(value: Any) -> str | None:
    if _is_of_server(value):
        return "<other>"
    kind = value.get("type") if isinstance(value, dict) else None
    return f"<{kind}>" if isinstance(kind, str) else None


_BY_KIND = Discriminator(
    _kind, custom_error_type="rejected", custom_error_message="must be a content block: an object with a 'type'"
)
UserBlock = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("<text>")] | Annotated[ToolResultBlock, Tag("<tool_result>")],
        _BY_KIND,
    ],
    BeforeValidator(_check_user),
]
AssistantBlock = Annotated[
    Annotated[
        Annotated[TextBlock, Tag("<text>")]
        | Annotated[ThinkingBlock, Tag("<thinking>")]
        | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
        | Annotated[ToolUseBlock, Tag("<tool_use>")]
        | Annotated[OtherBlock, Tag("<other>")],
        _BY_KIND,
    ],
    BeforeValidator(_check_assistant),
]
_BLOCKS = Discriminator(
    string_or_list,
    custom_error_type="rejected",
    custom_error_message="must be a string or a list of content blocks",
)


class UserMessage(StrictModel):
    """A user's turn: texts and results of tools."""

    role: Literal["user"]
    content: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[list[UserBlock], Field(max_length=MAX_PARTS), Tag("<list>")],
        _BLOCKS,
    ]


class AssistantMessage(StrictModel):
    """A turn of the assistant, as this server or another one has generated it."""

    role: Literal["assistant"]
    content: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[list[AssistantBlock], Field(max_length=MAX_CALLS), Tag("<list>")],
        _BLOCKS,
    ]


class SystemMessage(StrictModel):
    """Instructions within the conversation."""

    role: Literal["system"]
    content: Texts


def _role(value: Any) -> str | None:
    role = value.get("role") if isinstance(value, dict) else None
    return f"<{role}>" if role in ("user", "assistant", "system") else None


InputMessage = Annotated[
    Annotated[UserMessage, Tag("<user>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[SystemMessage, Tag("<system>")],
    Discriminator(
        _role,
        custom_error_type="rejected",
        custom_error_message="must be an object with the role 'user', 'assistant' or 'system'",
    ),
]

Block = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock | OtherBlock


def blocks_of(message: UserMessage | AssistantMessage | SystemMessage) -> list[Block]:
    """Return the content of a message as blocks. A string becomes one text block."""
    if isinstance(message.content, str):
        return [TextBlock(type="text", text=message.content)]
    return list(message.content)


def text_of_blocks(content: str | list[TextBlock]) -> str:
    """Return the text of a content. The texts of several blocks are joined by newlines."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
