"""Request bodies of ``POST /v1/messages`` and ``POST /v1/messages/count_tokens``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from ...engine.types import MAX_TOKEN_COUNT
from ..protocol.adapter_parts import ModelName
from ..protocol.base import Id, Refusal, StrictModel, rejected
from ..protocol.cache_control import CacheControl
from ..protocol.call_ids import CallIdError, ToolCallIds
from ..protocol.chat import TemplateKwargs
from ..protocol.chat_messages import MAX_MESSAGES
from ..protocol.reasoning import MAX_THINKING_BUDGET
from ..protocol.sampling import CacheKey, OptionFields, PriorityName, Salt
from ..protocol.structured import Schema
from ..protocol.tools import MAX_TOOLS, OtherTool, by_tool_type, tools_left_out
from .content_blocks import (
    AssistantMessage,
    InputMessage,
    OtherBlock,
    TextBlock,
    Texts,
    ToolResultBlock,
    ToolUseBlock,
    blocks_of,
)

MAX_CACHE_MARKS = 4
_KEEP_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
_NEUTRAL_EDITS: tuple[dict[str, Any], ...] = ({}, {"edits": []}, {"edits": [_KEEP_THINKING]})


def _check_direct(callers: list[str]) -> list[str]:
    if any(caller != "direct" for caller in callers):
        raise rejected("must be ['direct']: code execution is not supported")
    return callers


def _check_at_once(value: bool) -> bool:
    if value:
        raise rejected("must be false: tools cannot be deferred")
    return value


class CustomTool(StrictModel):
    """A tool of the client. ``input_schema`` is enforced even if ``strict`` is not set."""

    type: Literal["custom"] = "custom"
    name: Id
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool = False
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    input_examples: Annotated[list[Any], Field(max_length=0)] = Field(default_factory=list)
    allowed_callers: Annotated[list[str], AfterValidator(_check_direct)] = Field(default_factory=list)
    defer_loading: Annotated[bool, AfterValidator(_check_at_once)] = False


AnyTool = Annotated[
    Annotated[CustomTool, Tag("<served>")] | Annotated[OtherTool, Tag("<other>")],
    by_tool_type("custom"),
]


class AnyToolChoice(StrictModel):
    """Number of tools that must be called: any number (auto), at least one (any), or none."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class OneToolChoice(StrictModel):
    """Forces a call of one tool."""

    type: Literal["tool"]
    name: Id
    disable_parallel_tool_use: bool = False


def _choice_form(value: Any) -> str | None:
    kind = value.get("type") if isinstance(value, dict) else None
    return "<one>" if kind == "tool" else "<any>" if kind in ("auto", "any", "none") else None


Choice = Annotated[
    Annotated[AnyToolChoice, Tag("<any>")] | Annotated[OneToolChoice, Tag("<one>")],
    Discriminator(
        _choice_form,
        custom_error_type="rejected",
        custom_error_message="must be an object with the type 'auto', 'any', 'tool' or 'none'",
    ),
]


class Thinking(StrictModel):
    """Switch for the model's reasoning, and its largest number of tokens.

    The reasoning is shown unchanged, or it is ``omitted``.
    """

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_THINKING_BUDGET)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @model_validator(mode="after")
    def _check_budget(self) -> Thinking:
        if self.type == "enabled" and self.budget_tokens is None:
            raise rejected("is required where 'type' is 'enabled'", "budget_tokens")
        if self.type != "enabled" and self.budget_tokens is not None:
            raise rejected(f"is only allowed with the type 'enabled', not with '{self.type}'", "budget_tokens")
        return self


