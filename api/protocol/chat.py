"""Request body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, Field, model_validator

from ...engine.types import MAX_LOGPROBS, MAX_PREFIX_PINS, MAX_TOKEN_COUNT
from .base import Refusal, rejected
from .cache_control import CacheControl
from .call_ids import in_call_order
from .chat_messages import ChatMessage, Messages, check_template_kwargs, num_characters
from .foreign_fields import foreign_rules
from .reasoning import ReasoningFields
from .sampling import SamplingFields, Verbosity, verbosity_left_out
from .tools import CallableTool, ToolChoice, Tools, check_tools, functions_of, tools_left_out

_FOREIGN = foreign_rules("chat")

_INSTRUCTIONS = ("system", "developer")
_MANY_MESSAGES = 64
_LONG_TEXT = 50_000

TemplateKwargs = Annotated[dict[str, Any], AfterValidator(check_template_kwargs)]


class TemplateInput(NamedTuple):
    """The input of a chat template, read from a body in one pass.

    Attributes:
        tools: functions that the model may call.
        kwargs: variables of the template.
        adds_header: whether the text ends with the header of a new answer.
        continued: text of the last message, which the answer continues; None for a new answer.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[CallableTool]
    kwargs: Mapping[str, Any]
    adds_header: bool
    continued: str | None

    def beginning(self, messages: Sequence[ChatMessage]) -> TemplateInput:
        """Return the input for only the given first messages of the conversation, without the header of an answer."""
        return self._replace(messages=messages, adds_header=False, continued=None)

    def definitions(self) -> list[dict[str, Any]]:
        """Return the tools in the form that chat templates expect."""
        return [tool.for_template() for tool in self.tools]

    @property
    def is_long(self) -> bool:
        """Whether rendering would take too long on the event loop.

        Counting characters stops as soon as that is known.
        """
        if len(self.messages) > _MANY_MESSAGES:
            return True
        size = num_characters(self.messages) + sum(len(each) for each in self.kwargs.values() if isinstance(each, str))
        return size > _LONG_TEXT or (bool(self.tools) and size + len(repr(self.definitions())) > _LONG_TEXT)


class ChatRequest(ReasoningFields):
    """Body of a chat request, with OpenAI's fields and the implemented extensions of vLLM.

    With ``max_tokens`` 0, the request only computes the prompt into the prefix cache (prefill only).
    """

    ignored: ClassVar[frozenset[str]] = SamplingFields.ignored - {"parallel_tool_calls"} | _FOREIGN.ignored
    refused: ClassVar[Mapping[str, Refusal]] = {
        **SamplingFields.refused,
        **_FOREIGN.refused,
        "functions": Refusal("give functions as 'tools'.", ([],)),
        "function_call": Refusal("choose functions with 'tool_choice'.", ("none", "auto")),
        "audio": Refusal("the model only generates text."),
        "modalities": Refusal("the model only generates text.", (["text"],)),
        "moderation": Refusal("moderation is not supported."),
        "web_search_options": Refusal("web search is not supported."),
    }

    messages: Messages
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0, le=MAX_TOKEN_COUNT)] | None = None
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    verbosity: Verbosity = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)
    echo: bool = False

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise rejected("is only allowed if 'logprobs' is true", "top_logprobs")
        if self.max_completion_tokens is not None and self.max_tokens not in (None, self.max_completion_tokens):
            raise rejected("contradicts 'max_completion_tokens'", "max_tokens")
        if self.is_prefill_only and self.min_tokens > 0:
            raise rejected("contradicts 'max_tokens'", "min_tokens")
        check_tools(self.tools, self.tool_choice)
        self.messages = in_call_order(self.messages)
        if len(list(islice(self.cache_points(), MAX_PREFIX_PINS + 1))) > MAX_PREFIX_PINS:
            raise rejected(f"may be given at most {MAX_PREFIX_PINS} times in messages and tools", "cache_control")
        if self.functions and self.include_stop_str_in_output:
            raise rejected("cannot be used with 'tools'", "include_stop_str_in_output")
        if self.functions and self.field_probabilities:
            raise rejected("cannot be used with 'tools': a tool call has another form", "field_probabilities")
        check_continuation(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self

    def cache_points(self) -> Iterator[tuple[list[ChatMessage], CacheControl]]:
        """Yield each ``cache_control`` of tools and messages, with the messages up to the one that has the mark.

        Templates write tools after the first instructions. So a mark on a tool covers these messages too.
        """
        first = next((number for number, each in enumerate(self.messages) if each.role not in _INSTRUCTIONS), 0)
        for tool in self.tools:
            if tool.cache_control is not None:
                yield self.messages[:first], tool.cache_control
        for number, message in enumerate(self.messages):
            for beginning, mark in message.cache_points():
                yield [*self.messages[:number], beginning], mark

    def template_input(self) -> TemplateInput:
        """Return the input of the chat template. By default a header is added, unless the last message is continued."""
        continued = self.messages[-1].text if self.continue_final_message else None
        adds_header = continued is None if self.add_generation_prompt is None else self.add_generation_prompt
        kwargs = {**self.thinking_kwargs, **self.chat_template_kwargs}
        return TemplateInput(self.messages, self.functions, kwargs, adds_header, continued)

    @property
    def functions(self) -> list[CallableTool]:
        """The tools that can be called."""
        return functions_of(self.tools)

    @property
    def left_out(self) -> list[str]:
        """Places and types of the tools that cannot be called, and a verbosity without effect."""
        return [*tools_left_out(self.tools), *verbosity_left_out("verbosity", self.verbosity)]

    @property
    def max_new_tokens(self) -> int | None:
        """Requested number of tokens; None for as many as fit."""
        if self.is_prefetch:
            return 0
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def asked_length(self) -> tuple[int | None, str]:
        """Return the requested number of tokens, None for as many as fit, and the name of the field that sets it.

        The engine always samples at least one token. If none is requested, the token is dropped.
        """
        field = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        asked = self.max_new_tokens
        return (1 if asked == 0 else asked), field

    @property
    def echoed_text(self) -> str:
        """Text of the last message, for ``echo``; "" if a new answer follows a message that is not the assistant's."""
        last, adds_header = self.messages[-1], self.add_generation_prompt
        if adds_header is None:
            adds_header = not self.continue_final_message
        return (last.text or "") if self.echo and (last.role == "assistant" or not adds_header) else ""

    @property
    def is_prefill_only(self) -> bool:
        return self.max_new_tokens == 0

    @property
    def num_logprobs(self) -> int | None:
        """Number of likeliest tokens with logprobs at each position; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def num_shown(self) -> int | None:
        """Number of logprobs shown at each position: of the requested tokens, or else of the likeliest tokens."""
        return len(self.logprob_token_ids) if self.logprob_token_ids else self.num_logprobs


def check_continuation(messages: list[ChatMessage], add_generation_prompt: bool | None, continue_final: bool) -> None:
    """Refuse contradictory fields, and the continuation of a message that is not the assistant's."""
    if continue_final and add_generation_prompt:
        raise rejected("contradicts 'add_generation_prompt'", "continue_final_message")
    if continue_final and (messages[-1].role != "assistant" or not messages[-1].text):
        raise rejected("needs a last message with role 'assistant' and content", "continue_final_message")
