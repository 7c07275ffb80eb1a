"""Chat messages of a request, and their conversion to the form that chat templates expect."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)

from ..config import RESERVED_TEMPLATE_KWARGS
from ..exact_json import dumps_exact, loads_exact
from .base import Refusal, StrictModel, rejected, string_or_list
from .cache_control import CacheControl
from .foreign_fields import foreign_rules
from .tools import CUSTOM_INPUT

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_CALLS = 128
MAX_TEMPLATE_KWARGS = 32
MAX_NAME = 256
MAX_ROLE = 64

Name = Annotated[str, Field(max_length=MAX_NAME)]
_ROLE = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
_IN_MESSAGE, _IN_PART, _IN_CALL = (foreign_rules(place) for place in ("message", "part", "tool_call"))

_PART_KINDS = {"image_url": "images", "input_audio": "audio", "file": "files", "refusal": "refusals"}


def _check_part(value: Any) -> Any:
    if isinstance(value, dict) and (kind := value.get("type")) != "text" and isinstance(kind, str):
        name = _PART_KINDS.get(kind, "this kind of part")
        raise rejected(f"must be 'text'; {name} is not supported", "type")
    return value


class CacheBreakpoint(StrictModel):
    """OpenAI's mark of a reusable prefix.

    It is ignored, because the prefix cache reuses every prefix, token by token.
    """

    mode: Literal["explicit"]
    ttl: Literal["30m", "12h"] | None = None


class TextPart(StrictModel):
    """A text part. The texts of a message's parts are concatenated."""

    ignored: ClassVar[frozenset[str]] = _IN_PART.ignored
    refused: ClassVar[Mapping[str, Refusal]] = _IN_PART.refused

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    prompt_cache_breakpoint: CacheBreakpoint | None = None


Content = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[list[Annotated[TextPart, BeforeValidator(_check_part)]], Field(max_length=MAX_PARTS), Tag("<list>")],
    Discriminator(
        string_or_list, custom_error_type="rejected", custom_error_message="must be a string or a list of text parts"
    ),
]


def _written(value: Any) -> Any:
    """Convert arguments to JSON text, because some clients send them back as a parsed object."""
    try:
        return dumps_exact(value).decode() if isinstance(value, dict) else value
    except RecursionError:
        raise rejected("is nested too deeply") from None


Arguments = Annotated[str, BeforeValidator(_written)]
"""Arguments of a call: the generated JSON text, or the object that it represents."""


class FunctionCall(StrictModel):
    """A function call of an earlier turn."""

    name: Name
    arguments: Arguments = ""

    def for_template(self) -> dict[str, Any]:
        """Return the call for the chat template. Arguments that are a JSON object are parsed; others stay text."""
        try:
            arguments = loads_exact(self.arguments.encode() or b"{}")
        except (orjson.JSONDecodeError, UnicodeEncodeError):
            arguments = None
        return {"name": self.name, "arguments": arguments if isinstance(arguments, dict) else self.arguments}


class CustomCall(StrictModel):
    """A call of a custom tool."""

    name: Name
    input: str = ""


def arguments_of_input(text: str) -> str:
    """Return the arguments of the function call that represents a call of a custom tool with the input ``text``."""
    return orjson.dumps({CUSTOM_INPUT: text}).decode()


class ToolCall(StrictModel):
    """A tool call of an earlier turn. Clients may send back the ``index`` of streamed calls.

    A call of a custom tool is converted to a call of the function that represents the tool.
    """

    ignored: ClassVar[frozenset[str]] = _IN_CALL.ignored

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_custom(cls, value: Any) -> Any:
        if not isinstance(value, dict) or value.get("type") != "custom":
            return value
        try:
            call = CustomCall.model_validate(value.get("custom"))
        except ValidationError:
            raise rejected("must be an object with the strings 'name' and 'input'", "custom") from None
        function = {"name": call.name, "arguments": arguments_of_input(call.input)}
        rest = {name: given for name, given in value.items() if name != "custom"}
        return {**rest, "type": "function", "function": function}


class ThoughtPiece(BaseModel):
    """A piece of the reasoning of an earlier turn: OpenRouter's ``reasoning_details``, LiteLLM's ``thinking_blocks``.

    Signatures, ids and encrypted pieces are meant for other servers, and are left out.
    """

    model_config = ConfigDict(strict=True)

    text: str | None = None
    summary: str | None = None
    thinking: str | None = None


Pieces = Annotated[list[ThoughtPiece], Field(max_length=MAX_PARTS)]