class JsonOutputFormat(StrictModel):
    """The schema of the answer."""

    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfig(StrictModel):
    """The effort, which the chat template gets as ``reasoning_effort``, and the output format of the answer."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class PromptFields(StrictModel):
    """Fields of both routes, which determine the prompt and its tokens."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("billing_policy", "diagnostics", "fallback_credit_token", "inference_geo", "metadata", "service_tier"),
            *("speed", "user_profile_id", "workspace_id"),
        }
    )
    refused: ClassVar[Mapping[str, Refusal]] = {
        "compaction": Refusal("the server never shortens a conversation."),
        "container": Refusal("code execution is not supported."),
        "context_management": Refusal("the server never shortens a conversation.", _NEUTRAL_EDITS),
        "fallbacks": Refusal("only the requested model answers.", ([],)),
        "thread": Refusal("messages are not stored: send the conversation."),
    }

    model: ModelName
    messages: Annotated[list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: Texts = ""
    tools: Annotated[list[AnyTool], Field(max_length=MAX_TOOLS)] = Field(default_factory=list)
    mcp_servers: list[Any] = Field(default_factory=list)
    tool_choice: Choice = AnyToolChoice(type="auto")
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: JsonOutputFormat | None = None
    cache_control: CacheControl | None = None
    cache_salt: Salt | None = None
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    @model_validator(mode="after")
    def _check_prompt(self) -> PromptFields:
        if self.output_format is not None and self.output_config.format is not None:
            raise rejected("contradicts 'output_config.format'", "output_format")
        if len(list(self.cache_marks())) > MAX_CACHE_MARKS:
            raise rejected(f"may be given at most {MAX_CACHE_MARKS} times in a request", "cache_control")
        self._check_calls()
        last = self.messages[-1]
        if isinstance(last, AssistantMessage):
            blocks = blocks_of(last)
            if any(isinstance(block, ToolUseBlock) for block in blocks):
                raise rejected("must be followed by a message with its tool_result", "messages", len(self.messages) - 1)
            if not any(isinstance(block, TextBlock) and block.text for block in blocks):
                raise rejected("needs text for the answer to continue", "messages", len(self.messages) - 1, "content")
        return self

    def _check_calls(self) -> None:
        """Refuse a result whose call does not exist, or whose call already has a result."""
        calls = ToolCallIds()
        for number, message in enumerate(self.messages):
            if message.role != "assistant":
                calls.end_turn()
            for index, block in enumerate(blocks_of(message)):
                if isinstance(block, ToolUseBlock):
                    calls.call(block.id)
                elif isinstance(block, ToolResultBlock):
                    try:
                        calls.result(block.tool_use_id)
                    except CallIdError as error:
                        path = ("messages", number, "content", index, "tool_use_id")
                        raise rejected(str(error), *path) from None

    @property
    def form(self) -> JsonOutputFormat | None:
        return self.output_config.format if self.output_format is None else self.output_format

    @property
    def left_out(self) -> list[str]:
        """Places and types of tools that cannot be called, of blocks that such tools have made, and of tool servers."""
        blocks = [
            f"messages[{number}].content[{index}] {block.type}"
            for number, message in enumerate(self.messages)
            for index, block in enumerate(blocks_of(message))
            if isinstance(block, OtherBlock)
        ]
        return [*tools_left_out(self.tools), *(["mcp_servers"] if self.mcp_servers else []), *blocks]

    def cache_marks(self) -> Iterator[CacheControl]:
        """Yield each ``cache_control`` of the request."""
        blocks: list[Any] = [self, *self.tools]
        blocks += [] if isinstance(self.system, str) else self.system
        for message in self.messages:
            blocks += blocks_of(message)
        blocks += [each for block in blocks if isinstance(block, ToolResultBlock) for each in _texts(block)]
        yield from (mark for block in blocks if (mark := getattr(block, "cache_control", None)) is not None)


def _texts(block: ToolResultBlock) -> list[TextBlock]:
    return [] if isinstance(block.content, str) else block.content


class MessagesRequest(PromptFields, OptionFields):
    """Body with Anthropic's fields and extensions as for chats. With ``max_tokens`` 0, only the prompt is computed."""

    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_sequences: list[str] = Field(default_factory=list)
    stream: bool = False
    seed: int | None = None
    prompt_cache_key: CacheKey | None = None
    priority: PriorityName | None = None
    field_probabilities: bool = False

    @model_validator(mode="after")
    def _check_fields(self) -> MessagesRequest:
        if self.field_probabilities and self.form is None:
            raise rejected("needs a JSON Schema in 'output_config.format'", "field_probabilities")
        if self.field_probabilities and self.tools:
            raise rejected("cannot be used with 'tools': a tool call has another form", "field_probabilities")
        return self

    @model_validator(mode="after")
    def _check_budget(self) -> MessagesRequest:
        budget = None if self.thinking is None else self.thinking.budget_tokens
        if budget is not None and 0 < self.max_tokens <= budget:
            raise rejected(f"must be less than 'max_tokens' ({self.max_tokens})", "thinking", "budget_tokens")
        return self


class CountTokensRequest(PromptFields):
    """The fields of a message request that determine the number of its prompt's tokens."""
