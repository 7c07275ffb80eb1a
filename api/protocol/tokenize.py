"""Request bodies of vLLM's ``POST /tokenize`` and ``POST /detokenize``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from .adapter_parts import ModelName
from .base import StrictModel, rejected
from .call_ids import in_call_order
from .chat import ChatRequest, TemplateKwargs, check_continuation
from .chat_messages import ChatMessage, Messages
from .tools import Tools, check_tools

MAX_TOKENS = 1 << 20


class TokenizeRequest(StrictModel):
    """A text, or a conversation for the chat template, that is to be tokenized.

    ``add_special_tokens`` is true by default for a text, and false for a conversation, because the template adds
    special tokens.
    """

    model: ModelName | None = None
    prompt: str | None = None
    messages: Messages | None = None
    tools: Tools = Field(default_factory=list)
    add_special_tokens: bool | None = None
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateKwargs = Field(default_factory=dict)

    def chat(self, messages: list[ChatMessage]) -> ChatRequest:
        """Return the chat request whose prompt is to be tokenized."""
        return ChatRequest(
            messages=messages,
            tools=self.tools,
            add_special_tokens=self.add_special_tokens or False,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    @model_validator(mode="after")
    def _check_input(self) -> TokenizeRequest:
        if self.prompt is None and self.messages is None:
            raise rejected("is required, or 'messages'", "prompt")
        if self.prompt is not None and self.messages is not None:
            raise rejected("contradicts 'messages'", "prompt")
        if self.prompt is not None and self.tools:
            raise rejected("is for 'messages' only", "tools")
        check_tools(self.tools, "auto")
        if self.messages is not None:
            self.messages = in_call_order(self.messages)
            check_continuation(self.messages, self.add_generation_prompt, self.continue_final_message)
        return self


class DetokenizeRequest(StrictModel):
    """Token ids to convert to text. Each id must be smaller than the size of the vocabulary."""

    model: ModelName | None = None
    tokens: Annotated[list[int], Field(max_length=MAX_TOKENS)]