def _check_role_name(role: str) -> str:
    if len(role) > MAX_ROLE or not _ROLE.fullmatch(role):
        raise rejected(f"must be a letter, then letters, digits, '_', '-' and '.', at most {MAX_ROLE} in all")
    return role


class ChatMessage(StrictModel):
    """A message of a chat. All fields of this server's answers may be sent back.

    Roles other than the usual ones are accepted if the chat template handles them; ``generate.chat_prompt`` checks
    this.
    """

    ignored: ClassVar[frozenset[str]] = _IN_MESSAGE.ignored
    refused: ClassVar[Mapping[str, Refusal]] = _IN_MESSAGE.refused

    role: Annotated[str, AfterValidator(_check_role_name)]
    content: Content | None = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS)] = Field(default_factory=list)
    function_call: FunctionCall | None = None
    tool_call_id: Name | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: Pieces = Field(default_factory=list)
    thinking_blocks: Pieces = Field(default_factory=list)
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.function_call is not None:
            if self.tool_calls:
                raise rejected("contradicts 'tool_calls'", "function_call")
            self.tool_calls = [ToolCall(function=self.function_call)]
        if self.tool_calls and self.role != "assistant":
            raise rejected("is only allowed in messages of the assistant", "tool_calls")
        if self.content is None and not self.tool_calls:
            if self.role != "assistant":
                raise rejected("is required", "content")
            self.content = ""
        if self.role == "tool" and self.tool_call_id is None:
            raise rejected("is required in messages with role 'tool'", "tool_call_id")
        return self

    @property
    def text(self) -> str | None:
        return "".join(part.text for part in self.content) if isinstance(self.content, list) else self.content

    @property
    def thought(self) -> str | None:
        """The reasoning of an earlier turn, from the newer field, the older field, or the pieces."""
        if self.reasoning is not None or self.reasoning_content is not None:
            return self.reasoning_content if self.reasoning is None else self.reasoning
        pieces = self.reasoning_details or self.thinking_blocks
        return "".join(piece.text or piece.summary or piece.thinking or "" for piece in pieces) or None

    def cache_points(self) -> Iterator[tuple[ChatMessage, CacheControl]]:
        """Yield each ``cache_control`` of the message, with the message up to the part that has the mark."""
        if isinstance(self.content, list):
            for end, part in enumerate(self.content, 1):
                if part.cache_control is not None:
                    beginning = {"content": self.content[:end], "tool_calls": []}
                    yield self.model_copy(update=beginning), part.cache_control
        if self.cache_control is not None:
            yield self, self.cache_control

    def for_template(self) -> dict[str, Any]:
        """Return the message for the chat template, with its reasoning under both names that templates use."""
        message: dict[str, Any] = {"role": self.role}
        # As in transformers, a null content of a message with calls is left out, because templates would print "None"
        # for it or fail.
        for key, value in (("content", self.text), ("name", self.name), ("tool_call_id", self.tool_call_id)):
            if value is not None:
                message[key] = value
        if self.thought is not None:
            message |= {"reasoning_content": self.thought, "reasoning": self.thought}
            if self.tool_calls and not self.text:
                # gpt-oss's template uses this name, and refuses a message with both reasoning and content.
                message["thinking"] = self.thought
        if self.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": call.function.for_template()} | ({"id": call.id} if call.id else {})
                for call in self.tool_calls
            ]
        return message


def check_template_kwargs(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Refuse names that the server sets, and values that are not scalars, because templates may mishandle them."""
    if len(kwargs) > MAX_TEMPLATE_KWARGS:
        raise rejected(f"must have at most {MAX_TEMPLATE_KWARGS} entries")
    for key, value in kwargs.items():
        if key in RESERVED_TEMPLATE_KWARGS:
            raise rejected("cannot be set here", key)
        if not isinstance(value, bool | int | float | str):
            raise rejected("must be a string, a number or a boolean", key)
    return kwargs


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


def num_characters(messages: Sequence[ChatMessage]) -> int:
    """Return the number of characters of all texts, reasoning texts and call arguments."""
    return sum(
        len(each.text or "") + len(each.thought or "") + sum(len(call.function.arguments) for call in each.tool_calls)
        for each in messages
    )


def for_template(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Return all messages for the chat template. A tool result gets the name of its call, which some templates need."""
    names = {call.id: call.function.name for message in messages for call in message.tool_calls if call.id}
    rendered = [message.for_template() for message in messages]
    for message in rendered:
        if message["role"] == "tool" and (name := names.get(message["tool_call_id"])):
            message.setdefault("name", name)
    return rendered
